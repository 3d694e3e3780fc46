"""What the doctor needs of torch.distributed: nodes that meet at a store, and an all-reduce between them."""

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
_LEAVE_S = 10.0
_BYTES = {"gloo": 16 << 20, "nccl": 256 << 20}


def backend_of(device_type: str) -> str:
    return "nccl" if device_type == "cuda" else "gloo"


def backend_version(backend: str) -> str | None:
    """What of `backend` is built into torch; None where it is not."""
    if not dist.is_available() or not dist.is_backend_available(backend):
        return None
    return ".".join(map(str, torch.cuda.nccl.version())) if backend == "nccl" else torch.__version__


class NodeRendezvous:
    """One process of each node around a TCPStore that node 0 hosts at `host:port`; JSON values go round."""

    def __init__(self, host: str, port: int, node: int, nodes: int, timeout_s: float):
        """Raises `PeerLostError` where the store of node 0 cannot be joined."""
        self.node, self.nodes, self.timeout = node, nodes, timedelta(seconds=timeout_s)
        self._leave_s = _LEAVE_S
        try:
            self._store: dist.Store | None = dist.TCPStore(
                host, port, is_master=node == 0, timeout=self.timeout, wait_for_workers=False
            )
        except RuntimeError as error:
            raise PeerLostError(f"{host}:{port} is not a doctor of node 0: {_first_line(error)}") from None

    @property
    def store(self) -> dist.Store:
        assert self._store is not None, "the meeting is over"
        return self._store

    def exchange(self, name: str, value: Any) -> list[Any]:
        """Every node's value of `name`, in order; returns at nearly the same moment on all nodes.

        Raises `PeerLostError` naming the nodes whose value did not come within the timeout.
        """
        try:
            self.store.set(f"{name}/{self.node}", json.dumps(value))
            keys = [f"{name}/{node}" for node in range(self.nodes)]
            if self._wait_for(keys, self.timeout.total_seconds()):
                return [json.loads(self.store.get(key)) for key in keys]
            missing = [str(node) for node, key in enumerate(keys) if not self.store.check([key])]
            self._leave_s = 1.0  # nobody need wait long for who never came
        except RuntimeError as error:
            raise PeerLostError(f"lost node 0: {_first_line(error)}") from None
        nodes = f"node{'s' * (len(missing) > 1)} {', '.join(missing)}"
        raise PeerLostError(f"no word from {nodes} within {self.timeout.total_seconds():g} s")

    def _wait_for(self, keys: Sequence[str], seconds: float) -> bool:
        """Whether all keys came in time. The store's own wait would hold up a Ctrl-C."""
        deadline = time.monotonic() + seconds
        while not (came := self.store.check(list(keys))) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return came

    def close(self) -> None:
        """Leave; whoever returns knows that node 0 no longer holds the port, so that the training may have it."""
        with suppress(RuntimeError):  # the end of the store, for which all but node 0 wait
            self.store.set(f"farewell/{self.node}", "")
            awaited = [f"farewell/{node}" for node in range(self.nodes)] if self.node == 0 else ["never"]
            self._wait_for(awaited, self._leave_s)
        self._store = None


@dataclass(frozen=True)
class Speed:
    """Of an all-reduce: the median time of 4 bytes, and bytes per second and link of a large one."""

    latency_us: float
    gigabytes_per_s: float


def all_reduce_speed(meeting: NodeRendezvous, device: torch.device) -> Speed:
    """Measure it with one process of each node. Raises `PeerLostError` where it fails, hangs or adds up wrongly."""
    backend = backend_of(device.type)
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # an exception on timeout, not the end of the process
    try:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("probe", meeting.store),
            rank=meeting.node,
            world_size=meeting.nodes,
            timeout=meeting.timeout,
            device_id=device if backend == "nccl" else None,
        )
        try:
            latency = statistics.median(_seconds(torch.ones(1, device=device), repeats=21))
            large = torch.ones(_BYTES[backend] // 4, device=device)
            seconds = statistics.median(_seconds(large, repeats=3))
            total = torch.full((1,), meeting.node + 1.0, device=device)
            dist.all_reduce(total)
        finally:
            dist.destroy_process_group()
    except RuntimeError as error:
        raise PeerLostError(f"{backend}: {_first_line(error)}") from None
    if float(total) != (expected := meeting.nodes * (meeting.nodes + 1) / 2):
        raise PeerLostError(f"{backend}: the sum over all nodes is {float(total):g}, expected {expected:g}")
    share = 2 * (meeting.nodes - 1) / meeting.nodes  # of the bytes that cross each link, as nccl-tests count
    return Speed(latency * 1e6, share * large.nbytes / seconds / 1e9)


def _seconds(tensor: torch.Tensor, repeats: int) -> list[float]:
    """Times of all-reduces of `tensor`, without the first, which sets up the connections."""
    found = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        dist.all_reduce(tensor)
        if tensor.is_cuda:
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
        tensor.fill_(1)
    return found[1:]


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
