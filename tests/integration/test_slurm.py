"""scripts/slurm with stand-ins for srun and scontrol, which start the command of each node on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.helpers.metrics import read_metrics
from tests.helpers.paths import ROOT
from tests.helpers.ports import free_port
from tests.helpers.slurm_commands import SCONTROL
from tests.helpers.two_nodes import environment
from tests.helpers.waiting import TEST_TIMEOUT_S, wait_until

SRUN = """\
#!/usr/bin/env bash
# The command on each node; SIGTERM is passed to all of them; the exit code is the highest.
while [[ "$1" == -* ]]; do shift; done
nodes=()
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do
  SLURM_NODEID="$node" "$@" &
  nodes+=("$!")
done
trap 'kill -TERM "${nodes[@]}"' TERM
highest=0
for node in "${nodes[@]}"; do
  while true; do
    wait "$node"; code=$?
    kill -0 "$node" 2>/dev/null || break
  done
  if ((code > highest)); then highest=$code; fi
done
exit "$highest"
"""


@pytest.fixture
def site(tmp_path: Path) -> dict[str, str]:
    """The environment of a job on two nodes."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "4321", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[0-1]"}
    job |= {"SLURM_GPUS_ON_NODE": "1", "MASTER_PORT": str(free_port()), "REQUEUED": str(tmp_path / "requeued")}
    result = environment(tmp_path / "logs", **job)
    return {**result, "PATH": f"{programs}{os.pathsep}{result['PATH']}"}


def submit(site: dict[str, str], *arguments: object, script: str = "train.sbatch") -> subprocess.Popen[str]:
    command = ["bash", str(ROOT / "scripts" / "slurm" / script), *map(str, arguments)]
    return subprocess.Popen(command, env=site, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def steps(run: Path) -> list[int]:
    path = run / "metrics.jsonl"
    return [record["step"] for record in read_metrics(path) if record["kind"] == "train"] if path.exists() else []


@pytest.mark.slow
def test_job_out_of_time_is_requeued_and_resumes(site: dict[str, str], tiny_config: Path, tmp_path: Path) -> None:
    run, requeued = tmp_path / "run", tmp_path / "requeued"
    arguments = ["ddp", tiny_config, "train.global_batch_size=128", "validation.every=0"]
    job = submit(site, *arguments, "train.steps=400")
    wait_until(lambda: bool(steps(run)), "a step")
    job.send_signal(signal.SIGUSR1)  # as `--signal=B:USR1@300` has Slurm do, to the batch script alone
    out, _ = job.communicate(timeout=TEST_TIMEOUT_S)
    assert job.returncode == 75 and "the run ended with code 75" in out, out
    assert requeued.read_text() == "4321\n"
    assert json.loads((run / "exit.rank1.json").read_text())["code"] == 75

    stopped_at = steps(run)[-1]
    job = submit({**site, "NODE_CHECK": "skip"}, *arguments, f"train.steps={stopped_at + 2}")
    out, _ = job.communicate(timeout=TEST_TIMEOUT_S)
    assert job.returncode == 0, out
    assert steps(run) == list(range(1, stopped_at + 3))
    assert requeued.read_text() == "4321\n"
    for node in range(2):
        assert f"node {node} of 2" in (tmp_path / "logs" / f"node{node}.log").read_text()


def test_outcome_of_an_earlier_job_is_ignored(site: dict[str, str], tiny_config: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "exit.json").write_text('{"code": 75, "time": 1.0}\n')
    job = submit(site, "ddp", tiny_config, "data.path=/nowhere")
    out, _ = job.communicate(timeout=TEST_TIMEOUT_S)
    assert job.returncode == 65 and "the run ended with code 65" in out, out
    assert not (tmp_path / "requeued").exists()


@pytest.mark.slow
def test_one_node(site: dict[str, str], tiny_config: Path, tmp_path: Path) -> None:
    one = {**site, "SLURM_JOB_NUM_NODES": "1", "NODE_CHECK": "skip", "NPROC_PER_NODE": "2"}
    job = submit(one, "ddp", tiny_config, script="train_one_node.sbatch")
    out, _ = job.communicate(timeout=TEST_TIMEOUT_S)
    assert job.returncode == 0 and "the run ended with code 0" in out, out
    assert steps(tmp_path / "run") == list(range(1, 9))


def test_outside_of_a_job_is_refused(tmp_path: Path) -> None:
    job = submit(environment(tmp_path / "logs"), "ddp", "CONFIG.yaml")
    out, _ = job.communicate(timeout=TEST_TIMEOUT_S)
    assert job.returncode != 0 and "there is no Slurm job around it" in out


@pytest.mark.quick
def test_both_scripts_ask_slurm_for_the_same() -> None:
    """But the number of nodes; the directives must stand before the first command."""
    directives = []
    for name in ("train.sbatch", "train_one_node.sbatch"):
        lines = (ROOT / "scripts" / "slurm" / name).read_text(encoding="utf-8").splitlines()
        first_command = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
        result = [line for line in lines[:first_command] if line.startswith("#SBATCH")]
        assert len(result) == len([line for line in lines if line.startswith("#SBATCH")]) > 5
        directives.append([line for line in result if "--nodes" not in line])
    assert directives[0] == directives[1]
