"""Train a run's steps again in a scratch folder, from nothing but the run folder and the data store."""

from __future__ import annotations

import io
import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path

from mmldlm.checkpoint.retention import Retention
from mmldlm.checkpoint.store import CheckpointStore
from mmldlm.config import CheckpointConfig, RunConfig
from mmldlm.distributed.launch import LauncherEnv
from mmldlm.distributed.process_group import process_group
from mmldlm.errors import DataError, StorageError
from mmldlm.settings.fields import build, set_dotted
from mmldlm.settings.successors import current, current_overrides
from mmldlm.telemetry.profiler import ProfileConfig
from mmldlm.tools.records import Record, check_record
from mmldlm.train import train_step
from mmldlm.trainer.trainer import Trainer
from mmldlm.utils.files import open_regular

_OF_STARTS = ("config", "data_manifest", "versions", "world_size", "ranks")  # keys of a start that a replay needs


@dataclass(frozen=True)
class RecordedRun:
    """A run as its folder describes it.

    Attributes:
        overrides: Settings that a replay changes, e.g. `data.path=NEW`.
        damaged: One message for each line that is no record.
    """

    folder: Path
    records: list[Record]
    overrides: Sequence[str] = ()
    damaged: Sequence[str] = ()

    @classmethod
    def read(cls, folder: Path, overrides: Sequence[str] = ()) -> RecordedRun:
        """Read the records of a run. Raises `DataError` if the record of a start is missing or incomplete."""
        path, records, damaged = folder / "metrics.jsonl", [], []
        with open_regular(path, folder) if path.exists() else io.BytesIO() as file:
            lines = file.read().splitlines()
        for number, line in enumerate(lines, start=1):
            try:
                records.append(check_record(line))
            except DataError as error:
                damaged.append(f"{path.name}, line {number}: {error}")
        run = cls(folder, records, overrides, damaged)
        if not run.starts:
            raise DataError("; ".join([f"{folder}: expected a start in {path.name}, found none", *damaged]))
        for start in run.starts:
            if missing := [key for key in _OF_STARTS if not start.get(key)]:
                raise DataError(f"{path}: {start['kind']} at step {start['step']}: lacks {', '.join(missing)}")
        return run

    @property
    def starts(self) -> list[Record]:
        """Records of the run's starts. Each has the config, engine and versions of the steps after it."""
        return [record for record in self.records if record["kind"] in ("start", "resume")]

    @property
    def last_step(self) -> int:
        """The last step that the run has completed."""
        return max(record["step"] for record in self.records if record["kind"] != "micro_batch")

    @property
    def checkpoints(self) -> dict[int, Path]:
        """The checkpoint folders by step, in ascending order. They are not verified."""
        return CheckpointStore(self.folder / "checkpoints", Retention()).by_step()

    def grad_norms(self) -> dict[int, float]:
        """Return the gradient norm of each step that has a record."""
        norms: dict[int, float] = {}
        for record in self.records:
            recorded = record.get("grad_norms", [])
            if record["kind"] == "skip":
                recorded = [record.get("optim/grad_norm")]
            for step, norm in zip(range(record["step"], 0, -1), reversed(recorded), strict=False):
                norms[step] = math.inf if norm is None else norm  # JSON has no infinity
        return norms

    def start_before(self, step: int) -> Record:
        """Return the start that computed the steps after `step`."""
        return [start for start in self.starts if start["step"] <= step][-1]

    def config_after(self, step: int) -> RunConfig:
        """Return the config with which the steps after `step` were computed, with the overrides."""
        tree = current(self.start_before(step)["config"], str(self.folder), is_record=True)
        for assignment in current_overrides(self.overrides):
            set_dotted(tree, assignment)
        return build(RunConfig, tree)


def replay(
    run: RecordedRun, first: int, last: int, launch: LauncherEnv, folder: Path | None = None
) -> Iterator[tuple[Trainer, int, int, bool]]:
    """Replay the steps `first` to `last`, stretch by stretch, from the newest checkpoint before them (collective).

    A stretch lies between two checkpoints or starts of the run. For each stretch, the caller advances the trainer to
    the last step and saves. Meanwhile nothing is printed to stdout. The scratch folder is created in `folder`, which
    all nodes must share, or by default among temporary files.

    Yields:
        The trainer, placed before the stretch. The step that it has reached. The last step of the stretch. Whether the
        stretch begins at the run's own checkpoint or start, rather than where the previous stretch ended.
    """
    saved, origin = run.checkpoints, run.starts[0]
    if source := origin.get("resumed_from"):  # the run started from another run's checkpoint
        saved.setdefault(origin["step"], Path(source["path"]))
    begins = {origin["step"], *saved}
    begin = max((step for step in begins if step < first), default=origin["step"])
    edges = {*begins, *(start["step"] for start in run.starts), run.last_step}
    with process_group(run.config_after(begin).distributed, launch) as ranks:
        with ranks.raise_on_all_ranks("making of the scratch folder"):
            try:
                made = tempfile.mkdtemp(prefix="mmldlm-", dir=folder) if ranks.is_main else ""
            except OSError as error:
                raise StorageError(f"--scratch: cannot make a folder in {folder}: {error.strerror}") from None
        scratch = Path(ranks.gather(made)[0])
    try:
        for start, stop in pairwise(sorted(step for step in edges if step >= begin)):
            if start >= last:
                return
            checkpoint = saved.get(start) if start in begins else RecordedRun(scratch, []).checkpoints[start]
            config = _replay_config(run.config_after(start), checkpoint, scratch)
            with redirect_stdout(io.StringIO()), Trainer(config, launch) as trainer:
                yield trainer, start, stop, start in begins
    finally:
        if launch.rank == 0:
            shutil.rmtree(scratch, ignore_errors=True)


def _replay_config(config: RunConfig, checkpoint: Path | None, scratch: Path) -> RunConfig:
    """Return the config of a replay. It validates as the run did, since the saved state has the best validations."""
    return replace(
        config,
        run=replace(config.run, dir=str(scratch)),
        resume="never" if checkpoint is None else str(checkpoint),
        # Only a full verification finds the bad samples that the run left out.
        data=replace(config.data, verify="full" if config.data.max_bad_samples else "sizes"),
        checkpoint=CheckpointConfig(every_steps=0, keep_best=config.checkpoint.keep_best, async_=False),
        validation=replace(config.validation, text_samples=0, prompts=""),
        log=replace(config.log, trackers=[]),  # but keep TensorBoard: a run with it measures more in some validations
        profile=ProfileConfig(),
    )


def advance(trainer: Trainer, step: int) -> None:
    """Train up to the end of `step`, counted from 1 (collective)."""
    for number, micro_batches in islice(trainer.steps(), step - trainer.state.step):
        train_step(trainer, number, micro_batches)
