#!/usr/bin/env bash
# From nothing to a model that generates sentences, on the embedded data: about 12 minutes on 2 cores.
# Safe to run again: finished parts are kept, and an interrupted training resumes where it stopped.
#
#   bash scripts/quickstart.sh [key.sub=value ...]    settings for the training, e.g. train.steps=100
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# In a checkout .venv is made here; in a folder of `mmldlm new`, mmldlm is installed.
if [ -f scripts/setup.sh ]; then
  bash scripts/setup.sh
fi
bin=""
if [ -x .venv/bin/mmldlm ]; then
  bin=.venv/bin/
elif ! command -v mmldlm >/dev/null; then
  echo "quickstart: error: no mmldlm on PATH or in .venv: install its wheel there" >&2
  exit 1
fi
mmldlm="${bin}mmldlm"

step() { printf '\n==> %s\n    %s\n' "$1" "$2"; }

prepare=(prepare --corpus simple-docs --tokenizer words --encoder learned --latent-tokens 4 --on-problem skip)
prepare+=(--out data/simple-docs)
step "1/4 Preparing data: short English sentences from the docs of Python and of installed packages" \
  "mmldlm ${prepare[*]}"
"$mmldlm" "${prepare[@]}"

step "2/4 Training" "mmldlm train configs/quickstart.yaml${*:+ $*}"
"$mmldlm" train configs/quickstart.yaml "$@"

step "3/4 Evaluating on held-out documents" "mmldlm evaluate runs/quickstart --texts 1000"
"$mmldlm" evaluate runs/quickstart --texts 1000 # all of them, as in the table of README.md and docs/results.md

text="Return a list of the names of all files in the given directory."
step "4/4 Sampling: a latent from a sentence, texts from the latent" \
  "mmldlm sample runs/quickstart --mode l2t --text \"$text\" -n 3"
"$mmldlm" sample runs/quickstart --mode l2t --text "$text" -n 3

cat <<END

==> Done. Look at
    runs/quickstart/samples.md         held-out texts and those generated from their latents
    runs/quickstart/evaluation.json    every metric with its baseline
    and at the curves:
    ${bin}tensorboard --logdir runs --samples_per_plugin text=200,images=200,scalars=100000 --host 127.0.0.1
END
