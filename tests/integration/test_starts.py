"""Starting is boring: every one of many starts of four ranks is good, however busy the machine is."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.forked_runs import ForkedRuns

RANKS = 4


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Run so many endless loops beside the body."""
    loops = [multiprocessing.get_context("spawn").Process(target=_spin, daemon=True) for _ in range(processes)]
    for loop in loops:
        loop.start()
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()


def _spin() -> None:
    while True:
        pass


def bad_starts(forked: ForkedRuns, folder: Path, starts: int, engine: str, *arguments: object, script: str = "") -> str:
    """Return the exit codes and logs of the starts in which a rank did not end well."""
    bad = []
    for number in range(starts):
        log = folder / f"{number}.log"
        given = [*arguments, f"run.dir={folder / str(number)}"] if arguments else []
        pids = forked.start(engine, given, RANKS, log, script)
        codes = forked.wait(pids)
        if [codes.get(pid) for pid in pids] != [0] * RANKS:
            bad.append(f"start {number}: {list(codes.values())}\n{log.read_text()[-2000:]}")
            forked.kill(pids)
    return "\n".join(bad)


@pytest.mark.slow
def test_a_hundred_groups_of_four_ranks_on_a_busy_machine(forked: ForkedRuns, tmp_path: Path) -> None:
    with busy(8):
        assert not bad_starts(forked, tmp_path, 100, "ddp", script="joined_rank.py")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_fifty_runs_of_four_ranks_on_a_busy_machine(
    engine: str, parity_config: Path, forked: ForkedRuns, tmp_path: Path
) -> None:
    settings = ("train.steps=1", "train.micro_batch_size=1", "validation.every=0", "checkpoint.every_steps=0")
    with busy(8):
        assert not bad_starts(forked, tmp_path, 50, engine, parity_config, *settings)
