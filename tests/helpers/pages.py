"""Pages of the documentation that are run as a reader would: each command as printed, in a scratch folder."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from tests.helpers.paths import ROOT
from tests.helpers.waiting import TEST_TIMEOUT_S, wait_until


class Block(NamedTuple):
    kind: str  # "bash", "bash goes-on", "text" (what a command said), "text by chance" (what no test can know)
    text: str


def blocks(page: str) -> list[Block]:
    return [Block(*result) for result in re.findall(r"^```(\w[\w -]*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)]


def wait_for(words: str, log: Path, process: subprocess.Popen[bytes]) -> None:
    wait_until(lambda: words in log.read_text() or process.poll() is not None, f"{words} in {log}")


class Reader:
    """A shell in a scratch folder, and all its commands and their output.

    Args:
        folder: The scratch folder, in a folder of its own; gets `.venv`.
        until: By command, what it says before it is interrupted, and how it may end then.
        variables: Of the environment, besides those of this process.
    """

    def __init__(
        self, folder: Path, until: Mapping[str, tuple[str, set[int]]], variables: Mapping[str, str] | None = None
    ):
        self.folder, self.printed, self.until = folder, "", until
        (folder / ".venv").symlink_to(sys.prefix, target_is_directory=True)
        own = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "COLUMNS": "120"}
        self.environment = {**os.environ, **own, **(variables or {})}
        self._going_on: list[tuple[str, subprocess.Popen[bytes], Path]] = []

    def run(self, commands: str, expected: int = 0) -> None:
        process, log = self._start(commands)
        code = process.wait(2 * TEST_TIMEOUT_S)
        self.printed += f"$ {commands}{log.read_text()}"
        assert code == expected, f"exit code {code}, expected {expected}\n{self.printed[-5000:]}"

    def start(self, commands: str) -> None:
        """Start a command in the background and wait for its first output."""
        (name,) = (name for name in self.until if f"/{name} " in commands or f"/mmldlm {name} " in commands)
        process, log = self._start(commands)
        self._going_on.append((name, process, log))
        first = "step " if name == "train" else self.until[name][0]
        wait_for(first, log, process)

    def interrupt(self) -> None:
        """Send Ctrl-C to all running commands, the last first."""
        while self._going_on:
            name, process, log = self._going_on.pop()
            word, expected = self.until[name]
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


_NUMBER = re.compile(r"[+-]?\d[\d,.]*(?:e[+-]\d+)?[kMG]?")


def shape(line: str) -> str:
    """The line without its numbers, bars of curves and widths of columns."""
    return " ".join(_NUMBER.sub("#", re.sub("[▁▂▃▄▅▆▇█]+", "", line)).split())


def numbers(line: str) -> list[float]:
    return [float(text.replace(",", "").rstrip(".kMG")) for text in _NUMBER.findall(line)]


def nothing_else_is_shown(page: Iterable[Block], printed: str) -> None:
    """Check that each line on the page was printed, but for numbers; a line that ends in ... by its beginning.

    Metrics, which depend on no clock, are within 60 %, or 0.3, of those on the page.
    """
    lines: dict[str, list[str]] = {}
    for line in printed.splitlines():
        lines.setdefault(shape(line), []).append(line)
    for line in (line for kind, text in page if kind == "text" for line in text.splitlines()):
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
