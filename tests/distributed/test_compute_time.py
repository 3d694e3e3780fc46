"""A rank's compute time has its work and its own delays, and none of its waits for other ranks."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from mmldlm.distributed.compute_time import DeviceTimer, HostTimer, Work


@pytest.mark.quick
def test_only_the_hosts_work_counts() -> None:
    timer = HostTimer()
    timer.start()
    until = time.thread_time() + 0.1
    while time.thread_time() < until:
        pass
    time.sleep(0.2)  # as in a wait for other ranks
    timer.stop(flops=7.0)
    work = timer.take()
    assert 0.1 <= work.seconds < 0.2 and work.flops == 7.0
    assert timer.take() == Work(), "once"


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
