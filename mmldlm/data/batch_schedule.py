"""Batch sizes as a function of the step, and how a step's samples are dealt to ranks and micro-batches.

Shape letters: S steps, G samples of a global batch, W ranks, R = G / W rounds (each deals one sample to every rank), B
samples of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mmldlm.batch import BatchSize
from mmldlm.errors import ConfigError
from mmldlm.settings.declaration import setting

_Size = Literal["global_batch_size", "micro_batch_size", "micro_batch_tokens"]


@dataclass(frozen=True)
class TrainConfig:
    """The `train` section of a run config."""

    steps: int = setting(
        1000, "optimizer steps", at_least=1, advice="With schedule.lr other than constant, choose it at the start"
    )
    global_batch_size: int = setting(
        128,
        "samples of one optimizer step, over all ranks",
        at_least=1,
        advice="It is part of the method: if you change it, tune the learning rate again",
    )
    micro_batch_size: int | None = setting(
        None,
        "samples of one forward pass on one rank; with micro_batch_tokens, at most this many; null: no accumulation",
        at_least=1,
        advice="As large as memory allows: it does not change the curve",
    )
    micro_batch_tokens: int = setting(
        0,
        "most text and latent tokens of one forward pass on one rank: the step's samples are dealt to as few "
        "micro-batches as can hold them, each with short and long samples. A longer sample gets a micro-batch of its "
        "own. 0: only micro_batch_size counts",
        at_least=0,
        advice="Use it on GPUs, which wait for the host below about 16,000 tokens: as large as memory allows. It does "
        "not change the curve",
    )
    stop_after_worse: int = setting(
        0,
        "end the run after this many validations in a row without a new lowest loss (checkpoint.keep_best); 0: never",
        at_least=0,
        advice="3 to 5 for a small corpus, which a network soon memorizes. The learning-rate schedule still covers all "
        "steps",
    )
    batch_schedule: dict[int, dict[_Size, int]] = setting(
        factory=dict,
        doc="batch sizes from the given optimizer steps on, counted from 0; sizes that you do not name stay: "
        "{1000: {micro_batch_size: 4}, 5000: {global_batch_size: 256}}",
    )
    auto_micro_batch: bool = setting(
        False,
        "before the first step, halve the micro-batches on all ranks until the largest of the run fit in memory; costs "
        "some forward and backward passes at the start; not under fsdp2 and zero3",
        advice="If the longest samples of a store are rare, and the run is unattended",
    )

    def __post_init__(self) -> None:
        for step, sizes in self.batch_schedule.items():
            if step < 0:
                raise ValueError(f"batch_schedule.{step}: expected an optimizer step, at least 0, found {step}")
            if not sizes:
                raise ValueError(f"batch_schedule.{step}: expected a size, such as global_batch_size, found none")
            for name, size in sizes.items():
                at_least = 0 if name == "micro_batch_tokens" else 1
                if size < at_least:
                    raise ValueError(f"batch_schedule.{step}.{name}: must be at least {at_least}, found {size}")

    def is_due(self, done: int, every: int) -> bool:
        """Return whether an action is due after `done` steps: every `every` steps (0: never), and after the last."""
        return every > 0 and (done % every == 0 or done == self.steps)

    def batch_stages(self, world_size: int) -> dict[int, BatchSize]:
        """Return the batch sizes by the optimizer step where they begin, in order and from step 0."""
        return {
            step: BatchSize(size, micro or max(1, size // world_size), tokens)
            for step, size, micro, tokens in self._stages()
        }

    def batch_at(self, step: int, world_size: int) -> BatchSize:
        """Return the batch sizes of optimizer step `step`, counted from 0."""
        stages = self.batch_stages(world_size)
        return stages[max(start for start in stages if start <= step)]

    def samples_before(self, step: int) -> int:
        """Return the number of samples of all optimizer steps before `step`."""
        stages = [(min(first, step), size) for first, size, *_ in self._stages()]
        # A stage ends where the next begins, the last one at `step`.
        stops = [*(first for first, _ in stages[1:]), step]
        return sum(size * (stop - first) for (first, size), stop in zip(stages, stops, strict=True))

    def check_batches(self, world_size: int) -> None:
        """Check that the ranks can share every global batch evenly.

        It is a `ConfigError` if a global batch is not a multiple of micro-batch size x ranks, also in a stage beyond
        `steps`.
        """
        for step, size, micro, tokens in self._stages():
            # With a token budget, or one micro-batch per rank that is its whole share, only the ranks must divide.
            micro = None if tokens else micro
            unit = (micro or 1) * world_size
            if size % unit:
                key = (
                    f"batch_schedule.{step}: global_batch_size" if step in self.batch_schedule else "global_batch_size"
                )
                parts = f"micro_batch_size x processes ({micro} x {world_size} = {unit})"
                nearest = max(1, size // unit) * unit
                raise ConfigError(
                    f"train.{key} is {size}, expected a multiple of {parts if micro else f'{unit} processes'}, "
                    f"such as {nearest} or {nearest + unit}"
                )

    def _stages(self) -> Iterator[tuple[int, int, int | None, int]]:
        """Yield (first step, global batch size, micro-batch size or None, token budget or 0) of each stage."""
        size, micro, tokens = self.global_batch_size, self.micro_batch_size, self.micro_batch_tokens
        for step in sorted({0, *self.batch_schedule}):
            changes = self.batch_schedule.get(step, {})
            size, micro = changes.get("global_batch_size", size), changes.get("micro_batch_size", micro)
            tokens = changes.get("micro_batch_tokens", tokens)
            yield step, size, micro, tokens


def deal(lengths: np.ndarray, size: BatchSize, world_size: int, latent_tokens: int) -> list[np.ndarray]:
    """Return the slots of all ranks' samples in each micro-batch of a step.

    Samples sorted by length are dealt in rounds, and each round runs in the opposite direction of the round before
    ("snake" order), so that no rank always gets the longest. Consecutive rounds form a micro-batch. With a token
    budget, rounds are dealt to micro-batches the way samples are dealt to ranks, which makes the micro-batches alike.
    All ranks then have the same number of micro-batches and of samples in each, and nearly the same number of tokens.
    No curve depends on how we deal.

    Args:
        lengths: Text tokens of each sample by slot, int [G].
        latent_tokens: Latent tokens of each sample, which count toward the token budget too.

    Returns:
        Slots of each micro-batch, int64 [B, W].
    """
    rounds = _snake_rounds(np.argsort(lengths, kind="stable"), world_size)
    if not size.micro_batch_tokens:
        return list(rounds.reshape(-1, size.micro_batch_size, world_size))
    return [rounds[part] for part in _alike(lengths[rounds] + latent_tokens, size)]


def largest_micro_batches(tokens: np.ndarray, size: BatchSize, world_size: int) -> np.ndarray:
    """Return the tokens of the largest micro-batch of any rank in each of S steps, int64 [S], as `deal` makes them.

    `tokens` are the text and latent tokens of the steps' samples, int64 [S, G].
    """
    rounds = _snake_rounds(np.sort(tokens, axis=1), world_size)
    if not size.micro_batch_tokens:
        return rounds.reshape(len(tokens), -1, size.micro_batch_size, world_size).sum(axis=2).max(axis=(1, 2))
    return np.array([max(step[part].sum(axis=0).max() for part in _alike(step, size)) for step in rounds])


def largest_possible(longest: int, size: BatchSize) -> int:
    """Return an upper bound on the tokens of a micro-batch whose samples have at most `longest` tokens."""
    if size.micro_batch_tokens:
        return max(longest, min(size.micro_batch_tokens, size.micro_batch_size * longest))
    return size.micro_batch_size * longest


def _snake_rounds(samples: np.ndarray, world_size: int) -> np.ndarray:
    """Arrange samples [..., G], in order of length, in rounds [..., R, W], every second one in reverse."""
    rounds = samples.reshape(*samples.shape[:-1], -1, world_size)
    rounds[..., 1::2, :] = rounds[..., 1::2, ::-1]
    return rounds


def _alike(tokens: np.ndarray, size: BatchSize) -> list[np.ndarray]:
    """Divide rounds into few, similar micro-batches that stay within the token budget on every rank.

    A micro-batch gets every n-th round in snake order, starting from the longest. A round that exceeds the budget gets
    a micro-batch of its own. `tokens` are the text and latent tokens of each rank's sample, int [R, W], with rounds in
    ascending order.
    """
    budget = size.micro_batch_tokens
    fitting = tokens[tokens.max(axis=1) <= budget]
    count = max(-(-fitting.sum(axis=0).max() // budget), -(-len(fitting) // size.micro_batch_size))
    while True:
        turn, place = np.divmod(np.arange(len(fitting))[::-1], count)
        place = np.where(turn % 2, count - 1 - place, place)
        sums = np.zeros((count, tokens.shape[1]), np.int64)
        np.add.at(sums, place, fitting)
        if sums.max(initial=0) <= budget:
            place = np.append(place, np.arange(count, count + len(tokens) - len(fitting)))
            return np.split(place.argsort(kind="stable"), np.bincount(place).cumsum()[:-1])
        count += 1 + count // 64
