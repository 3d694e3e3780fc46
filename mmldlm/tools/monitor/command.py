"""`mmldlm monitor RUN [RUN ...]`: watch runs from outside; docs/review.md explains the alerts."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mmldlm.errors import ExitCode, UsageError
from mmldlm.settings.declaration import leaves
from mmldlm.settings.fields import build, set_dotted
from mmldlm.tools.monitor.alerts import Alert, alerts
from mmldlm.tools.monitor.snapshot import Snapshot, Thresholds
from mmldlm.tools.monitor.view import TerminalView, paired_lines, snapshot_to_dict
from mmldlm.tools.report.paired import paired_difference
from mmldlm.tools.run_history import History
from mmldlm.utils.nested import replace_nonfinite
from mmldlm.utils.short_repr import short_repr

_STALL_MARGIN_S = 0.05  # after the stall timeout, so that the next snapshot sees it exceeded


def _parser() -> argparse.ArgumentParser:
    rows = "\n".join(f"  {key:<17} {field.default!s:>6}  {field.metadata['doc']}" for key, field in leaves(Thresholds))
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


@dataclass(frozen=True)
class Output:
    """Prints snapshots: in place on a terminal, one after the other elsewhere."""

    as_json: bool
    once: bool

    def show(self, snapshots: Sequence[tuple[Snapshot, list[Alert]]]) -> None:
        """Print one snapshot of each run with its alerts."""
        if self.as_json:
            runs = [snapshot_to_dict(snapshot, alerts) for snapshot, alerts in snapshots]
            for run, (snapshot, _) in zip(runs[1:], snapshots[1:], strict=True):
                if one := paired_difference(snapshots[0][0].history, snapshot.history):
                    run["difference_from_first"] = replace_nonfinite(one.to_dict())
            print(json.dumps(runs, allow_nan=False), flush=True)
            return
        terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        columns, rows = shutil.get_terminal_size((120, 40)) if terminal else (121, 0)
        unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
        color = terminal and "NO_COLOR" not in os.environ
        views = [TerminalView(snapshot, alerts, columns - 1, unicode, color) for snapshot, alerts in snapshots]
        text = "\n\n".join("\n".join(view.lines()) for view in views)
        text += "".join(f"\n\n{line}" for line in paired_lines([each for each, _ in snapshots], columns - 1))
        if terminal and not self.once and len(views) > 1 and text.count("\n") + 1 > rows - 1:
            text = "\n".join(view.row() for view in views)
        if self.once:
            print(text, flush=True)
        elif terminal:
            # Overwritten line by line instead of cleared at once, and without scrolling.
            lines = text.split("\n")[: rows - 1]
            print("\x1b[H", *(f"{line}\x1b[K\n" for line in lines), "\x1b[J", sep="", end="", flush=True)
        else:
            print(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')}\n{text}", flush=True)


def watch(histories: Sequence[History], interval_s: float, thresholds: Thresholds, output: Output) -> int:
    """Show snapshots until every run has ended, or one with `output.once`; return the exit code of the last one."""
    if not (output.once or output.as_json) and sys.stdout.isatty():
        print("\x1b[2J", end="")
    while True:
        snapshots = [Snapshot(history, interval_s, thresholds) for history in histories]
        with_alerts = [(snapshot, alerts(snapshot)) for snapshot in snapshots]
        output.show(with_alerts)
        if output.once or not any(snapshot.state.is_active for snapshot in snapshots):
            return ExitCode.ALERT if any(alerts for _, alerts in with_alerts) else ExitCode.DONE
        time.sleep(_pause_s(snapshots, interval_s))
        for history in histories:
            history.refresh()


def _pause_s(snapshots: Sequence[Snapshot], interval_s: float) -> float:
    """Return the seconds to the next snapshot: the interval, or less if a run would become silent before."""
    until_silent = [
        snapshot.stall_timeout_s - snapshot.news_age_s
        for snapshot in snapshots
        if snapshot.state.is_active and snapshot.news_age_s is not None
    ]
    return min([interval_s, *(seconds + _STALL_MARGIN_S for seconds in until_silent if seconds > 0)])


def _thresholds(assignments: Sequence[str]) -> Thresholds:
    tree: dict[str, object] = {}
    known = [key for key, _ in leaves(Thresholds)]
    for assignment in assignments:
        if assignment.partition("=")[0] not in known:
            raise UsageError(
                f"--threshold {short_repr(assignment)}: expected KEY=VALUE, KEY being one of {', '.join(known)}"
            )
        set_dotted(tree, assignment)
    return build(Thresholds, tree)


def main(argv: list[str] | None = None) -> int:
    """Run `mmldlm monitor`; an `MmldlmError` propagates."""
    options = _parser().parse_args(argv)
    if not 0.1 <= options.interval <= 86_400:
        raise UsageError(f"--interval {options.interval:g}: expected 0.1 to 86400 seconds")
    thresholds = _thresholds(options.threshold)
    histories = [History(run) for run in options.runs]
    try:
        return watch(histories, options.interval, thresholds, Output(options.json, options.once))
    except KeyboardInterrupt:
        return ExitCode.DONE
