"""Figures of a report, drawn with matplotlib as PNG files.

They are those that TensorBoard does not draw: runs of several seeds in one color, with their events, and the paired
difference with its interval.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mmldlm.tools.report.comparison import Comparison, RunGroup
from mmldlm.tools.report.paired import record_difference
from mmldlm.tools.report.run_summary import HELD_OUT_KINDS, Curve, RunSummary, is_metric_baseline
from mmldlm.utils.short_repr import truncate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colors of the groups.
COLORS = ("#0b6bcb", "#d1480f", "#0b8457", "#a3359b", "#9a6b00", "#0f8b9d", "#6a4fd8", "#7a5145")

EVENT_MARKERS = {"resume": ("^", "resumed"), "skip": ("x", "skipped step"), "failure": ("X", "failed or killed")}
_MODE_SUFFIXES = ("_l2t", "_t2l", "_joint")  # of the names of losses of one mode
_MAX_PANELS = 12
_MAX_BINS = 200  # of a curve; longer ones are binned
_MAX_DOTS = 60  # of a held-out curve
_MAX_SHADED_RUNS = 3  # with more runs, the lowest and highest values of bins are not shaded
_MAX_LABEL_LENGTH = 48

_RC_PARAMS: Any = {
    "font.size": 9,
    "axes.titlelocation": "left",
    "axes.titlesize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.alpha": 0.4,
    "axes.formatter.limits": (-4, 6),
    "legend.frameon": False,
    "text.parse_math": False,
    "savefig.dpi": 150,
}


class Panel(NamedTuple):
    """One pair of axes: a tag of training records, and one of held-out documents; what a run lacks is not drawn."""

    title: str
    train_tag: str
    held_out_tag: str


def draw_figures(groups: Sequence[RunGroup], comparisons: Sequence[Comparison], folder: Path) -> dict[str, list[str]]:
    """Draw all figures for which the runs have data, as `NAME.png` in `folder`.

    Returns:
        By name of each figure, the titles of the panels that it has no room for.
    """
    import matplotlib

    losses, others = plan_panels([run for group in groups for run in group.runs])
    omitted: dict[str, list[str]] = {}
    with matplotlib.rc_context(_RC_PARAMS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # in the name of a run
        for name, panels in (("loss", losses), ("quality", others)):
            if panels:
                build_figure(groups, panels[:_MAX_PANELS]).savefig(folder / f"{name}.png")
                omitted[name] = [panel.title for panel in panels[_MAX_PANELS:]]
        if any(comparison.pairs for comparison in comparisons):
            build_paired_figure(comparisons).savefig(folder / "paired.png")
            omitted["paired"] = []
    return omitted


def plan_panels(runs: Sequence[RunSummary]) -> tuple[list[Panel], list[Panel]]:
    """Return the panels of losses of all modes, and those of losses of one mode and of other held-out metrics."""
    train = dict.fromkeys(tag for run in runs for tag in run.history.tags("train") if tag.startswith("loss/"))
    held_out = dict.fromkeys(tag for run in runs for tag in run.history.tags(*HELD_OUT_KINDS))
    others = [tag for tag in held_out if not tag.startswith("validation/")]
    names = dict.fromkeys(tag.partition("/")[2] for tag in (train | held_out) if tag not in others)
    panels = [Panel(name, f"loss/{name}", f"validation/{name}") for name in names]
    panels += [Panel(tag, tag, tag) for tag in others if not is_metric_baseline(tag)]
    losses = [panel for panel in panels if "/" not in panel.title and not panel.title.endswith(_MODE_SUFFIXES)]
    return losses, [panel for panel in panels if panel not in losses]


def build_paired_figure(comparisons: Sequence[Comparison]) -> Figure:
    """Draw the relative difference of each pair's total loss with its confidence sequence, over the steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.4), layout="constrained")
    axis = figure.subplots()
    axis.axhline(0, color="gray", linewidth=1)
    for index, comparison in enumerate(comparisons, start=1):
        for a, b in comparison.pairs:
            one = record_difference(a.history, b.history, "loss/total", comparison.max_step)
            if one is None or not one.baseline:
                continue
            color, scale = COLORS[index % len(COLORS)], 100 / abs(one.baseline)
            # Without their interval the first means would set the scale.
            bounded = np.isfinite(one.half_widths)
            steps, means, widths = (np.asarray(each)[bounded] for each in (one.steps, one.means, one.half_widths))
            axis.plot(steps, scale * means, color=color)
            axis.fill_between(steps, scale * (means - widths), scale * (means + widths), color=color, alpha=0.15)
    _label_axis(axis, "difference of the total loss, %")
    return figure


def build_figure(groups: Sequence[RunGroup], panels: Sequence[Panel]) -> Figure:
    """Draw all runs into each panel, one color per group, with their events as markers on the curves."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(10, 0.9 + 2.5 * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    runs = [(run, COLORS[index % len(COLORS)]) for index, group in enumerate(groups) for run in group.runs]
    for axis, panel in zip(axes, panels, strict=False):
        for run, color in runs:
            _draw_run(axis, panel, run, color, is_shaded=len(runs) <= _MAX_SHADED_RUNS)
        _label_axis(axis, panel.title)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    lines = [Line2D([], [], color=COLORS[index % len(COLORS)], linewidth=2.5) for index in range(len(groups))]
    # matplotlib leaves labels that start with an underscore out of the legend.
    titles = [f" {group.title}" if group.title.startswith("_") else group.title for group in groups]
    figure.legend(lines, [truncate(title, _MAX_LABEL_LENGTH) for title in titles], loc="outside upper left", ncols=3)
    kinds = {kind for run, _ in runs for kind, _ in run.events}
    markers = {
        label: Line2D([], [], color="black", marker=marker, linestyle="")
        for kind, (marker, label) in EVENT_MARKERS.items()
        if kind in kinds
    }
    if markers:
        figure.legend(list(markers.values()), list(markers), loc="outside lower left", ncols=3)
    return figure


def _draw_run(axis: Axes, panel: Panel, run: RunSummary, color: str, is_shaded: bool) -> None:
    train, held_out = run.curve(panel.train_tag, "train"), run.curve(panel.held_out_tag, *HELD_OUT_KINDS)
    if len(held_out.steps):
        marker = "o" if len(held_out.steps) <= _MAX_DOTS else ""
        axis.plot(held_out.steps, held_out.values, color=color, linestyle=(0, (4, 2)), marker=marker, markersize=3.5)
    if not len(train.steps):
        return
    steps, mean, low, high = bin_curve(train, _MAX_BINS)
    # A line through a single point would be invisible.
    axis.plot(steps, mean, color=color, marker="." if len(steps) == 1 else "")
    if is_shaded and len(steps) < len(train.steps):
        axis.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
    for kind, (marker, _) in EVENT_MARKERS.items():
        if marked := [step for event, step in run.events if event == kind]:
            axis.plot(marked, np.interp(marked, steps, mean), color=color, linestyle="", marker=marker, clip_on=False)


def _label_axis(axis: Axes, title: str) -> None:
    axis.set_title(title)
    axis.set_xlabel("step")
    axis.margins(x=0.02)


def bin_curve(curve: Curve, max_bins: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Bin a curve into at most `max_bins` consecutive parts; short curves keep one bin per record.

    Returns:
        Mean step, mean value, lowest value and highest value of each bin, as arrays of shape [bins].
    """
    num_bins = min(len(curve.steps), max_bins)
    steps, values = (np.array_split(np.asarray(data, float), num_bins) for data in curve)
    mean, low, high = (np.array([reduce(part) for part in values]) for reduce in (np.mean, np.min, np.max))
    return np.array([part.mean() for part in steps]), mean, low, high
