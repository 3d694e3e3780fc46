"""`mmldlm monitor` as it is called: on a terminal, into a file, for scripts."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from mmldlm import cli
from mmldlm.tools.monitor.view import BARS, PLAIN_BARS, sparkline
from mmldlm.utils.lock import RunLock
from tests.helpers.paths import ROOT
from tests.helpers.run_records import record, train, write_run
from tests.helpers.waiting import TEST_TIMEOUT_S

pytestmark = pytest.mark.quick
MONITOR = [sys.executable, "-m", "mmldlm.cli", "monitor"]
Printed = pytest.CaptureFixture[str]
RECORDS = [
    record("start", 0, total_steps=40),
    *train(1, 20, loss__total=lambda step: 5 - step / 10, speed__tokens_per_s=1234.0),
]
EXIT = {"rank": 0, "step": 20, "cause": "so it went", "time": 1.0}


@pytest.fixture
def going_on(tmp_path: Path) -> Iterator[Path]:
    """A run of this very process, which has just begun to save."""
    with RunLock(tmp_path / "going-on"):
        yield write_run(tmp_path / "going-on", [*RECORDS, record("heartbeat", 20, what="saving") | {"time": 4e9}])


def ended(folder: Path, code: int, cause: str) -> Path:
    return write_run(folder, [*RECORDS, record("checkpoint", 20)], exit={**EXIT, "code": code, "cause": cause})


def monitor(printed: Printed, *arguments: object) -> tuple[int, str]:
    code = cli.main(["monitor", *map(str, arguments)])
    out, err = printed.readouterr()
    assert not err
    return code, out


def test_once_for_scripts(going_on: Path, tmp_path: Path, capsys: Printed) -> None:
    """Several runs at once; the exit code says whether any of them needs someone."""
    done = ended(tmp_path / "done", 0, "finished")
    code, out = monitor(capsys, going_on, done, "--once", "--json")
    first, second = json.loads(out)
    assert code == 0
    assert (first["state"], first["step"], first["total_steps"], first["alerts"]) == ("running", 20, 40, [])
    assert first["values"] == {"loss/total": 3.0, "speed/step_s": 2.0, "speed/tokens_per_s": 1234.0}
    assert (second["state"], second["code"], second["checkpoint"]["step"]) == ("finished", 0, 20)
    code, out = monitor(capsys, going_on, "--once", "--json", "--threshold", "disk_gib=1e9")
    assert code == 69 and [alert["name"] for alert in json.loads(out)[0]["alerts"]] == ["disk"]


def test_one_run_has_its_details(going_on: Path, tmp_path: Path, capsys: Printed) -> None:
    code, out = monitor(capsys, going_on, "--once")
    assert code == 0 and out.startswith("going-on  running  step 20/40 (50%)  ETA 40s  news 0s ago\n")
    loss = next(line.split() for line in out.splitlines() if line.startswith("  loss"))
    assert loss[:2] == ["loss", "3.0000"] and loss[2][0] == BARS[-1] and loss[2][-1] == BARS[0]
    code, out = monitor(capsys, ended(tmp_path / "lost", 74, "cannot write [red]x\x1b[2J: full"), "--once")
    assert code == 69 and "! failed: exit code 74: cannot write [red]x\\x1b[2J: full" in out
    assert "-> fix what is named" in out and "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 120


def test_several_runs_have_a_row_each(going_on: Path, tmp_path: Path, capsys: Printed) -> None:
    """Of one with control characters in its name, nothing reaches the terminal as an order."""
    runs = [ended(tmp_path / f"run{number}\x1b]0;title\x07", 74, "disk full") for number in range(5)]
    code, out = monitor(capsys, going_on, *runs, "--once", "--threshold", "disk_gib=1e9")
    head, first, *rows = out.splitlines()
    assert code == 69 and "\x1b" not in out and "\x07" not in out and len(rows) == 5
    assert head.split() == ["run", "state", "step", "ETA", "loss", "news", "alert"]
    assert "going-on" in first and "running" in first and " 20/40 (50%)" in first and "disk:" in first
    for number, row in enumerate(rows):
        assert row.startswith(f"run{number}\\x1b]0;title\\x07") and "failed (+1): exit code 74: disk full" in row


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 65, "is no run folder: expected metrics.jsonl"),
        (["--interval", "0"], 2, "--interval 0: expected 0.1 to 86400"),
        (["--threshold", "rise=1"], 2, "--threshold 'rise=1': expected KEY=VALUE"),
        (["--threshold", "memory=2"], 64, "memory: must be below 1"),
    ],
)
def test_invalid_arguments_are_refused(
    tmp_path: Path, arguments: list[str], code: int, said: str, capsys: Printed
) -> None:
    assert cli.main(["monitor", str(tmp_path), *arguments]) == code
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and said in err


def test_into_a_file_it_ends_with_the_run(going_on: Path) -> None:
    process = subprocess.Popen(
        [*MONITOR, str(going_on), "--interval", "0.2"], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None and process.stdout.readline().startswith("--- 20")
    assert process.stdout.readline().startswith("going-on  running  step 20/40 (50%)")
    (going_on / "exit.json").write_text(json.dumps({**EXIT, "code": 75}))
    rest, _ = process.communicate(timeout=TEST_TIMEOUT_S)
    assert process.returncode == 0 and "going-on  stopped" in rest and "\x1b" not in rest


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_on_a_terminal_it_draws_over_itself_and_leaves_quietly(going_on: Path, encoding: str) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "PYTHONIOENCODING": encoding, "COLUMNS": "60", "LINES": "24"}
    command = [*MONITOR, str(going_on), "--interval", "0.2"]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, cwd=ROOT, env=environment)
    os.close(theirs)
    seen = b""
    interrupted = False
    with suppress(OSError):  # once the other end is closed; until then it is read, or the monitor could wait for us
        while select.select([ours], [], [], TEST_TIMEOUT_S)[0]:
            seen += os.read(ours, 65536)
            if not interrupted and seen.count(b"going-on") >= 3:
                process.send_signal(signal.SIGINT)  # Ctrl-C
                interrupted = True
    os.close(ours)
    assert process.wait(TEST_TIMEOUT_S) == 0, seen
    text = seen.decode()
    assert "\x1b[1A" in text and "Traceback" not in text and "KeyboardInterrupt" not in text and "error" not in text
    bars = BARS if encoding == "utf-8" else PLAIN_BARS
    assert "going-on  running" in text and all(bar in text for bar in bars)


def test_sparklines() -> None:
    assert sparkline([1.0, 2.0, 3.0]) == BARS[0] + BARS[4] + BARS[7] and sparkline([]) == ""
    assert sparkline([5.0] * 3) == BARS[3] * 3
    assert sparkline([1.0, float("nan"), 3.0]) == BARS[0] + "x" + BARS[7]
    assert sparkline([0.0, 2.0, 8.0, 8.0], columns=2) == BARS[0] + BARS[7]
    assert len(sparkline([float(i) for i in range(1000)], columns=30)) == 30
