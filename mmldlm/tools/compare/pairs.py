"""Differences of two runs with the same order, noise and masks, and of several such pairs. Imports no torch.

Two questions have two answers.

- One pair: by how much B's expected loss is below A's, on average over the records so far. Given everything before a
  record, only the draw of its samples and noise is random, so the differences minus their expectations are a
  martingale, however much the runs drift. The answer is about these two runs: two of one config with other initial
  weights differ as well, by luck.
- Pairs of several seeds: by how much the configs differ in the mean over seeds, luck included.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from mmldlm.tools.report.comparison import ABSENT, RunGroup
from mmldlm.tools.report.run_summary import RunSummary
from mmldlm.tools.run_history import History
from mmldlm.utils.confidence_sequence import confidence_sequence
from mmldlm.utils.format import format_number
from mmldlm.utils.nested import flatten

Pair = tuple[RunSummary, RunSummary]
Unit = Literal["records", "pairs"]
Verdict = Literal["lower", "higher", "equal", "open"]

# Variance of the mixture over effects: small for records, of which there are hundreds, large for pairs, of which there
# are few, so that only differences of several standard deviations can be settled.
_EFFECT_VARIANCE: Mapping[Unit, float] = {"records": 0.08, "pairs": 10.0}
_MIN_RECORDS = 10  # with an interval: the mean of fewer is far from normal

# Settings that decide which samples a record is about, and those under which the draws are the same, but not all that
# is made of them. A group stands for all its settings.
_DATA = ("data.path", "data.mixture")
_ORDER = ("run.seed", *_DATA, "data.window", "train.global_batch_size", "train.batch_schedule", "log.every")
_NOISE = {"mode": "modes", "mode_schedule": "modes", "text": "masks", "latent": "noise", "model.dropout": "dropout"}
_LOSS = ("loss", "latent", "mode", "mode_schedule")  # settings that change what a loss is a mean of


@dataclass(frozen=True)
class Difference:
    """Differences of a metric, B minus A.

    Attributes:
        tag: The metric.
        unit: What there is a difference for.
        steps: Last step of each record, or number of each pair.
        baseline: Mean of A.
        means: Mean of the first n differences, for each n.
        half_widths: Half-widths of their intervals; infinite without one.
    """

    tag: str
    unit: Unit
    steps: Sequence[int]
    baseline: float
    means: np.ndarray
    half_widths: np.ndarray

    @classmethod
    def between(cls, tag: str, unit: Unit, steps: Sequence[int], a: np.ndarray, b: np.ndarray) -> Difference:
        """Return the differences of the values `b` and `a`, of which there is at least one."""
        means, half_widths = confidence_sequence(b - a, _EFFECT_VARIANCE[unit])
        if unit == "records":
            half_widths[: _MIN_RECORDS - 1] = np.inf
        return cls(tag, unit, steps, float(a.mean()), means, half_widths)

    @property
    def is_detail(self) -> bool:
        """True for a metric of one mode or noise bin."""
        return any(part in self.tag for part in ("_noise_", "_l2t", "_t2l", "_joint"))

    def relative(self) -> tuple[float, float, float]:
        """Return the mean difference and its interval as fractions of A's mean; NaN if that is 0."""
        value, half_width, scale = self.means[-1], self.half_widths[-1], abs(self.baseline) or math.nan
        return float(value / scale), float((value - half_width) / scale), float((value + half_width) / scale)

    def verdict(self, at_least: float) -> Verdict:
        """Return whether B is lower or higher, or equal up to the fraction `at_least` of A's mean."""
        _, low, high = self.relative()
        if high < 0 or low > 0:
            return "lower" if high < 0 else "higher"
        return "equal" if -at_least < low and high < at_least else "open"

    def __str__(self) -> str:
        value, low, high = (f"{100 * number:+.3g}" for number in self.relative())
        interval = f"[{low}, {high}]" if math.isfinite(self.half_widths[-1]) else "(no interval)"
        return f"{self.tag:<24} {format_number(self.baseline):>9}  {value:>7} % {interval}"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of the difference."""
        value, *interval = self.relative()
        counts = {"metric": self.tag, "of": self.unit, "n": len(self.steps), "last": self.steps[-1]}
        return {**counts, "baseline": self.baseline, "relative_difference": value, "relative_interval": interval}


def describe_pairing(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """Return one line on what two configs, by dotted key, have in common."""

    def changed(groups: Collection[str]) -> list[str]:
        within = tuple(f"{group}." for group in groups)
        keys = [key for key in {**a, **b} if key in groups or key.startswith(within)]
        # Sizes of micro-batches, of which a batch schedule has some, change no sample.
        return [key for key in keys if a.get(key, ABSENT) != b.get(key, ABSENT) and ".micro_batch" not in key]

    if order := changed(_ORDER):
        values = (f"{key} is {a.get(key, ABSENT)} and {b.get(key, ABSENT)}" for key in order)
        return f"not paired because {', '.join(values)}"
    parts = [f"{what} ({', '.join(keys)})" for group, what in _NOISE.items() if (keys := changed([group]))]
    line = f"paired except {', '.join(parts)}" if parts else "paired: the same samples, noise and masks in every step"
    return line + (f"; other losses ({', '.join(loss)})" if (loss := changed(_LOSS)) else "")


def pairing(a: History, b: History) -> str:
    """Return `describe_pairing` of two runs, whose stores are compared by content."""
    settings = []
    for run in (a, b):
        config, store = flatten(run.config), run.startup.get("data_manifest")
        if not config:
            return f"not known to be paired: {run.run_dir} has no readable config.yaml"
        if store:
            config = {key: value for key, value in config.items() if not key.startswith(_DATA)} | {_DATA[0]: store}
        settings.append(config)
    return describe_pairing(*settings)


def record_difference(a: History, b: History, tag: str, max_step: float = math.inf) -> Difference | None:
    """Return the differences of a metric in the training records of the same steps up to `max_step`, if there are any.

    Of a validation metric, which is always of the same samples and noise, it is the last difference, without interval.
    """
    kinds = ("train",) if not tag.startswith("validation/") else ("validation",)
    first, second = (dict(zip(*run.series(tag, *kinds)[:2], strict=True)) for run in (a, b))
    steps = [step for step in first if step <= max_step and math.isfinite(first[step] + second.get(step, math.nan))]
    steps = steps[-1:] if kinds == ("validation",) else steps
    if not steps:
        return None
    return Difference.between(
        tag, "records", steps, *(np.array([run[step] for step in steps]) for run in (first, second))
    )


def record_differences(a: History, b: History, max_step: float = math.inf) -> list[Difference]:
    """Return the differences of all losses, accuracies and validation metrics of a pair."""
    tags = [tag for tag in a.tags() if tag.startswith(("loss/", "accuracy/", "validation/"))]
    differences = (record_difference(a, b, tag, max_step) for tag in tags)
    return [difference for difference in differences if difference is not None]


def seed_differences(pairs: Sequence[Pair]) -> list[Difference]:
    """Return the differences of all final values over the pairs that have ended; none with fewer than two."""
    ended = [pair for pair in pairs if all(run.history.step >= (run.history.total_steps or math.inf) for run in pair)]
    values = [[run.final_values() for run in pair] for pair in ended]
    if len(values) < 2:
        return []
    tags = [tag for tag in values[0][0] if all(tag in run for pair in values for run in pair)]
    numbers = range(1, len(values) + 1)
    return [
        Difference.between(tag, "pairs", numbers, *(np.array([pair[arm][tag] for pair in values]) for arm in (0, 1)))
        for tag in tags
        if tag.startswith(("loss/", "accuracy/", "validation/", "quality/"))
    ]


def pair_by_seed(baseline: RunGroup, group: RunGroup) -> list[Pair]:
    """Return the pairs of runs of equal seed, in the order of the baseline's; a seed's first runs count."""
    return [(a[0], b[0]) for a in baseline.by_seed() for b in group.by_seed() if a[0].seed == b[0].seed is not None]
