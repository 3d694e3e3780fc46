"""scripts/launch_node.sh on one machine: refused variables, log, exit code, signals and restarts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.helpers.metrics import read_metrics
from tests.helpers.paths import ROOT
from tests.helpers.ports import free_port
from tests.helpers.two_nodes import LAUNCH, environment
from tests.helpers.waiting import TEST_TIMEOUT_S, wait_until


def launch(logs: Path, arguments: Sequence[object], cwd: Path = ROOT, **variables: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*LAUNCH, *map(str, arguments)],
        env=environment(logs, **{"MASTER_PORT": free_port(), **variables}),
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def kinds(run: Path, kind: str) -> list[int]:
    path = run / "metrics.jsonl"
    return [record["step"] for record in read_metrics(path) if record["kind"] == kind] if path.exists() else []


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def alive(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that still exist and are not zombies."""
    return [result for result in processes if state(result) not in ("", psutil.STATUS_ZOMBIE)]


def state(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        return process.status()
    return ""


def is_check(process: psutil.Process) -> bool:
    with suppress(psutil.Error):  # it has ended since it was found
        return "--check" in process.cmdline()
    return False


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ([], {}, "expected ENGINE CONFIG.yaml [key.sub=value ...] [--check], found ''"),
        (["ddp"], {}, "expected ENGINE CONFIG.yaml [key.sub=value ...] [--check], found 'ddp'"),
        (["dpp", "CONFIG"], {}, "ENGINE: expected one of cpu ddp fsdp2 fsdp2_hsdp"),
        (["ddp", "/nowhere.yaml"], {}, "CONFIG.yaml: no such file: /nowhere.yaml"),
        (["ddp", "CONFIG"], {"NPROC_PER_NODE": ""}, "NPROC_PER_NODE is not set; expected NPROC_PER_NODE"),
        (["ddp", "CONFIG"], {"NPROC_PER_NODE": "08"}, "NPROC_PER_NODE: expected a whole number from 1 to"),
        (["ddp", "CONFIG"], {"NNODES": 2}, "NODE_RANK is not set; expected NPROC_PER_NODE NODE_RANK MASTER_ADDR"),
        (["ddp", "CONFIG"], {"NNODES": 2, "NODE_RANK": 0}, "MASTER_ADDR is not set"),
        (["ddp", "CONFIG"], {"NNODES": 2, "NODE_RANK": 2, "MASTER_ADDR": "a"}, "NODE_RANK: expected a whole number"),
        (["ddp", "CONFIG"], {"DOCTOR": "skip"}, "DOCTOR is gone, use NODE_CHECK=skip"),
        (["ddp", "CONFIG"], {"PYTHON": "/nowhere/python"}, "PYTHON: /nowhere/python cannot be run"),
    ],
)
def test_missing_variables_are_refused(
    tiny_config: Path, tmp_path: Path, arguments: list[str], variables: dict[str, object], message: str
) -> None:
    given = [tiny_config if argument == "CONFIG" else argument for argument in arguments]
    process = launch(tmp_path / "logs", given, **{"NPROC_PER_NODE": 2, **variables})
    out, _ = process.communicate(timeout=TEST_TIMEOUT_S)
    assert process.returncode == 2 and out.startswith(f"launch_node: error: {message}") and out.count("\n") == 1, out
    assert not (tmp_path / "logs").exists()


def test_a_failed_check_ends_the_launch(tiny_config: Path, tmp_path: Path) -> None:
    process = launch(tmp_path / "logs", ["ddp", tiny_config, "data.path=/nowhere"], NPROC_PER_NODE=2)
    out, _ = process.communicate(timeout=TEST_TIMEOUT_S)
    assert process.returncode == 65 and "FAIL  data store" in out
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_run_is_logged_stopped_and_resumed(tiny_config: Path, tmp_path: Path) -> None:
    """Started from another folder, with a relative path, as users do."""
    run, arguments = tmp_path / "run", ["ddp", tiny_config.name, "train.steps=300", "validation.every=0"]
    process = launch(tmp_path / "logs", arguments, tmp_path, NPROC_PER_NODE=2)
    wait_until(lambda: bool(kinds(run, "train")), "a step")
    processes = descendants(process)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=TEST_TIMEOUT_S)
    assert process.returncode == 1  # the launcher's; the run's own is in exit.json
    assert json.loads((run / "exit.json").read_text())["code"] == 75
    wait_until(lambda: not alive(processes), "the end of all processes")
    log = (tmp_path / "logs" / "node0.log").read_text()
    assert log == out and "stopped by SIGTERM" in log and "\nready" in log
    header = log.splitlines()[0]
    assert header.startswith("==> ") and " node 0 of 1 on " in header and header.endswith(f"{' '.join(arguments[1:])}")

    stopped_at = kinds(run, "train")[-1]
    place = {"NPROC_PER_NODE": 2, "NODE_CHECK": "skip"}
    process = launch(tmp_path / "logs", [*arguments, f"train.steps={stopped_at + 2}"], tmp_path, **place)
    out, _ = process.communicate(timeout=TEST_TIMEOUT_S)
    assert process.returncode == 0, out
    assert kinds(run, "train") == list(range(1, stopped_at + 3)) and kinds(run, "resume") == [stopped_at]
    assert (tmp_path / "logs" / "node0.log").read_text() == log + out


def test_nohup_is_respected(tiny_config: Path, tmp_path: Path) -> None:
    """Though the launcher forwards SIGHUP, which it does not ignore."""
    run, arguments = tmp_path / "run", ["ddp", tiny_config, "train.steps=100000", "validation.every=0"]
    place = {"NPROC_PER_NODE": 2, "NODE_CHECK": "skip", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": 1}
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = launch(tmp_path / "logs", arguments, **place)
    finally:
        signal.signal(signal.SIGHUP, previous)
    wait_until(lambda: bool(kinds(run, "train")), "a step")
    process.send_signal(signal.SIGHUP)
    step = kinds(run, "train")[-1]
    wait_until(lambda: kinds(run, "train")[-1] > step + 5 or process.poll() is not None, "more steps")
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=TEST_TIMEOUT_S)
    assert "stopped by SIGTERM" in out and json.loads((run / "exit.json").read_text())["code"] == 75


def test_a_signal_during_the_check_starts_no_run(tiny_config: Path, tmp_path: Path) -> None:
    process = launch(tmp_path / "logs", ["ddp", tiny_config], NPROC_PER_NODE=2)
    wait_until(lambda: any(map(is_check, descendants(process))), "the check")
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=TEST_TIMEOUT_S)
    assert process.returncode == 143 and not (tmp_path / "run").exists(), out


def test_a_check_starts_the_engine_and_trains_nothing(tiny_config: Path, tmp_path: Path) -> None:
    process = launch(tmp_path / "logs", ["zero2", tiny_config, "--check", "train.steps=3"], NPROC_PER_NODE=2)
    out, _ = process.communicate(timeout=TEST_TIMEOUT_S)
    assert process.returncode == 0, out
    assert "\nstarted zero2 (ranks: 2, nodes: 1)\n" in out and out.endswith("\nready\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_restart_resumes_from_the_last_checkpoint(tiny_config: Path, tmp_path: Path) -> None:
    run, arguments = tmp_path / "run", ["ddp", tiny_config, "train.steps=60", "train.global_batch_size=128"]
    arguments += ["checkpoint.every_steps=2", "validation.every=0", "distributed.timeout_s=5"]
    process = launch(tmp_path / "logs", arguments, NPROC_PER_NODE=2, NODE_CHECK="skip", MAX_RESTARTS=1)
    wait_until(lambda: bool(kinds(run, "checkpoint")), "a checkpoint")
    workers = [result for result in descendants(process) if "mmldlm.train" in result.cmdline()[:4]]
    ranks = {result.environ()["RANK"]: result for result in workers if "RANK" in result.environ()}
    os.kill(ranks["1"].pid, signal.SIGKILL)
    out, _ = process.communicate(timeout=TEST_TIMEOUT_S)
    assert process.returncode == 0, out
    assert kinds(run, "train") == list(range(1, 61))
    (resumed_at,) = kinds(run, "resume")
    assert 2 <= resumed_at < 60


def test_deepspeed_reads_the_example_of_a_hostfile() -> None:
    from deepspeed.launcher.runner import fetch_hostfile

    assert fetch_hostfile(ROOT / "scripts" / "hostfile.example") == {"10.0.0.1": 8, "10.0.0.2": 8}
