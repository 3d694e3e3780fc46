"""A rank's compute time has its work and its own delays, and none of its waits for other ranks."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from mmldlm.distributed.compute_time import DeviceTimer, HostTimer, Work


def compute(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


@pytest.mark.quick
def test_host_waits_for_other_ranks_do_not_count() -> None:
    timer = HostTimer()
    timer.start()
    compute(0.1)
    with timer.waiting():
        time.sleep(0.2)
        with timer.waiting():
            time.sleep(0.2)
        compute(0.1)
    timer.stop(flops=7.0)
    work = timer.take()
    assert 0.2 <= work.seconds < 0.35 and work.flops == 7.0
    assert timer.take() == Work(), "once"
    timer.start()
    time.sleep(0.2)  # a disk that is slow on this rank
    timer.stop(flops=1.0)
    assert 0.19 <= timer.take().seconds < 0.35
    timer.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_is_measured_without_waiting_for_it() -> None:
    block = nn.Linear(4096, 4096, device="cuda")
    timer, data = DeviceTimer([block]), torch.randn(8192, 4096, device="cuda")
    block(data)  # not part of a step
    torch.cuda.synchronize()
    timer.start()
    torch.cuda._sleep(1_000_000_000)  # busy between the blocks, as with collectives: about half a second
    for _ in range(3):
        block(data)
    timer.stop(flops=5.0)
    assert timer.take() == Work(), "the device has not finished the step"
    torch.cuda.synchronize()
    work = timer.take()
    assert work.flops == 5.0 and 0 < work.seconds < 0.2
    assert timer.take() == Work()
