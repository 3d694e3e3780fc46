"""`UpdateCheck`: at some steps, whether all ranks compute the same update, and the right one.

Under FSDP2 and ZeRO no two ranks hold the same numbers, so comparing what they hold finds little. Four checks together
find a rank with noise, data, learning rate or weights of its own, whatever the engine:

- The learning rates of all ranks are equal.
- Gradients: samples, masks and noise are functions of (seed, step, slot), so before the step each rank runs forward and
  backward on the micro-batches of the next rank. The reduced gradients must be those of the step itself.
- Update: a sample of each shard's elements must move as plain, unfused AdamW (arXiv 1711.05101) moves them with the run
  config's settings, and the network must compute with the updated weights.
- Replicas: weights that several ranks hold must be equal.

A gradient or an update is compared by its fingerprint: two projections onto fixed random directions of +-1. It is
linear, so the fingerprint of a whole tensor is the sum of those of its shards, under every engine.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from mmldlm.config import RunConfig
from mmldlm.distributed.engine import Engine, Shard
from mmldlm.distributed.launcher import DDP
from mmldlm.errors import NumericalError
from mmldlm.optim.param_groups import muon_matrices, parameter_groups

PERIOD = 4093  # of the signs; a prime, so that they do not line up with the rows of a matrix
SAMPLE_SIZE = 64  # elements of each shard whose update is computed again
# Tolerances, each far above rounding and far below what a fault changes.
GRADIENT_TOLERANCE, LOW_PRECISION_TOLERANCE = 1e-3, 3e-2  # of a gradient's norm, where only the order of sums differs
UPDATE_TOLERANCE = 2e-2  # of an update's norm
ROUNDING = 2e-7  # of a float32 weight, by decay and update
REPLICA_TOLERANCE = 1e-6  # of a fingerprint
SMALL_GRADIENT = 0.1  # of the norm of all gradients: smaller ones may be the rounding error of a sum that cancels


@cache
def _signs() -> Tensor:
    """Return the directions of the fingerprint, float64 [PERIOD, 2]."""
    return torch.randint(0, 2, (PERIOD, 2), generator=torch.Generator().manual_seed(0)).double() * 2 - 1


def fingerprint(name: str, start: int, values: Tensor) -> Tensor:
    """Return the fingerprint of a part of a tensor, float64 [2] on the device of `values`.

    Args:
        name: Name of the tensor, of which its directions are a function.
        start: Index in the flattened tensor of the first element of `values` [n].
    """
    signs = _signs().roll(-(start + zlib.crc32(name.encode())) % PERIOD, 0).to(values.device)
    whole = len(values) // PERIOD * PERIOD
    column_sums, rest = values[:whole].view(-1, PERIOD).sum(0, dtype=torch.float64), values[whole:].double()
    return column_sums @ signs + rest @ signs[: len(rest)]


def fingerprints(parts: Iterable[tuple[str, int, Tensor]]) -> tuple[list[str], Tensor]:
    """Return the names of tensors and the fingerprints of their parts, float64 [tensors, 2] on the host."""
    names, rows = [], []
    for name, start, values in parts:
        names.append(name)
        rows.append(fingerprint(name, start, values))
    return names, torch.stack(rows).cpu() if rows else torch.zeros(0, 2, dtype=torch.float64)


@dataclass(frozen=True)
class Gradients:
    """Fingerprints and norms of this rank's shards of the reduced gradients."""

    names: list[str]
    fingerprints: Tensor  # float64 [shards, 2] on the host
    norms: Tensor  # float64 [shards] on the host


def measure_gradients(engine: Engine) -> Gradients:
    """Measure the gradients between the last backward pass of a step and its update."""
    shards = [shard for shard in engine.local_shards(gradients=True) if shard.gradient is not None]
    names, values = fingerprints((shard.name, shard.start, shard.gradient) for shard in shards)  # type: ignore[misc]
    norms = [torch.linalg.vector_norm(shard.gradient).double() for shard in shards]
    return Gradients(names, values, torch.stack(norms).cpu() if norms else torch.zeros(0, dtype=torch.float64))


@dataclass(frozen=True)
class Fault:
    """What a rank finds wrong with its own shards; the cause of another fault has the lower `order`."""

    order: int
    tensor: str
    size: float  # relative difference
    text: str


def compare_gradients(gradients: Gradients, reference: Gradients, tolerance: float) -> Fault | None:
    """Return the shard whose gradient differs most from the reference's, if it does by more than `tolerance`."""
    assert gradients.names == reference.names
    if not gradients.names:
        return None
    scale = gradients.norms.clamp_min(max(SMALL_GRADIENT * float(gradients.norms.norm()), 1e-30))
    errors = ((gradients.fingerprints - reference.fingerprints).abs().amax(1) / scale).nan_to_num(nan=math.inf)
    worst = int(errors.argmax())
    size, name = float(errors[worst]), gradients.names[worst]
    if size <= tolerance:
        return None
    text = (
        f"the gradient of {name} is another one ({size:.2g} of its norm) when the ranks exchange their "
        "micro-batches: one has noise or weights of its own or loses a micro-batch, or gradients are summed over "
        "the wrong ranks"
    )
    return Fault(0, name, size, text)


@dataclass(frozen=True)
class ShardSample:
    """Some elements of a shard and of the optimizer's state before the update, float64 on the host."""

    weight: Tensor
    gradient: Tensor
    first_moment: Tensor
    second_moment: Tensor
    steps: float


@dataclass(frozen=True)
class BeforeUpdate:
    """What `UpdateCheck` needs to know from before the update."""

    fingerprint: Tensor  # of this rank's weights, float64 [2]
    samples: dict[str, ShardSample]
    gradients_differ: Fault | None


class UpdateCheck:
    """Verification of the first step of every start and of every `guard.verify_updates_every`-th step."""

    def __init__(self, config: RunConfig, engine: Engine, model: nn.Module):
        self.config, self.engine = config, engine
        self.every, self._pending = config.guard.verify_updates_every, True
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        groups = parameter_groups(model, config.optim.weight_decay)
        self._decay = {names[id(p)]: float(group["weight_decay"]) for group in groups for p in group["params"]}
        muon = muon_matrices(model) if config.optim.name == "muon" else []
        self._muon = {names[id(parameter)] for parameter in muon}
        hook = config.distributed.ddp.comm_hook if engine.name == DDP else "none"
        # PowerSGD's gradients depend on the compression errors of earlier steps, which belong to a rank.
        self.exchanges_micro_batches = engine.world_size > 1 and hook != "powersgd"
        low = config.precision != "fp32" or hook != "none"
        self._gradient_tolerance = LOW_PRECISION_TOLERANCE if low else GRADIENT_TOLERANCE

    def is_due(self, step: int) -> bool:
        """Return whether step `step`, counted from 0, is verified; a skipped one is made up for by the next."""
        return self.every > 0 and (self._pending or (step + 1) % self.every == 0)

    def before_update(self, reference: Gradients | None) -> BeforeUpdate:
        """Measure weights, gradients and optimizer state after the last backward pass, and compare the gradients."""
        self._pending = True
        gradients_differ = (
            None
            if reference is None
            else compare_gradients(measure_gradients(self.engine), reference, self._gradient_tolerance)
        )
        samples = {
            s.name: _sample_shard(s, self.engine.gradient_factor) for s in self.engine.local_shards(gradients=True)
        }
        return BeforeUpdate(self._weight_fingerprint(), samples, gradients_differ)

    def after_update(self, step: int, before: BeforeUpdate, lr: float, norm: float) -> list[float] | None:
        """Verify an update that was not skipped (collective); `norm` is the gradient norm before clipping.

        Returns:
            Fingerprint of the update, the same under every engine but for rounding. None if it made weights non-finite:
            that is no disagreement, and the guard acts on it in the next step.

        Raises:
            NumericalError: The ranks compute different updates; the message names step, tensor and, if known, rank.
        """
        engine = self.engine
        self._compare_lr(step, lr)
        fault = before.gradients_differ or self._compare_shards(before, lr, norm)
        names, weights = fingerprints(engine.network_weights())
        # Not a number: this rank has found a fault, so all exchange what they have found.
        own = weights.sum(0) if fault is None else torch.full((2,), math.nan)
        by_rank = engine.gather_vectors(own, "comparison of the weights")
        if not by_rank.isfinite().all():
            self._raise_first_fault(step, fault)
            return None
        self._compare_replicas(step, names, weights, by_rank)
        self._pending = False
        update = engine.sum(self._weight_fingerprint() - before.fingerprint, "fingerprint of the update")
        return [value / engine.num_replicas for value in update.tolist()]

    def _weight_fingerprint(self) -> Tensor:
        return fingerprints((s.name, s.start, s.weight) for s in self.engine.local_shards())[1].sum(0)

    # --- the checks ----------------------------------------------------------------------------------------

    def _compare_lr(self, step: int, lr: float) -> None:
        rates = self.engine.gather_vectors(torch.tensor([lr], dtype=torch.float64), "comparison of the learning rates")
        for rank, rate in enumerate(rates[:, 0].tolist()):
            if rate != rates[0, 0]:
                _fail(step, f"the learning rate is {rate:g} on rank {rank} and {float(rates[0, 0]):g} on rank 0")

    def _compare_shards(self, before: BeforeUpdate, lr: float, norm: float) -> Fault | None:
        """Return the shard whose update differs most from the optimizer's formula, if one does."""
        clip_norm, faults = self.config.optim.clip_norm, []
        clip = min(1.0, clip_norm / (norm + 1e-6)) if clip_norm else 1.0
        for shard in self.engine.local_shards():
            sample = before.samples[shard.name]
            error = self._update_error(shard, sample, lr, clip)
            if not error <= 1:
                text = f"the update of {shard.name} is not that of {self.config.optim.name} at learning rate {lr:g}"
                faults.append(Fault(1, shard.name, error, text))
            copy = shard.network_weight
            if copy is not None and not torch.equal(copy, shard.weight.to(copy.device, copy.dtype)):
                text = f"the network computes with another {shard.name} than the optimizer has updated"
                faults.append(Fault(2, shard.name, 1.0, text))
        return min(faults, key=lambda fault: (fault.order, -fault.size), default=None)

    def _update_error(self, shard: Shard, sample: ShardSample, lr: float, clip: float) -> float:
        """Return the difference between a shard's update and the expected one, relative to what is tolerated."""
        update = _sample(shard.weight) - sample.weight
        if not update.isfinite().all():
            return 0.0
        rounding = ROUNDING * float(sample.weight.norm())
        if shard.name in self._muon:
            # The update of an element depends on the whole matrix. It is zero for none but stale ones.
            is_stale = lr > 0 and not update.any() and bool(sample.gradient.any())
            return math.inf if is_stale else 0.0
        optim = self.config.optim
        (beta1, beta2), steps = optim.betas, sample.steps + 1
        gradient = sample.gradient * clip
        mean = torch.lerp(sample.first_moment, gradient, 1 - beta1) / (1 - beta1**steps)
        square = torch.lerp(sample.second_moment, gradient.square(), 1 - beta2) / (1 - beta2**steps)
        expected = -lr * (mean / (square.sqrt() + optim.eps) + self._decay[shard.name] * sample.weight)
        tolerated = UPDATE_TOLERANCE * float(expected.norm()) + rounding
        return float((update - expected).norm()) / tolerated if tolerated else 0.0

    def _compare_replicas(self, step: int, names: list[str], weights: Tensor, by_rank: Tensor) -> None:
        """Raise `NumericalError` if the weights of two replicas differ (collective)."""
        engine = self.engine
        replicas = [int(replica) for replica in engine.gather_vectors(torch.tensor([engine.replica]), "replicas")[:, 0]]
        if not _differ(_sum_by(replicas, by_rank)).any():
            return
        rows = engine.gather_vectors(weights.flatten(), "comparison of each weight").view(engine.world_size, -1, 2)
        totals = _sum_by(replicas, rows)
        worst = int((totals.amax(0) - totals.amin(0)).amax(1).argmax())
        _fail(step, f"the replicas of the weights differ, most in {names[worst]}")

    def _raise_first_fault(self, step: int, fault: Fault | None) -> None:
        """Raise `NumericalError` on all ranks for the first cause that a rank has found, if any (collective)."""
        own = None if fault is None else [fault.order, -fault.size, fault.text]
        gathered = self.engine.gather(own, "faults of the update")
        reports = [[*report, rank] for rank, report in enumerate(gathered) if report is not None]
        if reports:
            order, _, text, rank = min(reports)
            # Reducing gradients mixes what the ranks computed; an update is a rank's own.
            _fail(step, text if order == 0 else f"{text}, on rank {rank}")


def _fail(step: int, text: str) -> NoReturn:
    raise NumericalError(
        f"step {step + 1}: {text} (guard.verify_updates_every); this update is in no checkpoint, see 'When the ranks "
        "disagree' in docs/engines.md"
    )


def _sample_shard(shard: Shard, gradient_factor: float) -> ShardSample:
    weight = _sample(shard.weight)
    zeros = torch.zeros_like(weight)
    get: Callable[[str], Any] = shard.state.get
    return ShardSample(
        weight=weight,
        gradient=zeros if shard.gradient is None else _sample(shard.gradient) * gradient_factor,
        first_moment=_sample(get("exp_avg")) if get("exp_avg") is not None else zeros,
        second_moment=_sample(get("exp_avg_sq")) if get("exp_avg_sq") is not None else zeros,
        steps=float(get("step") or 0),
    )


def _sample(values: Tensor) -> Tensor:
    return values[:: max(1, len(values) // SAMPLE_SIZE)][:SAMPLE_SIZE].to("cpu", torch.float64, copy=True)


def _sum_by(replicas: list[int], by_rank: Tensor) -> Tensor:
    """Return the sums over the ranks of each replica, [replicas, ...]."""
    totals = by_rank.new_zeros(max(replicas) + 1, *by_rank.shape[1:])
    return totals.index_add(0, torch.tensor(replicas), by_rank)


def _differ(totals: Tensor) -> Tensor:
    return totals.amax(0) - totals.amin(0) > REPLICA_TOLERANCE * totals.abs().amax(0)
