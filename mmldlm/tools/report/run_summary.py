"""What a run came to: its final values, each by a rule of its group, and what happened to it."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from mmldlm.settings.fields import flatten
from mmldlm.tools.history.run_history import History, Series
from mmldlm.tools.history.run_status import State, read_json

TAIL = 0.1  # share of the steps over which a training loss is averaged

EventKind = Literal["start", "resume", "skip", "checkpoint", "micro_batch", "stop", "finish", "failure"]

MEASURED = ("validation", "quality")  # the kinds of records of what is measured on held-out documents

# Keys of evaluation.json that say how it was measured, and others that are no measurement.
_HOW_EVALUATED = ("step", "weights", "split", "samples", "texts", "times", "seed")
_NO_METRIC = (*_HOW_EVALUATED, "batch", "documents")
_CONTROLS = (
    *("control", "shuffled", "mean_latent", "chance", "unigram", "_true", "_noise"),
    *("standard_error", "texts", "candidates", "_needed"),
)
_HIGHER = (
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
)
_LOWER = (
    "loss",
    "validation",
    "bits_per",
    "perplexity",
    "frechet",
    "repetition",
    "step_s",
    "wait_s",
    "memory",
    "unencodable",
    "median_rank",
)

Better = Literal["higher", "lower", ""]


def _tail_mean(series: Series) -> float:
    begin = (1 - TAIL) * series.steps[-1]
    values = [value for step, value in zip(series.steps, series.values, strict=True) if step > begin]
    return statistics.fmean(values)


def _last(series: Series) -> float:
    return series.values[-1]


# By group of tags: the kinds of records, what stands for the whole series, and that in words.
RULES: dict[str, tuple[tuple[str, ...], Callable[[Series], float], str]] = {
    "loss/": (("train",), _tail_mean, "mean of the training records of the last 10 % of the steps"),
    "validation/": (MEASURED, _last, "last validation"),
    "quality/": (MEASURED, _last, "last measurement of what the run generates"),
    "speed/": (("train",), lambda series: statistics.median(series.values), "median of the training records"),
    "memory/": (("train",), lambda series: max(series.values), "highest of the training records, of rank 0"),
    "data/": (("train",), _last, "last training record"),
    "health/": (("train",), _last, "last training record"),
}
BEST = "validation/total/best"
BEST_RULE = "lowest validation/total"
EVALUATION = "evaluation/"
EVALUATION_RULE = "evaluation.json, as mmldlm evaluate wrote it"


def better(key: str) -> Better:
    """Which values of a metric are the better ones; "" where none are, as of a control."""
    if is_control(key):
        return ""
    if any(word in key for word in _HIGHER):
        return "higher"
    return "lower" if any(word in key for word in _LOWER) else ""


def is_control(key: str) -> bool:
    """Whether a metric is there for others to be held against."""
    return key.startswith((EVALUATION, "quality/")) and any(word in key for word in _CONTROLS)


@dataclass(frozen=True)
class Event:
    kind: EventKind
    step: int
    time: float  # unix seconds
    text: str


class Run:
    """A run as its folder showed it at one moment."""

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self.history = History.read(path)
        self.name = self.history.name
        self._curves: dict[tuple[str, ...], Series] = {}
        # Between two records there may be a validation and a save.
        usual = (self.history.step_s or 0.0) * self.history.steps_between
        self.state: State = self.history.state(patience_s=max(600.0, 10 * usual))

    @cached_property
    def config(self) -> dict[str, Any]:
        """By dotted key; empty where the run's file is missing or being written."""
        return flatten(self.history.config)

    @property
    def seed(self) -> int | None:
        return self.config.get("run.seed")

    @property
    def last_step(self) -> int:
        """Of the curves."""
        steps = [record["step"] for record in self.history.of("train", *MEASURED)]
        return max(steps, default=0)

    @cached_property
    def seconds(self) -> float:
        """Between the first and the last record of each of its sessions, summed up."""
        total, began, last = 0.0, None, 0.0
        for record in self.history.records:
            if record["kind"] in ("start", "resume") or began is None:
                total += last - began if began is not None else 0.0
                began = record["time"]
            last = record["time"]
        return total + (last - began if began is not None else 0.0)

    # --- values -----------------------------------------------------------------------------------------------

    def curve(self, tag: str, *kinds: str, until: float = math.inf) -> Series:
        """The finite values of `tag` in records of `kinds` up to step `until`."""
        key = (tag, *kinds)
        if key not in self._curves:
            steps, values, times = series = self.history.series(tag, *kinds)
            kept = [index for index, value in enumerate(series.values) if math.isfinite(value)]
            self._curves[key] = Series([steps[i] for i in kept], [values[i] for i in kept], [times[i] for i in kept])
        whole = self._curves[key]
        end = bisect_right(whole.steps, until)
        return Series(whole.steps[:end], whole.values[:end], whole.times[:end])

    def values(self, until: float = math.inf) -> dict[str, float]:
        """What stands for each curve up to step `until`, by tag."""
        found: dict[str, float] = {}
        for group, (kinds, rule, _) in RULES.items():
            for tag in self.history.tags(*kinds):
                if tag.startswith(group) and (series := self.curve(tag, *kinds, until=until)).steps:
                    found[tag] = rule(series)
                    if tag == "validation/total":
                        found[BEST] = min(series.values)
        return found

    @cached_property
    def evaluation(self) -> dict[str, float]:
        """The numbers of evaluation.json by dotted key; empty where there is none."""
        numbers = {
            key: float(value)
            for key, value in flatten(self._evaluation).items()
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        }
        return {EVALUATION + key: value for key, value in numbers.items() if key not in _NO_METRIC}

    @cached_property
    def evaluated(self) -> dict[str, Any]:
        """How that was measured: two evaluations can be compared where this is equal."""
        return {key: self._evaluation[key] for key in _HOW_EVALUATED if key in self._evaluation}

    @property
    def texts(self) -> list[Any]:
        """Texts and what was written from their latents, of evaluation.json."""
        l2t = self._evaluation.get("l2t")
        found = l2t.get("samples") if isinstance(l2t, Mapping) else None
        return found if isinstance(found, list) else []

    @cached_property
    def _evaluation(self) -> Mapping[str, Any]:
        return read_json(self.path / "evaluation.json")

    # --- events -----------------------------------------------------------------------------------------------

    @cached_property
    def events(self) -> list[Event]:
        """What happened, in order; of a run that broke off, with how."""
        found = [event for record in self.history.records if (event := _event(record)) is not None]
        if self.state.name in ("failed", "killed"):
            words, last = self.history.exits[:1], self.history.last()
            step = words[0].step if words else self.history.step
            when = words[0].time if words else (last["time"] if last else math.nan)
            code = f" (exit code {self.state.code})" if self.state.code is not None else ""
            found.append(Event("failure", step, when, f"{self.state.cause}{code}"))
        return found


def _event(record: Mapping[str, Any]) -> Event | None:
    kind, step, when = record["kind"], record["step"], record["time"]
    get = record.get
    if kind in ("start", "resume"):
        processes = get("world_size", "?")
        text = f"{get('engine', 'unknown engine')}, {processes} process{'es' * (processes != 1)}"
        return Event(kind, step, when, text + (f" of steps up to {get('total_steps')}" if get("total_steps") else ""))
    if kind == "skip":
        norm = get("optim/grad_norm")
        found = f", gradient norm {norm:.4g}" if isinstance(norm, int | float) and math.isfinite(norm) else ""
        return Event("skip", step, when, f"step left out, reason: {get('reason', 'unknown')}{found}")
    if kind == "checkpoint":
        stall = get("stall_s")
        waited = f", training waited {stall:.2g} s" if isinstance(stall, int | float) else ""
        return Event("checkpoint", step, when, f"{Path(str(get('path', ''))).name}{waited}")
    if kind == "micro_batch":
        return Event("micro_batch", step, when, f"out of memory: {get('before')} -> {get('micro_batch_size')} samples")
    if kind == "end":
        by = get("stopped_by")
        return Event("stop", step, when, f"stopped by {by}, saved") if by else Event("finish", step, when, "finished")
    return None
