"""The communication backend of a device, and the speed of an all-reduce between the ranks."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

from mmldlm.distributed.collectives import Collectives

_BYTES = {"gloo": 16 << 20, "nccl": 256 << 20}  # size of the large tensor


def backend_of(device_type: str) -> str:
    """Return the backend for tensors of a device, nccl or gloo."""
    return "nccl" if device_type == "cuda" else "gloo"


def backend_version(backend: str) -> str | None:
    """Return the version of `backend` in this build of torch (torch's own for gloo), or None if it is missing."""
    if not dist.is_available() or not dist.is_backend_available(backend):
        return None
    return ".".join(map(str, torch.cuda.nccl.version())) if backend == "nccl" else torch.__version__


def all_reduce_speed(ranks: Collectives, device: torch.device) -> tuple[float, float]:
    """Measure an all-reduce between several ranks (collective).

    Return the latency in microseconds (the median time of 4 bytes), and the bandwidth of a link in GB/s.
    """
    large = _BYTES[backend_of(device.type)] // 4
    with ranks.in_collective("all-reduces to measure"):
        latency, seconds = (
            _all_reduce_seconds(torch.ones(size, device=device), n) for size, n in ((1, 21), (large, 3))
        )
    # Bus bandwidth as defined by nccl-tests: this fraction of the bytes crosses each link.
    fraction = 2 * (ranks.world_size - 1) / ranks.world_size
    return latency * 1e6, fraction * 4 * large / seconds / 1e9


def _all_reduce_seconds(tensor: torch.Tensor, repeats: int) -> float:
    """Return the median time of an all-reduce of ones, without the first one, which sets up the connections."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        dist.all_reduce(tensor)
        assert float(tensor[0]) == dist.get_world_size()  # reading the value waits for the device
        times.append(time.perf_counter() - start)
        tensor.fill_(1)
    return statistics.median(times[1:])
