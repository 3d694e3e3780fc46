"""Runs of `scripts/watchdog_rank.py`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from tests.helpers.engine_runs import environment
from tests.helpers.forked_runs import ForkedRuns
from tests.helpers.paths import BIN, ROOT, SCRIPTS
from tests.helpers.ports import free_port
from tests.helpers.waiting import TEST_TIMEOUT_S, wait_until

SCRIPT = SCRIPTS / "watchdog_rank.py"


class WatchedRun:
    """Context manager around the processes of a run; kills those that are left."""

    def __init__(
        self,
        forked: ForkedRuns,
        folder: Path,
        world_size: int,
        timeout_s: float,
        fault: str,
        rank: int | None = None,
        **variables: str,
    ):
        self.forked, self.folder, self.world_size, self.variables = forked, folder, world_size, variables
        self.arguments = [str(folder), str(timeout_s), fault, *([] if rank is None else [str(rank)])]

    def __enter__(self) -> WatchedRun:
        self.start()
        self.pids = [int(self._await(f"ready.rank{rank}")) for rank in range(self.world_size)]
        self.began = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.forked.kill(self.ranks)

    def start(self) -> None:
        given = (self.arguments, self.world_size, self.folder / "output", str(SCRIPT))
        self.ranks = self.forked.start("ddp", *given, **self.variables)

    def ended(self) -> bool:
        return len(self.forked.wait(self.ranks, 0)) == self.world_size

    def harm(self, rank: int, number: signal.Signals) -> None:
        """Send a signal after the heartbeats of the current steps were written and read."""
        for each in range(self.world_size):
            self._await(f"heard.rank{each}")
        self.began = time.monotonic()
        os.kill(self.pids[rank], number)

    def code(self, rank: int, seconds: float = TEST_TIMEOUT_S) -> int | None:
        """Exit code of a rank that ends within `seconds`."""
        return self.forked.wait([self.pids[rank]], seconds).get(self.pids[rank])

    def codes(self) -> list[int | None]:
        """Return the exit codes of all processes, which end without help."""
        codes = [self.code(rank) for rank in range(self.world_size)]
        self.seconds = time.monotonic() - self.began
        return codes

    def record(self, name: str = "exit.json") -> dict[str, Any]:
        return json.loads((self.folder / name).read_text())

    def stacks(self, rank: int) -> str:
        return (self.folder / f"stacks.rank{rank}.txt").read_text()

    def files(self) -> set[str]:
        ours = ("output", "ready.", "heard.")
        return {path.name for path in self.folder.iterdir() if not path.name.startswith(ours)}

    def output(self, rank: int | str = "") -> str:
        return (self.folder / f"output{rank}").read_text()

    def complaints(self, rank: int) -> list[str]:
        return re.findall("^mmldlm: error: (.*)$", self.output(rank), re.MULTILINE)

    def _await(self, name: str) -> str:
        path = self.folder / name
        wait_until(lambda: path.exists() or self.ended(), name)
        assert path.exists(), self.output()
        return path.read_text()


class LaunchedRun(WatchedRun):
    """The same under torchrun, whose exit code is the only one."""

    def start(self) -> None:
        launcher = [str(BIN / "torchrun"), f"--nproc_per_node={self.world_size}", f"--master_port={free_port()}"]
        command, env = [*launcher, str(SCRIPT), *self.arguments], environment(PYTHONPATH=str(ROOT))
        with (self.folder / "output").open("wb") as out:
            self.process = subprocess.Popen(
                command, env=env, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def ended(self) -> bool:
        return self.process.poll() is not None

    def codes(self) -> list[int | None]:
        result = self.process.wait(TEST_TIMEOUT_S)
        left = [pid for pid in self.pids if psutil.pid_exists(pid)]
        assert not left, f"left running: {left}"
        return [result]
