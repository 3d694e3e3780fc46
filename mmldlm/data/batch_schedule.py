"""`TrainConfig`: the length of a run, and its batch sizes as a function of the step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mmldlm.errors import ConfigError
from mmldlm.settings.fields import setting


@dataclass(frozen=True)
class BatchSize:
    """Batch sizes of one optimizer step."""

    global_batch_size: int  # samples over all ranks
    micro_batch_size: int  # samples of one forward pass on one rank

    def accumulation(self, world_size: int) -> int:
        """Return the number of micro-batches of the step on each rank."""
        return self.global_batch_size // (self.micro_batch_size * world_size)


@dataclass(frozen=True)
class TrainConfig:
    """The `train` section of a run config."""

    steps: int = setting(
        1000,
        "optimizer steps",
        at_least=1,
        advice="With schedule.lr other than constant, choose it at the start",
    )
    global_batch_size: int = setting(
        128,
        "samples of one optimizer step, over all ranks",
        at_least=1,
        advice="Part of the method: another one needs another learning rate",
    )
    micro_batch_size: int | None = setting(
        None,
        "samples of one forward pass on one rank; null: no accumulation",
        at_least=1,
        advice="Not part of the method: as large as memory allows; the curve does not change",
    )
    batch_schedule: dict[int, dict[Literal["global_batch_size", "micro_batch_size"], int]] = setting(
        factory=dict,
        doc="other batch sizes from the given optimizer steps on, counted from 0; sizes that are not named stay: "
        "{1000: {micro_batch_size: 4}, 5000: {global_batch_size: 256}}",
    )
    auto_micro_batch: bool = setting(
        False,
        "halve the micro-batches, permanently and on all ranks, when one does not fit into memory; costs an extra "
        "forward and backward pass before each step with a larger micro-batch than all before, or under fsdp2 and "
        "zero3, which plan by an estimate instead, some seconds at the start",
        advice="If the longest samples of a store are rare, and the run is unattended",
    )

    def __post_init__(self) -> None:
        for step, sizes in self.batch_schedule.items():
            if step < 0:
                raise ValueError(f"batch_schedule.{step}: expected an optimizer step, at least 0, found {step}")
            if not sizes:
                raise ValueError(
                    f"batch_schedule.{step}: expected global_batch_size or micro_batch_size, found neither"
                )
            for name, size in sizes.items():
                if size < 1:
                    raise ValueError(f"batch_schedule.{step}.{name}: must be at least 1, found {size}")

    def is_due(self, done: int, every: int) -> bool:
        """Return whether something that happens every `every` steps and at the end is due after `done` steps.

        Zero `every` means never.
        """
        return every > 0 and (done % every == 0 or done == self.steps)

    def batch_stages(self, world_size: int) -> dict[int, BatchSize]:
        """Return the batch sizes by the optimizer step from which they apply, in order; the first is step 0."""
        return {step: BatchSize(size, micro or max(1, size // world_size)) for step, size, micro in self._stages()}

    def batch_at(self, step: int, world_size: int) -> BatchSize:
        """Return the batch sizes of optimizer step `step`, counted from 0."""
        stages = self.batch_stages(world_size)
        return stages[max(start for start in stages if start <= step)]

    def samples_before(self, step: int) -> int:
        """Return the number of samples of all optimizer steps before `step`."""
        stages = [(first, size) for first, size, _ in self._stages() if first < step]
        # A stage ends where the next begins, the last one at `step`.
        stops = [*(first for first, _ in stages[1:]), step]
        return sum(size * (stop - first) for (first, size), stop in zip(stages, stops, strict=True))

    def check_batches(self, world_size: int) -> None:
        """Check that the ranks can share every global batch evenly.

        Raises:
            ConfigError: A global batch is no multiple of micro-batch size x ranks, in a stage within or beyond `steps`.
        """
        for step, size, micro in self._stages():
            # Without a micro-batch size one micro-batch per rank is the whole share, so only the ranks must divide.
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

    def _stages(self) -> Iterator[tuple[int, int, int | None]]:
        """Yield (first step, global batch size, micro-batch size or None) of each stage."""
        size, micro = self.global_batch_size, self.micro_batch_size
        for step in sorted({0, *self.batch_schedule}):
            changes = self.batch_schedule.get(step, {})
            size, micro = changes.get("global_batch_size", size), changes.get("micro_batch_size", micro)
            yield step, size, micro
