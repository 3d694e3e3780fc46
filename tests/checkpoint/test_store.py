"""Checkpoints are complete or absent; the newest good one is found, and the others are pruned by rules."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from mmldlm.checkpoint.manifest import verify_checkpoint
from mmldlm.checkpoint.retention import Retention
from mmldlm.checkpoint.store import CheckpointStore, write_files
from mmldlm.errors import DataError, StorageError
from mmldlm.utils.files import FileInfo
from tests.helpers.save_checkpoint import save_checkpoint

quick = pytest.mark.quick
FILES = {
    "model.bin": b"m" * 1000,
    "tokenizer/a/tokenizer.json": b"{}",
    "written.bin": lambda path: path.write_bytes(b"w" * 50),
}


def save(store, step, files=FILES, **info):
    return save_checkpoint(store, step, files, {"world_size": 1, **info})


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@quick
def test_round_trip(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", Retention(last=3))
    assert store.newest() is None
    path = save(store, 7, loss=0.1)
    checkpoint = store.newest()
    assert checkpoint == verify_checkpoint(path) and checkpoint.step == 7
    assert checkpoint.info == {"world_size": 1, "loss": 0.1} and path.name == "step-00000007"
    assert checkpoint.file("tokenizer/a/tokenizer.json").read_bytes() == b"{}"
    with pytest.raises(DataError, match=r"other.*model\.bin"):
        checkpoint.file("other")
    assert path.stat().st_mode & 0o077 == 0, "for the owner only"


@quick
def test_keep_last(tmp_path):
    store = CheckpointStore(tmp_path, Retention(last=3))
    for step in (10, 5, 20, 15, 30, 40, 100_000_000, 100_000_001):
        saved = save(store, step)
        assert saved in store.paths() and len(store.paths()) <= 3, "the one just saved is never pruned"
    assert names(tmp_path) == ["step-00000040", "step-100000000", "step-100000001"]
    assert store.newest().step == 100_000_001


@quick
def test_old_checkpoints_are_removed_last(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path, Retention(last=1))
    save(store, 1)
    with monkeypatch.context() as patch, pytest.raises(StorageError, match="No space left"):
        patch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
        save(store, 2)
    assert names(tmp_path) == ["step-00000001"] and store.newest().step == 1


@quick
def test_saving_a_step_again_always_leaves_a_valid_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path, Retention(last=2))
    save(store, 1)
    save(store, 2)
    save(store, 2, {"model.bin": b"new"})
    assert names(tmp_path) == ["step-00000001", "step-00000002.1"]
    assert store.newest().file("model.bin").read_bytes() == b"new"


@quick
def test_order_of_writes_fsyncs_and_rename(tmp_path, monkeypatch):
    """Every file is on disk before the manifest, all of it before the rename, the rename before the pruning."""
    store = CheckpointStore(tmp_path, Retention(last=1))
    save(store, 1)
    events, paths = [], {}
    real_open, real_fsync, real_rename, real_rmtree = os.open, os.fsync, Path.rename, shutil.rmtree

    def opened(path, *args, **kwargs):
        descriptor = real_open(path, *args, **kwargs)
        paths[descriptor] = Path(path)
        return descriptor

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(("fsync", paths[fd].name)), real_fsync(fd)))
    monkeypatch.setattr(Path, "rename", lambda a, b: (events.append(("rename", b.name)), real_rename(a, b))[1])
    monkeypatch.setattr(
        shutil, "rmtree", lambda p, *a, **k: (events.append(("remove", Path(p).name)), real_rmtree(p, *a, **k))
    )
    save(store, 2)
    events = [event if not event[1].startswith(".tmp") else (event[0], "temporary") for event in events]
    kept = [event for event in events if event != ("remove", "temporary")]
    assert kept[:3] == [("fsync", "model.bin"), ("fsync", "tokenizer.json"), ("fsync", "written.bin")]
    assert kept[3:6] == [("fsync", "a"), ("fsync", "tokenizer"), ("fsync", "temporary")]
    assert kept[6:8] == [("fsync", "manifest.json"), ("fsync", "temporary")]
    assert kept[8:10] == [("rename", "step-00000002"), ("fsync", tmp_path.name)]
    assert kept[10:] == [
        ("remove", ".old-step-00000001"),  # of an attempt before
        ("rename", ".old-step-00000001"),
        ("fsync", tmp_path.name),
        ("remove", ".old-step-00000001"),
    ]


@quick
def test_missing_files_are_detected(tmp_path):
    store = CheckpointStore(tmp_path, Retention(last=1))
    path = save(store, 1)
    for name in [*FILES, "manifest.json"]:
        (path / name).rename(tmp_path / "aside")
        with pytest.raises(DataError, match=name):
            verify_checkpoint(path)
        (tmp_path / "aside").rename(path / name)
    assert verify_checkpoint(path).step == 1


@quick
def test_damaged_newest_is_set_aside_and_the_previous_used(tmp_path, caplog):
    store = CheckpointStore(tmp_path, Retention(last=3))
    for step in (1, 2, 3):
        save(store, step)
    (tmp_path / "step-00000003" / "model.bin").write_bytes(b"x" * 1000)
    (tmp_path / "step-00000002" / "manifest.json").unlink()
    assert store.newest(repair=False).step == 1 and len(store.paths()) == 3, "a reader changes nothing"
    assert store.newest().step == 1
    assert names(tmp_path) == ["damaged-step-00000002", "damaged-step-00000003", "step-00000001"]
    assert "step-00000003 is damaged" in caplog.text and "SHA-256" in caplog.text
    save(store, 3)
    (tmp_path / "step-00000003" / "model.bin").unlink()
    assert store.newest().step == 1 and (tmp_path / "damaged-step-00000003-1").is_dir()
    (tmp_path / "step-00000001" / "model.bin").unlink()
    for _ in range(2):  # not "None", from which a run would start again
        with pytest.raises(DataError, match="damaged-step-00000001"):
            store.newest()


@quick
def test_superseded_branch_is_not_picked_up(tmp_path):
    store = CheckpointStore(tmp_path, Retention(last=5))
    for step in (1, 2, 3):
        save(store, step)
    store.set_aside_after(1)
    assert {path.name for path in tmp_path.glob("superseded-*")} == {
        "superseded-step-00000003",
        "superseded-step-00000002",
    }
    assert store.newest().step == 1
    store.set_aside_after(-1)
    assert store.newest() is None


@quick
def test_leftovers_of_killed_writers_are_removed(tmp_path):
    store = CheckpointStore(tmp_path, Retention(last=1))
    for name in (".tmp-step-00000001-x", ".old-step-00000001"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"")
    save(store, 1)
    assert names(tmp_path) == ["step-00000001"]


@quick
def test_retention_rules(tmp_path):
    """The newest, those of given steps, of every multiple, and the best; a new loss lets the worst of them go."""
    store = CheckpointStore(tmp_path, Retention(last=2, steps=(3,), every=10, best=2))
    losses = {2: 0.5, 4: 0.9, 5: 0.4, 6: 0.4, 7: 3.0, 12: 0.1}
    for step in range(1, 16):
        save(store, step, validation_loss=losses.get(step))
    assert names(tmp_path) == [f"step-{step:08}" for step in (3, 6, 10, 12, 14, 15)]


def test_parts_of_several_processes_become_one_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr("mmldlm.checkpoint.store._VISIBLE_TIMEOUT_S", 0.5)  # of the lost part
    store = CheckpointStore(tmp_path, Retention(last=1))
    temporary = store.begin(1, 100)
    assert temporary.stat().st_mode & 0o077 == 0
    parts = [write_files(temporary, {f"part-{rank}": bytes([rank]) * 50, f"sub/{rank}": b""}) for rank in range(3)]
    assert store.newest() is None, "not before the commit"
    records = {name: record for part in parts for name, record in part.items()}
    lost = {**records, "part-7": FileInfo(50, "0" * 64)}
    with pytest.raises(StorageError, match=r"part-7.*50"):
        store.commit(temporary, 1, lost, {}, {})
    path = store.commit(temporary, 1, records, {}, {})
    assert sorted(verify_checkpoint(path).files) == sorted(records) and names(tmp_path) == ["step-00000001"]
    assert all(file.stat().st_mode & 0o077 == 0 for file in path.rglob("*"))


@quick
def test_too_little_disk_space_is_refused_before_writing(tmp_path):
    store = CheckpointStore(tmp_path, Retention(last=1))
    save(store, 1)
    with pytest.raises(StorageError, match=r"1048576\.0 MiB.* [\d.]+ MiB"):
        save_checkpoint(store, 2, FILES, {}, needed_bytes=2**40)
    assert names(tmp_path) == ["step-00000001"]
