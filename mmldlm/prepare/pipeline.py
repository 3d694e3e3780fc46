"""`mmldlm prepare` makes a store from raw data.

    count     number of documents of each chunk, if latents belong to them by position    read.py
    read      chunks of the input to caches of documents, each with its split             read.py
    fit       tokenizer and encoder, on the training split only                           fit.py
    encode    documents of a chunk to shards of tokens and latents                        encode.py
    mean      mean of all training latents                                                merge.py
    measure   deviations of each chunk's latents from that mean                           merge.py
    merge     the shards of all chunks to one store                                       merge.py

A stage is a set of tasks, one per chunk or one for all chunks, and begins when the stage before is finished. A task
depends only on the plan and on earlier stages. So the store does not depend on which process runs which task: this one
or worker processes (`workers.py`).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mmldlm.data.manifest import Manifest
from mmldlm.errors import MmldlmError, PeerLostError, StoppedBySignal, StorageError
from mmldlm.prepare.encode import encode_chunk
from mmldlm.prepare.fit import fit
from mmldlm.prepare.job import Job, Stage, make_plan
from mmldlm.prepare.merge import latent_mean, measure_chunk, merge
from mmldlm.prepare.options import PrepareConfig, parse_options
from mmldlm.prepare.read import count_chunk, read_chunk
from mmldlm.prepare.readers.latents import POSITION
from mmldlm.prepare.report import StageProgress, summary
from mmldlm.prepare.workers import run_in_process, worker_pool
from mmldlm.utils.lock import RunLock
from mmldlm.utils.process import CONTINUE, stop_at_signals
from mmldlm.utils.progress import INTERVAL_S, print_status

COUNT = Stage("count", "counting documents", count_chunk)
STAGES = (
    Stage("read", "reading documents", read_chunk),
    Stage("fit", "fitting", fit, per_chunk=False),
    Stage("encode", "tokenizing and encoding", encode_chunk),
    Stage("mean", "averaging latents", latent_mean, per_chunk=False),
    Stage("measure", "measuring latents", measure_chunk),
)


def prepare(config: PrepareConfig, progress: bool = True, interval: float = INTERVAL_S) -> Manifest:
    """Make the store `config.out` and return its manifest. A finished store of the same options and sources is kept.

    Progress goes to stderr. If that is not a terminal, there is a line every `interval` seconds.

    Raises:
        RunInUseError: Another process is preparing the same store.
        PeerLostError: A worker process died. The same command continues.
    """
    config = config.checked()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums depend on the number of threads
    try:
        stage_progress = StageProgress(progress, interval)
        with stage_progress:
            stage_progress.phase("looking through the input", announce=False)
            job = Job(config, make_plan(config))
            # Check this without the lock, which would create a staging folder next to a finished store.
            if not job.staging.exists() and (manifest := job.existing_store()):
                return manifest
            with _locked(job):
                if manifest := job.existing_store():
                    # A process was killed between publishing the store and removing its tasks.
                    if job.staged_plan() in ("", job.plan.to_json()):
                        shutil.rmtree(job.staging)
                    return manifest
                job.open_staging()
                _run_stages(job, stage_progress)
            manifest = Manifest.read(job.out)
            print_status(summary(manifest))
            return manifest
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _locked(job: Job) -> Iterator[None]:
    """Hold the lock of the staging folder."""
    while True:
        with RunLock(job.staging) as lock:
            if lock.path.exists():  # else the previous holder has just removed it
                yield
                return


def _run_stages(job: Job, progress: StageProgress) -> None:
    """Run the unfinished tasks of all stages on this machine, merge, and remove the staging folder."""
    try:
        with worker_pool(job) as run_in_pool:
            # If latents belong to documents by position, a chunk needs the sizes of the chunks before it.
            for stage in (COUNT, *STAGES) if job.config.latent_ids == POSITION else STAGES:
                if missing := stage.missing(job):
                    (run_in_pool if stage.per_chunk else run_in_process)(job, stage, missing, progress)
        progress.phase("writing the store")
        merge(job)
    except (PeerLostError, StoppedBySignal, StorageError):
        raise  # the same command continues
    except MmldlmError:
        shutil.rmtree(job.staging)
        raise
    shutil.rmtree(job.staging)


def main(argv: list[str] | None = None) -> int:
    """Run `mmldlm prepare` and return 0."""
    config = parse_options(argv)
    with stop_at_signals(CONTINUE):
        prepare(config)
    return 0
