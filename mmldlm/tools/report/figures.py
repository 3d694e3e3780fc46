"""Figures of a report, drawn with matplotlib: each as a PNG file and as SVG for the page."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmldlm.tools.report.comparison import RunGroup
from mmldlm.tools.report.paired import PairedComparison
from mmldlm.tools.report.run_summary import HELD_OUT_KINDS, EventKind, RunSummary, is_metric_baseline
from mmldlm.tools.runs import Series
from mmldlm.utils.short_repr import truncate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colors of the groups, the same in the figures and on the page, which inverts their lightness in dark mode.
COLORS = ("#0b6bcb", "#d1480f", "#0b8457", "#a3359b", "#9a6b00", "#0f8b9d", "#6a4fd8", "#7a5145")
_INK, _SOFT, _BAD = "#1f2933", "#65717e", "#c81e3a"

EVENT_MARKERS: dict[EventKind, tuple[str, float, str]] = {  # marker, size, label
    "checkpoint": ("|", 7, "checkpoint"),
    "resume": ("^", 6, "resumed"),
    "micro_batch": ("v", 6, "micro-batch halved"),
    "skip": ("x", 6, "skipped step"),
    "slow_rank": ("d", 5, "a rank slow, or as fast again"),
    "stop": ("s", 5.5, "stopped"),
    "failure": ("X", 9, "failed or killed"),
}
PANEL_TITLES = {
    "speed/tokens_per_s": "tokens per second",
    "speed/samples_per_s": "samples per second",
    "speed/tflops_per_s": "useful TFLOPs per second",
    "speed/mfu": "MFU: useful FLOPs over the device's peak",
    "speed/step_s": "seconds per step",
    "speed/data_wait_s": "seconds per step waiting for data",
    "speed/compute_s": "seconds per step in which the median rank computes",
    "speed/compute_s_slowest": "seconds per step in which the slowest rank computes",
    "speed/cores_of_others": "cores busy with other processes",
    "memory/resident_mib": "resident memory, MiB",
    "memory/host_free_mib": "free memory of the host, MiB",
    "memory/cuda_allocated_mib": "CUDA memory allocated between steps, MiB",
    "memory/cuda_reserved_mib": "CUDA memory reserved between steps, MiB",
    "memory/cuda_peak_allocated_mib": "CUDA memory allocated, peak, MiB",
    "memory/cuda_peak_reserved_mib": "CUDA memory reserved, peak, MiB",
    "optim/lr": "learning rate",
    "optim/grad_norm": "gradient norm before clipping",
    "optim/loss_scale": "loss scale of fp16",
    "health/skipped_steps": "skipped steps so far",
    "health/cuda_alloc_retries": "allocations repeated after freeing CUDA's cache, so far",
    "health/cuda_ooms": "allocations that found no CUDA memory, so far",
}
_MODE_SUFFIXES = ("_l2t", "_t2l", "_joint")  # of the names of losses of one mode
_LOG_SCALE_TAGS = ("optim/grad_norm", "optim/loss_scale")
_MAX_PANELS = 12
_MAX_MARKERS = 200  # per kind of event and curve
_MAX_UNBINNED_POINTS = 60  # longer curves are binned
_MIN_BINS = 40
_MAX_BINS = 200
_MAX_SHADED_RUNS = 3  # with more runs, the lowest and highest values of bins are not shaded
_MAX_LABEL_LENGTH = 48

_RC_PARAMS: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _SOFT,
    "axes.labelcolor": _SOFT,
    "xtick.color": _SOFT,
    "ytick.color": _SOFT,
    "text.color": _INK,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": _SOFT,
    "grid.alpha": 0.25,  # of a neutral gray: visible on light and dark pages
    "axes.axisbelow": True,
    "axes.formatter.limits": (-4, 6),
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,
    "savefig.dpi": 150,
}


@dataclass(frozen=True)
class Panel:
    """One pair of axes; a tag that a run lacks is not drawn.

    Attributes:
        train_tag: Tag in training records, or "".
        held_out_tag: Tag in records of held-out documents, or "".
        from_zero: The y-axis starts at 0.
    """

    title: str
    train_tag: str = ""
    held_out_tag: str = ""
    log_scale: bool = False
    from_zero: bool = False


@dataclass(frozen=True)
class RenderedFigure:
    """A figure as SVG, with the titles of the panels that it has no room for."""

    name: str
    title: str
    caption: str
    svg: str
    omitted_panels: Sequence[str] = ()

    @property
    def file_name(self) -> str:
        """Name of the PNG file."""
        return f"{self.name}.png"


def draw_figures(groups: Sequence[RunGroup], paired: Sequence[PairedComparison], folder: Path) -> list[RenderedFigure]:
    """Draw all figures for which the runs have data, and write their PNGs into `folder`."""
    import matplotlib

    figures = []

    def render(name: str, title: str, caption: str, figure: Figure, omitted: Sequence[str] = ()) -> None:
        figure.savefig(folder / f"{name}.png")
        figure.set_layout_engine("none")  # the layout has been computed; the SVG has the same
        figures.append(RenderedFigure(name, title, caption, _render_svg(figure, name), omitted))

    with matplotlib.rc_context(_RC_PARAMS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # in the name of a run
        for name, title, caption, panels in plan_figures([run for group in groups for run in group.runs]):
            if panels:
                omitted = [panel.title for panel in panels[_MAX_PANELS:]]
                render(name, title, caption, build_figure(groups, panels[:_MAX_PANELS]), omitted)
        if paired:
            caption = "Mean difference of loss/total from the baseline over the records up to a step, and its interval."
            render("paired", "Paired differences", caption, build_paired_figure(paired))
    return figures


def build_paired_figure(paired: Sequence[PairedComparison]) -> Figure:
    """Draw the relative difference of each pair's total loss with its confidence sequence, over the steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.4), layout="constrained")
    axis = figure.subplots()
    axis.axhline(0, color=_SOFT, linewidth=1)
    for index, comparison in enumerate(paired, start=1):
        for pair in comparison.pairs:
            if (one := pair.difference("loss/total")) is None:
                continue
            color, scale = COLORS[index % len(COLORS)], 100 / abs(one.baseline)
            # Without their interval the first means would set the scale.
            bounded = np.isfinite(one.half_widths)
            steps, means, widths = (np.asarray(each)[bounded] for each in (one.steps, one.means, one.half_widths))
            axis.plot(steps, scale * means, color=color)
            axis.fill_between(steps, scale * (means - widths), scale * (means + widths), color=color, alpha=0.15)
    _finish(axis, Panel("difference of the total loss, %"))
    return figure


def plan_figures(runs: Sequence[RunSummary]) -> list[tuple[str, str, str, list[Panel]]]:
    """Return (name, title, caption, panels) of each figure, from the tags that the runs have."""
    train = dict.fromkeys(tag for run in runs for tag in run.history.tags("train"))
    held_out = dict.fromkeys(tag for run in runs for tag in run.history.tags(*HELD_OUT_KINDS))
    names = dict.fromkeys(
        [tag.removeprefix("loss/") for tag in train if tag.startswith("loss/")]
        + [tag.removeprefix("validation/") for tag in held_out if not is_metric_baseline(tag)]
    )
    all_modes = [name for name in names if "/" not in name and not name.endswith(_MODE_SUFFIXES)]
    first = ("total", "text", "latent", "length")
    all_modes.sort(key=lambda name: first.index(name) if name in first else len(first))

    def loss_panels(losses: Sequence[str]) -> list[Panel]:
        panels = []
        for name in losses:
            train_tag = f"loss/{name}" if f"loss/{name}" in train else ""
            held_out_tag = name if name in held_out else f"validation/{name}"  # quality/... is a full tag already
            panels.append(Panel(_loss_title(name), train_tag, held_out_tag if held_out_tag in held_out else ""))
        return panels

    def tag_panels(prefix: str, from_zero: bool) -> list[Panel]:
        return [
            Panel(PANEL_TITLES.get(tag, tag), tag, log_scale=tag in _LOG_SCALE_TAGS, from_zero=from_zero)
            for tag in train
            if tag.startswith(prefix)
        ]

    return [
        ("loss", "Loss", "Solid: training. Dashed, with dots: validation.", loss_panels(all_modes)),
        (
            "quality",
            "Quality",
            "Metrics on held-out documents, with the training loss of the same mode if there is one.",
            loss_panels([name for name in names if name not in all_modes]),
        ),
        ("speed", "Speed", "", tag_panels("speed/", True)),
        ("memory", "Memory", "Memory of rank 0's process.", tag_panels("memory/", True)),
        ("optimizer", "Learning rate and gradients", "", tag_panels("optim/", False) + tag_panels("health/", True)),
    ]


def _loss_title(name: str) -> str:
    if name.startswith("quality/"):
        return name.removeprefix("quality/").replace("_", " ")
    loss, _, mode = name.partition("_") if name.endswith(_MODE_SUFFIXES) else (name, "", "")
    return f"{loss} loss, {mode}" if mode else name if "/" in name else f"{name} loss"


def build_figure(groups: Sequence[RunGroup], panels: Sequence[Panel]) -> Figure:
    """Draw all runs into each panel, one color per group, with their events as markers on the curves."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    columns = len(panels) if len(panels) < 4 else 2 if len(panels) == 4 else 3
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(10, 0.9 + 2.5 * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    drawn: set[EventKind] = set()
    shaded = sum(len(group.runs) for group in groups) <= _MAX_SHADED_RUNS
    for axis, panel in zip(axes, panels, strict=False):
        for index, group in enumerate(groups):
            for run in group.runs:
                drawn |= _draw_run(axis, panel, run, COLORS[index % len(COLORS)], shaded)
        _finish(axis, panel)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    lines = [Line2D([], [], color=COLORS[i % len(COLORS)], linewidth=2.5) for i in range(len(groups))]
    figure.legend(lines, [_label(group.title) for group in groups], loc="outside upper left", ncols=3)
    markers = {
        label: Line2D([], [], color=_marker_color(kind, _INK), marker=marker, markersize=size, linestyle="")
        for kind, (marker, size, label) in EVENT_MARKERS.items()
        if kind in drawn
    }
    if markers:
        figure.legend(list(markers.values()), list(markers), loc="outside lower left", ncols=6, labelcolor=_SOFT)
    return figure


def _draw_run(axis: Axes, panel: Panel, run: RunSummary, color: str, shaded: bool) -> set[EventKind]:
    """Draw the curves of a run with its events; return the kinds of events that were drawn."""
    train, held_out = run.curve(panel.train_tag, "train"), run.curve(panel.held_out_tag, *HELD_OUT_KINDS)
    if held_out.steps:
        marker = "o" if len(held_out.steps) <= _MAX_UNBINNED_POINTS else ""
        axis.plot(held_out.steps, held_out.values, color=color, linestyle=(0, (4, 2)), marker=marker, markersize=3.5)
    if not train.steps:
        return set()
    steps, mean, low, high = bin_series(train, _MAX_BINS)
    # A line through a single point would be invisible.
    axis.plot(steps, mean, color=color, marker="." if len(steps) == 1 else "")
    if shaded and len(steps) < len(train.steps):
        axis.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
    drawn: set[EventKind] = set()
    for kind, (marker, size, _) in EVENT_MARKERS.items():
        event_steps = [event.step for event in run.events if event.kind == kind]
        if not event_steps:
            continue
        drawn.add(kind)
        event_steps = event_steps[:: -(-len(event_steps) // _MAX_MARKERS)]
        axis.plot(
            event_steps,
            np.interp(event_steps, steps, mean),
            color=_marker_color(kind, color),
            linestyle="",
            marker=marker,
            markersize=size,
            markeredgewidth=1.4 if marker in "|x" else 0,
            clip_on=False,
            zorder=5,
        )
    return drawn


def _finish(axis: Axes, panel: Panel) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_title(panel.title)
    axis.set_xlabel("step")
    axis.margins(x=0.02)
    if panel.log_scale:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(_plain_number)
        axis.yaxis.set_minor_locator(NullLocator())
    elif panel.from_zero:
        axis.set_ylim(0, 1.08 * axis.get_ylim()[1])


def _plain_number(value: float, _: Any) -> str:
    return f"{value:g}"


def _marker_color(kind: EventKind, color: str) -> str:
    return _BAD if kind in ("skip", "failure") else color


def _label(name: str) -> str:
    # matplotlib leaves labels that start with an underscore out of the legend.
    return truncate(f" {name}" if name.startswith("_") else name, _MAX_LABEL_LENGTH)


def bin_series(series: Series, max_bins: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Bin a curve into at most `max_bins` consecutive parts of about 8 records; short curves keep one bin per record.

    Returns:
        Mean step, mean value, lowest value and highest value of each bin, as arrays of shape [bins].
    """
    count = len(series.steps)
    num_bins = count
    if count > min(_MAX_UNBINNED_POINTS, max_bins):
        num_bins = min(max(count // 8, _MIN_BINS), max_bins)
    steps, values = (np.array_split(np.asarray(data, float), num_bins) for data in (series.steps, series.values))
    mean = np.array([part.mean() for part in values])
    low, high = np.array([part.min() for part in values]), np.array([part.max() for part in values])
    return np.array([part.mean() for part in steps]), mean, low, high


def _render_svg(figure: Figure, name: str) -> str:
    """Return an <svg> to embed in the page, as wide as its container, without URLs and with ids that are unique."""
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):  # ids of clip paths and markers are hashes with this salt
        figure.savefig(file, format="svg", transparent=True)
    svg = file.getvalue()
    view_box = re.search(r'viewBox="[^"]*"', svg)
    assert view_box is not None
    body = svg[svg.index("</metadata>") + len("</metadata>") :]
    # Names of runs are text between tags, where matplotlib has escaped "<". No reference uses the ids of groups.
    return f"<svg {view_box[0]}>" + re.sub(r'<g id="[^"]*">|<!--.*?-->', lambda tag: "<g>" * (tag[0][1] == "g"), body)
