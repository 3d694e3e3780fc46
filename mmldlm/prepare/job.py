"""A preparation: its plan, its stages, and its staging folder, where each finished task is a folder of its own.

`STORE.incomplete/` holds `plan.json`, the lock, and one folder per finished task, e.g. `read-00003`. Such a folder
appears in one rename. So a preparation that was killed continues after the last finished task, and two processes that
happen to run the same task do not harm each other.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from mmldlm import __version__
from mmldlm.data.encoders import LatentEncoder, SentenceTransformerEncoder, load_encoder
from mmldlm.data.manifest import CHECKSUM_NAME, MANIFEST_NAME, Manifest
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.errors import DataError
from mmldlm.prepare.documents import Chunk, Part
from mmldlm.prepare.inputs import describe_sources, find_inputs, make_chunks
from mmldlm.prepare.options import PrepareConfig
from mmldlm.prepare.readers import python_docs
from mmldlm.prepare.readers.latents import LatentFile
from mmldlm.prepare.report import StageProgress, summary
from mmldlm.utils.files import folder_around, fsync, naming, write_atomically
from mmldlm.utils.printable import printable
from mmldlm.utils.progress import print_status
from mmldlm.utils.versions import install_command

_PLAN, _RESULT = "plan.json", "result.json"


@dataclass(frozen=True)
class Plan:
    """A preparation of `chunks` with the `options` that its store records.

    `sources` describes all inputs with their hashes, as in the store's manifest. Chunks depend only on the sizes of the
    inputs and on `--part-bytes`, not on the number of processes.
    """

    version: str
    options: dict[str, Any]
    sources: list[dict[str, Any]]
    chunks: list[Chunk]

    def to_json(self) -> str:
        """Return the contents of `plan.json`."""
        chunks = [[[format, asdict(part)] for format, part in chunk] for chunk in self.chunks]
        return json.dumps({**vars(self), "chunks": chunks}, ensure_ascii=False) + "\n"


def make_plan(config: PrepareConfig) -> Plan:
    """Find the inputs of `config`, hash them and cut them into chunks."""
    # Tuples become lists, as in `plan.json` and manifests, which we compare these options with.
    options = json.loads(json.dumps(config.recorded()))
    inputs = [] if config.corpus else find_inputs(config)
    sources = describe_sources(inputs, config)
    if config.corpus:
        corpus_chunk = (("", Part(config.corpus, 0, 0)),)
        packages = python_docs.sources(config.corpus)
        if absent := [source["package"] for source in packages if source["version"] is None]:
            missing = f"{config.corpus}: has no sentences of {', '.join(absent)}, which are not installed"
            print_status(printable(f"{missing}; {install_command('deepspeed')}"))
        return Plan(__version__, options, packages + sources, [corpus_chunk])
    return Plan(__version__, options, sources, list(make_chunks(inputs, sources, config)))


@dataclass(frozen=True)
class Job:
    """A preparation of the inputs in `plan` by the options `config`. Results of finished tasks are loaded once."""

    config: PrepareConfig
    plan: Plan

    def __reduce__(self) -> tuple[Any, ...]:
        return Job, (self.config, self.plan)  # without the loaded results

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
        kind, _, path = self.config.encoder.partition(":")
        return LatentFile(path, self.config.latent_ids) if kind == "precomputed" else None

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

    def result(self, stage: str, chunk: int = 0) -> dict[str, Any]:
        """Return the result of a finished task."""
        return json.loads((self.path(stage, chunk) / _RESULT).read_text(encoding="utf-8"))

    def results(self, stage: str) -> list[dict[str, Any]]:
        """Return the results of a finished stage, in the order of the chunks."""
        return [self.result(stage, chunk) for chunk in self.chunks]

    def open_staging(self) -> None:
        """Continue in the staging folder if it holds work of this plan, else start over.

        It is a `DataError` if it holds work of another plan, and `--overwrite` is not given.
        """
        staged = self.staged_plan()
        is_other = staged not in ("", self.plan.to_json())
        if is_other and not self.config.overwrite:
            raise DataError(
                f"{self.staging}: left unfinished with other {', '.join(self._differing(staged))}; expected the same "
                "to continue, or --overwrite to start over"
            )
        if is_other:
            # Remove the plan before the tasks: if we are interrupted, the rest belongs to no plan and goes next time.
            (self.staging / _PLAN).unlink()
        # If the work is of this plan, remove only temporary folders of killed tasks, whose names begin with a dot.
        for folder in self.staging.iterdir():
            if folder.is_dir() and (is_other or not staged or folder.name.startswith(".")):
                shutil.rmtree(folder)
        write_atomically(self.staging / _PLAN, self.plan.to_json())

    def staged_plan(self) -> str:
        """Return the text of the plan of the staging folder, or "" if it has none."""
        path = self.staging / _PLAN
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def _differing(self, staged: str) -> list[str]:
        """Name the differences between a staged plan and this one."""
        other = json.loads(staged)
        differing = self.config.differing(other["options"])
        differing += ["sources"] if other["sources"] != self.plan.sources else []
        differing += [f"version ({other['version']})"] if other["version"] != self.plan.version else []
        return differing or ["chunks"]

    @contextmanager
    def temporary_folder(self, name: str) -> Iterator[Path]:
        """Yield a new folder in the staging folder, and remove it at the end of the block if it is still there."""
        folder = self.staging / f".{name}.{uuid.uuid4().hex}"
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def existing_store(self) -> Manifest | None:
        """Return the manifest of a finished store at `out` with these options and sources, or None.

        It is a `DataError` if there is something else at `out`, or a store of other data and `--overwrite` is not
        given.
        """
        config, out = self.config, self.out
        if around := folder_around(out, "startup.json", CHECKSUM_NAME):
            raise DataError(f"{out}: is in the run or data store {around}; expected a folder outside")
        if not out.exists():
            return None
        if not (out / MANIFEST_NAME).is_file() or not (manifest := Manifest.read(out)).splits:
            raise DataError(f"{out}: exists and is no data store; --overwrite replaces stores only")
        if config.overwrite:
            expected = {MANIFEST_NAME, CHECKSUM_NAME, *(name for name, _ in manifest.all_files())}
            present = {path.relative_to(out).as_posix() for path in out.rglob("*") if not path.is_dir()}
            if foreign := sorted(present - expected):
                raise DataError(f"{out}: {foreign[0]} is no part of the store, but --overwrite would delete it")
            return None
        # `merge` adds the number of documents to the sources of an embedded corpus.
        known = [{key: value for key, value in source.items() if key != "documents"} for source in manifest.sources]
        differing = config.differing(manifest.options) + (["sources"] if known != self.plan.sources else [])
        if differing:
            raise DataError(f"{out}: a store with other {', '.join(differing)}; expected a new folder, or --overwrite")
        print_status(f"{out}: already prepared\n{summary(manifest)}")
        return manifest


class Stage(NamedTuple):
    """A stage: a function of one chunk, or of all at once, that needs all chunks of the stages before it.

    `run(job, chunk, folder, progress)` fills `folder` and returns JSON values. It depends only on the job, the chunk
    and the tasks of earlier stages.
    """

    name: str
    title: str
    run: Callable[[Job, int, Path, StageProgress], dict[str, Any]]
    per_chunk: bool = True

    def missing(self, job: Job) -> list[int]:
        """Return the chunks whose tasks are not finished, or [0] for an unfinished task of all chunks."""
        return [chunk for chunk in (job.chunks if self.per_chunk else [0]) if not job.path(self.name, chunk).exists()]


def run_task(job: Job, stage: Stage, chunk: int, progress: StageProgress) -> None:
    """Run a task unless it is finished. Its folder appears in one rename."""
    path = job.path(stage.name, chunk)
    if path.exists():
        return
    with naming(job.staging), job.temporary_folder(path.name) as folder:
        result = stage.run(job, chunk, folder, progress)
        (folder / _RESULT).write_text(json.dumps(result, ensure_ascii=False) + "\n", encoding="utf-8")
        # Sync before the rename, so that a task's folder is complete even after a power failure.
        for file in [*folder.rglob("*"), folder]:
            fsync(file)
        try:
            folder.rename(path)
        except OSError:
            if not path.exists():  # otherwise another process has finished the same task
                raise
    fsync(job.staging)
