"""A run killed at random times loses only the steps since its last checkpoint."""

from __future__ import annotations

import random
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mmldlm.checkpoint.manifest import verify_checkpoint
from mmldlm.checkpoint.retention import Retention
from mmldlm.checkpoint.store import CheckpointStore
from tests.helpers.engine_runs import CURVE
from tests.helpers.forked_runs import ForkedRuns
from tests.helpers.metrics import read_metrics
from tests.helpers.tiny_config import TINY
from tests.helpers.waiting import TEST_TIMEOUT_S

STEPS, EVERY = 60, 3
SETTINGS = (
    f"train.steps={STEPS}",
    f"checkpoint.every_steps={EVERY}",
    "validation.every=0",
    "data.num_workers=0",
    "distributed.timeout_s=5",
)
PEER_LOST = 76
VARIANTS = [(asynchronous, last) for asynchronous in (True, False) for last in (1, 3)]


@dataclass
class Toll:
    """Counts of the kills of one engine."""

    engine: str
    kills: int = 0
    inside: int = 0  # with a checkpoint in the making
    alone: int = 0  # of one rank, whose peer then ended by itself
    starts: int = 0
    runs: int = 0
    lost: int = 0  # steps, at most
    noticed_s: float = 0.0  # from the death of a rank to the end of its peer, at most
    began: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.engine}: {self.kills} kills ({self.alone} of one rank), {self.inside} inside saves, "
            f"{self.starts} starts for {self.runs} runs, at most {self.lost} steps lost, peers gone after at most "
            f"{self.noticed_s:.1f} s, {time.monotonic() - self.began:.0f} s in all"
        )


class KilledRun:
    """One run folder, and the attempts to get its run to the end."""

    def __init__(self, runs: ForkedRuns, engine: str, config: Path, folder: Path, asynchronous: bool, last: int):
        self.runs, self.engine, self.folder = runs, engine, folder
        self.processes = {"single": 1, "fsdp2_hsdp": 4}.get(engine, 2)
        self.store = CheckpointStore(folder / "checkpoints", Retention(last=last))
        self.may_lose = 2 * EVERY if asynchronous else EVERY  # the save in flight and the steps since
        how = [f"checkpoint.async={str(asynchronous).lower()}", f"checkpoint.keep_last={last}"]
        self.command = [config, f"run.dir={folder}", *SETTINGS, *how]
        self.log = folder.with_suffix(".log")
        self.safe = 0  # step of the newest checkpoint

    def start(self) -> list[int]:
        return self.runs.start(self.engine, self.command, self.processes, self.log)

    def to_the_end(self) -> None:
        codes = self.runs.wait(self.start())
        assert set(codes.values()) == {0}, self._story(codes)

    def kill_once(self, draw: random.Random, span: float, toll: Toll) -> bool:
        """Start the run and kill it within `span` seconds after its first step, or in the save that follows.

        Returns whether it was complete before.
        """
        started, pids = time.time(), self.start()
        toll.starts += 1
        early = draw.random() < 0.1  # while it starts, where a lone survivor would wait for its peer to appear
        if not early:
            self._await_step(started, pids)
        time.sleep(draw.random() * span)
        if not early and draw.random() < 0.5:
            self._await_save(pids)
        victims = pids if early or draw.random() < 0.6 else [draw.choice(pids)]
        self.runs.kill(victims)
        struck, inside = time.monotonic(), any(self.store.folder.glob(".tmp-*"))
        codes = self.runs.wait(pids)
        assert codes.keys() == set(pids), f"still running: {self._story(codes)}"
        if -signal.SIGKILL in codes.values():
            toll.kills += 1
            toll.inside += inside
        gone_s = time.monotonic() - struck
        self._check(toll)
        for pid, code in codes.items():
            done = self.safe == STEPS and code == 0
            assert done or code == (-signal.SIGKILL if pid in victims else PEER_LOST), self._story(codes)
        if PEER_LOST in codes.values():
            toll.alone += 1
            toll.noticed_s = max(toll.noticed_s, gone_s)
        return set(codes.values()) == {0}

    def _check(self, toll: Toll) -> None:
        """Every checkpoint is whole, and the newest as recent as it has to be."""
        result = [verify_checkpoint(path).step for path in self.store.paths()]
        newest = max(result, default=0)
        last = max((record["step"] for record in self.records()), default=0)
        assert not list(self.store.folder.glob("damaged-*"))
        assert self.safe <= newest and last - newest <= self.may_lose, self._story((self.safe, result, last))
        self.safe = newest
        toll.lost = max(toll.lost, last - newest)

    def _await_step(self, started: float, pids: list[int]) -> None:
        """Wait until this attempt has done a step or has ended."""
        deadline = time.monotonic() + TEST_TIMEOUT_S
        while not any(record["time"] > started for record in self.records()[-1:]):
            if len(self.runs.wait(pids, 0.01)) == len(pids):
                return
            assert time.monotonic() < deadline, self._story(pids)

    def _await_save(self, pids: list[int]) -> None:
        """Wait until a checkpoint is being written or this attempt has ended."""
        deadline = time.monotonic() + TEST_TIMEOUT_S
        while not any(self.store.folder.glob(".tmp-*")):
            if len(self.runs.wait(pids, 0.001)) == len(pids):
                return
            assert time.monotonic() < deadline, self._story(pids)

    def records(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        return [record for record in read_metrics(path) if record["kind"] == "train"] if path.exists() else []

    def outcome(self) -> tuple[list[list[float]], dict[str, bytes]]:
        """All that two runs must have in common to the bit: the curve in the order of the file, the last state."""
        newest = self.store.newest(repair=False)
        assert newest is not None and newest.step == STEPS
        files = {name: newest.file(name).read_bytes() for name in newest.files if name != "config.yaml"}
        return [[record["step"], *(record[key] for key in CURVE)] for record in self.records()], files

    def _story(self, facts: object) -> str:
        return f"{self.folder.name}: {facts}\n{self.log.read_text()[-4000:]}"


def kill_runs(runs: ForkedRuns, engine: str, kills: int, folder: Path, store: Path, span: float) -> Toll:
    """Drive runs through this number of kills; each must end like an undisturbed run."""
    config = folder / "config.yaml"
    config.write_text(TINY.format(run=folder, store=store))
    draw, toll = random.Random(engine), Toll(engine, began=time.monotonic())
    reference = KilledRun(runs, engine, config, folder / "reference", False, 1)
    reference.to_the_end()
    curve, files = reference.outcome()
    assert [row[0] for row in curve] == list(range(1, STEPS + 1))
    while toll.kills < kills:
        variant = VARIANTS[toll.runs % len(VARIANTS)]
        run = KilledRun(runs, engine, config, folder / f"run{toll.runs}", *variant)
        while toll.kills < kills and not run.kill_once(draw, span, toll):
            pass
        run.to_the_end()  # which a complete one reaches without a step
        assert run.outcome() == (curve, files), run.folder
        shutil.rmtree(run.folder)
        toll.runs += 1
    return toll


def test_kills_of_two_ranks(
    forked: ForkedRuns, tmp_path: Path, tiny_store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toll = kill_runs(forked, "ddp", 9, tmp_path, tiny_store, span=0.5)
    with capsys.disabled():
        print(f"\n{toll}")
    assert toll.inside and toll.alone


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "kills", "span"),
    [
        ("ddp", 2000, 0.5),
        ("single", 50, 0.5),
        ("fsdp2", 50, 3),
        ("fsdp2_hsdp", 50, 5),
        ("zero2", 50, 5),
        ("zero3", 50, 5),
    ],
)
def test_many_kills(
    engine: str,
    kills: int,
    span: float,
    forked: ForkedRuns,
    tmp_path: Path,
    tiny_store: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    toll = kill_runs(forked, engine, kills, tmp_path, tiny_store, span)
    with capsys.disabled():
        print(f"\n{toll}")
    # The starts of the others are long compared with their saves.
    assert toll.inside > (kills / 10 if engine == "ddp" else 0)
