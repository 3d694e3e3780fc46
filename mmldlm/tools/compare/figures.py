"""Figures of `mmldlm compare --figures`: curves with runs of one config in one color, and paired differences."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmldlm.tools.compare.comparison import Comparison, RunGroup
from mmldlm.tools.compare.paired import record_difference
from mmldlm.tools.compare.run_summary import HELD_OUT_KINDS, Curve, RunSummary, is_metric_baseline
from mmldlm.utils.short_repr import truncate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colors of the groups.
COLORS = ("#0b6bcb", "#d1480f", "#0b8457", "#a3359b", "#9a6b00", "#0f8b9d", "#6a4fd8", "#7a5145")
MAX_PANELS = 12
MAX_POINTS = 200  # in a curve: a longer one shows means of consecutive records
MAX_LABEL_LENGTH = 48

_RC_PARAMS: Any = {
    "font.size": 9,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.alpha": 0.4,
    "text.parse_math": False,
    "savefig.dpi": 150,
}


def draw_figures(groups: Sequence[RunGroup], comparisons: Sequence[Comparison], folder: Path) -> None:
    """Draw `curves.png` and `paired.png` into `folder`, each only if the runs have data for it."""
    import matplotlib

    panels = plan_panels([run for group in groups for run in group.runs])
    with matplotlib.rc_context(_RC_PARAMS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # in a run's name
        if panels:
            build_curves(groups, panels).savefig(folder / "curves.png")
        if any(comparison.pairs for comparison in comparisons):
            build_paired(comparisons).savefig(folder / "paired.png")


def plan_panels(runs: Sequence[RunSummary]) -> list[str]:
    """Choose at most `MAX_PANELS` panels: names of losses, e.g. "total", then tags of other held-out metrics."""
    train = [tag for run in runs for tag in run.history.tags("train") if tag.startswith("loss/")]
    held_out = [tag for run in runs for tag in run.history.tags(*HELD_OUT_KINDS)]
    losses = [tag.partition("/")[2] for tag in (*train, *held_out) if tag.startswith(("loss/", "validation/"))]
    others = [tag for tag in held_out if not tag.startswith("validation/") and not is_metric_baseline(tag)]
    return list(dict.fromkeys((*losses, *others)))[:MAX_PANELS]


def build_curves(groups: Sequence[RunGroup], panels: Sequence[str]) -> Figure:
    """Draw all runs into each panel: training as lines, held-out documents as dashed lines with dots."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(10, 0.9 + 2.5 * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis, name in zip(axes, panels, strict=False):
        for index, group in enumerate(groups):
            color = COLORS[index % len(COLORS)]
            for run in group.runs:
                # A tag has a group, e.g. "quality/l2t_bleu". The name of a loss has none.
                train_tag, held_out_tag = (name, name) if "/" in name else (f"loss/{name}", f"validation/{name}")
                axis.plot(*shorten(run.curve(train_tag, "train")), color=color)
                axis.plot(*shorten(run.curve(held_out_tag, *HELD_OUT_KINDS)), color=color, linestyle="--", marker=".")
        axis.set(title=name, xlabel="step")
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    lines = [Line2D([], [], color=COLORS[index % len(COLORS)]) for index in range(len(groups))]
    # matplotlib leaves labels that start with an underscore out of the legend.
    titles = [f" {group.title}" if group.title.startswith("_") else group.title for group in groups]
    figure.legend(lines, [truncate(title, MAX_LABEL_LENGTH) for title in titles], loc="outside upper left", ncols=3)
    return figure


def build_paired(comparisons: Sequence[Comparison]) -> Figure:
    """Draw the relative difference of each pair's loss with its confidence sequence, over the steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.4), layout="constrained")
    axis = figure.subplots()
    axis.axhline(0, color="gray", linewidth=1)
    axis.set(title="difference of the loss, %", xlabel="step")
    for index, comparison in enumerate(comparisons, start=1):
        for a, b in comparison.pairs:
            one = record_difference(a.history, b.history, "loss/total", comparison.max_step)
            if one is None or not one.baseline:
                continue
            color, scale = COLORS[index % len(COLORS)], 100 / abs(one.baseline)
            # Leave out the first means: they have no interval yet, and their noise would set the scale.
            bounded = np.isfinite(one.half_widths)
            steps, means, widths = (np.asarray(each)[bounded] for each in (one.steps, one.means, one.half_widths))
            axis.plot(steps, scale * means, color=color)
            axis.fill_between(steps, scale * (means - widths), scale * (means + widths), color=color, alpha=0.15)
    return figure


def shorten(curve: Curve) -> Curve:
    """Reduce a curve to at most `MAX_POINTS` points by averaging consecutive ones."""
    if len(curve.steps) <= MAX_POINTS:
        return curve
    return Curve(*(np.array([part.mean() for part in np.array_split(data, MAX_POINTS)]) for data in curve))
