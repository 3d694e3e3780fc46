"""`mmldlm explain RUN STEP`: the samples that caused a step's gradient norm, with their texts.

The step is computed again from the nearest checkpoint before it, in a scratch folder, and its batch is halved until the
sample is found, or the pair.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mmldlm.config import split_arguments
from mmldlm.diffusion.noise import MODES, draw_noise, mode_weights_at
from mmldlm.distributed.launcher import read_launcher_env
from mmldlm.errors import ExitCode, UsageError
from mmldlm.tools.replay import RecordedRun, advance, replay
from mmldlm.trainer.explain import Explanation, explain_step, sample_names
from mmldlm.trainer.trainer import Trainer
from mmldlm.utils.printable import printable


def explain(run: RecordedRun, step: int, scratch_in: Path | None = None) -> tuple[Explanation, list[str]]:
    """Explain a step of a run, counted from 1, in this process; return the explanation and the lines of its report.

    A step that the run does not have is a `UsageError`.
    """
    if not run.starts[0]["step"] < step <= run.last_step:
        raise UsageError(f"STEP: expected {run.starts[0]['step'] + 1} to {run.last_step}, found {step}")
    launch = read_launcher_env(os.environ)
    for trainer, _, stop, _ in replay(run, step, step, launch, scratch_in):
        advance(trainer, min(stop, step - 1))
        if stop >= step:
            result = explain_step(trainer, step - 1, trainer.state.samples_drawn, run.grad_norms().get(step))
            return result, _report(trainer, step - 1, result)
        trainer.save(wait=True)
    raise AssertionError(f"no stretch has step {step}")


def _report(trainer: Trainer, step: int, result: Explanation) -> list[str]:
    """Return the lines about an explanation of a step, counted from 0."""
    config, components, position = trainer.config, trainer.components, trainer.state.samples_drawn
    size = components.loader.batch_at(step)
    relation = f"above limit {result.limit:.4g}"
    if not result.is_spike:
        relation = f"no spike; the samples are those without which it is at most half, {result.limit:.4g}"
    lines = [f"step {step + 1}: gradient norm {result.norm:.4g}, {relation}; "]
    lines[0] += f"{result.replays} replays of parts of its {size.global_batch_size} samples"
    weights = mode_weights_at(step, config.mode, config.mode_schedule)
    samplers = config.text.sampler, config.latent.sampler
    for name, slot in zip(sample_names(trainer, step, position, result), result.slots, strict=True):
        batch = components.loader.read_slots(position, size, np.array([slot]))[0]
        noise = draw_noise(batch, config.run.seed, step, size.global_batch_size, weights, *samplers)
        mode, times = MODES[int(noise.mode[0])], f"t_text {float(noise.t_text[0]):.2f}"
        times += f", t_latent {float(noise.t_latent[0]):.2f}"
        rms = float(batch.latents.square().mean().sqrt())
        lines.append(f"{name}: {mode}, {times}, latents of RMS {rms:.3g} (usually 1)")
        lines.append(f"    {components.tokenizer.decode_batch([batch.tokens.tolist()])[0]}")
    conclusion = "they caused it" if result.is_found else "these samples alone did not cause it"
    return [*lines, f"without: gradient norm {result.rest:.4g}; {conclusion}"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, whatever it finds. A `MmldlmError` propagates."""
    parser = argparse.ArgumentParser("mmldlm explain", description=__doc__)
    parser.add_argument("arguments", nargs="+", metavar="RUN STEP | key.sub=value")
    parser.add_argument("--scratch", type=Path, metavar="DIR", help="where to compute, in a new folder")
    options = parser.parse_intermixed_args(argv)
    places, overrides = split_arguments(options.arguments)
    if len(places) != 2 or not places[1].isdecimal():
        raise UsageError(f"expected a run folder and a step, found {' '.join(places)}")
    _, lines = explain(RecordedRun.read(Path(places[0]), overrides), int(places[1]), options.scratch)
    print("\n".join(map(printable, lines)))
    return ExitCode.DONE
