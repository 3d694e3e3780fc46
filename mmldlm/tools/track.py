"""`mmldlm track RUN --to TRACKER ...`: send the records of a run to experiment trackers, live or afterwards.

A tracker cannot take back rows, but a run that was killed repeats the steps since its last checkpoint. So only rows
that no resume repeats are sent. If a run nevertheless resumes from an earlier step, the tracker gets a new run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from mmldlm.errors import ExitCode, StorageError, UsageError, run_command
from mmldlm.telemetry.metrics import RESERVED
from mmldlm.telemetry.tracker_bridges import PACKAGES, TrackerName, check_packages, tracker_folder
from mmldlm.tools.runs import History
from mmldlm.tools.tracker_runs import TRACKERS, Row, RunInfo, TrackerRun
from mmldlm.utils.lock import RunLock
from mmldlm.utils.nested import flatten
from mmldlm.utils.printable import printable

GIVE_UP_S = 86_400.0  # without the tracker, if the run has ended
_MAX_PAUSE_S = 60.0
_ROWS_PER_REQUEST = 100
_TAGS = ("engine", "world_size", "parameters_total", "git")  # entries of the first record


def rows_to_send(history: History, everything: bool) -> list[Row]:
    """Return the scalars of training, validation and quality records, in the order of the file.

    With `everything`, include the steps since the last complete checkpoint, which a resume would repeat.
    """
    kept_steps = [record["step"] for record in history.by_kind("checkpoint", "resume", "end")]
    last = history.step if everything else max(kept_steps, default=0)
    rows = []
    for record in history.by_kind("train", "validation", "quality"):
        if record["step"] <= last:
            scalars = {k: float(v) for k, v in record.items() if k not in RESERVED and isinstance(v, int | float)}
            rows.append(Row(record["step"], round(record["time"] * 1000), scalars))
    return rows


class Bridge:
    """Sends the rows of a run to one tracker.

    With `everything`, once the run has ended, the steps since its last checkpoint are sent, too.
    """

    def __init__(self, run_dir: Path, tracker: TrackerName, everything: bool):
        self.history, self.tracker, self.everything = History(run_dir), tracker, everything
        self.run: TrackerRun | None = None

    def follow(self, interval_s: float) -> str:
        """Send rows until the run has ended and the tracker has all; return what it has.

        Whatever an attempt fails by, the tracker is opened and asked again, as after a kill.

        Raises:
            StorageError: The run has ended, and the tracker was out of reach for a day.
        """
        error_file = tracker_folder(self.history.run_dir, self.tracker) / "error.txt"
        pause_s, failing_since = interval_s, None
        while True:
            self.history.refresh()
            state = self.history.state()
            try:
                rows = rows_to_send(self.history, self.everything and not state.is_active)
                self._send(rows)
                if self.run is not None and not state.is_active:
                    self.run.close(state.name in ("finished", "stopped"))
                error_file.unlink(missing_ok=True)
                if not state.is_active:
                    return self._summary(rows)
                pause_s, failing_since = interval_s, None
            except Exception as error:  # of the tracker's package: any type
                line = f"tracker {self.tracker}: {type(error).__name__}: {error}".splitlines()[0]
                error_file.write_text(f"{line}\n\n{traceback.format_exc()}", encoding="utf-8")
                if failing_since is None:
                    failing_since = time.monotonic()
                    print(printable(f"{line}; trying again, see {error_file}"), file=sys.stderr, flush=True)
                elif not state.is_active and time.monotonic() - failing_since > GIVE_UP_S:
                    raise StorageError(f"{line}; given up after a day") from None
                self.run, pause_s = None, min(2 * pause_s, _MAX_PAUSE_S)
            time.sleep(pause_s)

    def _send(self, rows: Sequence[Row]) -> None:
        if self.run is not None and not self.run.is_start_of(rows):
            self.run.close(succeeded=False)
            self.run = None
        if self.run is None and rows:
            self.run = self._open(rows)
        while self.run is not None and (batch := rows[self.run.sent : self.run.sent + _ROWS_PER_REQUEST]):
            self.run.send(batch)

    def _open(self, rows: Sequence[Row]) -> TrackerRun:
        """Open the first of the tracker's runs for this run that has no other rows."""
        start = (self.history.by_kind("start", "resume") or self.history.records)[0]
        identity = hashlib.sha256(json.dumps(start, sort_keys=True).encode()).hexdigest()[:16]
        tags = {key: str(start[key]) for key in _TAGS if start.get(key)}
        number = 1
        while True:
            name = self.history.name + (f" ({number})" if number > 1 else "")
            run = TRACKERS[self.tracker](RunInfo(f"{identity}-{number}", name, flatten(self.history.config), tags))
            if run.is_start_of(rows):
                return run
            run.close(succeeded=False)
            number += 1

    def _summary(self, rows: Sequence[Row]) -> str:
        held_back = len(rows_to_send(self.history, everything=True)) - len(rows)
        note = f"; {held_back} after the last checkpoint are held back, --all sends them" if held_back else ""
        return f"{self.tracker}: has {len(rows)} rows of {self.history.run_dir}{note}"


def main(argv: list[str] | None = None) -> int:
    """Run `mmldlm track`; an `MmldlmError` propagates."""
    parser = argparse.ArgumentParser("mmldlm track", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--to", nargs="+", required=True, choices=[*PACKAGES], help="trackers")
    parser.add_argument("--all", action="store_true", help="also the steps after the last checkpoint of an ended run")
    parser.add_argument("--interval", type=float, default=5.0, metavar="S", help="seconds between looks (%(default)g)")
    options = parser.parse_args(argv)
    if not 0.1 <= options.interval <= 86_400:
        raise UsageError(f"--interval {options.interval:g}: expected 0.1 to 86400 seconds")
    check_packages(options.to, "--to")
    if len(options.to) > 1:  # in processes of their own, so that none waits for another
        flags = [str(options.run), f"--interval={options.interval}", *(["--all"] if options.all else [])]
        commands = [[sys.executable, "-m", "mmldlm.tools.track", *flags, "--to", name] for name in options.to]
        codes = [process.wait() for process in [subprocess.Popen(command) for command in commands]]
        # A bridge that was killed by a signal has a code below 0, and counts as it does in a shell.
        return max(code if code >= 0 else 128 - code for code in codes)
    bridge = Bridge(options.run, options.to[0], options.all)
    while True:
        with RunLock(tracker_folder(options.run, bridge.tracker)):
            print(printable(bridge.follow(options.interval)), flush=True)
        # The bridge of a new start of the run has ended if it found the lock held.
        bridge = Bridge(options.run, bridge.tracker, options.all)
        if not bridge.history.state().is_active:
            return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(run_command(main))
