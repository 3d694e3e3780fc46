"""Differences of two runs, or of two configs over several seeds: the statistic of `mmldlm compare`.

We can ask two questions.

- About one pair of runs: how far is B's expected loss below A's, on average over the records so far? Given everything
  before a record, only the draw of its samples and noise is random. So the differences minus their expectations are a
  martingale, however much the runs drift. The answer is about these two runs only: two runs of one config with
  different initial weights also differ, by luck.
- About two configs over several seeds: how far apart are their means over seeds, luck included? We take the differences
  of runs with equal seeds. If no seeds are equal, we take Welch's interval for two independent samples.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from mmldlm.tools.compare.run_summary import better_direction
from mmldlm.tools.runs import History, Start
from mmldlm.utils.format import format_number
from mmldlm.utils.intervals import confidence_sequence, welch_half_width

Unit = Literal["records", "pairs", "runs"]
Decision = Literal["lower", "higher", "equal", "open"]

# Variance of the mixture over effects. It is small for records: there are hundreds, and the first ten get no interval.
# It is large for pairs: there are few, so only a difference of several standard deviations is settled.
_EFFECT_VARIANCE: Mapping[Unit, float] = {"records": 0.08, "pairs": 10.0}

_BATCHES = ("train.global_batch_size", "train.batch_schedule")
# ORDER decides which samples a record is about. Under _NOISE the random draws stay the same, but the modes, masks or
# noise made from them may differ. A group, e.g. "text", stands for all its settings.
_DATA = ("data.path", "data.mixture")
ORDER = ("run.seed", *_DATA, "data.window", "data.skip_samples", *_BATCHES, "log.every")
_NOISE = {"mode": "modes", "mode_schedule": "modes", "text": "masks", "latent": "noise", "model.dropout": "dropout"}
LOSS = ("loss", "latent", "mode", "mode_schedule")  # settings that change the quantity that a loss averages


@dataclass(frozen=True)
class Difference:
    """Difference of a metric, B minus A.

    Attributes:
        tag: The metric.
        unit: The mean is over records, pairs or runs.
        steps: Last step of each record, or numbers of the pairs or runs.
        baseline: Mean of A.
        means: Mean of the first n differences, for each n. For `runs`, only the mean of all.
        half_widths: Half-widths of the intervals of `means`, infinite where there is no interval yet.
    """

    tag: str
    unit: Unit
    steps: Sequence[int]
    baseline: float
    means: np.ndarray
    half_widths: np.ndarray

    @classmethod
    def of_paired(cls, tag: str, unit: Unit, steps: Sequence[int], a: np.ndarray, b: np.ndarray) -> Difference:
        """Compare the values `a` and `b` of the same records or pairs. There must be at least one."""
        return cls(tag, unit, steps, float(a.mean()), *confidence_sequence(b - a, _EFFECT_VARIANCE[unit]))

    @classmethod
    def of_independent(cls, tag: str, a: np.ndarray, b: np.ndarray) -> Difference:
        """Compare the mean values of independent runs."""
        numbers = range(1, len(a) + len(b) + 1)
        mean, half_width = np.array([b.mean() - a.mean()]), np.array([welch_half_width(a, b)])
        return cls(tag, "runs", numbers, float(a.mean()), mean, half_width)

    @property
    def is_detail(self) -> bool:
        """Return whether this metric is about a single mode or noise bin."""
        return any(part in self.tag for part in ("_noise_", "_l2t", "_t2l", "_joint"))

    @property
    def has_interval(self) -> bool:
        """Return whether there are enough differences for an interval."""
        return math.isfinite(self.half_widths[-1])

    @property
    def verdict(self) -> Literal["better", "worse", ""]:
        """Say whether B is better or worse, or "" if the interval contains 0 or the metric has no better side."""
        side, direction = self.decision(0), better_direction(self.tag)
        if not direction or side not in ("lower", "higher"):
            return ""
        return "better" if side == direction else "worse"

    def relative(self) -> tuple[float, float, float]:
        """Return the mean difference and its interval as fractions of A's mean, or NaN if A's mean is 0."""
        value, half_width, scale = self.means[-1], self.half_widths[-1], abs(self.baseline) or math.nan
        return float(value / scale), float((value - half_width) / scale), float((value + half_width) / scale)

    def decision(self, at_least: float) -> Decision:
        """Decide whether B is lower or higher than A, or equal up to the fraction `at_least` of A's mean."""
        _, low, high = self.relative()
        if high < 0 or low > 0:
            return "lower" if high < 0 else "higher"
        return "equal" if -at_least < low and high < at_least else "open"

    def __str__(self) -> str:
        """Return the metric, A's mean, and the difference in percent with its interval, unless A's mean is 0."""
        value, low, high = (f"{100 * number:+.3g}" for number in self.relative())
        percent = f"{value:>7} % " + (f"[{low}, {high}]" if self.has_interval else "(no interval)")
        return f"{self.tag:<24} {format_number(self.baseline):>9}  {percent if self.baseline else '      –'}"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of the difference."""
        value, *interval = self.relative()
        return {
            "metric": self.tag,
            "of": self.unit,
            "n": len(self.steps),
            "last": self.steps[-1],
            "baseline": self.baseline,
            "relative_difference": value,
            "relative_interval": interval,
            "verdict": self.verdict,
        }


def pairing(a: History, b: History) -> str:
    """Say in one line which steps of two runs are paired, judged by the config and data of each start.

    Different versions, processes or processors are noted at the end of the line, since they round sums differently.
    """
    starts, end = (a.starts, b.starts), min(a.step, b.step)
    begins = sorted({start.step for one in starts for start in one if start.step < end}) or [0]
    lines, notes, batches = list[tuple[int, str]](), dict[str, None](), list[str]()
    for begin in begins:
        first, second = ([one[0], *(start for start in one if start.step <= begin)][-1] for one in starts)
        line = _pairing(first, second)
        if line.startswith("paired") and batches:  # after a different number of samples, the next samples differ, too
            line = f"not paired because {', '.join(batches)} differed before"
        batches += changed_settings(first.config, second.config, _BATCHES)
        if not lines or line != lines[-1][1]:
            lines.append((begin, line))
        ours, theirs = first.environment, second.environment
        keys = (ours.keys() & theirs.keys()) - {"git", "data_manifest"}
        notes |= {f"{key} {ours[key]} and {theirs[key]}": None for key in sorted(keys) if ours[key] != theirs[key]}
    text = lines[0][1]
    if len(lines) > 1:
        ends = [*(f" to {begin}" for begin, _ in lines[1:]), " on"]
        text = "; ".join(f"from step {begin + 1}{end} {line}" for (begin, line), end in zip(lines, ends, strict=True))
    return text + (f"; other {', '.join(notes)}" if notes else "")


def _pairing(a: Start, b: Start) -> str:
    """Say whether the steps after two starts are paired."""
    if not (a.config and b.config):
        return "perhaps not paired: a run has no readable config.yaml"
    settings = []
    for config, report in ((a.config, a.report), (b.config, b.report)):
        if store := report.get("data_manifest"):
            config = {key: value for key, value in config.items() if not key.startswith(_DATA)} | {_DATA[0]: store}
            config["data.skip_samples"] = report.get("skipped_samples") or config.get("data.skip_samples")
        settings.append(config)

    first, second = settings
    if order := changed_settings(first, second, ORDER):
        values = (f"{key} is {' and '.join(str(config.get(key)) for config in settings)}" for key in order)
        return f"not paired because {', '.join(values)}"
    noise = [(what, changed_settings(first, second, [group])) for group, what in _NOISE.items()]
    parts = [f"{what} ({', '.join(keys)})" for what, keys in noise if keys]
    line = f"paired except {', '.join(parts)}" if parts else "paired: the same samples, noise and masks in every step"
    return line + (f"; other losses ({', '.join(loss)})" if (loss := changed_settings(first, second, LOSS)) else "")


def changes(run: History) -> list[str]:
    """Return a line for each start of a run whose settings, versions or processes differ from the start before."""
    lines = []
    for before, after in pairwise(run.starts):
        old, new = ({**start.config, **start.environment} for start in (before, after))
        keys = [key for key in {**old, **new} if old.get(key) != new.get(key) and key not in ("run.dir", "resume")]
        values = ", ".join(f"{key} {old.get(key)} -> {new.get(key)}" for key in keys)
        lines += [f"{run.run_dir}: changed after step {after.step}: {values}"] if keys else []
    return lines


def changed_settings(first: Mapping[str, Any], second: Mapping[str, Any], groups: Collection[str]) -> list[str]:
    """Return the settings of `groups`, by dotted key, that differ between two flat configs."""
    keys = [key for key in {**first, **second} if f"{key}.".startswith(tuple(f"{group}." for group in groups))]
    # A micro-batch size changes no sample. A batch schedule may contain some.
    return [key for key in keys if first.get(key) != second.get(key) and ".micro_batch" not in key]


def record_difference(a: History, b: History, tag: str, max_step: float = math.inf) -> Difference | None:
    """Compare a metric in the training records that both runs have up to `max_step`. Return None if there are none.

    A validation metric always has the same samples and noise, so only its last difference counts, without an interval.
    """
    is_validation = tag.startswith("validation/")
    first, second = (
        dict(zip(*run.series(tag, "validation" if is_validation else "train"), strict=True)) for run in (a, b)
    )
    steps = [step for step in first if step <= max_step and math.isfinite(first[step] + second.get(step, math.nan))]
    steps = steps[-1:] if is_validation else steps
    values = (np.array([run[step] for step in steps]) for run in (first, second))
    return Difference.of_paired(tag, "records", steps, *values) if steps else None
