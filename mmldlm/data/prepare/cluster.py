"""The stages of a preparation as steps of datatrove, on the machines of a Slurm or Ray cluster. Needs extra `cluster`.

Each stage is an executor with one task per chunk that is missing. All machines share the folders of inputs and store.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datatrove.executor.ray import RayPipelineExecutor
from datatrove.executor.slurm import SlurmPipelineExecutor
from datatrove.pipeline.base import PipelineStep

from mmldlm.data.prepare.job import Job, Stage, run_task
from mmldlm.data.prepare.merge import merge
from mmldlm.data.prepare.options import PrepareConfig
from mmldlm.data.prepare.report import StageProgress
from mmldlm.errors import MmldlmError, PeerLostError, UsageError, error_from_exit_code
from mmldlm.utils.lock import RunLock
from mmldlm.utils.progress import print_status
from mmldlm.utils.versions import install_command

_SET_HERE = {"self", "pipeline", "tasks", "depends", "depends_job_id", "logging_dir", "skip_completed", "sbatch_args"}
_ERROR = "error.txt"


class TaskStep(PipelineStep):
    """A stage as a step of datatrove: its task number i calls `function` with `chunks[i]`."""

    type = "mmldlm prepare"

    def __init__(self, name: str, function: Callable[[int], None], chunks: Sequence[int], logs: Path):
        self.name = name
        super().__init__()
        self.function, self.chunks, self.logs = function, chunks, logs
        self.folder = Path.cwd()  # paths of inputs and store may be relative

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Any:
        """Run a task; a user error is left in `logs`."""
        os.chdir(self.folder)
        torch.set_num_threads(1)  # sums depend on the number of threads
        try:
            self.function(self.chunks[rank])
        except MmldlmError as error:
            # datatrove passes on no exception; `_run_on_ray` raises it again from this file.
            (self.logs / _ERROR).write_text(f"{int(error.exit_code)} {error}", encoding="utf-8")
            raise
        return data


def run_on_cluster(job: Job, stages: Sequence[Stage], options: dict[str, Any]) -> None:
    """Run what is missing of all stages: on Ray until the store is there; on Slurm, submit the tasks and return.

    If Slurm rejects the jobs, that is a `UsageError`; the error of a task on Ray that failed is raised.
    """
    logs = job.out.with_name(f"{job.out.name}.logs") / datetime.now().strftime("%Y-%m-%d-%H%M%S-%f")
    tasks = [(stage.name, partial(_run_stage, job, stage), stage.missing(job)) for stage in stages]
    tasks.append(("merge", partial(_merge, job), [0]))
    executor: SlurmPipelineExecutor | None = None
    for name, function, chunks in tasks:
        if not chunks:
            continue
        folder = (logs / name).absolute()
        folder.mkdir(parents=True)
        step, common = TaskStep(name, function, chunks, folder), {"tasks": len(chunks), "logging_dir": str(folder)}
        if job.config.cluster == "slurm":
            names = {
                "job_name": f"mmldlm-prepare-{name}",
                "env_command": f"export PATH={Path(sys.executable).parent}:$PATH",
            }
            # Each stage depends on the one before; only the last is run, which submits the chain.
            executor = SlurmPipelineExecutor([step], depends=executor, **common, **names | options)
        else:
            print_status(f"{name}: {len(chunks)} tasks on Ray; logs in {folder}")
            _run_on_ray(RayPipelineExecutor([step], **common, **options), step)
    if executor is not None:
        try:
            executor.run()  # submits the stages that it depends on first
        except subprocess.CalledProcessError as error:
            raise UsageError(f"sbatch ended with exit code {error.returncode}; its message is above") from None
        print_status(f"submitted; {job.out} appears when all jobs have ended; logs in {logs}")


def _run_on_ray(executor: RayPipelineExecutor, step: TaskStep) -> None:
    """Run a stage's tasks on Ray; raise an error, which datatrove only logs while its `depends` waits without end."""
    import ray

    ray.init(ignore_reinit_error=True, log_to_driver=False)
    executor.run()
    if (step.logs / _ERROR).exists():
        code, _, text = (step.logs / _ERROR).read_text(encoding="utf-8").partition(" ")
        raise error_from_exit_code(int(code), text)
    if failed := executor.get_incomplete_ranks():
        raise PeerLostError(
            f"{step.name}: {len(failed)} of {len(step.chunks)} tasks failed, see {step.logs}; start the same command "
            "again to continue"
        )


def _run_stage(job: Job, stage: Stage, chunk: int) -> None:
    run_task(job, stage, chunk, StageProgress(enabled=False))


def _merge(job: Job, chunk: int) -> None:
    if job.staging.exists():  # else Slurm has started this task again after it had finished
        with RunLock(job.staging):
            merge(job)
        shutil.rmtree(job.staging)


def executor_options(config: PrepareConfig) -> dict[str, Any]:
    """Return the arguments of datatrove's executor that `--cluster-option NAME=VALUE` sets.

    An argument that does not exist, or what the cluster needs and is missing, is a `UsageError`.
    """
    on_slurm = config.cluster == "slurm"
    if on_slurm and shutil.which("sbatch") is None:
        raise UsageError("--cluster slurm: no sbatch on PATH; expected a machine that submits jobs")
    if not on_slurm and importlib.util.find_spec("ray") is None:
        raise UsageError(f"--cluster ray needs ray: {install_command('ray')}")
    executor = SlurmPipelineExecutor if on_slurm else RayPipelineExecutor
    allowed = [name for name in inspect.signature(executor.__init__).parameters if name not in _SET_HERE]
    values: dict[str, Any] = {}
    sbatch: dict[str, Any] = {"kill-on-invalid-dep": "yes"}  # else jobs behind one that failed stay in the queue
    for option in config.cluster_options:
        name, is_set, value = option.partition("=")
        if is_set and on_slurm and name.startswith("sbatch."):
            sbatch[name.removeprefix("sbatch.")] = value
        elif is_set and name in allowed:
            values[name] = _number(value)
        else:
            expected = ", ".join([*allowed, *["sbatch.*"] * on_slurm])
            raise UsageError(f"--cluster-option {option}: expected NAME=VALUE with one of {expected}")
    for name in ("partition", "time") if on_slurm else ():
        if name not in values:
            raise UsageError(f"--cluster slurm: expected --cluster-option {name}=...")
    return values | ({"sbatch_args": sbatch} if on_slurm else {})


def _number(text: str) -> int | float | str:
    """Return the number that a text spells, or the text."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text
