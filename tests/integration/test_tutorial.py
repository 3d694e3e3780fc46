"""Run docs/tutorial.md as a reader would: each command as printed, in an empty folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.waiting import TEST_TIMEOUT_S, wait_until

PAGE = ROOT / "docs" / "tutorial.md"

# What a command says before it is interrupted, and how it may end then; TensorBoard has a moment between its line and
# its handler of Ctrl-C.
UNTIL: dict[str, tuple[str, set[int]]] = {
    "train": ("step 60/300 ", {75}),
    "monitor": ("step ", {0}),
    "tensorboard": ("http://127.0.0.1:", {0, -signal.SIGINT}),
}


class Block(NamedTuple):
    kind: str  # "bash", "bash goes-on", "text" (what a command said), "text by chance" (what no test can know)
    text: str


def blocks(page: str) -> list[Block]:
    return [Block(*result) for result in re.findall(r"^```(\w[\w -]*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)]


def wait_for(words: str, log: Path, process: subprocess.Popen[bytes]) -> None:
    wait_until(lambda: words in log.read_text() or process.poll() is not None, f"{words} in {log}")


class Reader:
    """A shell in a scratch folder, and all its commands and their output."""

    def __init__(self, folder: Path):
        self.folder, self.printed = folder, ""
        shutil.copytree(ROOT / "configs", folder / "configs")
        (folder / ".venv").symlink_to(sys.prefix, target_is_directory=True)
        self.environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "COLUMNS": "120"}
        self._going_on: list[tuple[str, subprocess.Popen[bytes], Path]] = []

    def run(self, commands: str) -> None:
        process, log = self._start(commands)
        code = process.wait(2 * TEST_TIMEOUT_S)
        self.printed += f"$ {commands}{log.read_text()}"
        assert code == 0, self.printed[-5000:]

    def start(self, commands: str) -> None:
        """Start a command in the background and wait for its first output."""
        (name,) = (name for name in UNTIL if f"/{name} " in commands or f"/mmldlm {name} " in commands)
        process, log = self._start(commands)
        self._going_on.append((name, process, log))
        first = "step " if name == "train" else UNTIL[name][0]
        wait_for(first, log, process)

    def interrupt(self) -> None:
        """Send Ctrl-C to all running commands, the last first."""
        while self._going_on:
            name, process, log = self._going_on.pop()
            word, expected = UNTIL[name]
            wait_for(word, log, process)
            os.killpg(process.pid, signal.SIGINT)
            code = process.wait(TEST_TIMEOUT_S)
            self.printed += f"$ {name}\n{log.read_text()}"
            assert code in expected, f"{name}: {code}\n{self.printed[-5000:]}"

    def close(self) -> None:
        for _, process, _ in self._going_on:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _start(self, commands: str) -> tuple[subprocess.Popen[bytes], Path]:
        log = self.folder.with_name(f"log{len(list(self.folder.parent.glob('log*')))}")
        shell = [
            "env",
            "--default-signal=INT",
            "bash",
            "-euo",
            "pipefail",
            "-c",
            commands,
        ]  # however this process was started
        with log.open("wb") as out:
            process = subprocess.Popen(
                shell, stdout=out, stderr=out, cwd=self.folder, env=self.environment, start_new_session=True
            )
        return process, log


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    (tmp_path / "scratch").mkdir()
    result = Reader(tmp_path / "scratch")
    yield result
    (tmp_path / "printed").write_text(result.printed)
    result.close()


@pytest.mark.slow
def test_tutorial_runs(reader: Reader) -> None:
    page = PAGE.read_text(encoding="utf-8")
    result = blocks(page)
    assert len(result) > 12 and {block.kind for block in result} == {"bash", "bash goes-on", "text", "text by chance"}
    for kind, text in result:
        if kind == "bash":
            reader.interrupt()
            reader.run(text)
        elif kind == "bash goes-on":
            reader.start(text)
    reader.interrupt()
    nothing_else_is_shown(page, reader.printed)
    all_files_are_there(page, reader.folder)
    runs_are_as_described(reader.folder / "runs")


_NUMBER = re.compile(r"[+-]?\d[\d,.]*(?:e[+-]\d+)?[kMG]?")


def shape(line: str) -> str:
    """The line without its numbers, bars of curves and widths of columns."""
    return " ".join(_NUMBER.sub("#", re.sub("[▁▂▃▄▅▆▇█]+", "", line)).split())


def numbers(line: str) -> list[float]:
    return [float(text.replace(",", "").rstrip(".kMG")) for text in _NUMBER.findall(line)]


def nothing_else_is_shown(page: str, printed: str) -> None:
    """Check that each line on the page was printed, but for numbers; a line that ends in ... by its beginning.

    Metrics, which depend on no clock, are within 60 %, or 0.3, of those on the page.
    """
    lines: dict[str, list[str]] = {}
    for line in printed.splitlines():
        lines.setdefault(shape(line), []).append(line)
    for line in (line for kind, text in blocks(page) if kind == "text" for line in text.splitlines()):
        if line.endswith("..."):
            assert any(printed_shape.startswith(shape(line[:-3])) for printed_shape in lines), line
            continue
        assert shape(line) in lines, line
        if "baseline:" in line or line.startswith("memory per process"):
            near = [
                all(abs(a - b) <= max(0.3, 0.6 * abs(a)) for a, b in zip(numbers(line), numbers(other), strict=True))
                for other in lines[shape(line)]
            ]
            assert any(near), f"{line!r} on the page, printed: {lines[shape(line)]}"


def all_files_are_there(page: str, folder: Path) -> None:
    promised = re.findall(r"`((?:configs|data|runs)/[^`\s]*)`", page)
    assert len(promised) > 5
    assert [name for name in promised if not (folder / name).exists()] == []


def runs_are_as_described(runs: Path) -> None:
    records = [json.loads(line) for line in (runs / "tutorial" / "metrics.jsonl").read_text().splitlines()]
    trained = [record["step"] for record in records if record["kind"] == "train"]
    assert trained == list(range(5, 301, 5)) and "resume" in {record["kind"] for record in records}
    result = json.loads((runs / "report" / "final_metrics.json").read_text())
    names = {name: [f"{name}-seed{seed}" for seed in (1, 2, 3)] for name in ("tutorial", "low-rate")}
    assert result["groups"] == {names["tutorial"][0]: names["tutorial"], names["low-rate"][0]: names["low-rate"]}
    (comparison,) = result["comparison"].values()
    losses = {entry["metric"]: entry for entry in comparison["over_seeds"]}
    assert losses["validation/total"]["n"] == 3 and losses["validation/total"]["relative_interval"][0] < 0
    # And as the page says: it writes from latents, and finds them.
    evaluated = json.loads((runs / "tutorial" / "evaluation.json").read_text())
    assert evaluated["t2l"]["recall_at_10"] > 0.3
    l2t = evaluated["l2t"]
    assert l2t["bits_per_token"] < l2t["bits_per_token_unigram"] / 2, "the page says that it has learned this"
