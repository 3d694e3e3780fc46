#!/usr/bin/env bash
# What only a GPU can show, in stages of at most nine minutes (best, speedrun: twelve), for a machine without a network.
#
#   bash scripts/gpu_check.sh prepare              with a network, no GPU needed: fills .gpu/ with the wheels that the
#                                                  GPU machine lacks (Python 3.12, PyTorch there) and with data stores
#                                                  (needs apt: WordNet's definitions are in a Debian package)
#   bash scripts/gpu_check.sh STAGE [OUT [--tiny]] smoke, speed, profile, reference, state, graphs, speedrun (trains an
#                                                  inverter of WordNet's vectors), or best: the most valuable parts of
#                                                  the others. OUT/STAGE.json is written after each part
#                                                  (default benchmarks/results/gpu, whose files are held against
#                                                  benchmarks/gpu_bars.py). --tiny shows on any machine that the stage
#                                                  works; GPU_CHECK_SECONDS is its limit (555, best and speedrun 700)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
stage="${1:?expected a stage: prepare, smoke, speed, profile, reference, state, graphs, speedrun or best}" out="${2:-benchmarks/results/gpu}"

if [ "$stage" = prepare ]; then
  rm -rf .gpu/site # what a run has installed from older wheels
  mkdir -p .gpu/wheels
  build="$(mktemp -d)"
  python3 -m venv "$build/venv"
  pip="$build/venv/bin/pip"
  "$pip" -q install 'setuptools>=77,<81' wheel ninja py-cpuinfo numpy
  # deepspeed is a source distribution. Without its operators it is pure Python; they are built where they run.
  DS_BUILD_OPS=0 "$pip" wheel -q --no-deps --no-build-isolation -w .gpu/wheels deepspeed==0.19.8
  "$pip" download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -d .gpu/wheels \
    hjson==3.1.0 pydantic==2.14.3 pydantic_core==2.50.4 typing_inspection==0.4.5 annotated_types==0.8.0 \
    typing_extensions frozendict loguru==0.7.3 mmdit==0.3.0 einx==0.4.3 hyper-connections==0.4.11 \
    torch-einops-utils==0.2.0 x-transformers==2.31.10
  rm -rf "$build"
  .venv/bin/python -c 'from pathlib import Path
from benchmarks.common.task import SHAPES
from benchmarks.yardstick import prepare_texts
print(prepare_texts("wordnet", Path(".gpu/stores/wordnet"))[0].path)
for kind in ("documents", "full", "sentences"):
    print(SHAPES["gpu"].store(Path(".gpu/stores"), kind))'
  du -sh .gpu
  exit 0
fi

export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
python=.venv/bin/python
if [ ! -x "$python" ]; then # the machine's own python, and what it lacks from .gpu
  python=python3
  [ -d .gpu/site ] ||
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target .gpu/site .gpu/wheels/*.whl
  export PYTHONPATH="$PWD/.gpu/site:$PYTHONPATH"
fi
options='from mmldlm.utils.malloc import CUDA_ALLOCATOR_OPTIONS; print(",".join(CUDA_ALLOCATOR_OPTIONS))'
PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-$("$python" -c "$options")}" # as `mmldlm train` sets it
export PYTORCH_ALLOC_CONF
mkdir -p "$out"
"$python" -m benchmarks.gpu_check "$stage" --out "$out" --stores .gpu/stores "${@:3}" 2>&1 | tee "$out/$stage.log"
