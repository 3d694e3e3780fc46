"""Bars for the results of `scripts/gpu_check.sh`, for one H200 with a dense peak of 989 TFLOP/s.

`tests/benchmarks/test_gpu_results.py` compares the committed results with them. A number that was not measured neither
passes nor fails. A bar that the committed result misses says why. It is a goal until a result passes it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.report import RESULTS

Results = Mapping[str, Any]  # a result by stage
FOLDER = RESULTS / "gpu"
# Reasons why bars are missed.
HOST = "measured without CUDA graphs, where the host starts kernels more slowly than the GPU ends them"
ROWS = "samples had 513 rows, for which attention has 25 tiles where 512 have 16"


@dataclass(frozen=True)
class Bar:
    """A requirement for a number.

    Attributes:
        name: Name of the measured quantity.
        path: Keys of the number in the results, beginning with the stage.
        at_least: The smallest value that passes.
        at_most: The largest value that passes.
        stretch: A better value that may be possible.
        over: Keys of another number to divide by.
        missed: Why the committed result misses the bar. Empty if it passes.
    """

    name: str
    path: tuple[str, ...]
    at_least: float = -math.inf
    at_most: float = math.inf
    stretch: float | None = None
    over: tuple[str, ...] = ()
    missed: str = ""

    def measured(self, results: Results) -> float | None:
        """Return the number, or None if it was not measured, or NaN if its measurement failed."""
        values = [_find(results, path) for path in (self.path, self.over) if path]
        if None in values:
            return None
        return values[0] / values[1] if self.over else values[0]  # type: ignore[operator]

    def passes(self, value: float) -> bool:
        """Return whether `value` passes the bar. NaN does not."""
        return self.at_least <= value <= self.at_most


def _find(results: Results, path: tuple[str, ...]) -> float | None:
    """Return the number at `path`, or None if nothing was measured there, or NaN if that failed."""
    node: Any = results
    for key in path:
        if key not in node:
            failed = "error" in node or node.get("exit", 0) != 0
            return math.nan if failed else None
        node = node[key]
    return float(node)


def _run(name: str, key: str) -> tuple[str, ...]:
    return "speed", "runs", name, key


def _reference(variant: str) -> tuple[str, ...]:
    return "reference", "ladder", variant, "tokens_per_s"


# bf16, micro-batches of 32 samples of 512 rows: 511 tokens and a latent. docs/performance.md has the reasons for the
# figures.
BARS = (
    Bar("`pytest -m gpu`: exit code", ("smoke", "gpu_tests", "exit"), at_most=0),
    Bar("engines at world size 1 over NCCL: runs that failed", ("smoke", "engines", "failed"), at_most=0),
    Bar("their bf16 curves against one process: relative", ("smoke", "engines", "largest_difference"), at_most=5e-3),
    Bar("curves of replayed steps: runs that failed", ("graphs", "curves", "failed"), at_most=0),
    Bar("their bf16 curves against others: relative", ("graphs", "curves", "largest_difference"), at_most=5e-3),
    Bar("replayed attention, other lengths: relative", ("graphs", "replay", "largest_difference"), at_most=5e-3),
    Bar("engines with graphs: runs that failed", ("graphs", "launched", "failed"), at_most=0),
    Bar("their bf16 curves: relative", ("graphs", "launched", "largest_difference"), at_most=5e-3),
    Bar(
        "MFU, 24 x 1024, compiled",
        _run("24x1024-full-32-compiled", "mfu"),
        at_least=0.38,
        stretch=0.42,
        missed=f"{HOST}; {ROWS}",
    ),
    Bar("MFU, 12 x 768, compiled", _run("12x768-full-32-compiled", "mfu"), at_least=0.28, stretch=0.34, missed=HOST),
    Bar(
        "MFU, 24 x 2048, compiled",
        _run("24x2048-full-32-compiled", "mfu"),
        at_least=0.45,
        stretch=0.52,
        missed=ROWS,
    ),
    Bar(
        "tokens/s, 12 x 768, compiled",
        _run("12x768-full-32-compiled", "tokens_per_s"),
        at_least=560_000,
        missed=HOST,
    ),
    Bar(
        "tokens/s against plain compiled PyTorch, 24 x 1024",
        _run("24x1024-full-32-compiled", "tokens_per_s"),
        at_least=0.85,
        stretch=0.95,
        over=("speed", "plain", "compiled", "tokens_per_s"),
        missed="as above",
    ),
    Bar(
        "tokens/s of documents in micro-batches of 32,768 tokens against full ones",
        _run("24x1024-documents-256-compiled", "tokens_per_s"),
        at_least=0.95,
        over=_run("24x1024-full-32-compiled", "tokens_per_s"),
    ),
    Bar(
        "tokens/s of sentences in micro-batches of 32,768 tokens against full ones",
        _run("24x1024-sentences-2048-compiled", "tokens_per_s"),
        at_least=0.85,
        over=_run("24x1024-full-32-compiled", "tokens_per_s"),
    ),
    Bar("share of a step that waits for data", _run("24x1024-full-32-compiled", "data_wait_share"), at_most=0.01),
    Bar("memory reserved against allocated", ("profile", "compiled", "reserved_share"), at_most=1.15),
    Bar(
        "share of a step with the GPU busy, compiled",
        ("profile", "compiled", "busy"),
        at_least=0.97,
        stretch=0.99,
        missed=HOST,
    ),
    Bar(
        "stall of the first checkpoint, 386M, s",
        ("profile", "saving", "first_stall_s"),
        at_most=1.0,
        missed="measured with one thread that locks memory, by a mistake of the stage",
    ),
    Bar(
        "stall of later checkpoints, 386M, s",
        ("profile", "saving", "later_stall_s"),
        at_most=0.3,
    ),
    Bar(
        "tokens/s against mmdit with 2 streams",
        _reference("trainer-compiled"),
        at_least=5.0,
        over=_reference("reference"),
    ),
    Bar(
        "tokens/s against mmdit with 1 stream and PyTorch's attention",
        _reference("trainer-compiled"),
        at_least=2.0,
        over=_reference("reference-1-flash"),
    ),
    Bar("estimate of memory, lowest error", ("state", "memory", "lowest_error"), at_least=-0.10),
    Bar("estimate of memory, highest error", ("state", "memory", "highest_error"), at_most=0.05),
)


# Predicted GPU time (ms) of a step of 24 x 1024: the measured trace, minus the savings of each change.
PREDICTED = {
    "CUDA graphs of forward, loss and backward": 110,
    "512 rows a sample in place of 513": 103,
    "head and losses in one compiled region": 97,
    "gated add, norm and modulation in one kernel each way": 88,
    "heads written in the order of attention": 85,
    "clipping inside the update": 84,
    "FlashAttention 4, where it is installed": 80,
}


def steps(results: Results) -> list[dict[str, str]]:
    """Return the table of a step of 24 x 1024: as measured, and as predicted change by change."""
    keys = "with each change above it", "GPU, ms", "tokens/s", "of plain", "MFU", "measured on"
    speed = results["speed"]
    run, plain = speed["runs"]["24x1024-full-32-compiled"], speed["plain"]["compiled"]["tokens_per_s"]
    took = [(name, f"{ms}", 16_384 / ms * 1e3, "predicted") for name, ms in PREDICTED.items()]
    for stage, part in (("speed", run), ("profile", results["profile"]["compiled"])):
        where = f"{results[stage]['machine']['device']}, PyTorch {results[stage]['versions']['torch']}"
        busy = f"{1e3 * part['busy_s']:.0f}, " if "busy_s" in part else ""
        took.insert(0, ("as measured", f"{busy}step {1e3 * part['step_s']:.0f}", part["tokens_per_s"], where))
    shown = []
    for name, ms, rate, where in took:
        mfu = f"{run['mfu'] / run['tokens_per_s'] * rate:.0%}"
        shown.append(
            dict(zip(keys, (name, ms, f"{round(rate, -3):,.0f}", f"{rate / plain:.2f}", mfu, where), strict=True))
        )
    return shown


def committed(folder: Path = FOLDER) -> dict[str, Any]:
    """Return the committed results by stage."""
    paths = sorted(folder.glob("*.json"))
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def rows(results: Results) -> list[dict[str, Any]]:
    """Return the table of bars: each bar, its stretch goal, and the measured value."""
    table = []
    for bar in BARS:
        sign, limit = ("at least", bar.at_least) if bar.at_least > -math.inf else ("at most", bar.at_most)
        value = bar.measured(results)
        shown = "" if value is None else "failed" if math.isnan(value) else _number(value)
        shown += f", missed: {bar.missed}" if bar.missed and value is not None and not bar.passes(value) else ""
        stretch = "" if bar.stretch is None else _number(bar.stretch)
        table.append({"what": bar.name, "bar": f"{sign} {_number(limit)}", "stretch": stretch, "measured": shown})
    return table


def headline(results: Results) -> str:
    """Return the speed on a GPU in a sentence."""
    speed = results["speed"]
    large, small = (speed["runs"][f"{size}-full-32-compiled"] for size in ("24x1024", "12x768"))
    share = large["tokens_per_s"] / speed["plain"]["compiled"]["tokens_per_s"]
    where = f"{speed['machine']['device']} (PyTorch {speed['versions']['torch']}, {speed['date'][:10]})"
    return (
        f"- **On one {where}**: {large['tokens_per_s']:,.0f} tokens/s with 24 blocks of 1024 in bf16, {share:.2f} "
        f"of plain\n  compiled PyTorch and {large['mfu']:.0%} of the peak; with 12 of 768 {small['tokens_per_s']:,.0f} "
        "([goals and reasons](docs/performance.md#on-a-gpu))."
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
