"""Buffers for copies of tensors on a GPU: parts of few page-locked blocks, each with a storage of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmldlm.trainer.checkpointer import BLOCK_BYTES, Checkpointer

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class OnGPU:
    """A tensor that says it is on a GPU."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor, self.is_cuda = tensor, True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)


@pytest.mark.quick
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_tensors_share_blocks(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, empty = [], torch.empty

    def allocate(size: int, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        blocks.append(size)
        assert pin_memory
        return empty(size, dtype=dtype, pin_memory=device == "cuda")

    monkeypatch.setattr(torch, "empty", allocate)
    saving: Any = SimpleNamespace(_block=torch.zeros(0, dtype=torch.uint8))
    tensors = [
        torch.randn(3, 5),
        torch.randn(7).bfloat16(),
        torch.tensor(3.0),
        torch.arange(6).view(1, 2, 3),
        torch.randn(2, 2),
        torch.randn(BLOCK_BYTES // 8),
        torch.randn(BLOCK_BYTES // 8),  # with which the first block is full
    ]
    buffers = []
    for tensor in tensors:
        buffer = Checkpointer._host_buffer(saving, OnGPU(tensor) if device == "cpu" else tensor.to(device))  # type: ignore[arg-type]
        assert buffer.is_pinned() == (device == "cuda")
        buffers.append(buffer.copy_(tensor))
    assert blocks == [BLOCK_BYTES, BLOCK_BYTES]
    if device == "cuda":  # a tensor of more than a block has its own
        large = Checkpointer._host_buffer(saving, torch.zeros(BLOCK_BYTES + 1, dtype=torch.uint8, device=device))
        assert large.is_pinned() and len(blocks) == 2
    for buffer, tensor in zip(buffers, tensors, strict=True):
        assert buffer.dtype == tensor.dtype and torch.equal(buffer, tensor)
    assert len({buffer.untyped_storage().data_ptr() for buffer in buffers}) == len(tensors)
