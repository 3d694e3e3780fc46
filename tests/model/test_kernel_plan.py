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
    products: int
    kernels: int  # of forward and backward, products included
    megabytes: float  # read and written by all but the products


# By compiled function, for 32 samples of 512 tokens, width 1024. A block of the formulas alone, without kernels of our
# own, has 84 kernels and 4,950 MB.
LIMITS = {
    "MMDiTBlock.forward": Limit(products=24, kernels=45, megabytes=2_930),
    "MMDiT.predict_text": Limit(products=12, kernels=40, megabytes=2_870),  # half of the tokens, vocabulary 1,024
}


def test_a_region_has_few_kernels_and_little_traffic() -> None:
    pytest.importorskip("triton", reason="needs Triton, which PyTorch for CUDA brings")
    command = [sys.executable, "-m", "tests.helpers.kernel_plan", *LIMITS]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for line, (function, limits) in zip(done.stdout.splitlines(), LIMITS.items(), strict=True):
        kernels = json.loads(line)[-2:][0]  # the first and the last block may differ from the others
        others = sorted(((size / 1e6, name) for name, size in kernels if "extern_kernels" not in name), reverse=True)
        measured = Limit(len(kernels) - len(others), len(kernels), sum(size for size, _ in others))
        listed = "\n".join(f"{size:8.1f} MB  {name[:100]}" for size, name in others)
        assert all(one <= limit for one, limit in zip(measured, limits, strict=True)), (
            f"{function}: {measured}\n{listed}"
        )
        assert measured.products == limits.products, f"{function} computes something else"
