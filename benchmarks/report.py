"""What the smaller benchmarks share: options, tables of rows, and a JSON file of both."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import ROOT, circumstances, write_json
from benchmarks.task import device
from mmldlm.errors import UsageError

Row = Mapping[str, Any]  # what is neither a list nor a mapping is shown
Tables = Mapping[str, Sequence[Row]]  # by title; all rows of a table have the same keys


def parser(name: str, description: str) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog=f"mmldlm bench {name}", description=description)
    found.add_argument("--rounds", type=positive, default=9, help="measurements, of which medians count (%(default)s)")
    found.add_argument("--threads", type=positive, default=1, help="of PyTorch; with one, seconds are of its CPU time")
    found.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the JSON (%(default)s)"
    )
    found.add_argument("--name", default=f"{name}-{device().type}", help="of the file in it (%(default)s)")
    found.add_argument("--quick", action="store_true", help="small and short, to see that it works: nothing to quote")
    return found


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None, **quick: Any) -> argparse.Namespace:
    """The options; with --quick, those of `quick` unless they are given."""
    options = parser.parse_intermixed_args(argv)
    if options.quick:
        parser.set_defaults(**quick)
        options = parser.parse_intermixed_args(argv)
    return options


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, found {value}")
    return value


def chosen(option: str, given: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """Those of `known` that are asked for; all, where none is. UsageError for a name that is none."""
    for name in given or ():
        if name not in known:
            raise UsageError(f"{option}: {name!r} is none here, expected some of {', '.join(known)}")
    return [name for name in known if given is None or name in given]


@contextmanager
def workplace(options: argparse.Namespace) -> Iterator[Path]:
    """A folder for stores and runs, which goes at the end; PyTorch has `options.threads` threads meanwhile."""
    threads = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
    finally:
        torch.set_num_threads(threads)


def report(options: argparse.Namespace, benchmark: str, tables: Tables) -> None:
    """Print the tables, and write them with what they are of to `options.out`/`options.name`.json."""
    what = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    result = {"benchmark": benchmark, "what": what, **circumstances(device()), "tables": tables}
    write_json(result, options.out, options.name)
    unit = "GPU and host" if device().type == "cuda" else "CPU" if options.threads == 1 else "wall"
    print(f"{result['machine']['device']}, {options.threads} thread(s), {unit} time\n")
    print("\n\n".join(f"{title}\n\n{markdown(rows)}" for title, rows in tables.items()))


def markdown(rows: Sequence[Row]) -> str:
    keys = [key for key, value in rows[0].items() if not isinstance(value, list | dict)]
    lines = [f"| {' | '.join(keys)} |", "|---" * len(keys) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(_cell(row[key]) for key in keys)} |" for row in rows)])


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
