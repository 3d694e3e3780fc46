"""Training runs that start in a fraction of a second: forked from one process that has imported everything.

The process is this module as a script, since a fork of pytest, with its threads, would not be clean. It reads one
request a line and answers each with one line, both in JSON.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.helpers.paths import ROOT, SCRIPTS

# What a run imports at its start; the last one has torch import its compiler.
LATE = (
    "mmldlm.train",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",
)


class ForkedRuns:
    """Client of the fork server; runs that are left are killed at the end of the context."""

    def __init__(self, environment: Mapping[str, str]):
        self.environment = environment

    def __enter__(self) -> ForkedRuns:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.forked_runs"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=self.environment,
            start_new_session=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._server.pid, signal.SIGKILL)
        self._server.communicate()

    def start(
        self, engine: str, arguments: Sequence[object], processes: int, log: Path, script: str = "", **variables: str
    ) -> list[int]:
        """`mmldlm train ARGUMENTS` under `engine` ("single" for one process); the processes, in order of rank.

        With a `script`, by its path or its name in `scripts/`, they run that instead. `variables` are added to their
        environment.
        """
        given = [str(argument) for argument in arguments]
        values = {"arguments": given, "processes": processes, "log": str(log), "script": script, "variables": variables}
        return self._ask("start", engine=engine, **values)

    def succeed(
        self, engine: str, folder: Path, processes: int, *arguments: object, script: str = "", **variables: str
    ) -> None:
        """Train in `folder`, to the end."""
        log = folder.with_suffix(".log")
        pids = self.start(engine, [*arguments, f"run.dir={folder}"], processes, log, script, **variables)
        codes = self.wait(pids)
        assert [codes.get(pid) for pid in pids] == [0] * processes, f"{codes}\n{log.read_text()[-3000:]}"

    def kill(self, pids: Sequence[int]) -> None:
        """Kill the processes that have not ended."""
        self._ask("kill", pids=list(pids))

    def wait(self, pids: Sequence[int], seconds: float = 300.0) -> dict[int, int]:
        """Return exit codes, or negative signals, of the processes that end within `seconds`."""
        return {int(pid): code for pid, code in self._ask("wait", pids=list(pids), seconds=seconds).items()}

    def _ask(self, verb: str, **values: Any) -> Any:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps([verb, values]) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())


# --- the process that forks -----------------------------------------------------------------------------------


def serve() -> None:
    sys.modules["mlflow"] = None  # type: ignore[assignment]  # if installed, DeepSpeed imports it, which starts threads
    for name in LATE:
        importlib.import_module(name)
    threads = list(Path("/proc/self/task").iterdir())
    assert len(threads) == 1, f"{len(threads)} threads: a fork would lose them and what they hold"
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps the output of libraries out of the answers
    codes: dict[int, int] = {}
    for line in sys.stdin:
        verb, values = json.loads(line)
        answer = {"start": start, "kill": kill, "wait": wait}[verb](codes, **values)
        print(json.dumps(answer), file=answers, flush=True)


def start(
    codes: dict[int, int],
    engine: str,
    arguments: list[str],
    processes: int,
    log: str,
    script: str,
    variables: dict[str, str],
) -> list[int]:
    master, pids = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(quiet_port())}, []
    if engine not in ("single", "ddp"):
        arguments = [*arguments, "--accelerate_config", f"accelerate_configs/{engine}.yaml"]
    for rank in range(processes):
        pid = os.fork()
        if not pid:
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
            if engine != "single":
                os.environ.update(master, **{name: str(value) for name, value in place.items()})
            os.environ.update(variables)
            run(arguments, log, script)
        pids.append(pid)
        codes.pop(pid, None)  # process ids are reused
    return pids


def run(arguments: list[str], log: str, script: str) -> None:
    """The life of a rank; never returns."""
    from mmldlm import train

    status = 1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if script:
            path = SCRIPTS / script
            sys.argv = [str(path), *arguments]
            runpy.run_path(str(path), run_name="__main__")
            status = 0
        else:
            status = train.main(arguments)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def kill(codes: dict[int, int], pids: list[int]) -> None:
    for pid in pids:
        if pid not in codes:  # otherwise its id may belong to another process by now
            os.kill(pid, signal.SIGKILL)


def wait(codes: dict[int, int], pids: list[int], seconds: float) -> dict[int, int]:
    """Return the exit codes of `pids` that are known; `codes` keeps all of them."""
    deadline = time.monotonic() + seconds
    for pid in pids:
        if pid not in codes:
            handle = os.pidfd_open(pid)
            if select.select([handle], [], [], max(0.0, deadline - time.monotonic()))[0]:
                codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.close(handle)
    return {pid: codes[pid] for pid in pids if pid in codes}


def quiet_port() -> int:
    """Return a free port below the ephemeral range, whose ports may be taken before we use them."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


if __name__ == "__main__":
    serve()
