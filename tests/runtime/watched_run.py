"""Starts and ends runs of `watched_rank.py`."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

SCRIPT = Path(__file__).with_name("watched_rank.py")
ROOT = SCRIPT.parent.parent.parent
START_S = 90  # on a machine that has other things to do


class WatchedRun:
    """Context manager around the processes of a run; it leaves none behind."""

    def __init__(
        self,
        folder: Path,
        world_size: int,
        timeout_s: float,
        fault: str,
        rank: int | None = None,
        torchrun: bool = False,
    ):
        self.folder, self.world_size, self.timeout_s = folder, world_size, timeout_s
        arguments = [str(SCRIPT), str(folder), str(timeout_s), fault, *([] if rank is None else [str(rank)])]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
        if torchrun:
            launcher = ["torch.distributed.run", f"--nproc_per_node={world_size}", f"--master_port={_free_port()}"]
            self.commands = [([sys.executable, "-m", *launcher, *arguments], environment)]
        else:
            environment |= {"MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(world_size)}
            ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]
            self.commands = [([sys.executable, *arguments], {**environment, **own}) for own in ranks]

    def __enter__(self) -> WatchedRun:
        self.processes: list[subprocess.Popen[bytes]] = []
        for index, (command, environment) in enumerate(self.commands):
            with (self.folder / f"output{index}").open("wb") as file:
                self.processes.append(subprocess.Popen(command, env=environment, stderr=file, stdout=file, cwd=ROOT))
        ends = time.monotonic() + START_S
        ready = [self.folder / f"ready.rank{rank}" for rank in range(self.world_size)]
        while not all(path.exists() for path in ready):
            assert time.monotonic() < ends and None in [p.poll() for p in self.processes], self.output()
            time.sleep(0.02)
        self.began = time.monotonic()
        self.pids = [int(path.read_text()) for path in ready]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for pid in getattr(self, "pids", []):  # of torchrun they are not our children
            with suppress(psutil.NoSuchProcess):
                rank = psutil.Process(pid)
                if str(SCRIPT) in rank.cmdline():
                    rank.kill()

    def harm(self, rank: int, number: signal.Signals) -> None:
        time.sleep(1.1)  # until heartbeats of the steps at hand were written and read
        self.began = time.monotonic()
        os.kill(self.pids[rank], number)

    def codes(self) -> list[int]:
        """Exit codes of all processes, which end within the timeout and 5 s more, and leave none behind."""
        ends = self.began + self.timeout_s + 5
        codes = [process.wait(max(0.0, ends - time.monotonic())) for process in self.processes]
        self.seconds = time.monotonic() - self.began
        left = [pid for pid in self.pids if psutil.pid_exists(pid)]
        assert not left, f"left running: {left}"
        return codes

    def record(self, name: str = "exit.json") -> dict[str, Any]:
        return json.loads((self.folder / name).read_text())

    def stacks(self, rank: int) -> str:
        return (self.folder / f"stacks.rank{rank}.txt").read_text()

    def files(self) -> set[str]:
        return {path.name for path in self.folder.iterdir() if not path.name.startswith(("output", "ready."))}

    def output(self, index: int = 0) -> str:
        return (self.folder / f"output{index}").read_text()

    def complaints(self, index: int) -> list[str]:
        return re.findall("^mmldlm: error: (.*)$", self.output(index), re.MULTILINE)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
