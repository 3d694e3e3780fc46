"""A rank's compute time has its work and its own delays, and none of its waits for other ranks."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from mmldlm.distributed.compute_time import ComputeTimer, compare_ranks


@pytest.mark.quick
def test_only_the_hosts_work_counts() -> None:
    timer = ComputeTimer([], on_cuda=False)
    before = timer.seconds()
    until = time.thread_time() + 0.1
    while time.thread_time() < until:
        pass
    time.sleep(0.2)  # as in a wait for other ranks
    assert 0.1 <= timer.seconds() - before < 0.2


@pytest.mark.quick
@pytest.mark.parametrize(
    ("seconds", "median"), [([1.0, 3.0], 1.0), ([3.0, 1.0, 2.0], 1.5), ([1.0, 2.0, 1.0, 9.0, 1.5], 1.25)]
)
def test_the_slowest_rank_is_compared_with_the_others(seconds: list[float], median: float) -> None:
    slowest = max(seconds)
    assert compare_ranks(seconds) == {
        "speed/compute_s": median,
        "speed/compute_s_slowest": slowest,
        "speed/slowest_rank": seconds.index(slowest),
    }


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_is_measured_without_waiting_for_it() -> None:
    block = nn.Linear(4096, 4096, device="cuda")
    timer, data = ComputeTimer([block], on_cuda=True), torch.randn(8192, 4096, device="cuda")
    torch.cuda._sleep(1_000_000_000)  # busy between the blocks, as with collectives: about half a second
    for _ in range(3):
        block(data)
    assert timer.seconds() == 0, "the device has not finished"
    torch.cuda.synchronize()
    assert 0 < timer.seconds() < 0.2
    assert timer.seconds() == timer.seconds()
