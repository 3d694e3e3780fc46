"""The tables of results in README.md and docs/, and the figures of results.

    python -m benchmarks pages

Writes them from the committed results, between `<!-- results:NAME -->` and `<!-- /results -->`. NAME is a block that a
benchmark makes from its result in `benchmarks/results`. A test compares.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks import decoder, generation, gpu_bars, meaning, real_run, results_figure, yardstick
from benchmarks.common.report import RESULTS, ROOT, markdown, read_result
from benchmarks.learning import learning_blocks

_BLOCK = re.compile(r"<!-- results:([\w-]+) -->\n.*?<!-- /results -->", re.DOTALL)
_MAKERS = {
    "learning": learning_blocks,
    "meaning": meaning.meaning_blocks,
    "real_run": real_run.blocks,
    "decoder": decoder.blocks,
    "generation": generation.blocks,
    "yardstick": yardstick.blocks,
}


def all_blocks() -> dict[str, str]:
    """Return Markdown by name, from all committed results."""
    made: dict[str, str] = {}
    for name, make in _MAKERS.items():
        if (RESULTS / f"{name}.json").is_file():
            made |= make(read_result(name))
    gpu = gpu_bars.committed()
    made |= {"gpu-bars": markdown(gpu_bars.rows(gpu)), "gpu-steps": markdown(gpu_bars.steps(gpu))}
    made["gpu-speed"] = gpu_bars.headline(gpu)
    return made


def figures() -> dict[Path, str]:
    """Return the figures as SVG, by their paths."""
    learning, contest = map(read_result, ("learning", "decoder"))
    return {
        results_figure.IMAGES / "results.svg": results_figure.draw(learning),
        results_figure.IMAGES / "crossover.svg": results_figure.draw_crossover(
            decoder.curves(contest["corpora"]["simple-docs"])
        ),
    }


def pages() -> Iterator[Path]:
    """Yield the pages that may have generated tables."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").glob("*.md"))


def rewritten(text: str, made: Mapping[str, str]) -> str:
    """Return a page with its blocks replaced.

    Raises:
        KeyError: No benchmark makes a block of that name.
    """
    return _BLOCK.sub(lambda match: f"<!-- results:{match[1]} -->\n{made[match[1]]}\n<!-- /results -->", text)


def main(argv: Sequence[str] | None = None) -> int:
    made = all_blocks()
    for page in pages():
        page.write_text(rewritten(page.read_text(encoding="utf-8"), made), encoding="utf-8")
    for path, figure in figures().items():
        path.write_text(figure, encoding="utf-8")
    return 0
