"""`mmldlm explain RUN STEP`: find the samples that caused a step's gradient norm. `mmldlm rewind RUN --before STEP`: go
back, and continue without them.

Samples, times, masks and noise are functions of (seed, step, slot). So the gradient of a step is the sum of its
samples' gradients, and we can compute any part of the sum again. We train from the nearest checkpoint up to the step,
in a scratch folder, and then halve its batch: at least one half has a gradient of half the whole norm. If that is the
first half, the search continues in it, otherwise in the second. This takes a forward and backward pass of half of the
samples, then of a quarter, and so on. A last pass leaves out the sample that was found, to see if that is enough.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mmldlm.config import split_arguments
from mmldlm.data.mixture import open_data
from mmldlm.diffusion.noise import MODES, draw_noise, mode_weights_at
from mmldlm.diffusion.objective import total_counts
from mmldlm.distributed.launch import read_launcher_env
from mmldlm.errors import ExitCode, UsageError
from mmldlm.loading.load import run_config
from mmldlm.tools.replay import RecordedRun, advance, replay
from mmldlm.trainer.branches import leave_branch
from mmldlm.trainer.trainer import Trainer
from mmldlm.utils.lock import RunLock
from mmldlm.utils.printable import printable

MAX_CAUSES = 2  # if it takes more samples, none is an outlier
USUAL_FACTOR = 10.0  # without `guard.grad_norm_spike`, a step is a spike above this many times the median norm


@dataclass
class Explanation:
    """The samples to leave out so that the gradient norm of a step is at most `limit`.

    Attributes:
        limit: The largest norm that is no spike. If the step is no spike, half of its own norm.
        slots: The slots of the samples, in the order of their discovery.
        rest: Gradient norm of all other samples.
    """

    norm: float
    limit: float
    is_spike: bool
    slots: list[int] = field(default_factory=list)
    rest: float = math.inf


class StepParts:
    """Computes gradients of parts of a step's batch. `step` counts from 0. The trainer has the weights before it."""

    def __init__(self, trainer: Trainer, step: int):
        self.trainer, self.step = trainer, step
        self.loader, self.position = trainer.components.loader, trainer.state.samples_drawn
        self.size = self.loader.batch_at(step)
        self.slots = np.arange(self.size.global_batch_size)
        self.replays = 0
        batches = self.loader.read_slots(self.position, self.size, self.slots)
        # Always divide by the counts of the whole step, so that gradients of parts add up.
        self._totals = total_counts(trainer.corrupt(step, batches)).tolist()

    def norm(self, slots: np.ndarray) -> float:
        """Return the gradient norm of the samples in `slots`, or infinity if it is not finite. Changes no weight."""
        trainer, engine = self.trainer, self.trainer.engine
        self.replays += 1
        batches = self.loader.read_slots(self.position, self.size, slots)
        # Every rank computes all samples, because no rank may have an empty batch. The sum over ranks then has each
        # sample `world_size` times.
        noised = [batch.to(engine.device) for batch in trainer.corrupt(self.step, batches)]
        for batch in engine.accumulate(noised):
            trainer.compute(batch, self._totals)
        engine.complete_gradients()
        norm = float(engine.update(0.0, 0.0, norm_limit=-1.0)) / engine.world_size  # a negative limit skips the update
        return norm if math.isfinite(norm) else math.inf

    def largest(self, slots: np.ndarray, norm: float) -> int:
        """Halve `slots` until one is left, and return it. `norm` is a lower bound of the norm of all `slots`."""
        while len(slots) > 1:
            first, second = np.array_split(slots, 2)
            of_first = self.norm(first)
            slots, norm = (first, of_first) if of_first >= norm / 2 else (second, norm - of_first)
        return int(slots[0])

    def explain(self, norm: float | None) -> Explanation:
        """Find the samples that cause the step's gradient norm. If `norm` is None, compute it first."""
        total = self.norm(self.slots) if norm is None else norm if math.isfinite(norm) else math.inf
        limit, accepted = self.trainer.guard.norm_limit, self.trainer.state.accepted_norms
        if math.isinf(limit) and accepted:
            limit = USUAL_FACTOR * statistics.median(accepted)
        is_spike = total > limit
        result = Explanation(total, limit if is_spike else min(total / 2, 1e300), is_spike)
        rest = self.slots
        while total > result.limit and len(result.slots) < MAX_CAUSES and len(rest) > 1:
            result.slots.append(self.largest(rest, total))
            rest = np.setdiff1d(rest, result.slots)
            total = result.rest = self.norm(rest)
        return result

    def report(self, result: Explanation) -> list[str]:
        """Format an explanation: its numbers, then each sample with its noise and text."""
        config, components = self.trainer.config, self.trainer.components
        relation = f"above limit {result.limit:.4g}"
        if not result.is_spike:
            relation = f"no spike; without these samples it is at most half, {result.limit:.4g}"
        lines = [
            f"step {self.step + 1}: gradient norm {result.norm:.4g}, {relation}; {self.replays} replays of parts of "
            f"its {self.size.global_batch_size} samples"
        ]
        weights = mode_weights_at(self.step, config.mode, config.mode_schedule)
        samplers = config.text.sampler, components.objective.latent.sampler
        for slot in result.slots:
            batch = self.loader.read_slots(self.position, self.size, np.array([slot]))[0]
            noise = draw_noise(batch, config.run.seed, self.step, self.size.global_batch_size, weights, *samplers)
            name = components.store.split("train").sample_name(int(batch.sample_ids[0]))
            lines.append(
                f"{name}: {MODES[int(noise.mode[0])]}, t_text {float(noise.t_text[0]):.2f}, "
                f"t_latent {float(noise.t_latent[0]):.2f}, "
                f"latents of RMS {float(batch.latents.square().mean().sqrt()):.3g} (usually 1)"
            )
            lines.append(f"    {components.tokenizer.decode_batch([batch.tokens.tolist()])[0]}")
        conclusion = "they caused it" if result.rest <= result.limit else "these samples alone did not cause it"
        return [*lines, f"without: gradient norm {result.rest:.4g}; {conclusion}"]


def explain(run: RecordedRun, step: int, scratch_in: Path | None = None) -> tuple[Explanation, list[str]]:
    """Explain a step of a run, counted from 1, in this process. Return the explanation and the lines of its report.

    Raises:
        UsageError: The run does not have this step.
    """
    if not run.starts[0]["step"] < step <= run.last_step:
        raise UsageError(f"STEP: expected {run.starts[0]['step'] + 1} to {run.last_step}, found {step}")
    for trainer, _, stop, _ in replay(run, step, step, read_launcher_env(os.environ), scratch_in):
        advance(trainer, min(stop, step - 1))
        if stop >= step:
            parts = StepParts(trainer, step - 1)
            result = parts.explain(run.grad_norms().get(step))
            return result, parts.report(result)
        trainer.save(wait=True)
    raise AssertionError(f"no stretch has step {step}")


def explain_main(argv: Sequence[str] | None = None) -> int:
    """Run `mmldlm explain`. Return 0, whatever it finds."""
    parser = argparse.ArgumentParser(
        "mmldlm explain", description="Find the samples that caused a step's gradient norm, and show their texts."
    )
    parser.add_argument("arguments", nargs="+", metavar="RUN STEP | key.sub=value")
    parser.add_argument(
        "--scratch", type=Path, metavar="DIR", help="folder to compute in; a new folder is created there"
    )
    options = parser.parse_intermixed_args(argv)
    places, overrides = split_arguments(options.arguments)
    if len(places) != 2 or not places[1].isdecimal():
        raise UsageError(f"expected a run folder and a step, found {' '.join(places)}")
    _, lines = explain(RecordedRun.read(Path(places[0]), overrides), int(places[1]), options.scratch)
    print("\n".join(map(printable, lines)))
    return ExitCode.DONE


def rewind_main(argv: Sequence[str] | None = None) -> int:
    """Run `mmldlm rewind`.

    Raises:
        ConfigError: The run has no such training sample.
        RunInUseError: The run is training.
    """
    parser = argparse.ArgumentParser(
        "mmldlm rewind",
        description="Go back to the newest checkpoint before a step. The run's usual command then continues from "
        "there, without the named samples. The abandoned branch is kept.",
    )
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--before", type=int, required=True, metavar="STEP", help="first step to abandon")
    parser.add_argument(
        "--skip", nargs="+", default=[], metavar="SAMPLE", help="training samples to leave out, as STORE:INDEX"
    )
    options = parser.parse_args(argv)
    split = open_data(run_config(options.run).data.location).split("train")
    for name in options.skip:
        split.index_of(name)
    with RunLock(options.run):
        rewind = leave_branch(options.run, options.before, options.skip)
    without = f", without {', '.join(options.skip)}" if options.skip else ""
    left = f"the abandoned branch is in {options.run / rewind['branch']}"
    print(printable(f"{options.run}: the next start continues from step {rewind['step']}{without}; {left}"))
    return ExitCode.DONE
