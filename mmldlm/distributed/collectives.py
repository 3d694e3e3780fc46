"""`Collectives`: communication between the ranks of a launch. `Engine` adds a model to it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mmldlm.distributed.watchdog import Watchdog
from mmldlm.errors import MmldlmError, PeerLostError, error_from_exit_code, exit_code_and_cause

T = TypeVar("T")


class PendingSum(Sequence[float]):
    """A sum of small numbers over the ranks, all-reduced in the background. The first access waits for it."""

    def __init__(self, total: np.ndarray, wait: Callable[[], Any]):
        self._total, self._wait = total, wait

    @cached_property
    def values(self) -> list[float]:
        """The sum, once it is complete."""
        self._wait()
        return self._total.tolist()

    def split(self, first: int) -> tuple[PendingSum, PendingSum]:
        """Return the `first` entries and the rest. The first access to either part waits for the whole sum."""
        begin, rest = np.split(self._total, [first])
        return PendingSum(begin, lambda: self.values), PendingSum(rest, lambda: self.values)

    def __getitem__(self, index: Any) -> Any:
        return self.values[index]

    def __len__(self) -> int:
        return len(self._total)


# We never free closed groups. If DDP's reducer dropped the last reference, gloo's threads would be joined while the GIL
# is held, and sometimes they wait for the GIL themselves.
_closed_groups: list[Any] = []


class Collectives:
    """This rank and its collectives. By default it is a single process.

    All ranks must call every method marked "collective", and in the same order.
    """

    shards_parameters = False  # whether a forward pass is collective

    def __init__(self, rank: int = 0, world_size: int = 1, watchdog: Watchdog | None = None):
        self.rank, self.world_size, self.watchdog = rank, world_size, watchdog
        self.peer_lost = False

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def in_collective(self, collective: str) -> contextlib.AbstractContextManager[Any]:
        """Tell the watchdog that the main thread waits for other ranks in this collective while the context is open."""
        return contextlib.nullcontext() if self.watchdog is None else self.watchdog.in_collective(collective)

    def local_items(self, items: Sequence[T]) -> Iterator[tuple[int, T, bool]]:
        """Yield this rank's share of `items` as (index, item, whether it counts).

        If a forward pass is collective, all ranks yield equally often: a rank that has run out of items yields the last
        item again and marks it as not counting.
        """
        # Each rank has ceil(len(items) / world size) positions. The last position may be past the end of the items.
        for position in range(self.rank, len(items) + self.rank, self.world_size):
            counts = position < len(items)
            if not counts and not self.shards_parameters:
                return
            index = min(position, len(items) - 1)
            yield index, items[index], counts

    def sum(self, values: Tensor, what: str = "sum over the ranks") -> Tensor:
        """Sum a small tensor over the ranks, on the host in float64 (collective). All ranks get identical bits."""
        return torch.tensor(self.start_sum(values, what).values, dtype=torch.float64)

    def start_sum(self, values: Tensor, what: str) -> PendingSum:
        """Start a sum over the ranks and return without waiting for it (collective). See `sum`."""
        # Copy: the all-reduce works in place, and `values` may already be a float64 tensor on the host.
        total = values.detach().to("cpu", torch.float64, copy=True)
        work = dist.all_reduce(total, async_op=True) if self.world_size > 1 else None

        def wait() -> None:
            if work is not None:
                with self.in_collective(what):
                    work.wait()

        return PendingSum(total.numpy(), wait)  # shares the memory of `total`

    def gather_vectors(self, values: Tensor, what: str) -> Tensor:
        """Return the small vector of every rank, float64 [ranks, n] on the host (collective)."""
        vector = values.detach().to("cpu", torch.float64)
        if self.world_size == 1:
            return vector[None]
        with self.in_collective(what):
            return torch.stack(_all_gather(vector))

    def gather(self, value: Any, what: str = "exchange of start-up facts") -> list[Any]:
        """Return the small value of every rank, by rank (collective).

        Values pass through JSON, so tuples become lists and keys become text.
        """
        text = json.dumps(value).encode()
        if self.world_size == 1:
            return [json.loads(text)]
        # PyTorch's `all_gather_object` would unpickle, and so execute, whatever arrives from the network.
        with self.in_collective(what):
            lengths = [int(length) for length in _all_gather(torch.tensor([len(text)]))]
            # An all-gather needs tensors of one shape. JSON ignores the spaces that `ljust` appends.
            padded = torch.frombuffer(bytearray(text.ljust(max(lengths))), dtype=torch.uint8)
            return [json.loads(part.numpy().tobytes()) for part in _all_gather(padded)]

    @contextlib.contextmanager
    def raise_on_all_ranks(self, what: str) -> Iterator[None]:
        """Raise on all ranks if any rank has a user error in the body (collective), so that no rank waits forever."""
        error: MmldlmError | OSError | None = None
        try:
            yield
        except (MmldlmError, OSError) as raised:
            error = raised
        # Any other exception is a bug. It leaves the function here, and the watchdog ends the other ranks.
        errors = self.gather(None if error is None else exit_code_and_cause(error), what)
        # A rank that has an error itself raises that one, with its traceback.
        if error is not None:
            raise error
        for rank, code_and_text in enumerate(errors):
            if code_and_text is not None:
                raise error_from_exit_code(code_and_text[0], f"rank {rank}: {code_and_text[1]}")

    def diagnose(self, error: Exception) -> PeerLostError | None:
        """Return the lost peer that caused `error`, or None if `error` is itself the cause (not collective)."""
        # A user error is always the cause. Any other error may be the consequence of a lost peer.
        lost = None if self.watchdog is None or isinstance(error, MmldlmError) else self.watchdog.diagnose(error)
        self.peer_lost = isinstance(lost or error, PeerLostError)
        return lost

    def close(self) -> None:
        """Leave the process group. A group that has lost a rank cannot be closed cleanly and ends with the process."""
        if self.watchdog is not None:
            self.watchdog.close()
        if dist.is_available() and dist.is_initialized() and not self.peer_lost:
            _closed_groups.append(dist.group.WORLD)
            dist.destroy_process_group()


def _all_gather(tensor: Tensor) -> list[Tensor]:
    """Return the CPU tensor of every rank (collective). All tensors must have the same shape."""
    tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, tensor)
    return tensors
