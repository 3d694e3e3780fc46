"""Comparison of runs: runs that differ only in their seed form a group, and each group is compared with a baseline."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mmldlm.tools.report.run_summary import RunSummary, better_direction
from mmldlm.utils.nested import flatten
from mmldlm.utils.ratio import Ratio, SeedStats, ratio_of_means

PER_RUN_SETTINGS = ("run.seed", "run.dir")  # settings in which the runs of one group may differ
ABSENT = "(absent)"

# Keys of the start-up report that influence a run besides its config.
_ENVIRONMENT_KEYS = (
    "engine",
    "sharding",
    "world_size",
    "nodes",
    "optimizer",
    "attention",
    "compile",
    "git",
    "data_manifest",
)
_FIRST_PREFIXES = ("validation/", "quality/", "loss/")  # metrics that are listed first, in this order


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
    def num_seeds(self) -> int:
        """Number of different seeds."""
        return len(self.by_seed())

    def by_seed(self) -> list[list[RunSummary]]:
        """Return one list of runs per seed, since runs of equal seed are not independent samples."""
        seeds: dict[str, list[RunSummary]] = {}
        for run in self.runs:
            # Runs of unknown seed count as different ones.
            seeds.setdefault(f"of {run.path}" if run.seed is None else str(run.seed), []).append(run)
        return list(seeds.values())


@dataclass(frozen=True)
class MetricComparison:
    """One metric: of the baseline, and by name of each other group, with its ratio to the baseline."""

    key: str
    baseline: SeedStats
    others: Mapping[str, tuple[SeedStats, Ratio]]

    def significance(self, name: str) -> Literal["better", "worse", ""]:
        """Return "better" or "worse" if the interval of group `name`'s ratio is on one side of 1, otherwise ""."""
        stats, ratio = self.others[name]
        direction = better_direction(self.key)
        if not direction or ratio.no_interval_reason or ratio.interval[0] <= 1 <= ratio.interval[1]:
            return ""
        return "better" if (stats.mean > self.baseline.mean) == (direction == "higher") else "worse"


def group_runs(runs: Sequence[RunSummary], baseline: RunSummary) -> list[RunGroup]:
    """Return the groups of `runs`, the first of which starts with `baseline`.

    A run whose config is unknown forms a group of its own.
    """
    groups: dict[str, list[RunSummary]] = {}
    for run in [baseline, *(other for other in runs if other is not baseline)]:
        shared = {key: value for key, value in run.config.items() if key not in PER_RUN_SETTINGS}
        identity = json.dumps(shared, sort_keys=True, default=str) if shared else str(run.path)
        groups.setdefault(identity, []).append(run)
    return [RunGroup(tuple(members)) for members in groups.values()]


def common_step(groups: Sequence[RunGroup]) -> int:
    """Return the last step that all runs with at least one record have reached."""
    return min((run.last_step for group in groups for run in group.runs if run.last_step), default=0)


def compare_groups(groups: Sequence[RunGroup], max_step: int) -> list[MetricComparison]:
    """Compare every scored metric that the first group, the baseline, shares with another.

    Curves are compared over the steps up to `max_step`; evaluations only if they have the same settings and step.
    """
    comparable = [
        group
        for group in groups
        if _evaluation_settings(group) and _evaluation_settings(group) == _evaluation_settings(groups[0])
    ]
    curves = [
        (group.name, _seed_stats(group, [_scored_metrics(run.final_values(max_step)) for run in group.runs]))
        for group in groups
    ]
    evaluations = [
        (group.name, _seed_stats(group, [_scored_metrics(run.evaluation_metrics) for run in group.runs]))
        for group in comparable
    ]
    return _compare_metrics(curves) + _compare_metrics(evaluations)


def _compare_metrics(groups: Sequence[tuple[str, Mapping[str, SeedStats]]]) -> list[MetricComparison]:
    """Compare each metric that the first of the (name, metrics) pairs shares with another."""
    if not groups:
        return []
    (_, baseline), *others = groups
    comparisons = []
    for key in sorted(baseline, key=_sort_key):
        shared = {
            name: (metrics[key], ratio_of_means(metrics[key], baseline[key]))
            for name, metrics in others
            if key in metrics
        }
        comparisons += [MetricComparison(key, baseline[key], shared)] if shared else []
    return comparisons


def _sort_key(key: str) -> tuple[int, bool]:
    """Return the rank of a metric; metrics of equal rank keep their order."""
    prefixes = [prefix for prefix in _FIRST_PREFIXES if key.startswith(prefix)]
    return _FIRST_PREFIXES.index(prefixes[0]) if prefixes else len(_FIRST_PREFIXES), "/total" not in key


def _scored_metrics(values: Mapping[str, float]) -> dict[str, float]:
    return {key: value for key, value in values.items() if better_direction(key)}


def _evaluation_settings(group: RunGroup) -> dict[str, Any] | None:
    """Return the evaluation settings of a group; None if it has no evaluation or its runs disagree."""
    settings = [run.evaluation_settings for run in group.runs if run.evaluation_metrics]
    return settings[0] if settings and all(other == settings[0] for other in settings) else None


def _seed_stats(group: RunGroup, values: Sequence[Mapping[str, float]]) -> dict[str, SeedStats]:
    """Return the statistics of each key over the seeds of a group; `values` has one mapping per run."""
    values_by_path = dict(zip((run.path for run in group.runs), values, strict=True))
    keys = dict.fromkeys(key for run_values in values for key in run_values)
    stats = {}
    for key in keys:
        per_seed = [
            [values_by_path[run.path][key] for run in runs if key in values_by_path[run.path]]
            for runs in group.by_seed()
        ]
        stats[key] = SeedStats.from_values([statistics.fmean(seed_values) for seed_values in per_seed if seed_values])
    return stats


def config_differences(groups: Sequence[RunGroup]) -> dict[str, list[Any]]:
    """Return the settings in which groups differ, as key -> value per group, without `PER_RUN_SETTINGS`."""
    return _differing(
        [{k: v for k, v in group.runs[0].config.items() if k not in PER_RUN_SETTINGS} for group in groups]
    )


def environment_differences(groups: Sequence[RunGroup]) -> dict[str, list[Any]]:
    """Return the differences in engine, processes, versions and data, by the latest start of each group's first run."""
    return _differing([_environment(group.runs[0]) for group in groups])


def _environment(run: RunSummary) -> dict[str, Any]:
    report = run.history.startup
    versions = report.get("versions")
    environment: dict[str, Any] = {key: report[key] for key in _ENVIRONMENT_KEYS if key in report}
    return flatten({**environment, "versions": versions} if isinstance(versions, Mapping) else environment)


def _differing(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    # A group without a known config makes no difference by itself.
    known = [values for values in settings if values]
    if len(known) < 2:
        return {}
    keys = dict.fromkeys(key for values in known for key in values)
    rows = {key: [values.get(key, ABSENT) if values else "(unknown)" for values in settings] for key in keys}
    return {
        key: row
        for key, row in rows.items()
        if any(values.get(key, ABSENT) != known[0].get(key, ABSENT) for values in known)
    }
