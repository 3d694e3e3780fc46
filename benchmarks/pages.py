"""Tables of README.md and docs/ that are generated from committed results, never typed.

    python -m benchmarks pages        writes all that stands between `<!-- results:NAME -->` and `<!-- /results -->`

NAME is one of the blocks that a benchmark makes of its result in `benchmarks/results`. A test compares.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks import decoding, learning
from benchmarks.results import ROOT

_BLOCK = re.compile(r"<!-- results:([\w-]+) -->\n.*?<!-- /results -->", re.DOTALL)
_MAKERS = {"learning": learning.blocks, "decoding": decoding.blocks}


def blocks() -> dict[str, str]:
    """Markdown by name, of all committed results."""
    found: dict[str, str] = {}
    for name, make in _MAKERS.items():
        path = ROOT / "benchmarks" / "results" / f"{name}.json"
        found |= make(json.loads(path.read_text(encoding="utf-8")))
    return found


def pages() -> Iterator[Path]:
    """The pages that may have generated tables."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").glob("*.md"))


def rewritten(text: str, made: Mapping[str, str]) -> str:
    """Return a page with its blocks as they were made; KeyError for a name that no benchmark has."""
    return _BLOCK.sub(lambda match: f"<!-- results:{match[1]} -->\n{made[match[1]]}\n<!-- /results -->", text)


def main(argv: Sequence[str] | None = None) -> int:
    made = blocks()
    for page in pages():
        page.write_text(rewritten(page.read_text(encoding="utf-8"), made), encoding="utf-8")
    return 0
