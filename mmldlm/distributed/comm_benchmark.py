"""The backend of a device, and the speed of an all-reduce between the ranks."""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from mmldlm.distributed.collectives import Collectives
from mmldlm.errors import ConfigError

_BYTES = {"gloo": 16 << 20, "nccl": 256 << 20}  # of the large tensor


def backend_of(device_type: str) -> str:
    """Return the backend for tensors of a device: nccl or gloo."""
    return "nccl" if device_type == "cuda" else "gloo"


def backend_version(backend: str) -> str | None:
    """Return the version of `backend` that is built into torch (torch's own for gloo); None if it is not built."""
    if not dist.is_available() or not dist.is_backend_available(backend):
        return None
    return ".".join(map(str, torch.cuda.nccl.version())) if backend == "nccl" else torch.__version__


class AllReduceSpeed(NamedTuple):
    """Latency (median time of 4 bytes) and bandwidth (bytes per second and link of a large tensor) of an all-reduce."""

    latency_us: float
    gigabytes_per_s: float


def all_reduce_speed(ranks: Collectives, device: torch.device) -> AllReduceSpeed:
    """Measure an all-reduce between several ranks (collective); a wrong sum is a `ConfigError`."""
    with ranks.in_collective("all-reduces to measure"):
        latency = statistics.median(_all_reduce_times(torch.ones(1, device=device), repeats=21))
        large = torch.ones(_BYTES[backend_of(device.type)] // 4, device=device)
        seconds = statistics.median(_all_reduce_times(large, repeats=3))
        # Another summand per rank, so that a missing or doubled one shows in the sum.
        total = torch.full((1,), ranks.rank + 1.0, device=device)
        dist.all_reduce(total)
    if float(total) != (expected := ranks.world_size * (ranks.world_size + 1) / 2):
        raise ConfigError(f"all-reduce: expected the sum {expected:g} over the ranks, found {float(total):g}")
    # Bus bandwidth as in nccl-tests: this fraction of the bytes crosses each link.
    fraction = 2 * (ranks.world_size - 1) / ranks.world_size
    return AllReduceSpeed(latency * 1e6, fraction * large.nbytes / seconds / 1e9)


def _all_reduce_times(tensor: torch.Tensor, repeats: int) -> list[float]:
    """Return the seconds of all-reduces of `tensor`, without the first, which sets up the connections."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        dist.all_reduce(tensor)
        if tensor.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        # Not timed. Without it the values would grow by the number of ranks each time, up to infinity.
        tensor.fill_(1)
    return times[1:]
