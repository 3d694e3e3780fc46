"""Runs side by side: those that differ in their seed alone as one group, and each group against a baseline."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mmldlm.settings.fields import flatten
from mmldlm.tools.report.ratio_interval import Ratio, Sample, ratio
from mmldlm.tools.report.run_summary import Run, better

PER_RUN = ("run.seed", "run.dir")  # settings in which the runs of one group may differ
ABSENT = "(absent)"

# What decides how a run went beside its config, by key of its start-up report.
_SURROUNDINGS = ("engine", "world_size", "nodes", "optimizer", "attention", "compile", "git", "data_manifest")
_FIRST = ("validation/", "quality/", "loss/")  # of the metrics, in this order


@dataclass(frozen=True)
class Group:
    """Runs of one config, by the name of the first."""

    runs: tuple[Run, ...]

    @property
    def name(self) -> str:
        return self.runs[0].name

    @property
    def title(self) -> str:
        return self.name if len(self.runs) == 1 else f"{self.name} and {len(self.runs) - 1} more"

    @property
    def seeds(self) -> int:
        return len(self.by_seed())

    def by_seed(self) -> list[list[Run]]:
        """Runs of equal seed, which are no independent samples, together."""
        seeds: dict[str, list[Run]] = {}
        for run in self.runs:
            seeds.setdefault(f"of {run.path}" if run.seed is None else str(run.seed), []).append(run)
        return list(seeds.values())


@dataclass(frozen=True)
class Row:
    """A metric of the baseline, and of each other group, by name, with its ratio to that."""

    key: str
    baseline: Sample
    others: Mapping[str, tuple[Sample, Ratio]]

    def verdict(self, name: str) -> Literal["better", "worse", ""]:
        """Of group `name`, where the interval of its ratio leaves no doubt."""
        sample, found = self.others[name]
        wanted = better(self.key)
        if not wanted or found.interval is None or found.interval[0] <= 1 <= found.interval[1]:
            return ""
        return "better" if (sample.mean > self.baseline.mean) == (wanted == "higher") else "worse"


def grouped(runs: Sequence[Run], baseline: Run) -> list[Group]:
    """The groups, that of `baseline` first and begun by it. A run whose config is not known is alone."""
    found: dict[str, list[Run]] = {}
    for run in [baseline, *(each for each in runs if each is not baseline)]:
        shared = {key: value for key, value in run.config.items() if key not in PER_RUN}
        identity = json.dumps(shared, sort_keys=True, default=str) if shared else str(run.path)
        found.setdefault(identity, []).append(run)
    return [Group(tuple(each)) for each in found.values()]


def common_step(groups: Sequence[Group]) -> int:
    """The last step that every run which has begun its curves has reached."""
    return min((run.last_step for group in groups for run in group.runs if run.last_step), default=0)


def compare(groups: Sequence[Group], until: int) -> list[Row]:
    """Every merit that the baseline, the first group, has in common with another, over the steps up to `until`.

    Evaluations are compared where they were made alike, at the same step.
    """
    alike = [group for group in groups if _evaluated(group) and _evaluated(group) == _evaluated(groups[0])]
    curves = [(group.name, _means(group, [_merits(run.values(until)) for run in group.runs])) for group in groups]
    evaluations = [(group.name, _means(group, [_merits(run.evaluation) for run in group.runs])) for group in alike]
    return _rows(curves) + _rows(evaluations)


def _rows(samples: Sequence[tuple[str, Mapping[str, Sample]]]) -> list[Row]:
    """One of each metric that the first of named groups has in common with another."""
    if not samples:
        return []
    (_, own), *theirs = samples
    rows = []
    for key in sorted(own, key=_place):
        found = {name: (each[key], ratio(each[key], own[key])) for name, each in theirs if key in each}
        rows += [Row(key, own[key], found)] if found else []
    return rows


def _place(key: str) -> tuple[int, bool]:
    """Of a metric among the others, whose order is kept where this is equal."""
    first = [prefix for prefix in _FIRST if key.startswith(prefix)]
    return _FIRST.index(first[0]) if first else len(_FIRST), "/total" not in key


def _merits(values: Mapping[str, float]) -> dict[str, float]:
    return {key: value for key, value in values.items() if better(key)}


def _evaluated(group: Group) -> dict[str, Any] | None:
    """How the evaluations of a group were made; None where they were not, or not all alike."""
    found = [run.evaluated for run in group.runs if run.evaluation]
    return found[0] if found and all(each == found[0] for each in found) else None


def _means(group: Group, values: Sequence[Mapping[str, float]]) -> dict[str, Sample]:
    """A sample of each key over the seeds of a group; `values` has those of each of its runs."""
    of_run = dict(zip((run.path for run in group.runs), values, strict=True))
    keys = dict.fromkeys(key for each in values for key in each)
    found = {}
    for key in keys:
        of_seeds = [[of_run[run.path][key] for run in runs if key in of_run[run.path]] for runs in group.by_seed()]
        found[key] = Sample.of([statistics.fmean(each) for each in of_seeds if each])
    return found


def config_differences(groups: Sequence[Group]) -> dict[str, list[Any]]:
    """By key, the value in each group, of settings in which groups differ; those of one run each aside."""
    return _differing([{k: v for k, v in group.runs[0].config.items() if k not in PER_RUN} for group in groups])


def surroundings_differences(groups: Sequence[Group]) -> dict[str, list[Any]]:
    """The same of engine, processes, versions and data, by the latest start of each group's first run."""
    return _differing([_surroundings(group.runs[0]) for group in groups])


def _surroundings(run: Run) -> dict[str, Any]:
    report = run.history.startup
    versions = report.get("versions")
    kept: dict[str, Any] = {key: report[key] for key in _SURROUNDINGS if key in report}
    return flatten({**kept, "versions": versions} if isinstance(versions, Mapping) else kept)


def _differing(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    known = [each for each in settings if each]
    if len(known) < 2:
        return {}
    keys = dict.fromkeys(key for each in known for key in each)
    rows = {key: [each.get(key, ABSENT) if each else "(unknown)" for each in settings] for key in keys}
    return {
        key: row
        for key, row in rows.items()
        if any(each.get(key, ABSENT) != known[0].get(key, ABSENT) for each in known)
    }
