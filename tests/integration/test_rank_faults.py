"""A rank that is stopped, is killed or raises ends the run on all ranks, with its cause; no process is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.engine_runs import CURVE, accelerate, exit_record, records, some, wait_for_step
from tests.helpers.forked_runs import ForkedRuns
from tests.helpers.waiting import TEST_TIMEOUT_S

SCRIPT = "faulty_rank.py"
ENDLESS = ["distributed.timeout_s=5", "train.steps=100000", "validation.every=0", "checkpoint.every_steps=0"]

# What the ranks may be waiting for in this run, as `in_collective` names it.
COLLECTIVES = (
    "all-reduce of the step's counts",
    "all-reduce of the losses to log",
    "numbers of the last steps",
    "forward: gather of the parameters",
    "backward: reduction of the gradients",
    "norm of the gradients",
    "optimizer step: overflow, norm and new parameters",
)


def pids(folder: Path) -> list[int]:
    return [rank["pid"] for rank in json.loads((folder / "startup.json").read_text())["ranks"]]


@pytest.mark.parametrize(
    ("engine", "fault"),
    [
        ("ddp", signal.SIGSTOP),
        ("fsdp2", signal.SIGKILL),
        pytest.param("ddp", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("fsdp2", signal.SIGSTOP, marks=pytest.mark.slow),
        *(pytest.param("zero2", each, marks=pytest.mark.slow) for each in (signal.SIGSTOP, signal.SIGKILL)),
    ],
)
def test_stopped_or_killed_rank(
    engine: str,
    fault: signal.Signals,
    parity_config: Path,
    tmp_path: Path,
    two_ranks: Callable[..., list[int]],
    forked: ForkedRuns,
) -> None:
    folder = tmp_path / "run"
    ranks = two_ranks(engine, parity_config, f"run.dir={folder}", *ENDLESS)
    wait_for_step(folder, 3, tmp_path / "log", lambda: forked.wait(ranks, 0))
    assert pids(folder) == ranks
    os.kill(ranks[1], fault)
    assert forked.wait(ranks) == {ranks[0]: 76, ranks[1]: -signal.SIGKILL}
    record = exit_record(folder)
    assert record["code"] == 76 and record["rank"] == 0, record
    assert "rank 1" in str(record["cause"]) and "step" in str(record["cause"]), record
    assert any(collective in str(record["cause"]) for collective in COLLECTIVES), record
    stacks = (folder / "stacks.rank0.txt").read_text()
    assert "mmldlm/train.py" in stacks and any(collective in stacks for collective in COLLECTIVES)


@pytest.mark.parametrize("fault", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("engine", "variables"),
    [("fsdp2_hsdp", {}), pytest.param("zero3_hpz", {"LOCAL_WORLD_SIZE": "2"}, marks=pytest.mark.slow)],
)
def test_stopped_or_killed_rank_of_a_group(
    engine: str,
    variables: dict[str, str],
    fault: signal.Signals,
    parity_config: Path,
    forked: ForkedRuns,
    tmp_path: Path,
) -> None:
    """The ranks of both groups end, also those that exchange nothing with the lost one."""
    folder = tmp_path / "run"
    # More processes than cores: the timeout of a collective allows for other work on the machine.
    given = [parity_config, f"run.dir={folder}", *ENDLESS[1:], "distributed.timeout_s=30", "train.micro_batch_size=1"]
    ranks = forked.start(engine, given, 4, tmp_path / "log", **variables)
    try:
        wait_for_step(folder, 3, tmp_path / "log", lambda: forked.wait(ranks, 0))
        os.kill(ranks[3], fault)
        assert forked.wait(ranks) == {**dict.fromkeys(ranks[:3], 76), ranks[3]: -signal.SIGKILL}
    finally:
        forked.kill(ranks)
    record = exit_record(folder)
    assert record["code"] == 76 and "rank 3" in str(record["cause"]) and "step" in str(record["cause"]), record


@pytest.mark.parametrize("engine", ["ddp", "zero2", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_a_rank_that_raises(
    engine: str, parity_config: Path, tmp_path: Path, two_ranks: Callable[..., list[int]], forked: ForkedRuns
) -> None:
    folder = tmp_path / "run"
    fault = {"FAULT": "raise", "FAULT_STEP": "5"}
    ranks = two_ranks(engine, parity_config, f"run.dir={folder}", *ENDLESS, script=SCRIPT, **fault)
    assert forked.wait(ranks) == {ranks[0]: 76, ranks[1]: 1}, (tmp_path / "log").read_text()[-3000:]
    first, other = exit_record(folder), exit_record(folder, "exit.rank0.json")
    assert first["rank"] == 1 and first["code"] == 1 and "planted in the data" in str(first["cause"])
    assert other["code"] == 76 and "rank 1" in str(other["cause"]) and "planted in the data" in str(other["cause"])


def test_a_rank_that_cannot_build_its_engine(
    parity_config: Path, tmp_path: Path, two_ranks: Callable[..., list[int]], forked: ForkedRuns
) -> None:
    """Other nodes learn of it though there is no engine yet, and no run folder."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nfrom tests.helpers.trainer_scripts import train_and_exit\n"
        "if os.environ['RANK'] == '1':\n    sys.modules['mmldlm.distributed.fsdp2'] = None\ntrain_and_exit()\n"
    )
    ranks = two_ranks("fsdp2", parity_config, f"run.dir={tmp_path / 'run'}", *ENDLESS, script=str(script))
    assert forked.wait(ranks) == {ranks[0]: 76, ranks[1]: 1}, (tmp_path / "log").read_text()[-3000:]
    assert "error: rank 1 ended with exit code 1 at step 0: ModuleNotFoundError" in (tmp_path / "log").read_text()


def test_a_rank_that_hangs_outside_of_collectives(
    parity_config: Path, tmp_path: Path, two_ranks: Callable[..., list[int]], forked: ForkedRuns
) -> None:
    folder = tmp_path / "run"
    fault = {"FAULT": "hang", "FAULT_STEP": "5"}
    ranks = two_ranks("ddp", parity_config, f"run.dir={folder}", *ENDLESS, script=SCRIPT, **fault)
    assert forked.wait(ranks) == dict.fromkeys(ranks, 76), (tmp_path / "log").read_text()[-3000:]
    assert "rank 1" in str(exit_record(folder)["cause"]) and exit_record(folder)["code"] == 76
    # The stack of the rank that hung says where.
    assert "faulty_rank.py" in (folder / "stacks.rank1.txt").read_text()


@pytest.mark.parametrize("engine", some("ddp", "fsdp2"))
def test_nonfinite_numbers_on_one_rank(engine: str, parity_config: Path, forked: ForkedRuns, tmp_path: Path) -> None:
    """All ranks skip that step and continue: the weights stay finite and equal to those of a run without it."""
    folder, fault = tmp_path / "run", {"FAULT": "nan", "FAULT_STEP": "3"}
    forked.succeed(engine, folder, 2, parity_config, "train.steps=6", "validation.every=0", script=SCRIPT, **fault)
    result = records(folder)
    assert sorted(result) == [1, 2, 3, 5, 6] and result[6]["health/skipped_steps"] == 1
    assert list(records(folder, "skip")) == [4]
    assert all(abs(result[step][key]) < float("inf") for step in result for key in CURVE)


@pytest.mark.slow
def test_elastic_restart_resumes(
    parity_config: Path,
    single: Callable[..., Path],
    forked: ForkedRuns,
    tmp_path: Path,
    started: Callable[..., subprocess.Popen[bytes]],
) -> None:
    """`--max_restarts` with `resume: auto`: a killed rank costs the steps since the last checkpoint, no more."""
    folder, settings = tmp_path / "run", ("train.steps=40", "checkpoint.every_steps=2", "validation.every=0")
    command = accelerate("ddp", 2, parity_config, f"run.dir={folder}", *settings, "distributed.timeout_s=20")
    command[2:2] = ["--max_restarts", "1", "--monitor_interval", "1"]
    process = started(command)
    wait_for_step(folder, 9, tmp_path / "log", lambda: process.poll() is not None)
    os.kill(pids(folder)[1], signal.SIGKILL)
    assert process.wait(TEST_TIMEOUT_S) == 0, (tmp_path / "log").read_text()[-3000:]
    ours, theirs = records(folder), records(single(*settings))
    assert list(ours) == list(range(1, 41)) == list(theirs)
    assert max(abs(ours[s][key] / theirs[s][key] - 1) for s in ours for key in CURVE) < 1e-5
    assert records(folder, "resume") and exit_record(folder)["code"] == 0
    forked.succeed("ddp", folder, 2, parity_config, *settings)  # which has nothing left to do
