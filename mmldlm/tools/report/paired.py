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
from functools import cached_property
from typing import Any, Literal

import numpy as np

from mmldlm.tools.report.comparison import RunGroup
from mmldlm.tools.report.run_summary import RunSummary
from mmldlm.tools.runs import History
from mmldlm.utils.confidence_sequence import confidence_sequence
from mmldlm.utils.format import format_number
from mmldlm.utils.nested import flatten

Unit = Literal["records", "pairs"]
Decision = Literal["lower", "higher", "equal", "open"]

# Variance of the mixture over effects: small for records, of which there are hundreds, and none of the first ten has an
# interval; large for pairs, of which there are few, so that only several standard deviations are settled.
_EFFECT_VARIANCE: Mapping[Unit, float] = {"records": 0.08, "pairs": 10.0}

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
        return cls(tag, unit, steps, float(a.mean()), means, half_widths)

    @property
    def is_detail(self) -> bool:
        """True for a metric of one mode or noise bin."""
        return any(part in self.tag for part in ("_noise_", "_l2t", "_t2l", "_joint"))

    @property
    def has_interval(self) -> bool:
        """True if there are enough differences for an interval."""
        return math.isfinite(self.half_widths[-1])

    def relative(self) -> tuple[float, float, float]:
        """Return the mean difference and its interval as fractions of A's mean; NaN if that is 0."""
        value, half_width, scale = self.means[-1], self.half_widths[-1], abs(self.baseline) or math.nan
        return float(value / scale), float((value - half_width) / scale), float((value + half_width) / scale)

    def decision(self, at_least: float) -> Decision:
        """Return whether B is lower or higher, or equal up to the fraction `at_least` of A's mean."""
        _, low, high = self.relative()
        if high < 0 or low > 0:
            return "lower" if high < 0 else "higher"
        return "equal" if -at_least < low and high < at_least else "open"

    def __str__(self) -> str:
        value, low, high = (f"{100 * number:+.3g}" for number in self.relative())
        interval = f"[{low}, {high}]" if self.has_interval else "(no interval)"
        return f"{self.tag:<24} {format_number(self.baseline):>9}  {value:>7} % {interval}"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of the difference."""
        value, *interval = self.relative()
        counts = {"metric": self.tag, "of": self.unit, "n": len(self.steps), "last": self.steps[-1]}
        return {**counts, "baseline": self.baseline, "relative_difference": value, "relative_interval": interval}


def pairing(a: History, b: History) -> str:
    """Return one line on what two runs have in common, by their configs and the content of their stores."""
    settings = []
    for run in (a, b):
        config, store = flatten(run.config), run.startup.get("data_manifest")
        if not config:
            return f"not known to be paired: {run.run_dir} has no readable config.yaml"
        if store:
            config = {key: value for key, value in config.items() if not key.startswith(_DATA)} | {_DATA[0]: store}
        settings.append(config)

    def changed(groups: Collection[str]) -> list[str]:
        first, second = settings
        keys = [key for key in {**first, **second} if f"{key}.".startswith(tuple(f"{group}." for group in groups))]
        # Sizes of micro-batches, of which a batch schedule has some, change no sample.
        return [key for key in keys if first.get(key) != second.get(key) and ".micro_batch" not in key]

    if order := changed(_ORDER):
        values = (f"{key} is {' and '.join(str(config.get(key)) for config in settings)}" for key in order)
        return f"not paired because {', '.join(values)}"
    parts = [f"{what} ({', '.join(keys)})" for group, what in _NOISE.items() if (keys := changed([group]))]
    line = f"paired except {', '.join(parts)}" if parts else "paired: the same samples, noise and masks in every step"
    return line + (f"; other losses ({', '.join(loss)})" if (loss := changed(_LOSS)) else "")


def record_difference(a: History, b: History, tag: str, max_step: float = math.inf) -> Difference | None:
    """Return the differences of a metric in the training records of the same steps up to `max_step`, if there are any.

    Of a validation metric, which is always of the same samples and noise, it is the last difference, without interval.
    """
    is_validation = tag.startswith("validation/")
    first, second = (
        dict(zip(*run.series(tag, "validation" if is_validation else "train")[:2], strict=True)) for run in (a, b)
    )
    steps = [step for step in first if step <= max_step and math.isfinite(first[step] + second.get(step, math.nan))]
    steps = steps[-1:] if is_validation else steps
    values = (np.array([run[step] for step in steps]) for run in (first, second))
    return Difference.between(tag, "records", steps, *values) if steps else None


def paired_difference(a: History, b: History) -> Difference | None:
    """Return the difference of the total training loss if the runs are paired and have common records."""
    return record_difference(a, b, "loss/total") if pairing(a, b).startswith("paired") else None


@dataclass(frozen=True)
class PairedRuns:
    """Two runs, and their differences over the records up to `max_step`."""

    a: RunSummary
    b: RunSummary
    max_step: float = math.inf

    @property
    def pairing(self) -> str:
        """What the runs have in common."""
        return pairing(self.a.history, self.b.history)

    def difference(self, tag: str) -> Difference | None:
        """Return the difference of a metric, see `record_difference`."""
        return record_difference(self.a.history, self.b.history, tag, self.max_step)

    @cached_property
    def differences(self) -> list[Difference]:
        """Differences of all losses, accuracies and validation metrics."""
        tags = [tag for tag in self.a.history.tags() if tag.startswith(("loss/", "accuracy/", "validation/"))]
        return [one for tag in tags if (one := self.difference(tag)) is not None]

    @property
    def has_ended(self) -> bool:
        """True if both runs have reached their last step."""
        return all(run.history.step >= (run.history.total_steps or math.inf) for run in (self.a, self.b))


@dataclass(frozen=True)
class PairedComparison:
    """The differences of one pair of runs, or of pairs of several seeds.

    Attributes:
        pairs: A run of A with one of B.
        is_over_seeds: The decision is about the mean over pairs, otherwise about the records of the only one.
        loss: The metric that the decision is about.
        at_least: Smallest difference that matters, as a fraction.
    """

    pairs: Sequence[PairedRuns]
    is_over_seeds: bool
    loss: str = "loss/total"
    at_least: float = 0.005

    @classmethod
    def of_groups(cls, baseline: RunGroup, group: RunGroup) -> PairedComparison:
        """Return the comparison of the runs of equal seed, of which each seed's first runs count."""
        runs = {runs[0].seed: runs[0] for runs in group.by_seed()}
        firsts = [runs[0] for runs in baseline.by_seed()]
        pairs = [PairedRuns(a, runs[a.seed]) for a in firsts if a.seed is not None and a.seed in runs]
        return cls(pairs, is_over_seeds=len(pairs) > 1)

    @cached_property
    def over_seeds(self) -> list[Difference]:
        """Differences of all final values over the pairs that have ended; none with fewer than two."""
        values = [(pair.a.final_values(), pair.b.final_values()) for pair in self.pairs if pair.has_ended]
        if len(values) < 2:
            return []
        kinds = ("loss/", "accuracy/", "validation/", "quality/")
        tags = [
            tag for tag in values[0][0] if tag.startswith(kinds) and all(tag in one for pair in values for one in pair)
        ]
        numbers = range(1, len(values) + 1)
        return [
            Difference.between(
                tag, "pairs", numbers, *(np.array([pair[arm][tag] for pair in values]) for arm in (0, 1))
            )
            for tag in tags
        ]

    @cached_property
    def deciding(self) -> Difference | None:
        """The difference that the decision is about, if there is any yet."""
        if not self.is_over_seeds:
            return self.pairs[0].difference(self.loss)
        return next((one for one in self.over_seeds if one.tag == self.loss), None)

    @property
    def decision(self) -> Decision:
        """The decision, "open" without any difference."""
        return "open" if self.deciding is None else self.deciding.decision(self.at_least)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of the comparison."""
        pairs = [
            {
                "a": str(pair.a.path),
                "b": str(pair.b.path),
                "pairing": pair.pairing,
                "differences": [one.to_dict() for one in pair.differences],
            }
            for pair in self.pairs
        ]
        over_seeds = [one.to_dict() for one in self.over_seeds]
        head = {"loss": self.loss, "at_least": self.at_least, "decision": self.decision}
        return {**head, "pairs": pairs, "over_seeds": over_seeds}
