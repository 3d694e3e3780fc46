"""Ends of a run that come from outside: a closed terminal, a killed launcher, lost output, a moved run folder."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.helpers.engine_runs import accelerate, deepspeed, environment, exit_record, records, torchrun, wait_for_step
from tests.helpers.forked_runs import ForkedRuns
from tests.helpers.metrics import read_metrics
from tests.helpers.paths import ROOT
from tests.helpers.user_errors import assert_user_error
from tests.helpers.waiting import TEST_TIMEOUT_S, wait_until

Started = Callable[..., "subprocess.Popen[bytes]"]

ENDLESS = ("train.steps=1000000", "validation.every=0", "checkpoint.every_steps=0", "schedule.lr=constant")
TRAIN = [sys.executable, "-m", "mmldlm.train"]


def launch_commands(config: Path, *settings: str) -> dict[str, list[str]]:
    arguments = [config, *ENDLESS, *settings]
    return {
        "python": [*TRAIN, *map(str, arguments)],
        "accelerate": accelerate("ddp", 2, *arguments),
        "accelerate, one process": accelerate("ddp", 1, *arguments),
        "torchrun": torchrun(2, *arguments),
        "deepspeed": deepspeed(2, *arguments, "--deepspeed_config", "ds_configs/zero2.json"),
    }


def last_step(run: Path) -> int:
    return max(records(run), default=0)


def assert_saved(run: Path, cause: str) -> None:
    """All ranks have ended with a checkpoint of the last step, and the folder is free."""
    wait_until(lambda: (run / "exit.json").exists() and not (run / "run.lock").read_text(), "the end of the run")
    record = exit_record(run)
    assert record["code"] == 75 and cause in str(record["cause"]), record
    (checkpoint,) = (run / "checkpoints").glob("step-*")
    assert int(checkpoint.name.removeprefix("step-")) == record["step"] == last_step(run)


# --- signals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "launcher",
    # SIGHUP that a launcher forwards, and one that it ignores: test_nohup_is_respected of test_launch_node.py.
    ["python", *(pytest.param(name, marks=pytest.mark.slow) for name in ("accelerate", "deepspeed", "torchrun"))],
)
def test_a_hangup_saves(launcher: str, tiny_config: Path, tmp_path: Path, started: Started) -> None:
    """As a shell whose terminal is closed sends it: to all processes of the job, twice."""
    process = started(launch_commands(tiny_config, "data.num_workers=1")[launcher])
    wait_for_step(tmp_path / "run", 2, tmp_path / "log", lambda: process.poll() is not None)
    for _ in range(2):
        os.killpg(process.pid, signal.SIGHUP)
    process.wait(TEST_TIMEOUT_S)
    assert_saved(tmp_path / "run", "stopped by")
    if launcher == "python":
        assert process.returncode == 75 and "Traceback" not in (tmp_path / "log").read_text()


def test_nohup_is_respected(tiny_config: Path, tmp_path: Path, started: Started) -> None:
    process, run = started(["nohup", *launch_commands(tiny_config)["python"]]), tmp_path / "run"
    wait_for_step(run, 1, tmp_path / "log", lambda: process.poll() is not None)
    process.send_signal(signal.SIGHUP)
    wait_for_step(run, last_step(run) + 5, tmp_path / "log", lambda: process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    assert process.wait(TEST_TIMEOUT_S) == 75
    assert_saved(run, "stopped by SIGTERM")


@pytest.mark.parametrize(
    ("number", "command"),
    [
        (signal.SIGHUP, "mmldlm.evaluate {run} --samples 100000 --times 1000 --out {out}"),
        (signal.SIGTERM, "mmldlm.cli sample {run} --mode joint -n 100000 --out {out}/texts.jsonl"),
    ],
    ids=["evaluate", "sample"],
)
def test_other_commands_end_in_one_line(
    command: str, number: signal.Signals, short_run_dir: Path, tmp_path: Path, started: Started
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    process = started([sys.executable, "-m", *command.format(run=short_run_dir, out=out).split()])
    wait_until(lambda: bool((tmp_path / "log").read_text() or [*out.iterdir()]), "the begin of the work")
    os.killpg(process.pid, number)
    assert process.wait(TEST_TIMEOUT_S) == 75
    assert_user_error((75, (tmp_path / "log").read_text()), 75, f"stopped by {number.name}", alone=False)


def test_a_closed_terminal_saves(tiny_config: Path, tmp_path: Path) -> None:
    """The kernel sends SIGHUP, and whatever is written to the terminal from then on is an error (EIO)."""
    terminal, end = pty.openpty()
    process = subprocess.Popen(
        launch_commands(tiny_config)["python"],
        cwd=ROOT,
        env=environment(),
        stdin=end,
        stdout=end,
        stderr=end,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(end)
    run = tmp_path / "run"
    while last_step(run) < 2 if (run / "metrics.jsonl").exists() else True:
        os.read(terminal, 1 << 16)
    os.close(terminal)
    assert process.wait(TEST_TIMEOUT_S) == 75
    assert_saved(run, "stopped by SIGHUP")


# --- the launcher -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "launcher",
    [
        "accelerate",
        pytest.param("deepspeed", marks=pytest.mark.slow),
        pytest.param("torchrun", marks=pytest.mark.slow),
        pytest.param("accelerate, one process", marks=pytest.mark.slow),
    ],
)
def test_ranks_save_and_end_when_their_launcher_is_killed(
    launcher: str, tiny_config: Path, tmp_path: Path, started: Started
) -> None:
    process, run = started(launch_commands(tiny_config, "data.num_workers=1")[launcher]), tmp_path / "run"
    wait_for_step(run, 2, tmp_path / "log", lambda: process.poll() is not None)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    left = psutil.wait_procs(children, timeout=TEST_TIMEOUT_S)[1]
    for child in left:
        child.kill()
    assert not left, (tmp_path / "log").read_text()[-3000:]
    assert_saved(run, "the end of its launcher")


# --- lost output ------------------------------------------------------------------------------------------


def without_output(command: list[str], lost: str) -> int:
    """Run a command whose reader has gone before it begins, or whose standard streams are closed."""

    def close() -> None:
        for number in (0, 1, 2):
            os.close(number)

    reader, writer = os.pipe()
    os.close(reader)
    hook = close if lost == "closed" else None
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), stdout=writer, stderr=writer, preexec_fn=hook, timeout=TEST_TIMEOUT_S
    )
    os.close(writer)
    return done.returncode


@pytest.mark.parametrize("lost", [pytest.param("pipe", marks=pytest.mark.slow), "closed"])
def test_training_goes_on_without_output(lost: str, tiny_config: Path, tmp_path: Path) -> None:
    assert without_output([sys.executable, "-m", "mmldlm.cli", "train", str(tiny_config)], lost) == 0
    assert last_step(tmp_path / "run") == 8 and exit_record(tmp_path / "run")["code"] == 0
    for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines():
        json.loads(line)


def test_evaluate_goes_on_without_output(short_run_dir: Path, tmp_path: Path) -> None:
    sizes = ["--samples", "4", "--texts", "1", "--times", "1", "--out", str(tmp_path)]
    assert without_output([sys.executable, "-m", "mmldlm.evaluate", str(short_run_dir), *sizes], "pipe") == 0
    assert json.loads((tmp_path / "evaluation.json").read_text())


def test_prepare_goes_on_without_output(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("".join(f"a text of number {number}\n" for number in range(200)))
    command = [sys.executable, "-m", "mmldlm.cli", "prepare", str(tmp_path / "corpus.txt"), "--out"]
    assert without_output([*command, str(tmp_path / "store")], "closed") == 0
    assert (tmp_path / "store/manifest.json").exists()


# --- the run folder ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("replaced", [False, True])
def test_a_run_folder_that_is_moved(replaced: bool, tiny_config: Path, tmp_path: Path, forked: ForkedRuns) -> None:
    run, moved = tmp_path / "run", tmp_path / "moved"
    given = [tiny_config, *ENDLESS, "log.tensorboard=true", "checkpoint.every_steps=5"]
    pids = forked.start("single", given, 1, tmp_path / "log")
    wait_for_step(run, 2, tmp_path / "log", lambda: forked.wait(pids, 0))
    run.rename(moved)
    if replaced:
        run.mkdir()
    assert forked.wait(pids) == dict.fromkeys(pids, 74)
    lines = (tmp_path / "log").read_text().splitlines()
    assert_user_error((74, lines[-1]), 74, str(run), "moved or deleted")
    assert "Traceback" not in "".join(lines)
    assert not list(run.iterdir()) if replaced else not run.exists()
    assert not (moved / "exit.json").exists() and read_metrics(moved / "metrics.jsonl")


@pytest.mark.slow
def test_a_run_folder_of_two_ranks_that_is_deleted(
    tiny_config: Path, tmp_path: Path, two_ranks: Callable[..., list[int]], forked: ForkedRuns
) -> None:
    pids = two_ranks("ddp", tiny_config, *ENDLESS, "checkpoint.every_steps=3")
    run = tmp_path / "run"
    wait_for_step(run, 4, tmp_path / "log", lambda: False)
    run.rename(tmp_path / "moved")
    shutil.rmtree(tmp_path / "moved")
    codes = forked.wait(pids)
    # Both at the checkpoint that is being written, or rank 0 at its next record.
    assert codes[pids[0]] == 74 and codes[pids[1]] in (74, 76), (tmp_path / "log").read_text()[-3000:]
    assert not run.exists() and "Traceback" not in (tmp_path / "log").read_text()
