"""The kernels of a compiled block on a GPU stay as few, and move as few bytes, as Inductor plans them today."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import NamedTuple

import pytest

from tests.helpers.paths import ROOT


class Limit(NamedTuple):
    kernels: int  # of forward and backward, products included
    megabytes: float  # read and written by all but the products


# 24 of the kernels are products. The formulas alone, without kernels of our own, have 84 and 4,950 MB.
LIMITS = {"block": Limit(kernels=79, megabytes=4_270)}  # of width 1024, with 32 samples of 512 tokens


def test_a_block_has_few_kernels_and_little_traffic() -> None:
    pytest.importorskip("triton", reason="needs Triton, which PyTorch for CUDA brings")
    command, env = [sys.executable, "-m", "tests.helpers.kernel_plan", "0"], {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (kernels,) = json.loads(done.stdout)
    others = sorted(((size / 1e6, name) for name, size in kernels if "extern_kernels" not in name), reverse=True)
    assert len(kernels) - len(others) == 24, "a block has other products"
    measured, limit = Limit(len(kernels), sum(size for size, _ in others)), LIMITS["block"]
    listed = "\n".join(f"{size:8.1f} MB  {name[:100]}" for size, name in others)
    assert measured.kernels <= limit.kernels and measured.megabytes <= limit.megabytes, f"{measured}\n{listed}"
