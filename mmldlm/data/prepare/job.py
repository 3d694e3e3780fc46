"""A preparation and its staging folder, where each finished task is a folder of its own.

`STORE.incomplete/` holds `plan.json`, the lock, and one folder per finished task, such as `read-00003`. Such a folder
appears in one rename, so a preparation that was killed continues behind the last of them, and two processes that happen
to run the same task do each other no harm.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from mmldlm.data.encoders import LatentEncoder, SentenceTransformerEncoder, load_encoder
from mmldlm.data.manifest import MANIFEST_NAME, Manifest
from mmldlm.data.prepare.inputs import latent_file
from mmldlm.data.prepare.options import PrepareConfig
from mmldlm.data.prepare.plan import Plan
from mmldlm.data.prepare.readers.latents import LatentFile
from mmldlm.data.prepare.report import StageProgress
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.errors import DataError
from mmldlm.utils.files import fsync, write_atomically

_PLAN, _RESULT = "plan.json", "result.json"


@dataclass(frozen=True)
class Job:
    """A preparation by `config` of the inputs in `plan`; what it reads from finished tasks is loaded once."""

    config: PrepareConfig
    plan: Plan

    def __reduce__(self) -> tuple[Any, ...]:
        return Job, (self.config, self.plan)  # what was loaded stays in this process

    @property
    def out(self) -> Path:
        """The folder of the store."""
        return Path(self.config.out)

    @property
    def staging(self) -> Path:
        """The folder of the finished tasks."""
        return self.out.with_name(f"{self.out.name}.incomplete")

    @property
    def chunks(self) -> range:
        """The numbers of the chunks."""
        return range(len(self.plan.chunks))

    @cached_property
    def latents(self) -> LatentFile | None:
        """The file of precomputed latents, if the options name one."""
        return latent_file(self.config)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The fitted tokenizer."""
        return Tokenizer.load(self.path("fit") / "tokenizer")

    @cached_property
    def encoder(self) -> LatentEncoder:
        """The fitted encoder."""
        config = self.config
        # Tasks may run on machines where nobody has named the model yet, except in these options.
        kind, _, location = config.encoder.partition(":")
        named = {"location": location} if kind == SentenceTransformerEncoder.kind else {}
        options = {"batch_size": config.encoder_batch_size, "device": config.encoder_device, **named}
        return load_encoder(self.path("fit") / "encoder", **options)

    def path(self, stage: str, chunk: int = 0) -> Path:
        """Return the folder of a task, which exists once the task is finished."""
        return self.staging / f"{stage}-{chunk:05d}"

    def is_done(self, stage: str, chunk: int = 0) -> bool:
        """Return whether a task is finished."""
        return self.path(stage, chunk).exists()

    def result(self, stage: str, chunk: int = 0) -> dict[str, Any]:
        """Return what the function of a finished task returned."""
        return json.loads((self.path(stage, chunk) / _RESULT).read_text(encoding="utf-8"))

    def results(self, stage: str) -> list[dict[str, Any]]:
        """Return the results of a stage that is finished, in the order of the chunks."""
        return [self.result(stage, chunk) for chunk in self.chunks]

    def open_staging(self) -> None:
        """Continue in the staging folder if it holds work of this plan; else start over.

        Work of another plan without `--overwrite` is a `DataError`.
        """
        if (result := self.staged_plan()) not in ("", self.plan.to_json()):
            if not self.config.overwrite:
                other = ", ".join(_differing(result, self))
                raise DataError(
                    f"{self.staging}: left unfinished with other {other}; expected the same to continue, or "
                    "--overwrite to start over"
                )
            # Before the tasks are removed: if that is interrupted, the rest belongs to no plan and goes next time.
            (self.staging / _PLAN).unlink()
            result = ""
        # Of this plan only temporary folders of killed tasks are removed; their names begin with a dot.
        for folder in self.staging.iterdir():
            if folder.is_dir() and (not result or folder.name.startswith(".")):
                shutil.rmtree(folder)
        write_atomically(self.staging / _PLAN, self.plan.to_json())

    def staged_plan(self) -> str:
        """Return the text of the plan that the staging folder belongs to, "" if there is none."""
        path = self.staging / _PLAN
        return path.read_text(encoding="utf-8") if path.exists() else ""

    @contextmanager
    def temporary_folder(self, name: str) -> Iterator[Path]:
        """Yield a new folder in the staging folder, which is removed at the end of the block if it is still there."""
        folder = self.staging / f".{name}.{uuid.uuid4().hex}"
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def existing_store(self) -> Manifest | None:
        """Return the manifest of a store at `out` that holds what is asked for, None if one has to be made.

        Something else there, or other data without `--overwrite`, is a `DataError`.
        """
        config, out = self.config, self.out
        if not out.exists() or (config.overwrite and (out / MANIFEST_NAME).is_file()):
            return None
        if not (out / MANIFEST_NAME).is_file():
            raise DataError(f"{out}: exists and is no data store; --overwrite replaces stores only")
        manifest = Manifest.read(out)
        # `merge` adds the number of documents to the sources of an embedded corpus.
        known = [{key: value for key, value in source.items() if key != "documents"} for source in manifest.sources]
        differing = config.differing(manifest.options)
        if known != self.plan.sources:
            differing.append("sources")
        if differing:
            raise DataError(f"{out}: a store with other {', '.join(differing)}; expected a new folder, or --overwrite")
        return manifest


def _differing(staged: str, job: Job) -> list[str]:
    """Return the names of what a staged plan differs in."""
    try:
        other = Plan.from_json(staged)
    except (ValueError, TypeError, KeyError, AttributeError):
        return ["contents"]
    differing = job.config.differing(other.options)
    if other.sources != job.plan.sources:
        differing.append("sources")
    if other.version != job.plan.version:
        differing.append(f"version ({other.version})")
    return differing or ["chunks"]


class Stage(NamedTuple):
    """A stage: a function of one chunk, or of all at once, that needs all chunks of the stages before it.

    `run(job, chunk, folder, progress)` fills `folder` and returns JSON values; it depends on nothing but the job, the
    chunk and the tasks of earlier stages. A job for which `when` is false does without the stage.
    """

    name: str
    title: str
    run: Callable[[Job, int, Path, StageProgress], dict[str, Any]]
    per_chunk: bool = True
    when: Callable[[Job], bool] | None = None

    def missing(self, job: Job) -> list[int]:
        """Return the chunks whose tasks are not finished; 0 if the one task for all chunks is not."""
        if self.when and not self.when(job):
            return []
        return [chunk for chunk in (job.chunks if self.per_chunk else [0]) if not job.is_done(self.name, chunk)]


def run_task(job: Job, stage: Stage, chunk: int, progress: StageProgress) -> None:
    """Run a task unless it is finished; its folder appears in one rename."""
    if job.is_done(stage.name, chunk):
        return
    path = job.path(stage.name, chunk)
    with job.temporary_folder(path.name) as folder:
        result = stage.run(job, chunk, folder, progress)
        (folder / _RESULT).write_text(json.dumps(result, ensure_ascii=False) + "\n", encoding="utf-8")
        # Before the rename, so that a task's folder is complete even after a power failure.
        for file in [*folder.rglob("*"), folder]:
            fsync(file)
        try:
            folder.rename(path)
        except OSError:
            if not path.exists():  # otherwise another process has finished the same task
                raise
    fsync(job.staging)
