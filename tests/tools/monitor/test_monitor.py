"""`mmldlm monitor` as it is called: on a terminal, into a file, for scripts."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from mmldlm.telemetry.metrics import MetricsFile
from mmldlm.tools.monitor.alerts import alerts
from mmldlm.tools.monitor.command import Output
from mmldlm.tools.monitor.snapshot import Snapshot
from mmldlm.tools.monitor.view import BARS, PLAIN_BARS, TerminalView, sparkline
from mmldlm.tools.run_history import History
from mmldlm.utils.lock import RunLock
from tests.helpers.paths import ROOT
from tests.helpers.terminal import Terminal
from tests.helpers.waiting import TEST_TIMEOUT_S

pytestmark = pytest.mark.quick
MONITOR = [sys.executable, "-m", "mmldlm.cli", "monitor"]


def written(folder: Path, steps: int) -> MetricsFile:
    file = MetricsFile(folder / "metrics.jsonl", None)
    file.write("start", 0, {"total_steps": 40})
    for step in range(1, steps + 1):
        file.write("train", step, {"loss/total": 5 - step / 10, "speed/step_s": 2.0, "speed/tokens_per_s": 1234.0})
    return file


@pytest.fixture
def going_on(tmp_path: Path) -> Iterator[Path]:
    """A run of this very process."""
    with RunLock(tmp_path / "going-on"):
        written(tmp_path / "going-on", 20)
        yield tmp_path / "going-on"


def ended(folder: Path, code: int, cause: str) -> Path:
    written(folder, 20).write("checkpoint", 20, {"path": "somewhere"})
    (folder / "exit.json").write_text(json.dumps({"code": code, "rank": 0, "step": 20, "cause": cause, "time": 1.0}))
    return folder


def monitor(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [*MONITOR, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=TEST_TIMEOUT_S)


def test_once_for_scripts(going_on: Path, tmp_path: Path) -> None:
    """Several runs at once; the exit code says whether any of them needs someone."""
    done, lost = ended(tmp_path / "done", 0, "finished"), ended(tmp_path / "lost", 74, "cannot write x\x1b[2J: full")
    result = monitor(going_on, done, "--once", "--json")
    assert result.returncode == 0 and result.stderr == ""
    first, second = json.loads(result.stdout)
    assert (first["state"], first["step"], first["total_steps"], first["alerts"]) == ("running", 20, 40, [])
    assert first["values"] == {"loss/total": 3.0, "speed/step_s": 2.0, "speed/tokens_per_s": 1234.0}
    assert (second["state"], second["code"], second["checkpoint"]["step"]) == ("finished", 0, 20)

    result = monitor(done, lost, "--once")
    assert result.returncode == 69 and "done  finished  step 20/40 (50%)" in result.stdout
    assert "! failed: exit code 74: cannot write x\\x1b[2J: full" in result.stdout, (
        "what files say is no order to a terminal"
    )
    assert "-> make room on the disk" in result.stdout and "\x1b" not in result.stdout

    slow = monitor(going_on, "--once", "--json", "--threshold", "disk_gib=1e9")
    assert slow.returncode == 69 and [alert["name"] for alert in json.loads(slow.stdout)[0]["alerts"]] == ["disk"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 65, "is no run folder: expected metrics.jsonl"),
        (["--interval", "0"], 2, "--interval 0: expected 0.1 to 86400"),
        (["--threshold", "dusk=1"], 2, "--threshold 'dusk=1': expected KEY=VALUE, KEY being one of skip_steps, "),
        (["--threshold", "memory=2"], 64, "memory: must be below 1"),
    ],
)
def test_invalid_arguments_are_refused(tmp_path: Path, arguments: list[str], code: int, said: str) -> None:
    result = monitor(tmp_path, *arguments)
    assert result.returncode == code and result.stdout == ""
    assert result.stderr.count("\n") == 1 and said in result.stderr


def test_into_a_file_it_ends_with_the_run(going_on: Path) -> None:
    process = subprocess.Popen(
        [*MONITOR, str(going_on), "--interval", "0.2"], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None and process.stdout.readline().startswith("--- 20")
    assert process.stdout.readline().startswith("going-on  running  step 20/40 (50%)")
    (going_on / "exit.json").write_text(json.dumps({"code": 75, "rank": 0, "step": 20, "cause": "x", "time": 1.0}))
    rest, _ = process.communicate(timeout=TEST_TIMEOUT_S)
    assert process.returncode == 0 and "going-on  stopped" in rest and "\x1b" not in rest


def test_on_a_terminal_it_draws_over_itself_and_leaves_quietly(going_on: Path) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "PYTHONIOENCODING": "utf-8"}
    command = [*MONITOR, str(going_on), "--interval", "0.2"]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, cwd=ROOT, env=environment)
    os.close(theirs)
    seen = b""
    interrupted = False
    with suppress(OSError):  # once the other end is closed; until then it is read, or the monitor could wait for us
        while select.select([ours], [], [], TEST_TIMEOUT_S)[0]:
            seen += os.read(ours, 65536)
            if not interrupted and seen.count(b"\x1b[H") >= 3:
                process.send_signal(signal.SIGINT)  # Ctrl-C
                interrupted = True
    os.close(ours)
    assert process.wait(TEST_TIMEOUT_S) == 0, seen
    text = seen.decode()
    assert "Traceback" not in text and "KeyboardInterrupt" not in text and "error" not in text
    assert "going-on  running" in text and any(bar in text for bar in BARS[1:])


def test_a_view_fits_its_terminal(going_on: Path) -> None:
    snapshot = Snapshot(History(going_on), 10.0)
    lines = TerminalView(snapshot, [], width=60, unicode=False).lines()
    assert max(map(len, lines)) <= 60 and all(line.isascii() for line in lines)
    row = next(line for line in lines if line.startswith("  loss"))
    assert row.split()[:2] == ["loss", "3.0000"] and row.split()[2][0] == PLAIN_BARS[-1]


def test_runs_that_do_not_fit_have_a_row_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LINES", "24")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", screen := Terminal())
    snapshots = [Snapshot(History(ended(tmp_path / f"run{number}", 74, "disk full")), 10.0) for number in range(5)]
    Output(as_json=False, once=False).show([(snapshot, alerts(snapshot)) for snapshot in snapshots])
    lines = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", screen.getvalue()).splitlines()
    assert len(lines) == 5 and all(len(line) < 100 for line in lines)
    assert all(f"run{number}  failed" in lines[number] and "! failed" in lines[number] for number in range(5))


def test_sparklines() -> None:
    assert sparkline([1.0, 2.0, 3.0]) == BARS[0] + BARS[4] + BARS[7] and sparkline([]) == ""
    assert sparkline([5.0] * 3) == BARS[3] * 3
    assert sparkline([1.0, float("nan"), 3.0]) == BARS[0] + "x" + BARS[7]
    assert sparkline([0.0, 2.0, 8.0, 8.0], columns=2) == BARS[0] + BARS[7]
    assert len(sparkline([float(i) for i in range(1000)], columns=30)) == 30


def test_memory_of_the_device_is_its_peak(tmp_path: Path) -> None:
    """What is reserved between two steps does not show how near the limit a run is."""
    (tmp_path / "startup.json").write_text(json.dumps({"ranks": [{"device": "cuda:0", "device_memory_mib": 1000.0}]}))
    file = MetricsFile(tmp_path / "metrics.jsonl", None)
    file.write("start", 0, {"total_steps": 2})
    file.write("train", 1, {"memory/cuda_reserved_mib": 300.0, "memory/cuda_peak_reserved_mib": 900.0})
    assert Snapshot(History(tmp_path), 10.0).memory == [("device cuda:0", 900.0, 1000.0)]
