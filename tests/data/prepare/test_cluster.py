"""Preparations by datatrove: on Slurm, with commands that stand in for those of Slurm, and on Ray."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from mmldlm.data.prepare.pipeline import main
from mmldlm.errors import run_command
from tests.helpers.paths import ROOT
from tests.helpers.prepare_job import PrepareJob
from tests.helpers.prepare_runs import differing, finished_tasks

pytest.importorskip("datatrove")

# Runs the tasks of a job array at once, one after the other, unless a job that it depends on has failed. A task for
# which there is a file `kill` is killed, and so once. Statistics of datatrove are of no interest here.
SBATCH = """#!/usr/bin/env python
import os, re, subprocess, sys
from pathlib import Path

state, script = Path(__file__).parent, Path(sys.argv[-1])
text, jobs = script.read_text(), state / "jobs"
number = len(jobs.read_text().splitlines()) if jobs.exists() else 0
needed = re.findall(r"afterok:(\\d+)", " ".join(sys.argv))
failed = any(jobs.read_text().splitlines()[int(job)] != "done" for job in needed)
if "merge_stats" not in text and not failed:
    last = int(re.search(r"--array=0-(\\d+)", text)[1])
    for task in range(last + 1):
        environment = {**os.environ, "SLURM_ARRAY_TASK_ID": str(task), "SLURM_NODELIST": "here", "RUN_OFFSET": "0"}
        with (state / "log").open("a") as log:
            failed |= subprocess.run(["bash", str(script)], env=environment, stdout=log, stderr=log).returncode != 0
with jobs.open("a") as file:
    file.write("failed\\n" if failed else "done\\n")
print(f"Submitted batch job {number}")
"""
SRUN = """#!/usr/bin/env bash
while [ "${1#-}" != "$1" ] || [ "$1" = 1 ]; do shift; done
here="$(dirname "$0")"
if [ "$SLURM_ARRAY_TASK_ID" = 1 ] && [ -e "$here/kill" ]; then rm "$here/kill"; kill -9 $$; fi
exec "$@"
"""
SCONTROL = '#!/usr/bin/env bash\necho "$3"\n'


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> PrepareJob:
    return PrepareJob(tmp_path_factory.mktemp("job"), part_bytes=20_000)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put stand-ins for Slurm's commands on PATH, and return their folder."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(text.replace("/usr/bin/env python", sys.executable))
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return folder


def slurm_arguments(job: PrepareJob, store: Path, *options: str) -> list[str]:
    given = [part for option in ("partition=cpu", "time=1:00:00", *options) for part in ("--cluster-option", option)]
    return [*job.arguments(store), "--cluster", "slurm", *given]


@pytest.mark.slow
def test_slurm(job: PrepareJob, tmp_path: Path, slurm: Path) -> None:
    """A task that is killed stops the jobs behind it; the same command runs what is missing, to the same bytes."""
    store = tmp_path / "store"
    (slurm / "kill").touch()
    arguments = slurm_arguments(job, store, "sbatch.account=theirs")
    assert main(arguments) == 0
    assert finished_tasks(store) == [f"read-{chunk:05d}" for chunk in range(job.chunks) if chunk != 1]
    scripts = list((tmp_path / "store.logs").glob("*/read/launch_script.slurm"))
    assert "#SBATCH --account=theirs" in scripts[0].read_text()
    assert main([*arguments, "--cluster-option", "tasks_per_job=100"]) == 0
    assert differing(job.reference, store) == [], (slurm / "log").read_text()[-3000:]
    assert not store.with_name("store.incomplete").exists()
    ranks = sorted((tmp_path / "store.logs").glob("*/read/ranks_to_run.json"))
    assert [path.read_text() for path in ranks] == ["[0, 1, 2]", "[0]"], "finished tasks were submitted again"
    assert main(arguments) == 0, "already prepared"


def test_options_of_clusters(
    job: PrepareJob, tmp_path: Path, slurm: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def error(*arguments: str) -> str:
        assert run_command(lambda: main([*job.arguments(tmp_path / "store"), *arguments])) == 2
        assert not (tmp_path / "store.incomplete").exists()
        return capfd.readouterr().err.splitlines()[-1]

    where = ["--cluster", "slurm"]
    assert "--cluster slurm: expected --cluster-option partition=..." in error(*where)
    assert "--cluster-option speed=2: expected NAME=VALUE with one of time" in error(
        *where, "--cluster-option", "speed=2"
    )
    assert "--cluster-option workers=2: expected --cluster" in error("--cluster-option", "workers=2")
    assert "--processes 2: expected 1" in error(*where, "--processes", "2")
    (slurm / "sbatch").write_text("#!/bin/sh\nexit 3\n")
    options = slurm_arguments(job, tmp_path / "rejected")
    assert run_command(lambda: main(options)) == 2
    assert "sbatch ended with exit code 3; its message is above" in capfd.readouterr().err.splitlines()[-1]
    monkeypatch.setenv("PATH", os.defpath)
    assert "--cluster slurm: no sbatch on PATH" in error(*where)


@pytest.mark.slow
def test_ray(job: PrepareJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    cluster = ["--cluster", "ray", "--cluster-option", "mem_per_cpu_gb=1", "--cluster-option", "workers=2"]
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        assert main([*job.arguments(tmp_path / "store"), *cluster]) == 0
        assert differing(job.reference, tmp_path / "store") == []
        failing = job.arguments(tmp_path / "other", on_problem="error")
        assert run_command(lambda: main([*failing, *cluster])) == 65
    finally:
        ray.shutdown()
