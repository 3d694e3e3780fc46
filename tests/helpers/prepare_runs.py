"""Preparations that start in a fraction of a second: forked from a process that has imported all there is."""

from __future__ import annotations

import filecmp
import multiprocessing
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from mmldlm.errors import run_command
from tests.helpers.waiting import TEST_TIMEOUT_S

FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["mmldlm.prepare.pipeline"])


class Preparation:
    """`mmldlm prepare ARGUMENTS` in a process of its own. Use as a context manager, which kills it at the end."""

    def __init__(self, arguments: Sequence[object], log: Path):
        self.log = log
        self.process = FORKING.Process(target=_run, args=(list(map(str, arguments)), str(log)))
        self.process.start()

    def __enter__(self) -> Preparation:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.join()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def wait(self) -> int | None:
        """Return the exit code; None if it hangs."""
        self.process.join(TEST_TIMEOUT_S)
        return self.process.exitcode

    def output(self) -> str:
        return self.log.read_text()


def _run(arguments: list[str], log: str) -> None:
    from mmldlm.prepare.pipeline import main

    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.exit(run_command(lambda: main(arguments)))


def finished_tasks(store: Path) -> list[str]:
    """Return the names of the finished tasks of an unfinished store."""
    folder = store.with_name(f"{store.name}.incomplete")
    return sorted(path.name for path in folder.glob("*") if re.fullmatch(r"[a-z]+-\d{5}", path.name))


def differing(one: Path, other: Path) -> list[str]:
    """Names of files that two stores do not both have, or with other bytes."""
    names = {path.relative_to(store) for store in (one, other) for path in store.rglob("*") if not path.is_dir()}
    assert len(names) > 12
    _, unlike, missing = filecmp.cmpfiles(one, other, map(str, names), shallow=False)
    return sorted(unlike + missing)
