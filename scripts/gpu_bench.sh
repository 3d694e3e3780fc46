#!/usr/bin/env bash
# Benchmark on one GPU, in about 20 minutes: set up, run the GPU tests, then measure speed, memory, kernels and MFU of
# the 24 x 1024 network in bf16 against the reference (mmdit 0.3.0 with 2 residual streams and with 1).
#
#   bash scripts/gpu_bench.sh [FOLDER]    FOLDER of the JSON and PNG files; default benchmarks/results
#
# Exit codes: 2 without a CUDA device; otherwise that of the first part that failed. All parts run in any case.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() { printf 'gpu_bench: error: %s\n' "$*" >&2; exit 2; }

[ $# -le 1 ] || fail "expected at most one folder, found '$*'"
out="${1:-benchmarks/results}"
nvidia-smi --list-gpus 2>/dev/null | grep -q . || fail "no CUDA device: nvidia-smi finds none"
bash scripts/setup.sh --dev
python=.venv/bin/python
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' \
  || fail "no CUDA device: PyTorch $("$python" -c 'import torch; print(torch.__version__)') finds none"
export TOKENIZERS_PARALLELISM=false PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"

status=0
part() { # SECONDS COMMAND ...
  printf '\n==> %s\n' "${*:2}"
  local code=0
  timeout --kill-after 10 "$@" || code=$?
  if ((code)); then
    printf 'gpu_bench: %s ended with %s\n' "${*:2}" "$code" >&2
    ((status)) || status=$code
  fi
}
ladder() { # SECONDS NAME OPTION ...
  part "$1" "$python" -m benchmarks ladder --shape gpu --precision bf16 --rounds 7 --batches 4 --out "$out" \
    --name "$2" "${@:3}"
}

part 300 "$python" -m pytest -q -m gpu
ladder 420 ladder-gpu-512 --positions 512 --batch 16 --variants reference reference-1 trainer trainer-compiled
# Two samples: the attention weights that the reference keeps grow with the square of the positions.
ladder 420 ladder-gpu-2048 --positions 2048 --batch 2 --variants reference reference-1 trainer trainer-compiled
# The largest batches that fit with the trainer.
ladder 240 ladder-gpu-512-large --positions 512 --batch 64 --variants trainer trainer-compiled trainer-selective
ladder 240 ladder-gpu-2048-large --positions 2048 --batch 16 --variants trainer trainer-compiled trainer-selective
exit "$status"
