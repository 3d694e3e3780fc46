"""The figures of a report, by matplotlib: each as a PNG, and as an SVG whose colors are those of the page."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmldlm.errors import UsageError
from mmldlm.tools.history.run_history import Series
from mmldlm.tools.report.comparison import Group
from mmldlm.tools.report.run_summary import MEASURED, EventKind, Run, is_control
from mmldlm.utils.short_repr import cut

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colors of the PNGs, which an SVG has as variables of the page, and their words there.
COLORS = ("#0b6bcb", "#d1480f", "#0b8457", "#a3359b", "#9a6b00", "#0f8b9d", "#6a4fd8", "#7a5145")
INK, SOFT, GRID, BAD = "#1f2933", "#65717e", "#e1e6eb", "#c81e3a"
VARIABLES = {INK: "ink", SOFT: "soft", GRID: "line", BAD: "bad"} | {c: f"run{i}" for i, c in enumerate(COLORS)}

MARKS: dict[EventKind, tuple[str, float, str]] = {  # marker, size, word
    "checkpoint": ("|", 7, "checkpoint"),
    "resume": ("^", 6, "resumed"),
    "micro_batch": ("v", 6, "micro-batch halved"),
    "skip": ("x", 6, "skipped step"),
    "stop": ("s", 5.5, "stopped"),
    "failure": ("X", 9, "failed or killed"),
}
TITLES = {
    "speed/tokens_per_s": "tokens per second",
    "speed/samples_per_s": "samples per second",
    "speed/tflops_per_s": "useful TFLOPs per second",
    "speed/mfu": "MFU: useful FLOPs over the device's peak",
    "speed/step_s": "seconds a step",
    "speed/data_wait_s": "seconds a step waits for data",
    "speed/cores_of_others": "cores that other processes keep busy",
    "memory/resident_mib": "resident memory, MiB",
    "memory/cuda_allocated_mib": "CUDA memory allocated, MiB",
    "memory/cuda_reserved_mib": "CUDA memory reserved, MiB",
    "optim/lr": "learning rate",
    "optim/grad_norm": "gradient norm before clipping",
    "optim/loss_scale": "loss scale of fp16",
    "health/skipped_steps": "skipped steps so far",
}
_OF_ONE_MODE = ("_l2t", "_t2l", "_joint")  # ends of the names of losses
_LOGARITHMIC = ("optim/grad_norm", "optim/loss_scale")
_MOST_PANELS = 12
_MOST_MARKS = 200  # of one kind on one curve
_DPI = 150  # of PNGs
_POINTS, _FEW_POINTS = 60, 40  # of a curve that are drawn as they are; longer ones are cut into parts
_CROWD = 3  # curves in one panel above which they are drawn with few points and without their spread
_LONGEST_LABEL = 48

_SETTINGS: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": SOFT,
    "axes.titlecolor": INK,
    "text.color": INK,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,
    "axes.formatter.limits": (-4, 6),
}


@dataclass(frozen=True)
class Panel:
    """One pair of axes; a tag that no run has is left out."""

    title: str
    train: str = ""  # tag of training records
    validation: str = ""  # tag of records of what is measured on held-out documents
    logarithmic: bool = False
    from_zero: bool = False


@dataclass(frozen=True)
class Drawing:
    name: str  # of the file, without its ending
    title: str
    about: str
    svg: str
    left_out: Sequence[str] = ()


def require_matplotlib() -> None:
    """UsageError where it is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError("the report needs matplotlib: pip install mmldlm[report]") from None


def draw(groups: Sequence[Group], folder: Path) -> list[Drawing]:
    """All figures that the runs have numbers for; PNGs into `folder`."""
    import matplotlib

    drawings = []
    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # in the name of a run
        for name, title, about, panels in plan([run for group in groups for run in group.runs]):
            if not panels:
                continue
            drawn = figure(groups, panels[:_MOST_PANELS])
            _write_png(drawn, folder / f"{name}.png")
            drawings.append(Drawing(name, title, about, _svg(drawn, name), [p.title for p in panels[_MOST_PANELS:]]))
    return drawings


def plan(runs: Sequence[Run]) -> list[tuple[str, str, str, list[Panel]]]:
    """(name, title, about, panels) of each figure, by the tags that the runs have."""
    train = dict.fromkeys(tag for run in runs for tag in run.history.tags("train"))
    validation = dict.fromkeys(tag for run in runs for tag in run.history.tags(*MEASURED))
    names = dict.fromkeys(
        [tag.removeprefix("loss/") for tag in train if tag.startswith("loss/")]
        + [tag.removeprefix("validation/") for tag in validation if not is_control(tag)]
    )
    whole = [name for name in names if "/" not in name and not name.endswith(_OF_ONE_MODE)]
    first = ("total", "text", "latent", "length")
    whole.sort(key=lambda name: first.index(name) if name in first else len(first))

    def losses(chosen: Sequence[str]) -> list[Panel]:
        found = []
        for name in chosen:
            measured = name if name in validation else f"validation/{name}"
            found.append(
                Panel(
                    _loss_title(name), f"loss/{name}" * (f"loss/{name}" in train), measured * (measured in validation)
                )
            )
        return found

    def each(prefix: str, from_zero: bool) -> list[Panel]:
        return [
            Panel(TITLES.get(tag, tag), tag, logarithmic=tag in _LOGARITHMIC, from_zero=from_zero)
            for tag in train
            if tag.startswith(prefix)
        ]

    return [
        ("loss", "Loss", "Solid: training. Dashed, with dots: validation.", losses(whole)),
        (
            "quality",
            "Quality",
            "What is measured on held-out documents, beside the training loss of the same mode where there is one.",
            losses([name for name in names if name not in whole]),
        ),
        ("speed", "Speed", "", each("speed/", True)),
        ("memory", "Memory", "Of the process of rank 0.", each("memory/", True)),
        ("optimizer", "Learning rate and gradients", "", each("optim/", False) + each("health/", True)),
    ]


def _loss_title(name: str) -> str:
    if name.startswith("quality/"):
        return name.removeprefix("quality/").replace("_", " ")
    what, _, mode = name.partition("_") if name.endswith(_OF_ONE_MODE) else (name, "", "")
    return f"{what} loss, {mode}" if mode else name if "/" in name else f"{name} loss"


def figure(groups: Sequence[Group], panels: Sequence[Panel]) -> Figure:
    """All runs in each panel, with a color a group, and what happened to them as marks on their curves."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    columns = len(panels) if len(panels) < 4 else 2 if len(panels) == 4 else 3
    rows = -(-len(panels) // columns)
    drawn = Figure(figsize=(10, 0.9 + 2.5 * rows), layout="constrained")
    axes = list(drawn.subplots(rows, columns, squeeze=False).flat)
    marked: set[EventKind] = set()
    crowded = sum(len(group.runs) for group in groups) > _CROWD
    for axis, panel in zip(axes, panels, strict=False):
        for index, group in enumerate(groups):
            for run in group.runs:
                marked |= _draw_run(axis, panel, run, COLORS[index % len(COLORS)], crowded)
        _finish(axis, panel)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    handles = [Line2D([], [], color=COLORS[i % len(COLORS)], linewidth=2.5) for i in range(len(groups))]
    drawn.legend(handles, [_label(group.title) for group in groups], loc="outside upper left", ncols=3)
    if marked:
        kinds = [kind for kind in MARKS if kind in marked]
        handles = [
            Line2D([], [], color=_mark_color(kind, INK), marker=MARKS[kind][0], markersize=MARKS[kind][1], linestyle="")
            for kind in kinds
        ]
        drawn.legend(handles, [MARKS[kind][2] for kind in kinds], loc="outside lower left", ncols=6, labelcolor=SOFT)
    return drawn


def _draw_run(axis: Axes, panel: Panel, run: Run, color: str, crowded: bool) -> set[EventKind]:
    """The curves of a run, and what happened to it on them; returns the kinds of events that are marked."""
    width = 1.0 if crowded else 1.6
    train, measured = run.curve(panel.train, "train"), run.curve(panel.validation, *MEASURED)
    if train.steps:
        steps, middle, low, high = binned(train, _FEW_POINTS if crowded else 200)
        axis.plot(steps, middle, color=color, linewidth=width, marker="." if len(steps) == 1 else "")
        if len(steps) < len(train.steps) and not crowded:
            axis.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
    if measured.steps:
        dots = "o" if len(measured.steps) <= _POINTS else ""
        axis.plot(
            measured.steps,
            measured.values,
            color=color,
            linewidth=width,
            linestyle=(0, (4, 2)),
            marker=dots,
            markersize=3.5,
        )
    if not train.steps:
        return set()
    marked: set[EventKind] = set()
    for kind, (marker, size, _) in MARKS.items():
        at = [event.step for event in run.events if event.kind == kind]
        at = at[:: -(-len(at) // _MOST_MARKS)] if at else at
        if at:
            marked.add(kind)
            axis.plot(
                at,
                np.interp(at, steps, middle),
                color=_mark_color(kind, color),
                linestyle="",
                marker=marker,
                markersize=size,
                markeredgewidth=1.4 if marker in "|x" else 0,
                clip_on=False,
                zorder=5,
            )
    return marked


def _finish(axis: Axes, panel: Panel) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_title(panel.title)
    axis.set_xlabel("step")
    axis.margins(x=0.02)
    if panel.logarithmic:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(_plain_number)
        axis.yaxis.set_minor_locator(NullLocator())
    elif panel.from_zero:
        axis.set_ylim(0, 1.08 * axis.get_ylim()[1])


def _plain_number(value: float, _: Any) -> str:
    return f"{value:g}"


def _mark_color(kind: EventKind, color: str) -> str:
    return BAD if kind in ("skip", "failure") else color


def _label(name: str) -> str:
    return cut(f" {name}" if name.startswith("_") else name, _LONGEST_LABEL)  # matplotlib hides those that begin so


def binned(series: Series, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(step, mean, lowest, highest) of consecutive parts of a curve, at most so many, of about 8 records each."""
    count = len(series.steps)
    parts = count if count <= min(_POINTS, most) else min(max(count // 8, _FEW_POINTS), most)
    steps, values = (np.array_split(np.asarray(each, float), parts) for each in (series.steps, series.values))
    middle = np.array([part.mean() for part in values])
    low, high = np.array([part.min() for part in values]), np.array([part.max() for part in values])
    return np.array([part.mean() for part in steps]), middle, low, high


def _write_png(figure: Figure, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure.set_dpi(_DPI)
    file = io.BytesIO()
    FigureCanvasAgg(figure).print_png(file)  # savefig would draw everything twice
    figure.set_layout_engine("none")  # it is laid out now
    path.write_bytes(file.getvalue())


def _svg(figure: Figure, name: str) -> str:
    """An <svg> for the middle of a page: no address in it, ids of its own, colors by variables of the page."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    figure.patch.set_alpha(0)
    file = io.StringIO()
    FigureCanvasSVG(figure).print_svg(file)
    text = file.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text[text.index("<svg") :], flags=re.DOTALL)
    return re.sub(r"<[^>]*>", lambda tag: _of_page(tag[0], name), text)  # what is no tag are names of runs


def _of_page(tag: str, name: str) -> str:
    tag = re.sub(r' xmlns(:\w+)?="[^"]*"', "", tag)
    if tag.startswith("<svg"):
        tag = re.sub(r' (width|height)="[^"]*"', "", tag)  # as wide as the page
    tag = re.sub(r'(\bid="|href="#|url\(#)', rf"\1{name}-", tag)
    for color, variable in VARIABLES.items():
        tag = tag.replace(color, f"var(--{variable})")
    return tag
