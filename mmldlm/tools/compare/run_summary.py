"""Summary of one run: its events, its evaluation, and the final value of each curve by the rule of its group."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from mmldlm.tools.records import read_json
from mmldlm.tools.runs import History, RunState
from mmldlm.utils.nested import flatten

TAIL_FRACTION = 0.1  # share of the steps over which a training loss is averaged

HELD_OUT_KINDS = ("validation", "quality")  # kinds of records about held-out documents

_NO_EVENTS = ("train", "validation", "quality", "scalars", "heartbeat")  # kinds of records that are no events

# Keys of evaluation.json that describe the evaluation. They and a few others are no metrics.
_EVALUATION_SETTINGS = ("step", "weights", "split", "samples", "texts", "times", "seed", "sampling", "data_manifest")
_NON_METRICS = (*_EVALUATION_SETTINGS, "batch", "documents")

Direction = Literal["higher", "lower", ""]

# Which values are better. Some groups have one direction for all metrics. Others go by the metric's name, without group
# and mode. A name that is missing here, e.g. a baseline, standard error or count, only serves to judge other metrics.
_GROUP_DIRECTIONS: dict[str, Direction] = {"loss": "lower", "validation": "lower", "accuracy": "higher"}
_DIRECTIONS: dict[str, Direction] = {
    **dict.fromkeys(("tokens_per_s", "samples_per_s", "tflops_per_s", "mfu", "host_free_mib"), "higher"),
    **dict.fromkeys(("step_s", "data_wait_s", "compute_s", "compute_s_slowest", "resident_mib"), "lower"),
    **dict.fromkeys(("cuda_allocated_mib", "cuda_reserved_mib"), "lower"),
    **dict.fromkeys(("cuda_peak_allocated_mib", "cuda_peak_reserved_mib"), "lower"),
    # quality/... and evaluation/...
    **dict.fromkeys(("bits_per_token", "bits_per_character", "bits_per_token_novel"), "lower"),
    **dict.fromkeys(("bits_per_token_with_length", "length_bits_per_token", "length_bits_per_token_up_to_64"), "lower"),
    **dict.fromkeys(("bits_per_token_by_confidence_up_to_64", "bits_per_token_by_confidence"), "lower"),
    **dict.fromkeys(
        ("generative_perplexity", "frechet_distance", "repetition_4", "unencodable", "median_rank"), "lower"
    ),
    **dict.fromkeys(("token_accuracy", "first_guess_accuracy", "exact_match", "bleu", "chrf"), "higher"),
    **dict.fromkeys(("cosine", "reencoded_cosine", "recall_at_1", "recall_at_10"), "higher"),
    **dict.fromkeys(("sts_recall_at_1", "sts_spearman"), "higher"),
    **dict.fromkeys(("distinct_1", "distinct_2", "distinct_3"), "higher"),
    **dict.fromkeys(("reencoded_cosine_drawn", "changed", "kept"), "higher"),
    **dict.fromkeys(
        ("token_entropy", "training_similarity", "training_copies", "trigram_bits_per_token", "copies"), ""
    ),
}
_MODES = ("l2t", "t2l", "joint", "figures")


class Curve(NamedTuple):
    """Finite values over the steps."""

    steps: np.ndarray
    values: np.ndarray


def _tail_mean(curve: Curve) -> float:
    return float(curve.values[curve.steps > (1 - TAIL_FRACTION) * curve.steps[-1]].mean())


def _last(curve: Curve) -> float:
    return float(curve.values[-1])


# For each group, in the order of tables: the kinds of its records, and how a curve's final value is computed.
SUMMARY_RULES: dict[str, tuple[tuple[str, ...], Callable[[Curve], float]]] = {
    "validation": (HELD_OUT_KINDS, _last),
    "quality": (HELD_OUT_KINDS, _last),
    "loss": (("train",), _tail_mean),
    "accuracy": (("train",), _tail_mean),
    "speed": (("train",), lambda curve: float(np.median(curve.values))),
    "memory": (("train",), lambda curve: float(curve.values.max())),
    "data": (("train",), _last),
    "health": (("train",), _last),
}


def _name(key: str) -> str:
    """Return the name of a metric, without its group and mode."""
    name = key.rpartition("/")[2].rpartition(".")[2]
    while name.partition("_")[0] in _MODES:
        name = name.partition("_")[2]
    return name


def better_direction(key: str) -> Direction:
    """Return which values of a metric are better, or "" if it is not scored, e.g. a baseline."""
    return _GROUP_DIRECTIONS.get(key.partition("/")[0]) or _DIRECTIONS.get(_name(key), "")


def is_metric_baseline(key: str) -> bool:
    """Return whether `key` only serves to judge other metrics, e.g. a baseline, standard error or count."""
    return key.startswith(("evaluation/", "quality/")) and _name(key) not in _DIRECTIONS


class RunSummary:
    """Snapshot of a run, read from its folder. Raises `DataError` if `path` is not a run folder."""

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self.history = History(path)
        self.name = self.history.name
        # Allow for a validation and a save between two records.
        record_interval_s = (self.history.step_s or 0.0) * self.history.steps_per_record
        self.state: RunState = self.history.state(stall_timeout_s=max(600.0, 10 * record_interval_s))

    @property
    def last_step(self) -> int:
        """Last step with a training or validation record."""
        latest = (self.history.last(kind) for kind in ("train", *HELD_OUT_KINDS))
        return max((record["step"] for record in latest if record), default=0)

    @cached_property
    def duration_s(self) -> float:
        """Total seconds between records, without the gaps between sessions."""
        pairs = pairwise(self.history.records)
        return sum((b["time"] - a["time"] for a, b in pairs if b["kind"] not in ("start", "resume")), 0.0)

    def curve(self, tag: str, *kinds: str, max_step: float = math.inf) -> Curve:
        """Return the finite values of `tag` in records of `kinds` up to `max_step`."""
        series = self.history.series(tag, *kinds)
        steps, values = np.array(series.steps), np.array(series.values)
        kept = np.isfinite(values) & (steps <= max_step)
        return Curve(steps[kept], values[kept])

    def final_values(self, max_step: float = math.inf) -> dict[str, float]:
        """Return the final value of each curve up to `max_step`, by tag, computed by `SUMMARY_RULES`."""
        result: dict[str, float] = {}
        for group, (kinds, reduce) in SUMMARY_RULES.items():
            for tag in (tag for tag in self.history.tags(*kinds) if tag.startswith(f"{group}/")):
                curve = self.curve(tag, *kinds, max_step=max_step)
                if len(curve.steps):
                    result[tag] = reduce(curve)
                    if tag == "validation/total":
                        result["validation/total/best"] = float(curve.values.min())
        return result

    @cached_property
    def evaluation_metrics(self) -> dict[str, float]:
        """The finite numbers of evaluation.json by dotted key, prefixed `evaluation/`. Empty without the file."""
        return {
            f"evaluation/{key}": float(value)
            for key, value in flatten(self._evaluation).items()
            if type(value) in (int, float) and math.isfinite(value) and key not in _NON_METRICS
        }

    @cached_property
    def evaluation_settings(self) -> dict[str, Any]:
        """Settings of the evaluation. Two evaluations are comparable only if they are equal."""
        return {key: self._evaluation[key] for key in _EVALUATION_SETTINGS if key in self._evaluation}

    @cached_property
    def _evaluation(self) -> Mapping[str, Any]:
        result = read_json(self.path / "evaluation.json")
        # Ignore the evaluation of an earlier run in the same folder.
        return result if result.get("run_id") == self.history.startup.get("run_id") else {}

    @cached_property
    def events(self) -> list[tuple[str, int]]:
        """Kind and step of each event in order. A failed or killed run ends with a `failure`."""
        records, exits = self.history.records, self.history.exits
        events = [(record["kind"], record["step"]) for record in records if record["kind"] not in _NO_EVENTS]
        if self.state.name in ("failed", "killed"):
            events.append(("failure", exits[0].step if exits else self.history.step))
        return events
