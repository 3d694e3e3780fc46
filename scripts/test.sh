#!/usr/bin/env bash
# Set up, then lint, types and tests: the gate of every change.
#
#   bash scripts/test.sh           the default suite
#   bash scripts/test.sh --quick   the inner loop, under two minutes
#   bash scripts/test.sh --slow    the longer proofs as well
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

marks="not slow"
case "${1:-}" in
  "") ;;
  --quick) marks="quick and not slow" ;;
  --slow) marks="" ;;
  *) printf "test: error: unknown option '%s', expected --quick, --slow or nothing\n" "$1" >&2; exit 2 ;;
esac

bash scripts/setup.sh --dev
bin=.venv/bin
# One thread per process: the tests run side by side, and their numbers do not depend on the machine's cores.
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

printf '==> lint\n'
"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/lint-imports" --no-logo
printf '==> types\n'
"$bin/mypy"
printf '==> tests (%s)\n' "${marks:-all}"
"$bin/python" -m pytest -q -n auto --dist worksteal --durations 25 -m "$marks"
