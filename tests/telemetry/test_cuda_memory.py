"""Records show the peaks of the GPU's memory since the last record; a stub stands in for its allocator."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from mmldlm.telemetry.resources import memory_metrics

MIB = 2**20


class Allocator:
    """What PyTorch's allocator on CUDA counts, in bytes."""

    def __init__(self) -> None:
        self.current = self.peak = 0
        self.counters = Counter(num_alloc_retries=0, num_ooms=0)

    def hold(self, size: int) -> None:
        self.current, self.peak = size, max(self.peak, size)

    def reset_peak(self) -> None:
        self.peak = self.current


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    stub = Allocator()
    for name, function in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "memory_allocated": lambda: stub.current,
        "memory_reserved": lambda: 2 * stub.current,
        "max_memory_allocated": lambda: stub.peak,
        "max_memory_reserved": lambda: 2 * stub.peak,
        "memory_stats": lambda: dict(stub.counters),
        "reset_peak_memory_stats": stub.reset_peak,
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    return stub


@pytest.mark.quick
def test_peaks_are_those_since_the_last_record(allocator: Allocator) -> None:
    shown = []
    for sizes in ((100, 900, 100), (100, 700, 200), (200,)):
        for size in sizes:
            allocator.hold(size * MIB)
        record = memory_metrics()
        shown.append([record[f"memory/cuda_{name}_mib"] for name in ("allocated", "peak_allocated", "peak_reserved")])
    assert shown == [[100, 900, 1800], [200, 700, 1400], [200, 200, 400]]


@pytest.mark.quick
def test_retries_and_failures_are_counted_from_the_start(allocator: Allocator) -> None:
    memory_metrics()
    allocator.counters.update(num_alloc_retries=3, num_ooms=1)
    for _ in range(2):
        record = memory_metrics()
        assert (record["health/cuda_alloc_retries"], record["health/cuda_ooms"]) == (3, 1)


@pytest.mark.quick
@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has GPUs")
def test_without_cuda_nothing_is_asked_of_it() -> None:
    assert not any("cuda" in key for key in memory_metrics())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_peak_of_freed_memory_on_cuda() -> None:
    torch.zeros(1, device="cuda")
    before = memory_metrics()["memory/cuda_allocated_mib"]
    block = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    del block
    peaks = [memory_metrics()["memory/cuda_peak_allocated_mib"] - before for _ in range(2)]
    assert peaks[0] >= 64 > peaks[1]
