"""`mmldlm bench`: run the benchmarks, which are stored next to the package in a source tree and not installed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from mmldlm.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]


def main(argv: list[str]) -> int | None:
    """Run `benchmarks/__main__.py`.

    Raises:
        UsageError: There is no source tree.
    """
    if not (ROOT / "benchmarks" / "__main__.py").is_file():
        raise UsageError(
            f"bench: there is no benchmarks/ in {ROOT}; run it in a checkout that was installed with pip -e"
        )
    sys.path.insert(0, str(ROOT))
    return importlib.import_module("benchmarks.__main__").run(argv)
