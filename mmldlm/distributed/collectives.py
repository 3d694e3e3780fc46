"""`Collectives`: those that the launcher started, and what they tell each other. A `Engine` has a model beside."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mmldlm.distributed.watchdog import Watchdog
from mmldlm.errors import MmldlmError, error_of

T = TypeVar("T")

# Groups that were left, never freed: where DDP's reducer holds the last reference, gloo's threads are joined under the
# lock of Python's interpreter, which now and then they wait for themselves.
_left: list[Any] = []


class Collectives:
    """This process among those of a run: by itself the only one.

    Every method that is called collective must be called by all ranks in the same order.
    """

    shards_parameters = False  # whether a forward pass is itself collective

    def __init__(self, rank: int = 0, world_size: int = 1, watchdog: Watchdog | None = None):
        self.rank, self.world_size, self.watchdog = rank, world_size, watchdog
        self.peer_lost = False

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def in_collective(self, collective: str) -> contextlib.AbstractContextManager[Any]:
        """Tell the watchdog what the main thread waits for from here on."""
        return contextlib.nullcontext() if self.watchdog is None else self.watchdog.in_collective(collective)

    def local_items(self, items: Sequence[T]) -> Iterator[tuple[int, T, bool]]:
        """This rank's share of `items` with their numbers, and whether each counts.

        Where a forward pass is collective, a rank that is out of items gets the last one again, uncounted.
        """
        for place in range(self.rank, len(items) + self.rank, self.world_size):
            counted = place < len(items)
            if not counted and not self.shards_parameters:
                return
            number = min(place, len(items) - 1)
            yield number, items[number], counted

    def sum(self, values: Tensor, what: str = "sum over the ranks") -> Tensor:
        """Collective: sum of a small tensor, on the host in float64; every rank gets the same bits."""
        total = values.detach().to("cpu", torch.float64, copy=True)
        if self.world_size > 1:
            with self.in_collective(what):
                dist.all_reduce(total)
        return total

    def gather(self, value: Any, what: str = "exchange of start-up facts") -> list[Any]:
        """Collective: the small value of each rank, in order of rank, as JSON has it: a tuple comes back as a list."""
        assert _is_json(value), f"{what}: {value!r} is more than JSON can say"
        text = json.dumps(value).encode()
        if self.world_size == 1:
            return [json.loads(text)]
        # PyTorch's own gather of objects unpickles, and so runs, whatever comes over the network.
        with self.in_collective(what):
            lengths = [int(length) for length in _all_gather(torch.tensor([len(text)]))]
            padded = torch.frombuffer(bytearray(text.ljust(max(lengths))), dtype=torch.uint8)
            return [json.loads(part.numpy().tobytes()) for part in _all_gather(padded)]

    @contextlib.contextmanager
    def raise_on_all_ranks(self, what: str) -> Iterator[None]:
        """Collective: a user error of one rank in the body is an error of all, so that nobody waits in vain."""
        error: MmldlmError | None = None
        try:
            yield
        except MmldlmError as found:
            error = found
        verdicts = self.gather(None if error is None else (int(error.exit_code), str(error)), what)
        if error is not None:
            raise error
        for rank, verdict in enumerate(verdicts):
            if verdict is not None:
                raise error_of(verdict[0], f"rank {rank}: {verdict[1]}")

    def close(self) -> None:
        """Leave the group; one that has lost a rank cannot be taken down in good order, and goes with the process."""
        if self.watchdog is not None:
            self.watchdog.close()
        if dist.is_available() and dist.is_initialized() and not self.peer_lost:
            _left.append(dist.group.WORLD)
            dist.destroy_process_group()


def _all_gather(tensor: Tensor) -> list[Tensor]:
    """Collective: this tensor of the host of each rank."""
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor)
    return found


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_json, value))
    return value is None or isinstance(value, (str, int, float))
