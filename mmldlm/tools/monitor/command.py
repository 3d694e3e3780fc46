"""`mmldlm monitor RUN [RUN ...]`: watch runs from outside; docs/review.md says what to do about what it says."""

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

from mmldlm.errors import ExitCode, UsageError, run_command
from mmldlm.settings.fields import build, leaves, set_dotted
from mmldlm.tools.history.run_history import History
from mmldlm.tools.monitor.alert import Alert
from mmldlm.tools.monitor.alerts import alerts
from mmldlm.tools.monitor.json_view import summary
from mmldlm.tools.monitor.snapshot import Snapshot, Thresholds
from mmldlm.tools.monitor.terminal import View
from mmldlm.utils.short_repr import shown

_LATE_S = 0.05  # after the moment at which silence would be too long


def _parser() -> argparse.ArgumentParser:
    rows = "\n".join(f"  {key:<17} {field.default!s:>6}  {field.metadata['doc']}" for key, field in leaves(Thresholds))
    parser = argparse.ArgumentParser(
        "mmldlm monitor",
        description="Watch runs: curves, speed, and alerts with advice. Ends with the last of them, or by Ctrl-C.",
        epilog=f"exit code: 0, or {int(ExitCode.ALERT)} where a run has an alert or ended badly\n\nthresholds:\n{rows}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--interval", type=float, default=10.0, metavar="S", help="seconds between looks (%(default)g)")
    parser.add_argument("--once", action="store_true", help="look once")
    parser.add_argument("--json", action="store_true", help="as JSON: a list of runs, one line a look")
    parser.add_argument(
        "--threshold", action="append", default=[], metavar="KEY=VALUE", help="of an alert, as listed below"
    )
    return parser


@dataclass(frozen=True)
class Output:
    """Where looks are shown: in place on a terminal, one behind the other elsewhere."""

    as_json: bool
    once: bool

    def show(self, found: Sequence[tuple[Snapshot, list[Alert]]]) -> None:
        if self.as_json:
            print(json.dumps([summary(look, alerts) for look, alerts in found], allow_nan=False), flush=True)
            return
        terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        columns, rows = shutil.get_terminal_size((120, 40)) if terminal else (121, 0)
        unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
        color = terminal and "NO_COLOR" not in os.environ
        text = "\n\n".join("\n".join(View(*one, columns - 1, unicode, color).lines()) for one in found)
        if self.once:
            print(text, flush=True)
        elif terminal:
            lines = text.split("\n")[: rows - 1]
            print("\x1b[H", *(f"{line}\x1b[K\n" for line in lines), "\x1b[J", sep="", end="", flush=True)
        else:
            print(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')}\n{text}", flush=True)


def watch(histories: Sequence[History], interval_s: float, thresholds: Thresholds, output: Output) -> int:
    """Look until every run has ended, or once; the exit code is that of the last look."""
    if not (output.once or output.as_json) and sys.stdout.isatty():
        print("\x1b[2J", end="")
    while True:
        looks = [Snapshot(history, interval_s, thresholds) for history in histories]
        found = [(look, alerts(look)) for look in looks]
        output.show(found)
        if output.once or not any(look.state.is_open for look in looks):
            return ExitCode.ALERT if any(alerts for _, alerts in found) else ExitCode.DONE
        time.sleep(_pause_s(looks, interval_s))
        for history in histories:
            history.refresh()


def _pause_s(looks: Sequence[Snapshot], interval_s: float) -> float:
    """To the next look: the interval, or less where a run would count as silent before."""
    left = [look.patience_s - look.news_age_s for look in looks if look.state.is_open and look.news_age_s is not None]
    return min([interval_s, *(seconds + _LATE_S for seconds in left if seconds > 0)])


def _thresholds(assignments: Sequence[str]) -> Thresholds:
    tree: dict[str, object] = {}
    known = [key for key, _ in leaves(Thresholds)]
    for assignment in assignments:
        if assignment.partition("=")[0] not in known:
            raise UsageError(
                f"--threshold {shown(assignment)}: expected KEY=VALUE, KEY being one of {', '.join(known)}"
            )
        set_dotted(tree, assignment)
    return build(Thresholds, tree)


def main(argv: list[str] | None = None) -> int:
    """`mmldlm monitor`; lets `MmldlmError` pass."""
    options = _parser().parse_args(argv)
    if not 0.1 <= options.interval <= 86_400:
        raise UsageError(f"--interval {options.interval:g}: expected 0.1 to 86400 seconds")
    thresholds = _thresholds(options.threshold)
    histories = [History.read(run) for run in options.runs]
    try:
        return watch(histories, options.interval, thresholds, Output(options.json, options.once))
    except KeyboardInterrupt:
        return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(run_command(main))
