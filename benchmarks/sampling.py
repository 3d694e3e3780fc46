"""Tokens per second of generation: texts from latents, in batches.

    python -m benchmarks sampling [--batches 1 8 32] [--steps 8 32] [--width 256] [--quick] [key.sub=value ...]

The network has its initial weights, which cost what trained ones do, and latents are random; lengths are those of
sentences, so none is drawn. Each batch size generates the same samples in each round, in turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.common.measure import compare, open_runs
from benchmarks.common.report import add_settings, parse, parser, positive, print_status, report, work_dir
from benchmarks.common.task import Task, device, heads_of, lengths_of, random_store
from mmldlm.data.loader import fixed_batches
from mmldlm.data.store import Store
from mmldlm.diffusion.objective import Objective
from mmldlm.diffusion.sampling import SamplingConfig, generate
from mmldlm.model.mmdit import MMDiT
from mmldlm.run.factory import build_model, build_objective


@dataclass(frozen=True)
class Generator:
    """Generates the texts of `samples`, rows of the store's training split, `batch` at a time."""

    model: MMDiT
    objective: Objective
    config: SamplingConfig
    store: Store
    samples: np.ndarray
    batch: int

    def step(self, number: int) -> int:
        """Generate all texts with the random numbers of `number`; return the number of tokens."""
        draw, tokens = torch.Generator().manual_seed(number), 0
        for batch in fixed_batches(self.store.split("train"), self.samples, self.batch):
            latents = batch.latents.to(device())
            text, latent = self.objective.text, self.objective.latent
            texts = generate(self.model, text, latent, "l2t", self.config, draw, latents, batch.lengths)
            tokens += len(texts.tokens)
        return tokens


@contextmanager
def open_generator(task: Task, samples: int, batch: int) -> Iterator[Generator]:
    config, store = task.config(), Store.open(task.store)
    model = build_model(config, store.manifest, device().type).to(device()).eval()
    yield Generator(model, build_objective(config, store.manifest), config.sampling, store, np.arange(samples), batch)


def measure(task: Task, batches: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    samples = max(batches)
    openers = {str(batch): partial(open_generator, task, samples, batch) for batch in dict.fromkeys(batches)}
    with open_runs(openers) as runs:
        tokens = {name: run.call(Generator.step, 0) for name, run in runs.items()}  # a first one warms up
        comparison = compare(runs, rounds, steps=1, first=1, patience=1)
    rows = []
    for name, num_tokens in tokens.items():
        speed, seconds = comparison.speed(name), comparison.seconds[name]
        rows.append(
            {
                "batch": int(name),
                "tokens/s": num_tokens / median(seconds),
                "ms a sample": 1000 * median(seconds) / samples,
                f"speed, {comparison.base} = 1": speed.median,
                "95 %": f"{speed.low:.2f} to {speed.high:.2f}",
                "tokens of a round": num_tokens,
                "first against itself": comparison.control.median,
                "trusted": comparison.trusted,
                "seconds": seconds,
            }
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    options = parser("sampling", "Tokens per second of generation.")
    add_settings(options)
    options.add_argument("--batches", type=positive, nargs="+", default=[1, 8, 32])
    options.add_argument("--width", type=positive, default=256)
    options.add_argument("--depth", type=positive, default=4)
    options.add_argument("--steps", type=positive, nargs="+", default=[8, 32], help="reverse steps (%(default)s)")
    options.set_defaults(rounds=5)
    given = parse(options, argv, batches=[1, 4], steps=[2, 4], width=64, depth=2, rounds=2)
    tables = {}
    with work_dir(given) as folder:
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
            print_status(f"{given.rounds} rounds of {steps} reverse steps")
            with_steps = replace(task, settings=(f"sampling.steps={steps}", *task.settings))
            title = f"Texts from latents, {steps} steps, {given.width} x {given.depth}"
            tables[title] = measure(with_steps, given.batches, given.rounds)
    report(given, "sampling", tables)
    return 0
