"""A rank that is stopped, killed or raises ends the run on all ranks, with its cause; nothing is left running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from engine_runs import (
    CURVE,
    ENGINES,
    ROOT,
    accelerate,
    environment,
    exit_record,
    records,
    run,
    succeed,
    wait_for_step,
    with_script,
)

TIMEOUT_S = 5
ENDLESS = [f"distributed.timeout_s={TIMEOUT_S}", "train.steps=100000", "validation.every=0", "checkpoint.every_steps=0"]

# What the ranks may be waiting for in this run, as `Runtime.waiting` names it.
COLLECTIVES = (
    "all-reduce of the step's counts",
    "all-reduce of the losses to log",
    "all-reduce of the counts to log",
    "forward: gather of the parameters",
    "agreement on the loss",
    "backward: reduction of the gradients",
    "norm of the gradients",
    "optimizer step: overflow, norm and new parameters",
)


def script(command: list[str]) -> list[str]:
    """The same launch with a faulty rank."""
    return with_script(command, "faulty_rank.py")


def pids(folder: Path) -> list[int]:
    return [rank["pid"] for rank in json.loads((folder / "startup.json").read_text())["ranks"]]


def alive(pid: int) -> bool:
    with suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def seconds_until_gone(wanted: list[int], limit: float) -> float:
    began = time.monotonic()
    while any(alive(pid) for pid in wanted):
        assert time.monotonic() - began < limit, f"still running after {limit} s: {[p for p in wanted if alive(p)]}"
        time.sleep(0.05)
    return time.monotonic() - began


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero2"])
@pytest.mark.parametrize("fault", ["SIGSTOP", "SIGKILL"])
def test_a_stopped_or_killed_rank(
    engine: str, fault: str, parity_config: Path, tmp_path: Path, started: Callable[..., subprocess.Popen[bytes]]
) -> None:
    folder = tmp_path / "run"
    process = started(accelerate(engine, 2, parity_config, f"run.dir={folder}", *ENDLESS))
    wait_for_step(folder, 3, process, tmp_path / "log")
    ranks = pids(folder)
    os.kill(ranks[1], getattr(signal, fault))
    seconds_until_gone([ranks[0]], TIMEOUT_S + 5)
    seconds_until_gone(ranks, 3)
    record = exit_record(folder)
    assert record["code"] == 76 and record["rank"] == 0, record
    assert "rank 1" in str(record["cause"]) and "step" in str(record["cause"]), record
    assert any(collective in str(record["cause"]) for collective in COLLECTIVES), record
    stacks = (folder / "stacks.rank0.txt").read_text()
    assert "mmldlm/train.py" in stacks and any(collective in stacks for collective in COLLECTIVES)
    assert process.wait(timeout=40) != 0
    assert not [child for child in psutil.Process().children(recursive=True) if child.pid in ranks]


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero2"])
def test_a_rank_that_raises(
    engine: str, parity_config: Path, tmp_path: Path, started: Callable[..., subprocess.Popen[bytes]]
) -> None:
    folder = tmp_path / "run"
    command = script(accelerate(engine, 2, parity_config, f"run.dir={folder}", *ENDLESS))
    process = started(command, FAULT="raise", FAULT_STEP="5")
    wait_for_step(folder, 5, process, tmp_path / "log")
    seconds_until_gone(pids(folder), TIMEOUT_S + 5)
    first, other = exit_record(folder), exit_record(folder, "exit.rank0.json")
    assert first["rank"] == 1 and first["code"] == 1 and "planted in the data" in str(first["cause"])
    assert other["code"] == 76 and "rank 1" in str(other["cause"]) and "planted in the data" in str(other["cause"])
    assert process.wait(timeout=40) != 0


def test_a_rank_that_hangs_outside_of_collectives(
    parity_config: Path, tmp_path: Path, started: Callable[..., subprocess.Popen[bytes]]
) -> None:
    folder = tmp_path / "run"
    command = script(accelerate("ddp", 2, parity_config, f"run.dir={folder}", *ENDLESS))
    process = started(command, FAULT="hang", FAULT_STEP="5")
    wait_for_step(folder, 5, process, tmp_path / "log")
    ranks = pids(folder)
    seconds_until_gone(ranks, TIMEOUT_S + 6)
    assert "rank 1" in str(exit_record(folder)["cause"]) and exit_record(folder)["code"] == 76
    # The stack of the rank that hung says where.
    assert "faulty_rank.py" in (folder / "stacks.rank1.txt").read_text()


@pytest.mark.parametrize("engine", ENGINES)
def test_numbers_that_are_not_finite_on_one_rank(engine: str, parity_config: Path, tmp_path: Path) -> None:
    """All ranks skip that step and go on together: the weights stay finite and equal to those of a run without it."""
    folder = tmp_path / "run"
    command = script(accelerate(engine, 2, parity_config, f"run.dir={folder}", "train.steps=6", "validation.every=0"))
    done = run(command, env=environment(PYTHONPATH=str(ROOT), FAULT="nan", FAULT_STEP="3"))
    assert done.returncode == 0, done.stdout[-3000:]
    found = records(folder)
    assert sorted(found) == [1, 2, 3, 5, 6] and found[6]["health/skipped_steps"] == 1
    assert list(records(folder, "skip")) == [4]
    assert all(abs(found[step][key]) < float("inf") for step in found for key in CURVE)


def test_an_elastic_restart_goes_on(
    parity_config: Path, single: Callable[..., Path], tmp_path: Path, started: Callable[..., subprocess.Popen[bytes]]
) -> None:
    """`--max_restarts` with `resume: auto`: a killed rank costs the steps since the last checkpoint, no more."""
    folder, settings = tmp_path / "run", ("train.steps=40", "checkpoint.every_steps=2", "validation.every=0")
    command = accelerate("ddp", 2, parity_config, f"run.dir={folder}", *settings, "distributed.timeout_s=20")
    command[2:2] = ["--max_restarts", "1", "--monitor_interval", "1"]
    process = started(command)
    wait_for_step(folder, 9, process, tmp_path / "log")
    os.kill(pids(folder)[1], signal.SIGKILL)
    assert process.wait(timeout=120) == 0, (tmp_path / "log").read_text()[-3000:]
    ours, theirs = records(folder), records(single(*settings))
    assert list(ours) == list(range(1, 41)) == list(theirs)
    assert max(abs(ours[s][key] / theirs[s][key] - 1) for s in ours for key in CURVE) < 1e-5
    assert records(folder, "resume") and exit_record(folder)["code"] == 0
    assert succeed(accelerate("ddp", 2, parity_config, f"run.dir={folder}", *settings))
