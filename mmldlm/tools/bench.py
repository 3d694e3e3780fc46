"""`mmldlm bench`: the benchmarks, which lie beside the package in a source tree and are not installed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from mmldlm.errors import UsageError

ROOT = Path(__file__).resolve().parent.parent


def main(argv: list[str]) -> int | None:
    """UsageError where there is no source tree; otherwise what `benchmarks/__main__.py` says."""
    if not (ROOT / "benchmarks" / "__main__.py").is_file():
        raise UsageError(f"bench: there is no benchmarks/ in {ROOT}; run it in a checkout, installed with pip -e")
    sys.path.insert(0, str(ROOT))
    return importlib.import_module("benchmarks.__main__").run(argv)
