"""Summary of one run: the final value of each curve, by the rule of its group, and its events."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from mmldlm.tools.records import read_json
from mmldlm.tools.runs import History, RunState, Series
from mmldlm.utils.nested import flatten

TAIL_FRACTION = 0.1  # share of the steps over which a training loss is averaged

EventKind = Literal["start", "resume", "skip", "checkpoint", "micro_batch", "slow_rank", "stop", "finish", "failure"]

HELD_OUT_KINDS = ("validation", "quality")  # kinds of records that are measured on held-out documents

# Keys of evaluation.json that describe the evaluation, and other keys that are not metrics.
_EVALUATION_SETTINGS = ("step", "weights", "split", "samples", "texts", "times", "seed", "sampling")
_NON_METRICS = (*_EVALUATION_SETTINGS, "batch", "documents")
# Substrings of keys: baselines of other metrics, metrics where higher is better, and metrics where lower is better.
_METRIC_BASELINES = (
    *("control", "shuffled", "mean_latent", "chance", "unigram", "_true", "_noise"),
    *("standard_error", "texts", "candidates", "_needed"),
)
_HIGHER_IS_BETTER = (
    "accuracy",
    "bleu",
    "chrf",
    "exact_match",
    "cosine",
    "recall",
    "spearman",
    "distinct",
    "tokens_per_s",
    "samples_per_s",
    "flops_per_s",
    "mfu",
    "host_free",
)
_LOWER_IS_BETTER = (
    "loss",
    "validation",
    "bits_per",
    "perplexity",
    "frechet",
    "repetition",
    "step_s",
    "wait_s",
    "compute_s",
    "memory",
    "unencodable",
    "median_rank",
)

Direction = Literal["higher", "lower", ""]


def _tail_mean(series: Series) -> float:
    begin = (1 - TAIL_FRACTION) * series.steps[-1]
    values = [value for step, value in zip(series.steps, series.values, strict=True) if step > begin]
    return statistics.fmean(values)


def _last(series: Series) -> float:
    return series.values[-1]


# Per tag prefix: kinds of records, function that reduces the series to one value, and its description.
SUMMARY_RULES: dict[str, tuple[tuple[str, ...], Callable[[Series], float], str]] = {
    "loss/": (("train",), _tail_mean, "mean of the training records of the last 10 % of the steps"),
    "accuracy/": (("train",), _tail_mean, "mean of the training records of the last 10 % of the steps"),
    "validation/": (HELD_OUT_KINDS, _last, "last validation"),
    "quality/": (HELD_OUT_KINDS, _last, "last measurement of what the run generates"),
    "speed/": (("train",), lambda series: statistics.median(series.values), "median of the training records"),
    "memory/": (("train",), lambda series: max(series.values), "highest of the training records, of rank 0"),
    "data/": (("train",), _last, "last training record"),
    "health/": (("train",), _last, "last training record"),
}
BEST = "validation/total/best"
BEST_RULE = "lowest validation/total"
EVALUATION = "evaluation/"
EVALUATION_RULE = "evaluation.json, as written by mmldlm evaluate"


def better_direction(key: str) -> Direction:
    """Return which values of a metric are better; "" for metrics that are not scored, such as baselines."""
    if is_metric_baseline(key):
        return ""
    # Checked first: memory/host_free_mib also contains "memory".
    if any(part in key for part in _HIGHER_IS_BETTER):
        return "higher"
    return "lower" if any(part in key for part in _LOWER_IS_BETTER) else ""


def is_metric_baseline(key: str) -> bool:
    """Return whether `key` only serves to judge other metrics, as a baseline, standard error or count does."""
    return key.startswith((EVALUATION, "quality/")) and any(part in key for part in _METRIC_BASELINES)


@dataclass(frozen=True)
class Event:
    """An event of a run, at `time` in Unix seconds."""

    kind: EventKind
    step: int
    time: float
    text: str


class RunSummary:
    """Snapshot of a run, read from its folder; a `path` that is not a run folder is a `DataError`."""

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self.history = History(path)
        self.name = self.history.name
        self._curves: dict[tuple[str, ...], Series] = {}
        # There may be a validation and a save between two records.
        record_interval_s = (self.history.step_s or 0.0) * self.history.steps_per_record
        self.state: RunState = self.history.state(stall_timeout_s=max(600.0, 10 * record_interval_s))

    @cached_property
    def config(self) -> dict[str, Any]:
        """Settings by dotted key; empty if the file is missing or still being written."""
        return flatten(self.history.config)

    @property
    def seed(self) -> int | None:
        """`run.seed`; None if the config is unknown."""
        return self.config.get("run.seed")

    @property
    def last_step(self) -> int:
        """Last step with a training or validation record."""
        steps = [record["step"] for record in self.history.by_kind("train", *HELD_OUT_KINDS)]
        return max(steps, default=0)

    @cached_property
    def duration_s(self) -> float:
        """Sum over sessions of the seconds between the first and the last record."""
        total, session_start, last = 0.0, None, 0.0
        for record in self.history.records:
            if record["kind"] in ("start", "resume") or session_start is None:
                total += last - session_start if session_start is not None else 0.0
                session_start = record["time"]
            last = record["time"]
        return total + (last - session_start if session_start is not None else 0.0)

    # --- values -----------------------------------------------------------------------------------------------

    def curve(self, tag: str, *kinds: str, max_step: float = math.inf) -> Series:
        """Return the finite values of `tag` in records of `kinds` up to `max_step`."""
        key = (tag, *kinds)
        if key not in self._curves:
            steps, values, times = series = self.history.series(tag, *kinds)
            finite = [index for index, value in enumerate(series.values) if math.isfinite(value)]
            self._curves[key] = Series(
                [steps[i] for i in finite], [values[i] for i in finite], [times[i] for i in finite]
            )
        curve = self._curves[key]
        # Steps ascend, as records that a resume superseded are left out.
        end = bisect_right(curve.steps, max_step)
        return Series(curve.steps[:end], curve.values[:end], curve.times[:end])

    def final_values(self, max_step: float = math.inf) -> dict[str, float]:
        """Return the value of each curve at `max_step` by `SUMMARY_RULES`, by tag."""
        result: dict[str, float] = {}
        for prefix, (kinds, reduce, _) in SUMMARY_RULES.items():
            for tag in self.history.tags(*kinds):
                if tag.startswith(prefix) and (series := self.curve(tag, *kinds, max_step=max_step)).steps:
                    result[tag] = reduce(series)
                    if tag == "validation/total":
                        result[BEST] = min(series.values)
        return result

    @cached_property
    def evaluation_metrics(self) -> dict[str, float]:
        """Finite numbers of evaluation.json by dotted key, prefixed `evaluation/`; empty without the file."""
        numbers = {
            key: float(value)
            for key, value in flatten(self._evaluation).items()
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        }
        return {EVALUATION + key: value for key, value in numbers.items() if key not in _NON_METRICS}

    @cached_property
    def evaluation_settings(self) -> dict[str, Any]:
        """Settings of the evaluation; two evaluations are comparable if these are equal."""
        return {key: self._evaluation[key] for key in _EVALUATION_SETTINGS if key in self._evaluation}

    @property
    def generated_texts(self) -> list[Any]:
        """Samples of evaluation.json: held-out texts and the texts generated from their latents."""
        l2t = self._evaluation.get("l2t")
        samples = l2t.get("samples") if isinstance(l2t, Mapping) else None
        return [sample for sample in samples if isinstance(sample, Mapping)] if isinstance(samples, list) else []

    @cached_property
    def _evaluation(self) -> Mapping[str, Any]:
        return read_json(self.path / "evaluation.json")

    # --- events -----------------------------------------------------------------------------------------------

    @cached_property
    def events(self) -> list[Event]:
        """Events in order; a failed or killed run ends with an event of kind `failure`."""
        events = [event for record in self.history.records if (event := _event(record)) is not None]
        if self.state.name in ("failed", "killed"):
            exit_reports, last = self.history.exits[:1], self.history.last()
            step = exit_reports[0].step if exit_reports else self.history.step
            time = exit_reports[0].time if exit_reports else (last["time"] if last else math.nan)
            code = f" (exit code {self.state.code})" if self.state.code is not None else ""
            events.append(Event("failure", step, time, f"{self.state.cause}{code}"))
        return events


def _event(record: Mapping[str, Any]) -> Event | None:
    kind, step, time = record["kind"], record["step"], record["time"]
    get = record.get
    if kind in ("start", "resume"):
        processes = get("world_size", "?")
        text = f"{get('engine', 'unknown engine')}, {processes} process{'es' * (processes != 1)}"
        text += f", {get('sharding')}" if get("sharding") else ""
        return Event(kind, step, time, text + (f" of steps up to {get('total_steps')}" if get("total_steps") else ""))
    if kind == "skip":
        norm = get("optim/grad_norm")
        norm_text = f", gradient norm {norm:.4g}" if norm is not None and math.isfinite(norm) else ""
        return Event("skip", step, time, f"step skipped, reason: {get('reason', 'unknown')}{norm_text}")
    if kind == "checkpoint":
        stall = get("stall_s")
        stall_text = f", training waited {stall:.2g} s" if stall is not None else ""
        return Event("checkpoint", step, time, f"{Path(str(get('path', ''))).name}{stall_text}")
    if kind == "micro_batch":
        after = (
            f"{get('micro_batch_tokens')} tokens" if get("micro_batch_tokens") else f"{get('micro_batch_size')} samples"
        )
        return Event("micro_batch", step, time, f"out of memory: {get('before')} -> {after}")
    if kind == "slow_rank":
        by = f"{get('slowdown'):.0%} slower than" if get("slow") else "as fast again as"
        return Event("slow_rank", step, time, f"rank {get('rank')} on {get('host')} is {by} the median of the others")
    if kind == "end":
        stopped_by = get("stopped_by")
        if stopped_by:
            return Event("stop", step, time, f"stopped by {stopped_by}, saved")
        return Event("finish", step, time, "finished")
    return None
