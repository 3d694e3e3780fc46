"""`ReplicaCheck`: checks at some steps that all ranks still train the same model.

Faulty hardware or software of a node may change the numbers of a rank without any error. We compare weights that
several ranks hold (DDP, ZeRO-1 and 2, replicas of FSDP2). Under ZeRO we also compare the network's copy of a weight
with the master that the optimizer updates. A fault in weights that only one rank holds cannot be found this way.
"""

from __future__ import annotations

import math
import zlib
from functools import cache
from typing import NoReturn

import torch
from torch import Tensor

from mmldlm.distributed.engine import Engine
from mmldlm.errors import NumericalError
from mmldlm.utils.callback import Callback

PERIOD = 4093  # after which signs repeat: a prime, so that they do not line up with the rows of a matrix
TOLERANCE = 1e-6  # relative, of a fingerprint: far above rounding, far below the effect of a fault


@cache
def _signs() -> Tensor:
    """Return the two directions of the fingerprint, float64 [PERIOD, 2]."""
    return torch.randint(0, 2, (PERIOD, 2), generator=torch.Generator().manual_seed(0)).double() * 2 - 1


def fingerprint(name: str, start: int, values: Tensor) -> Tensor:
    """Project part of a tensor onto two fixed directions of +-1. Return float64 [2], on the tensor's device.

    `values` [n] are the elements from index `start` on, and `name` selects the directions. A projection is linear, so
    the fingerprints of all shards add up to the fingerprint of the whole tensor.
    """
    signs = _signs().roll(-(start + zlib.crc32(name.encode())) % PERIOD, 0).to(values.device)
    whole = len(values) // PERIOD * PERIOD
    column_sums, rest = values[:whole].view(-1, PERIOD).sum(0, dtype=torch.float64), values[whole:].double()
    return column_sums @ signs + rest @ signs[: len(rest)]


class ReplicaCheck(Callback):
    """Compares the ranks in the first step after each start and in every `every`-th step. 0 means never."""

    def __init__(self, engine: Engine, every: int):
        self.engine, self.every, self._is_first_step = engine, every, True

    def after_step(self, step: int) -> None:
        """Compare the ranks if it is due (collective). `NumericalError` with step, weight and, if known, rank."""
        engine, due = self.engine, self._is_first_step or (self.every > 0 and step % self.every == 0)
        if engine.world_size == 1 or not self.every or not due:
            return
        self._is_first_step, lr = False, engine.unwrapped_optimizer.param_groups[0]["lr"]
        weights = engine.copied_weights()
        stale = next((name for name, copy, master in weights if not torch.equal(copy, master.to(copy))), None)
        names, rows = [], []
        for name, start, values in engine.network_weights():
            names.append(name)
            rows.append(fingerprint(name, start, values))
        prints = torch.stack(rows).cpu()  # [tensors, 2]
        own = torch.tensor([lr, engine.replica, stale is not None, *prints.sum(0)], dtype=torch.float64)
        by_rank = engine.gather_vectors(own, "comparison of the replicas")
        rates, replicas, has_stale, sums = by_rank[:, 0], by_rank[:, 1].long(), by_rank[:, 2], by_rank[:, 3:]
        for rank in range(engine.world_size):
            if rates[rank] != rates[0]:
                _fail(step, f"the learning rate is {rates[rank]:g} on rank {rank} and {rates[0]:g} on rank 0")
        if has_stale.any():
            names_by_rank = engine.gather(stale, "weights that are stale")
            rank, name = next((rank, name) for rank, name in enumerate(names_by_rank) if name)
            _fail(step, f"the network computes with another {name} than the optimizer has updated, on rank {rank}")
        # Non-finite weights are no disagreement: the guard acts on them in the next step.
        if math.isfinite(sums.sum()) and _spread(replicas, sums).any():
            # [ranks, tensors, 2]
            all_prints = engine.gather_vectors(prints.flatten(), "comparison of each weight").view(-1, len(names), 2)
            worst = int(_spread(replicas, all_prints, tolerance=0.0).amax(1).argmax())
            _fail(step, f"the replicas of the weights differ, most in {names[worst]}")


def _spread(replicas: Tensor, by_rank: Tensor, tolerance: float = TOLERANCE) -> Tensor:
    """Sum `by_rank` [ranks, ...] over the ranks of each replica. Return by how much replicas differ, [...].

    Differences within the tolerance count as 0.
    """
    totals = by_rank.new_zeros(int(replicas.max()) + 1, *by_rank.shape[1:]).index_add(0, replicas, by_rank)
    return (totals.amax(0) - totals.amin(0) - tolerance * totals.abs().amax(0)).clamp_min(0)


def _fail(step: int, text: str) -> NoReturn:
    raise NumericalError(
        f"step {step}: {text} (guard.verify_updates_every); this update is in no checkpoint, see 'When the ranks "
        "disagree' in docs/engines.md"
    )
