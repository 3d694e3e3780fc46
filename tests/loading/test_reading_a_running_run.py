"""Readers of a run that replaces its checkpoints meanwhile: they take the newest one that they can read whole."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread

import pytest

from mmldlm import cli
from mmldlm.checkpoint.manifest import _seal, read_manifest
from mmldlm.checkpoint.names import MANIFEST
from mmldlm.checkpoint.retention import Retention
from mmldlm.checkpoint.store import CheckpointStore

SAVE_EVERY_S = 0.15


@pytest.fixture
def saving_run(short_run_dir: Path, tmp_path: Path) -> Iterator[Path]:
    """A run that saves again and again and keeps one checkpoint, as with `checkpoint.keep_last=1`."""
    run, ended = shutil.copytree(short_run_dir, tmp_path / "run"), Event()
    store = CheckpointStore(run / "checkpoints", Retention(last=1))
    source = shutil.copytree(store.paths()[0], tmp_path / "source")

    def save() -> None:
        step = 20
        while not ended.wait(SAVE_EVERY_S):
            step += 1
            temporary = Path(tempfile.mkdtemp(dir=store.folder, prefix=".tmp-"))
            shutil.copytree(source, temporary, dirs_exist_ok=True)
            body = {key: value for key, value in read_manifest(temporary).items() if key != "sha256"}
            (temporary / MANIFEST).write_bytes(_seal({**body, "step": step}))
            store.publish(temporary, step)

    thread = Thread(target=save)
    thread.start()
    yield run
    ended.set()
    thread.join()


@pytest.mark.parametrize(
    "command",
    [
        ["sample", "{run}", "--mode", "joint", "--out", "{out}.jsonl", "sampling.steps=1"],
        ["export", "{run}", "{out}"],
        ["checkpoints", "merge", "{run}", "{run}", "{run}", "--out", "{out}"],
    ],
    ids=["sample", "export", "merge"],
)
def test_readers_beside_retention(command: list[str], saving_run: Path, tmp_path: Path) -> None:
    for trial in range(6):
        assert cli.main([word.format(run=saving_run, out=tmp_path / f"out{trial}") for word in command]) == 0
