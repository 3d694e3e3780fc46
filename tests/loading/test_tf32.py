"""`tf32` sets what PyTorch does in float32 products, in training and wherever the run is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mmldlm import train
from mmldlm.loading.load import load_run


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def allowed() -> set[bool]:
    """Return PyTorch's answers to whether products may round to TF32."""
    return {torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision() == "high"}


@pytest.mark.quick
@pytest.mark.setting("tf32")
def test_products_round_to_tf32_only_if_the_run_says_so(tiny_config: Path, tmp_path: Path) -> None:
    short = ("train.steps=1", "validation.every=0")
    for value in ("true", "false"):
        folder = tmp_path / value
        assert train.main([str(tiny_config), f"run.dir={folder}", f"tf32={value}", *short]) == 0
        assert allowed() == {value == "true"}
    for value in ("true", "false"):
        load_run(tmp_path / value)
        assert allowed() == {value == "true"}
