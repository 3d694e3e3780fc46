"""`mmldlm explain RUN STEP`: the samples that caused a step's gradient norm. `mmldlm rewind RUN --before STEP`: the run
without them.

Samples, times, masks and noise are functions of (seed, step, slot), so the gradient of a step is the sum of its
samples' gradients, and any part of it can be computed again. The step is trained to from the nearest checkpoint before
it, in a scratch folder, and its batch is halved: of two halves, at least one has a gradient of half the norm of both.
The search goes on in the first if that is the one, and in the second otherwise. It takes a forward and backward pass of
half of the samples, then of a quarter, and so on, and at last one without the sample that remains.
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
from mmldlm.run.load import run_config
from mmldlm.tools.replay import RecordedRun, advance, replay
from mmldlm.trainer.branches import leave_branch
from mmldlm.trainer.trainer import Trainer
from mmldlm.utils.lock import RunLock
from mmldlm.utils.printable import printable

MAX_CAUSES = 2  # more samples are no outliers
USUAL_FACTOR = 10.0  # of the median norm, above which a step is a spike where `guard.grad_norm_spike` is not set


@dataclass
class Explanation:
    """The samples without which the gradient norm of a step is at most `limit`.

    Attributes:
        limit: Largest norm that is not a spike; of a step that is none, half of its norm.
        slots: The samples' slots, found in this order.
        rest: Gradient norm of all other samples.
    """

    norm: float
    limit: float
    is_spike: bool
    slots: list[int] = field(default_factory=list)
    rest: float = math.inf


class StepParts:
    """Parts of the batch of the next step, counted from 0, of a trainer with the weights before it."""

    def __init__(self, trainer: Trainer, step: int):
        self.trainer, self.step = trainer, step
        self.loader, self.position = trainer.components.loader, trainer.state.samples_drawn
        self.size = self.loader.batch_at(step)
        self.slots = np.arange(self.size.global_batch_size)
        self.replays = 0
        batches = self.loader.read_slots(self.position, self.size, self.slots)
        # The denominators stay those of the whole step, so that gradients of parts add up.
        self._totals = total_counts(trainer.corrupt(step, batches)).tolist()

    def norm(self, slots: np.ndarray) -> float:
        """Return the gradient norm of the samples in some slots; infinite if it is not finite. No weight changes."""
        trainer, engine = self.trainer, self.trainer.engine
        self.replays += 1
        batches = self.loader.read_slots(self.position, self.size, slots)
        # Every rank computes all of them, so that none is without: the sum over the ranks has each of them that often.
        noised = [batch.to(engine.device) for batch in trainer.corrupt(self.step, batches)]
        for batch in engine.accumulate(noised):
            trainer.compute(batch, self._totals)
        engine.complete_gradients()
        norm = float(engine.update(0.0, 0.0, norm_limit=-1.0)) / engine.world_size  # a limit that no update passes
        return norm if math.isfinite(norm) else math.inf

    def largest(self, slots: np.ndarray, norm: float) -> int:
        """Return the slot that halving leads to; `norm` is at most that of all `slots`."""
        while len(slots) > 1:
            first, second = np.array_split(slots, 2)
            of_first = self.norm(first)
            slots, norm = (first, of_first) if of_first >= norm / 2 else (second, norm - of_first)
        return int(slots[0])

    def explain(self, norm: float | None) -> Explanation:
        """Find the samples that cause the step's gradient norm, which is `norm` if that is known."""
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
        """Return the lines about an explanation: its numbers, and each sample with its noise and text."""
        config, components = self.trainer.config, self.trainer.components
        relation = f"above limit {result.limit:.4g}"
        if not result.is_spike:
            relation = f"no spike; the samples are those without which it is at most half, {result.limit:.4g}"
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
    """Explain a step of a run, counted from 1, in this process; return the explanation and the lines of its report.

    A step that the run does not have is a `UsageError`.
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
    """Run `mmldlm explain`; return 0, whatever it finds."""
    parser = argparse.ArgumentParser(
        "mmldlm explain", description="Find the samples that caused a step's gradient norm, and show their texts."
    )
    parser.add_argument("arguments", nargs="+", metavar="RUN STEP | key.sub=value")
    parser.add_argument("--scratch", type=Path, metavar="DIR", help="where to compute, in a new folder")
    options = parser.parse_intermixed_args(argv)
    places, overrides = split_arguments(options.arguments)
    if len(places) != 2 or not places[1].isdecimal():
        raise UsageError(f"expected a run folder and a step, found {' '.join(places)}")
    _, lines = explain(RecordedRun.read(Path(places[0]), overrides), int(places[1]), options.scratch)
    print("\n".join(map(printable, lines)))
    return ExitCode.DONE


def rewind_main(argv: Sequence[str] | None = None) -> int:
    """Run `mmldlm rewind`.

    A sample that is not one of the run's training samples is a `ConfigError`, a run that is training a `RunInUseError`.
    """
    parser = argparse.ArgumentParser(
        "mmldlm rewind",
        description="Go back to the newest checkpoint before a step. The run's usual command then continues from "
        "there, without the named samples. The branch that it leaves stays.",
    )
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--before", type=int, required=True, metavar="STEP", help="first step that is left")
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
    left = f"the branch that it leaves is in {options.run / rewind['branch']}"
    print(printable(f"{options.run}: the next start continues from step {rewind['step']}{without}; {left}"))
    return ExitCode.DONE
