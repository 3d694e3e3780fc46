"""Tokens a second of generation: texts from latents, in batches.

    python -m benchmarks sampling [--batches 1 8 32] [--steps 8 32] [--width 256] [--quick] [key.sub=value ...]

The network has its initial weights, which cost what trained ones do, and latents are random; lengths are those of
sentences, so none is drawn.
Each batch size goes through the same samples in each round, in an order drawn anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.measure import CONTROL, Ratio, run_rounds, trusted
from benchmarks.random_store import random_store
from benchmarks.report import parse, parser, positive, report, workplace
from benchmarks.results import say
from benchmarks.task import Task, device, heads_of
from benchmarks.workload import lengths_of
from mmldlm.data.loader import fixed_batches
from mmldlm.data.store import Store
from mmldlm.diffusion.objective import Objective
from mmldlm.diffusion.sampling import SamplingConfig, generate
from mmldlm.model.mmdit import MMDiT
from mmldlm.run.factory import build_model, build_objective


@dataclass(frozen=True)
class Writer:
    """Writes the texts of `samples`, rows of the store's training split, `batch` at a time."""

    model: MMDiT
    objective: Objective
    config: SamplingConfig
    store: Store
    samples: np.ndarray
    batch: int

    def step(self, number: int) -> int:
        """All samples once, with random numbers of their own for each `number`; the tokens that were written."""
        draw, written = torch.Generator().manual_seed(number), 0
        for batch in fixed_batches(self.store.split("train"), self.samples, self.batch):
            latents = batch.latents.to(device())
            text, latent = self.objective.text, self.objective.latent
            made = generate(self.model, text, latent, "l2t", self.config, draw, latents, batch.lengths)
            written += len(made.tokens)
        return written


def measure(task: Task, batches: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    config, store = task.config("never-opened"), Store.open(task.store)
    model = build_model(config, store.manifest, device().type).to(device()).eval()
    objective = build_objective(config, store.manifest)
    samples = np.arange(max(batches))
    writers = {
        f"{batch}": Writer(model, objective, config.sampling, store, samples, batch) for batch in dict.fromkeys(batches)
    }
    tokens = {name: writer.step(0) for name, writer in writers.items()}
    seconds = run_rounds(writers, rounds, steps=1, first=1, patience=1).seconds
    base = next(iter(writers))
    control = Ratio.of(seconds[base], seconds[CONTROL])
    rows = []
    for name, written in tokens.items():
        speed = Ratio.of(seconds[base], seconds[name])
        rows.append(
            {
                "batch": int(name),
                "tokens/s": written / median(seconds[name]),
                "ms a sample": 1000 * median(seconds[name]) / len(samples),
                f"speed, {base} = 1": speed.median,
                "95 %": f"{speed.low:.2f} to {speed.high:.2f}",
                "tokens of a round": written,
                "first against itself": control.median,
                "trusted": trusted(control),
                "seconds": seconds[name],
            }
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    options = parser("sampling", "Tokens a second of generation.")
    options.add_argument("settings", nargs="*", metavar="key.sub=value", help="settings of the run config")
    options.add_argument("--batches", type=positive, nargs="+", default=[1, 8, 32])
    options.add_argument("--width", type=positive, default=256)
    options.add_argument("--depth", type=positive, default=4)
    options.add_argument("--steps", type=positive, nargs="+", default=[8, 32], help="reverse steps (%(default)s)")
    options.set_defaults(rounds=5)
    given = parse(options, argv, batches=[1, 4], steps=[2, 4], width=64, depth=2, rounds=2)
    tables = {}
    with workplace(given) as folder:
        task = Task(
            store=str(random_store(folder / "store", lengths_of("sentences", max(given.batches)))),
            width=given.width,
            depth=given.depth,
            heads=heads_of(given.width),
            batch=1,
            precision="fp32",
            settings=tuple(given.settings),
        )
        for steps in dict.fromkeys(given.steps):
            say(f"{given.rounds} rounds of {steps} reverse steps")
            with_steps = replace(task, settings=(f"sampling.steps={steps}", *task.settings))
            title = f"Texts from latents, {steps} steps, {given.width} x {given.depth}"
            tables[title] = measure(with_steps, given.batches, given.rounds)
    report(given, "sampling", tables)
    return 0
