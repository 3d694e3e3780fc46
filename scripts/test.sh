#!/usr/bin/env bash
# Set up, then lint, types and tests: the gate of every change.
#
#   bash scripts/test.sh           the default suite
#   bash scripts/test.sh --quick   the inner loop, about two minutes
#   bash scripts/test.sh --slow    the longer proofs as well
#   bash scripts/test.sh --lowest  engines, checkpoints, prepare and compare with the lowest versions of pyproject.toml
#   bash scripts/test.sh --newest  the same with the newest versions that the package index has, whatever constraints.txt says
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

marks="not slow"
case "${1:-}" in
  "") ;;
  --quick) marks="quick and not slow" ;;
  --slow) marks="" ;;
  --lowest) ;;
  --newest) ;;
  *) printf "test: error: unknown option '%s', expected --quick, --slow, --lowest, --newest or nothing\n" "$1" >&2; exit 2 ;;
esac
# One thread per process: the tests run side by side, and their numbers do not depend on the machine's cores.
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
unset PYTHONDONTWRITEBYTECODE # hundreds of processes start

if [ "${1:-}" = --lowest ] || [ "${1:-}" = --newest ]; then
  venv=".venv-${1#--}" torch=torch resolution=highest
  if [ "$1" = --lowest ]; then
    torch="$(sed -n 's/.*"\(torch\)>=\([0-9.]*\)".*/\1==\2/p' pyproject.toml)" resolution=lowest-direct
  else
    rm -rf "$venv" # what was the newest last week
  fi
  bin="$venv/bin"
  [ -x "$bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
  printf '==> %s with %s and the %s versions of the others\n' "$venv" "$torch" "${1#--}"
  # torch by pip, whose configuration may have a build of it for this machine, which uv does not read. Where it has none,
  # pip takes the build for CUDA: some GB, which need no GPU.
  "$bin/python" -m pip --disable-pip-version-check install --quiet uv "$torch"
  uv=("$bin/uv" pip install --quiet --python "$bin/python")
  "${uv[@]}" --resolution "$resolution" --editable ".[deepspeed,figures,tables]"
  "${uv[@]}" pytest pytest-xdist
  "$bin/python" -c 'import torch; print("==> torch", torch.__version__)'
  "$bin/python" -m pytest -q -n auto --dist worksteal -p no:cacheprovider -m "not slow" \
    tests/distributed/test_engine_parity.py tests/distributed/test_hybrid_sharding.py tests/trainer/test_step_guard.py \
    tests/checkpoint tests/prepare/test_{pipeline,parts,tables}.py tests/model/test_{compile,heads,mmdit}.py tests/tools/compare \
    tests/inference/test_bundle.py
  exit
fi

bash scripts/setup.sh --dev
bin=.venv/bin

printf '==> lint\n'
"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/lint-imports" --no-logo
printf '==> types\n'
"$bin/mypy"
lines() { find "$1" -name '*.py' -exec cat {} + | wc -l; }
printf '==> lines of Python: mmldlm %s, tests %s\n' "$(lines mmldlm)" "$(lines tests)"
printf '==> tests (%s)\n' "${marks:-all}"
"$bin/python" -m pytest -q -n auto --dist worksteal --durations 25 -m "$marks"
