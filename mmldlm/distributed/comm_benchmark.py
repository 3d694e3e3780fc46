"""`mmldlm doctor`'s use of torch.distributed: a rendezvous of nodes at a store, and an all-reduce between them."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mmldlm.errors import PeerLostError

_POLL_S = 0.01
_LEAVE_TIMEOUT_S = 10.0
_BYTES = {"gloo": 16 << 20, "nccl": 256 << 20}  # of the large tensor


def backend_of(device_type: str) -> str:
    """Return the backend for tensors of a device: nccl or gloo."""
    return "nccl" if device_type == "cuda" else "gloo"


def backend_version(backend: str) -> str | None:
    """Return the version of `backend` that is built into torch (torch's own for gloo); None if it is not built."""
    if not dist.is_available() or not dist.is_backend_available(backend):
        return None
    return ".".join(map(str, torch.cuda.nccl.version())) if backend == "nccl" else torch.__version__


class NodeRendezvous:
    """One process per node, connected to a TCPStore of node 0; they exchange JSON values."""

    def __init__(self, host: str, port: int, node: int, nodes: int, timeout_s: float):
        """Host the store on node 0, whose address is `host`, or connect to it.

        `timeout_s` bounds the wait for the other nodes, here and in `exchange`. A store that cannot be reached is a
        `PeerLostError`.
        """
        self.node, self.nodes, self.timeout = node, nodes, timedelta(seconds=timeout_s)
        self._leave_timeout_s = _LEAVE_TIMEOUT_S
        try:
            self._store: dist.Store | None = dist.TCPStore(
                host, port, is_master=node == 0, timeout=self.timeout, wait_for_workers=False
            )
        except RuntimeError as error:
            raise PeerLostError(f"no doctor of node 0 at {host}:{port}: {_first_line(error)}") from None

    @property
    def store(self) -> dist.Store:
        """The store of node 0, until `close`."""
        assert self._store is not None, "the rendezvous is closed"
        return self._store

    def exchange(self, name: str, value: Any) -> list[Any]:
        """Return every node's value of `name`, by node; returns at nearly the same time on all nodes.

        A `PeerLostError` names all nodes that sent no value within the timeout.
        """
        try:
            self.store.set(f"{name}/{self.node}", json.dumps(value))
            keys = [f"{name}/{node}" for node in range(self.nodes)]
            if self._wait_for(keys, self.timeout.total_seconds()):
                return [json.loads(self.store.get(key)) for key in keys]
            missing = [str(node) for node, key in enumerate(keys) if not self.store.check([key])]
            self._leave_timeout_s = 1.0  # the missing nodes will not leave either
        except RuntimeError as error:
            raise PeerLostError(f"lost node 0: {_first_line(error)}") from None
        nodes = f"node{'s' * (len(missing) > 1)} {', '.join(missing)}"
        raise PeerLostError(f"no response from {nodes} within {self.timeout.total_seconds():g} s")

    def _wait_for(self, keys: Sequence[str], timeout_s: float) -> bool:
        """Return whether all keys were set in time. The store's own wait would block Ctrl-C."""
        deadline = time.monotonic() + timeout_s
        while not (is_set := self.store.check(list(keys))) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return is_set

    def close(self) -> None:
        """Leave. Returns once node 0 no longer listens on the port, so that the training can use it."""
        with suppress(RuntimeError):  # raised by the end of the store, for which all but node 0 wait
            self.store.set(f"leave/{self.node}", "")
            keys = [f"leave/{node}" for node in range(self.nodes)] if self.node == 0 else ["never"]
            self._wait_for(keys, self._leave_timeout_s)
        self._store = None


@dataclass(frozen=True)
class AllReduceSpeed:
    """Latency (median time of 4 bytes) and bandwidth (bytes per second and link of a large tensor) of an all-reduce."""

    latency_us: float
    gigabytes_per_s: float


def all_reduce_speed(rendezvous: NodeRendezvous, device: torch.device) -> AllReduceSpeed:
    """Measure an all-reduce between the nodes, or raise `PeerLostError` if it fails or is wrong (collective)."""
    backend = backend_of(device.type)
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # a timeout raises instead of ending the process
    try:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("probe", rendezvous.store),
            rank=rendezvous.node,
            world_size=rendezvous.nodes,
            timeout=rendezvous.timeout,
            device_id=device if backend == "nccl" else None,
        )
        try:
            latency = statistics.median(_all_reduce_times(torch.ones(1, device=device), repeats=21))
            large = torch.ones(_BYTES[backend] // 4, device=device)
            seconds = statistics.median(_all_reduce_times(large, repeats=3))
            # Another summand per node, so that a missing or doubled one shows in the sum.
            total = torch.full((1,), rendezvous.node + 1.0, device=device)
            dist.all_reduce(total)
        finally:
            dist.destroy_process_group()
    except RuntimeError as error:
        raise PeerLostError(f"{backend}: {_first_line(error)}") from None
    if float(total) != (expected := rendezvous.nodes * (rendezvous.nodes + 1) / 2):
        raise PeerLostError(f"{backend}: the sum over all nodes is {float(total):g}, expected {expected:g}")
    # Bus bandwidth as in nccl-tests: this fraction of the bytes crosses each link.
    fraction = 2 * (rendezvous.nodes - 1) / rendezvous.nodes
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
        # Not timed. Without it the values would grow by the number of nodes each time, up to infinity.
        tensor.fill_(1)
    return times[1:]


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
