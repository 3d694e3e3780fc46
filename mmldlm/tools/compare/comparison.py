"""Groups of runs that differ only in their seed, and the comparison of each with a baseline."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mmldlm.tools.compare.paired import Decision, Difference, changes, pairing, record_difference
from mmldlm.tools.compare.run_summary import RunSummary, better_direction

PER_RUN_SETTINGS = ("run.seed", "run.dir")  # settings in which the runs of one group may differ
ABSENT = "(absent)"

_MEANINGS: dict[Decision, str] = {
    "lower": "B is below A",
    "higher": "B is above A",
    "equal": "B differs from A by less than {:g} %",
    "open": "open, B may differ from A by {:g} % in either direction",
}


@dataclass(frozen=True)
class RunGroup:
    """Runs of one config, named after the first of them."""

    runs: tuple[RunSummary, ...]

    @property
    def name(self) -> str:
        """Name of the first run."""
        return self.runs[0].name

    @property
    def title(self) -> str:
        """Name of the first run and the number of the others."""
        return self.name if len(self.runs) == 1 else f"{self.name} and {len(self.runs) - 1} more"

    @property
    def by_seed(self) -> dict[str, RunSummary]:
        """The first run of each seed, as runs of equal seed are not independent. Unknown seeds count as different."""
        seeds: dict[str, RunSummary] = {}
        for run in self.runs:
            by_step = {start.config.get("run.seed", run.path): start.step for start in reversed(run.history.starts)}
            seeds.setdefault(str(by_step if len(by_step) > 1 else next(iter(by_step))), run)
        return seeds


@dataclass(frozen=True)
class Comparison:
    """Compare a group of runs, B, with a baseline group, A, over the steps up to `max_step`.

    Attributes:
        is_over_seeds: If true, decide about the mean over seeds, otherwise about the records of the only pair.
        loss: The metric to decide about.
        at_least: The smallest difference that matters, as a fraction.
    """

    a: RunGroup
    b: RunGroup
    is_over_seeds: bool
    max_step: float = math.inf
    loss: str = "loss/total"
    at_least: float = 0.005

    @cached_property
    def pairs(self) -> list[tuple[RunSummary, RunSummary]]:
        """Pairs of runs with equal seeds, or the only two runs, whatever their seeds."""
        if len(self.a.runs) == len(self.b.runs) == 1:
            return [(self.a.runs[0], self.b.runs[0])]
        others = self.b.by_seed
        return [(run, others[seed]) for seed, run in self.a.by_seed.items() if seed in others]

    def over_records(self, pair: tuple[RunSummary, RunSummary]) -> list[Difference]:
        """Return the differences of a pair's losses, accuracies and validation metrics."""
        a, b = (run.history for run in pair)
        tags = [tag for tag in a.tags() if tag.startswith(("loss/", "accuracy/", "validation/"))]
        return [one for tag in tags if (one := record_difference(a, b, tag, self.max_step))]

    @cached_property
    def over_seeds(self) -> list[Difference]:
        """Differences of all scored final values, between the runs that have reached the last step.

        If several runs have a partner with the same seed, pairs are compared, otherwise independent runs.
        """
        has_partners = len(self.pairs) > 1
        if has_partners:
            done = [pair for pair in self.pairs if all(map(self._is_done, pair))]
            arms = [[pair[arm] for pair in done] for arm in (0, 1)]
        else:
            arms = [[run for run in group.by_seed.values() if self._is_done(run)] for group in (self.a, self.b)]
        if not all(arms):
            return []
        evaluated = [run.evaluation_settings for arm in arms for run in arm]
        is_comparable = bool(evaluated[0]) and all(settings == evaluated[0] for settings in evaluated)
        values = [
            [run.final_values(self.max_step) | (run.evaluation_metrics if is_comparable else {}) for run in arm]
            for arm in arms
        ]
        differences = []
        for tag in values[0][0]:
            if not better_direction(tag) or not all(tag in run for arm in values for run in arm):
                continue
            a, b = (np.array([run[tag] for run in arm]) for arm in values)
            if has_partners:
                differences.append(Difference.of_paired(tag, "pairs", range(1, len(a) + 1), a, b))
            else:
                differences.append(Difference.of_independent(tag, a, b))
        return differences

    def _is_done(self, run: RunSummary) -> bool:
        return run.history.step >= min(self.max_step, run.history.total_steps or math.inf)

    @cached_property
    def decision(self) -> Decision:
        """The decision, which is "open" if there is nothing to compare."""
        if self.is_over_seeds:
            difference = next((one for one in self.over_seeds if one.tag == self.loss), None)
        else:
            a, b = self.pairs[0]
            difference = record_difference(a.history, b.history, self.loss, self.max_step)
        return "open" if difference is None else difference.decision(self.at_least)

    @property
    def conclusion(self) -> str:
        """One line with the decision."""
        about = "over seeds" if self.is_over_seeds else "of these two runs alone"
        return f"{self.loss} {about}: {_MEANINGS[self.decision].format(100 * self.at_least)}"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of the comparison."""
        pairs = [
            {
                "a": str(a.path),
                "b": str(b.path),
                "pairing": pairing(a.history, b.history),
                "changes": [*changes(a.history), *changes(b.history)],
                "differences": [one.to_dict() for one in self.over_records((a, b))],
            }
            for a, b in self.pairs
        ]
        over_seeds = [one.to_dict() for one in self.over_seeds]
        head = {"loss": self.loss, "at_least": self.at_least, "decision": self.decision}
        return {**head, "pairs": pairs, "over_seeds": over_seeds}


def group_runs(runs: Sequence[RunSummary]) -> list[RunGroup]:
    """Group runs by config, in the order of each group's first run.

    A run whose config is unknown forms its own group.
    """
    groups: dict[str, list[RunSummary]] = {}
    for run in runs:
        shared = _shared_settings(run)
        identity = json.dumps(shared, sort_keys=True, default=str) if shared else str(run.path)
        groups.setdefault(identity, []).append(run)
    return [RunGroup(tuple(members)) for members in groups.values()]


def setting_differences(groups: Sequence[RunGroup]) -> dict[str, dict[str, Any]]:
    """Return the settings that differ between or within groups, as key -> group -> value, without `PER_RUN_SETTINGS`.

    The engine, processes, versions and data of all starts are included, as `start-up: KEY`. A run whose config or
    start is unknown does not count as different.
    """
    settings = [_shared_settings(group.runs[0]) for group in groups]
    starts, mixed = [], set[str]()
    for group in groups:
        values: dict[str, Any] = {}
        for environment in (start.environment for run in group.runs for start in run.history.starts):
            for key, value in ((f"start-up: {key}", value) for key, value in environment.items()):
                before = values.setdefault(key, value)
                if str(value) not in str(before).split(" and "):
                    values[key] = f"{before} and {value}"
                    mixed.add(key)
        starts.append(values)
    rows: dict[str, dict[str, Any]] = {}
    for sources in (settings, starts):
        known = [values for values in sources if values]
        for key in dict.fromkeys(key for values in known for key in values):
            if key in mixed or any(values.get(key, ABSENT) != known[0].get(key, ABSENT) for values in known):
                found = (values.get(key, ABSENT) if values else "(unknown)" for values in sources)
                rows[key] = dict(zip((group.name for group in groups), found, strict=True))
    return rows


def _shared_settings(run: RunSummary) -> dict[str, Any]:
    """Return the settings of the latest start, and each earlier setting with another value as "KEY after step N"."""
    *earlier, latest = run.history.starts
    settings = dict(latest.config)
    for start in earlier:
        others = {key: value for key, value in start.config.items() if value != latest.config.get(key)}
        settings |= {f"{key} after step {start.step}": value for key, value in others.items() if key != "resume"}
    return {key: value for key, value in settings.items() if key.split()[0] not in PER_RUN_SETTINGS}
