"""Progress of commands: plain lines without a terminal, also during one long call; a bar on a terminal."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mmldlm.data.prepare.pipeline import prepare
from mmldlm.utils.progress import Progress
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
