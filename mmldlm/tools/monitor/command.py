"""`mmldlm monitor RUN [RUN ...]`: watch runs from outside. docs/review.md explains the alerts."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console
from rich.live import Live

from mmldlm.errors import ExitCode, UsageError
from mmldlm.settings.declaration import leaves
from mmldlm.settings.fields import build, set_dotted
from mmldlm.tools.monitor.alerts import alerts
from mmldlm.tools.monitor.snapshot import Snapshot, Thresholds
from mmldlm.tools.monitor.view import BARS, PLAIN_BARS, to_json, view
from mmldlm.tools.runs import History
from mmldlm.utils.short_repr import short_repr

_FILE_COLUMNS = 120


def _parser() -> argparse.ArgumentParser:
    rows = "\n".join(f"  {key:<9} {field.default!s:>5}  {field.metadata['doc']}" for key, field in leaves(Thresholds))
    parser = argparse.ArgumentParser(
        "mmldlm monitor",
        description="Watch runs: curves, speed, and alerts with advice. Ends when all runs have ended, or on Ctrl-C.",
        epilog=f"exit code: 0, or {int(ExitCode.ALERT)} if a run has an alert or failed\n\nthresholds:\n{rows}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder")
    parser.add_argument(
        "--interval", type=float, default=10.0, metavar="S", help="seconds between snapshots (%(default)g)"
    )
    parser.add_argument("--once", action="store_true", help="take one snapshot and exit")
    parser.add_argument("--json", action="store_true", help="print JSON: a list of runs, one line per snapshot")
    parser.add_argument(
        "--threshold", action="append", default=[], metavar="KEY=VALUE", help="threshold of an alert, as listed below"
    )
    return parser


def _thresholds(assignments: Sequence[str]) -> Thresholds:
    tree: dict[str, object] = {}
    known = [key for key, _ in leaves(Thresholds)]
    for assignment in assignments:
        if assignment.partition("=")[0] not in known:
            raise UsageError(
                f"--threshold {short_repr(assignment)}: expected KEY=VALUE, where KEY is one of {', '.join(known)}"
            )
        set_dotted(tree, assignment)
    return build(Thresholds, tree)


def main(argv: list[str] | None = None) -> int:
    """Run `mmldlm monitor`. An `MmldlmError` is raised to the caller."""
    options = _parser().parse_args(argv)
    if not 0.1 <= options.interval <= 86_400:
        raise UsageError(f"--interval {options.interval:g}: expected 0.1 to 86400 seconds")
    thresholds = _thresholds(options.threshold)
    histories = [History(run) for run in options.runs]
    console = Console(width=None if sys.stdout.isatty() else _FILE_COLUMNS, markup=False, highlight=False, emoji=False)
    bars = PLAIN_BARS if console.options.ascii_only else BARS
    in_place = console.is_terminal and not (console.is_dumb_terminal or options.once or options.json)
    try:
        with Live(console=console, auto_refresh=False) if in_place else nullcontext() as live:
            while True:
                snapshots = [Snapshot(history, options.interval, thresholds) for history in histories]
                looks = [(snapshot, alerts(snapshot)) for snapshot in snapshots]
                if options.json:
                    print(json.dumps(to_json(looks), allow_nan=False), flush=True)
                elif live is not None:
                    live.update(view(looks, bars), refresh=True)
                else:
                    with console.capture() as capture:  # console.print would exit if the pipe is closed
                        console.print(view(looks, bars))
                    head = "" if options.once else f"--- {time.strftime('%Y-%m-%d %H:%M:%S')}\n"
                    print(head + capture.get(), end="", flush=True)
                if options.once or not any(snapshot.state.is_active for snapshot in snapshots):
                    return ExitCode.ALERT if any(raised for _, raised in looks) else ExitCode.DONE
                time.sleep(options.interval)
                for history in histories:
                    history.refresh()
    except KeyboardInterrupt:
        return ExitCode.DONE
