"""Progress of commands and runs: plain lines without a terminal, also during a long call; in place on a terminal."""

from __future__ import annotations

import io
import os
import pty
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from mmldlm.prepare.pipeline import prepare
from mmldlm.utils.progress import STATUS_INTERVAL_S, Progress, ProgressLine
from tests.helpers.paths import ROOT
from tests.helpers.sample_corpus import small_config, write_corpus
from tests.helpers.terminal import Terminal
from tests.helpers.waiting import wait_until

pytestmark = pytest.mark.quick


def test_every_item_is_counted_in_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(interval=0) as progress:
        progress.phase("reading")
        assert list(progress.track(iter("ab"), "documents")) == ["a", "b"]
        progress.phase("encoding")
        assert list(progress.track(range(1000), "batches", 1000)) == list(range(1000))
    printed = capsys.readouterr().err
    assert "\r" not in printed
    lines = [line.rpartition(",")[0] or line for line in printed.splitlines()]
    assert [*dict.fromkeys(lines)] == [
        "reading ...",
        "reading: 1 documents",
        "reading: 2 documents",
        "encoding ...",
        *(f"encoding: {done:,} of 1,000 batches" for done in range(1, 1001)),
    ]


def test_lines_are_rare(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(interval=1e6) as progress:
        progress.phase("reading")
        list(progress.track(range(10_000), "documents"))
    assert capsys.readouterr().err == "reading ...\n"


def test_long_calls_report_progress(capsys: pytest.CaptureFixture[str]) -> None:
    result: list[str] = []
    with Progress(interval=0) as progress:
        progress.phase("fitting")
        wait_until(lambda: bool(result.extend(capsys.readouterr().err.splitlines()) or len(result) > 1), "a line")
    assert result[0] == "fitting ..."
    assert re.fullmatch(r"fitting: \d+s", result[1])


def test_disabled_progress_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(enabled=False, interval=0) as progress:
        progress.phase("reading")
        list(progress.track(range(3), "documents"))
    assert capsys.readouterr().err == ""


def test_terminal_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress() as progress:
        progress.phase("reading")
        list(progress.track(range(7), "documents", 7))
        progress.phase("fitting")
    drawn = terminal.getvalue()
    assert "\r" in drawn and "reading:" in drawn and "0/7" in drawn and "fitting:" in drawn
    assert "reading ..." not in drawn


def test_prepare_counts_the_documents_of_each_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small_config(tmp_path / "store", write_corpus(tmp_path / "corpus.txt", 60))
    prepare(config, interval=0)
    printed = capsys.readouterr().err
    stages = ("reading documents", "grouping duplicates", "fitting the tokenizer", "fitting the encoder")
    for stage in (*stages, "tokenizing and encoding", "measuring latents", "writing the store"):
        assert f"{stage} ...\n" in printed
    counts = re.findall(r"^reading documents: (\d+) documents, \d+s$", printed, re.MULTILINE)
    assert [*dict.fromkeys(map(int, counts))] == list(range(1, len({*counts}) + 1)) and len(counts) > 30
    of = re.findall(r"^tokenizing and encoding: (\d+) of (\d+) documents", printed, re.MULTILINE)
    assert of[-1][0] == of[-1][1]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


VALUES = {
    "loss/total": 3.25,
    "loss/text": 3.0,
    "loss/latent": 0.25,
    "optim/lr": 3e-4,
    "optim/grad_norm": 0.9,
    "speed/tokens_per_s": 12345.0,
    "health/skipped_steps": 2,
}


def test_plain_lines_of_a_run_in_a_file() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = ProgressLine(1000, 0, stream, clock)
    for step in (10, 20):
        clock.now += 5
        progress.update(step, VALUES)
    progress.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2 and "\r" not in stream.getvalue()
    assert lines[1] == (
        "step 20/1,000 (2%)  loss 3.2500  12.3k tokens/s  ETA 8m 10s"
        "  text 3.0000  latent 0.2500  lr 3.00e-04  grad 0.90  skipped 2"
    )


def test_the_remaining_time_is_by_the_last_twenty_lines() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = ProgressLine(1000, 0, stream, clock)
    for step, seconds in enumerate([100] * 10 + [1] * 19 + [21], start=1):
        clock.now += seconds
        progress.update(step, {})
    assert progress.eta_s() == 970 * 40 / 20


def test_one_line_in_place_on_a_terminal() -> None:
    stream = Terminal()
    progress = ProgressLine(10, 0, stream, Clock())
    progress.update(1, VALUES)
    progress.update(2, {})
    progress.message("checkpoint")
    progress.close()
    drawn, last, rest = stream.getvalue().split("\n")
    first, second, *_, message = filter(None, (line for line in drawn.split("\r")))
    assert rest == "" and first.startswith("step 1/10") and len(first) == 79, "cut"
    assert second.startswith("step 2/10") and len(second) == 79, "nothing of the longer line stays"
    assert message == "checkpoint" and last.strip("\r").startswith("step 2/10"), "above the line in place"


def test_a_terminal_that_does_not_tell_its_size() -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as stream:
        progress = ProgressLine(10, 0, stream, Clock())
        progress.update(1, {})
        progress.end()
    drawn = b""
    with suppress(OSError):  # at the end
        while part := os.read(ours, 1000):
            drawn += part
    os.close(ours)
    assert b"step 1/10" in drawn


def test_long_phases_are_logged() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = ProgressLine(1000, 0, stream, clock)
    progress.update(10, {})
    progress.set_status(13)
    progress.print_status_if_due()
    clock.now += STATUS_INTERVAL_S
    progress.print_status_if_due()
    progress.print_status_if_due()
    progress.set_status(13, "validation")
    clock.now += 2 * STATUS_INTERVAL_S
    progress.print_status_if_due()
    assert stream.getvalue().splitlines()[1:] == [
        f"step 13/1,000  training ... {STATUS_INTERVAL_S:.0f}s",
        f"step 13/1,000  validation ... {2 * STATUS_INTERVAL_S:.0f}s",
    ]


def test_eta_follows_recent_steps_of_this_session() -> None:
    clock = Clock()
    progress = ProgressLine(1000, 500, io.StringIO(), clock)
    assert progress.eta_s() is None
    clock.now += 300  # a slow first step: compilation
    progress.update(501, {})
    for step in range(502, 540):
        clock.now += 2
        progress.update(step, {})
    assert progress.eta_s() == pytest.approx(2 * (1000 - 539))


# Stands in for the interpreter of .venv: its pip works until there is a file `go`, and ends with the code in it.
PYTHON = """#!/usr/bin/env bash
if [ "$1" = -m ]; then
  until [ -s go ]; do sleep 0.05; done
  exit "$(cat go)"
fi
cat > /dev/null
echo abc
"""


@pytest.mark.parametrize("code", [0, 3])
def test_setup_reports_progress_of_pip(tmp_path: Path, code: int) -> None:
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/setup.sh", "scripts/test-model.txt", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    process = subprocess.Popen(
        ["bash", "scripts/setup.sh"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHON": sys.executable, "TELL_EVERY": "0.1"},
    )
    with process:
        assert process.stdout is not None and process.stderr is not None
        lines = [process.stdout.readline() for _ in range(3)]
        (tmp_path / "go").write_text(str(code))
        rest, error = process.stdout.read(), process.stderr.read()
    assert lines[0].startswith("==> installing mmldlm into .venv")
    assert all(re.fullmatch(r"==> still installing: \d+ s, \d+ MiB in \.venv so far\n", line) for line in lines[1:])
    assert process.returncode == (1 if code else 0)
    assert ("pip could not install" in error) == bool(code)
    assert ("==> set up" in rest) == (not code)
