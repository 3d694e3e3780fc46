from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from engine_runs import PARITY, ROOT, environment
from forked_runs import ForkedRuns

from mmldlm import train


@pytest.fixture(scope="session")
def parity_config(tmp_path_factory: pytest.TempPathFactory, tiny_store: Path) -> Path:
    folder = tmp_path_factory.mktemp("parity")
    path = folder / "config.yaml"
    path.write_text(PARITY.format(run=folder / "run", store=tiny_store), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def single(tmp_path_factory: pytest.TempPathFactory, parity_config: Path) -> Callable[..., Path]:
    """The run folder of one process with these settings; trained once."""
    made: dict[tuple[str, ...], Path] = {}

    def reference(*settings: str) -> Path:
        if settings not in made:
            folder = tmp_path_factory.mktemp("single")
            assert train.main([str(parity_config), f"run.dir={folder}", *settings]) == 0
            made[settings] = folder
        return made[settings]

    return reference


@pytest.fixture
def two_ranks(forked: ForkedRuns, tmp_path: Path) -> Iterator[Callable[..., list[int]]]:
    """Start a run of two processes, its output in `tmp_path/log`; killed at the end."""
    started: list[int] = []

    def start(engine: str, *arguments: object, script: str = "", **variables: str) -> list[int]:
        started.extend(forked.start(engine, arguments, 2, tmp_path / "log", script, **variables))
        return started

    yield start
    forked.kill(started)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a command in the background, its output in `tmp_path/log`; killed with all its children at the end."""
    processes = []

    def start(command: list[str], **variables: str) -> subprocess.Popen[bytes]:
        log = (tmp_path / "log").open("w")
        env = environment(PYTHONPATH=str(ROOT), **variables)
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=log, stderr=log, text=True, start_new_session=True
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
