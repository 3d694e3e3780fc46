#!/usr/bin/env bash
# Show on which versions of Python the package installs. For each version:
#
#   resolves   the pinned dependencies have wheels for it (from their metadata; nothing is installed)
#   compiles   its interpreter, on PATH or of pyenv, compiles every module without a warning
#   new        in a venv of it the wheel installs by itself, and `mmldlm new` writes the files
#   trains     with --full only, which installs all dependencies (gigabytes): two steps of configs/tiny.yaml
#
#   bash scripts/python_versions.sh [--full] [3.12 ...]      default: 3.10 3.11 3.12 3.13 3.14
#
# Exit code 1 if anything fails; "no interpreter" is no failure.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

full=""
if [ "${1:-}" = --full ]; then
  full=yes
  shift
fi
versions=("$@")
[ $# -gt 0 ] || versions=(3.10 3.11 3.12 3.13 3.14)
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

"${PYTHON:-python3}" -m venv "$work/tools"
"$work/tools/bin/pip" install --quiet uv vermin
rm -rf build/lib # of an earlier build: it would end up in the wheel
"$work/tools/bin/pip" wheel --quiet --no-deps --wheel-dir "$work/dist" .
binary=()
for package in torch numpy tokenizers safetensors pydantic-core psutil pyyaml scipy matplotlib pillow; do
  binary+=(--only-binary "$package")
done

failed=0
report() { # VERSION CHECK COMMAND...
  if "${@:3}" >"$work/log" 2>&1; then
    printf '%-6s %-9s yes\n' "$1" "$2"
  else
    failed=1
    printf '%-6s %-9s NO: %s\n' "$1" "$2" "$(tail -n 3 "$work/log" | tr '\n' ' ')"
  fi
}
interpreter() { # VERSION: its path, or nothing
  local path
  for path in "$(command -v "python$1" || true)" "$HOME/.pyenv/versions/$1".*/bin/python; do
    if [ -x "$path" ] && "$path" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null; then
      printf '%s\n' "$path"
      return
    fi
  done
}
train() ( # BIN; a function whose working directory is its own
  printf 'The rose of soil and water %d.\n' {1..60} >"$work/own.txt"
  "$1/mmldlm" prepare "$work/own.txt" --vocab-size 300 --channels 8 --out "$work/data" &&
    cd "$work/new" && "$1/mmldlm" train configs/tiny.yaml "data.path=$work/data" train.steps=2
)

report all features "$work/tools/bin/vermin" --no-tips --violations --target=3.10- --eval-annotations mmldlm
for version in "${versions[@]}"; do
  report "$version" resolves "$work/tools/bin/uv" pip compile --quiet pyproject.toml --constraint constraints.txt \
    --extra deepspeed --extra figures --extra demo --python-version "$version" \
    --python-platform x86_64-manylinux_2_28 "${binary[@]}" --output-file "$work/resolved"
  python="$(interpreter "$version")"
  if [ -z "$python" ]; then
    printf '%-6s no interpreter here: compiles and new were not run\n' "$version"
    continue
  fi
  rm -rf "$work/venv" "$work/new" "$work/data" "$work/pycache"
  report "$version" compiles env PYTHONPYCACHEPREFIX="$work/pycache" "$python" -W error -m compileall -q mmldlm
  "$python" -m venv "$work/venv"
  install=(--no-deps)
  [ -z "$full" ] || install=(--constraint constraints.txt)
  "$work/venv/bin/pip" install --quiet "${install[@]}" "$work"/dist/*.whl || failed=1
  report "$version" new "$work/venv/bin/mmldlm" new "$work/new"
  [ -z "$full" ] || report "$version" trains train "$work/venv/bin"
done
exit "$failed"
