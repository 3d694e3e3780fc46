"""`TrainConfig`: how long a run is, and how large its batches are as a function of the step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mmldlm.errors import ConfigError
from mmldlm.settings.fields import setting


@dataclass(frozen=True)
class BatchSize:
    """Of one optimizer step."""

    global_batch_size: int  # samples over all ranks
    micro_batch_size: int  # samples of one forward pass on one rank

    def accumulation(self, world_size: int) -> int:
        """Micro-batches of the step on each rank."""
        return self.global_batch_size // (self.micro_batch_size * world_size)


@dataclass(frozen=True)
class TrainConfig:
    steps: int = setting(1000, "optimizer steps", at_least=1)
    global_batch_size: int = setting(128, "samples of one optimizer step, over all ranks", at_least=1)
    micro_batch_size: int | None = setting(
        None, "samples of one forward pass on one rank; null: no accumulation", at_least=1
    )
    batch_schedule: dict[int, dict[Literal["global_batch_size", "micro_batch_size"], int]] = setting(
        factory=dict,
        doc="optimizer steps, counted from 0, from which on other sizes hold, and what is not named stays: "
        "{1000: {micro_batch_size: 4}, 5000: {global_batch_size: 256}}",
    )
    auto_micro_batch: bool = setting(
        False,
        "halve the micro-batches, for good and on all ranks, where one does not fit into memory; costs a forward and "
        "backward pass more before each step with a larger micro-batch than all before; single, ddp, zero1, zero2",
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

    def due(self, done: int, every: int) -> bool:
        """Whether what comes each `every` steps (0: never), and with the last, is due after `done` steps."""
        return every > 0 and (done % every == 0 or done == self.steps)

    def batch_stages(self, world_size: int) -> dict[int, BatchSize]:
        """The sizes by the optimizer step that they begin at; in order, the first at step 0."""
        return {
            step: BatchSize(size, micro or max(1, size // world_size)) for step, size, micro in self._stages_as_named()
        }

    def batch_at(self, step: int, world_size: int) -> BatchSize:
        """The sizes of optimizer step `step`, counted from 0."""
        stages = self.batch_stages(world_size)
        return stages[max(start for start in stages if start <= step)]

    def samples_before(self, step: int) -> int:
        """Samples of the optimizer steps before `step`."""
        stages = [(first, size) for first, size, _ in self._stages_as_named() if first < step]
        stops = [*(first for first, _ in stages[1:]), step]
        return sum(size * (stop - first) for (first, size), stop in zip(stages, stops, strict=True))

    def check_batches(self, world_size: int) -> None:
        """ConfigError naming the first stage, also beyond `steps`, whose batch the ranks cannot share evenly."""
        for step, size, micro in self._stages_as_named():
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

    def _stages_as_named(self) -> Iterator[tuple[int, int, int | None]]:
        """(first step, global batch size, micro-batch size or null) of each stage."""
        size, micro = self.global_batch_size, self.micro_batch_size
        for step in sorted({0, *self.batch_schedule}):
            named = self.batch_schedule.get(step, {})
            size, micro = named.get("global_batch_size", size), named.get("micro_batch_size", micro)
            yield step, size, micro
