"""Preparations that start in a fraction of a second: forked from a process that has imported all there is."""

from __future__ import annotations

import filecmp
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mmldlm.errors import run_command
from tests.helpers.waiting import PATIENCE_S

FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["mmldlm.data.prepare.pipeline"])


class Preparation:
    """`mmldlm prepare ARGUMENTS` in as many processes as a launcher would have started. Use as a context manager."""

    launches = 0

    def __init__(self, arguments: Sequence[object], processes: int, log: Path, others: Sequence[object] = ()):
        """`others` are the arguments of all ranks but the first, where these are to differ."""
        Preparation.launches += 1
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
        places = [(rank, rank, processes, Preparation.launches) for rank in range(processes)]
        self.log = log
        self.ranks = [
            FORKING.Process(
                target=_run,
                args=(
                    list(map(str, (place[0] and others) or arguments)),
                    dict(zip(names, map(str, place), strict=True)),
                    str(log),
                ),
            )
            for place in places
        ]
        for rank in self.ranks:
            rank.start()

    def __enter__(self) -> Preparation:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    @property
    def at_work(self) -> bool:
        return any(rank.is_alive() for rank in self.ranks)

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()
        self.wait()

    def wait(self, seconds: float = PATIENCE_S) -> list[int | None]:
        """Exit codes by rank; None for one that is still at work."""
        deadline = time.monotonic() + seconds
        for rank in self.ranks:
            rank.join(max(0.0, deadline - time.monotonic()))
        return [rank.exitcode for rank in self.ranks]

    def said(self) -> str:
        return self.log.read_text()


def _run(arguments: list[str], place: dict[str, str], log: str) -> None:
    from mmldlm.data.prepare.pipeline import main

    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(place, TOKENIZERS_PARALLELISM="false")
    sys.exit(run_command(lambda: main(arguments)))


def pieces(store: Path) -> int:
    """How much of an unfinished store is done."""
    folder = store.with_name(f"{store.name}.incomplete")
    return sum(not path.name.startswith(".") for path in folder.glob("work-*/*"))


def differing(one: Path, other: Path) -> list[str]:
    """Names of files that two stores do not both have, or with other bytes."""
    names = {path.relative_to(store) for store in (one, other) for path in store.rglob("*") if not path.is_dir()}
    assert len(names) > 12
    _, unlike, missing = filecmp.cmpfiles(one, other, map(str, names), shallow=False)
    return sorted(unlike + missing)
