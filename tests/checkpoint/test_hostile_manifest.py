"""Untrusted manifests give a verified checkpoint or one short error; no path outside the folder is accessed."""

from __future__ import annotations

import os
import random
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from mmldlm.checkpoint.manifest import MAX_MANIFEST_BYTES, Checkpoint, verify_checkpoint
from mmldlm.checkpoint.retention import Retention
from mmldlm.checkpoint.store import CheckpointStore, write_files
from mmldlm.errors import DataError
from tests.helpers.hostile_checkpoints import HASH, manifest_body, read_or_refused, seal
from tests.helpers.save_checkpoint import save_checkpoint

quick = pytest.mark.quick
CASES = 2000

NAMES = [
    "../outside", "/etc/hostname", "a/../../outside", "./x", "a//b", "", ".", "..", "~", "a\\b", "C:x", "manifest.json",
    "link", "folder_link/outside", "fifo", "socket", "null", "a", "a\nb", "a\0b", "\ud800", "\x1b[2J", "\u2028", "é",
    "x" * 300, "x/" * 3000 + "x", "y" * 100_000, "a/" * 120, "-rf", "$(touch canary)", "model.bin/", "model.bin ", " ",
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, -1, 1.0, 1e300, 2**62, 2**63, 2**64, 10**4000, -(10**4000), "", "1", "x" * 5000, "\n", HASH,
    [[[]]], [], {}, {"bytes": 1}, {"bytes": 1, "sha256": HASH}, {"bytes": 2**62, "sha256": HASH},
    {"bytes": -1, "sha256": HASH},
    {"bytes": 1000.0, "sha256": HASH}, {"bytes": True, "sha256": HASH}, {"bytes": 1000, "sha256": "\n" * 64},
    {"bytes": 1000, "sha256": [HASH]}, {"bytes": 1000, "sha256": HASH * 1000}, {"files": {"files": {}}},
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint among things that its manifest must not lead to."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "outside").write_bytes(b"secret")
    (tmp_path / "checkpoints" / "outside").write_bytes(b"secret")
    store = CheckpointStore(tmp_path / "checkpoints", Retention(last=1))
    path = save_checkpoint(store, 1, {"model.bin": b"m" * 1000, "a/b": b"", "state.json": b"{}"}, {"world_size": 1})
    (path / "link").symlink_to("model.bin")
    (path / "folder_link").symlink_to(tmp_path)
    os.mkfifo(path / "fifo")
    (path / "null").symlink_to("/dev/zero")
    return path


def mutate(rng: random.Random, body: dict[str, Any]) -> None:
    record = deepcopy(body["files"]["model.bin"])
    for _ in range(rng.randint(1, 2)):
        what = rng.randrange(5)
        if what == 0 and isinstance(body.get("files"), dict):
            body["files"][rng.choice(NAMES)] = rng.choice([record, *VALUES])
        elif what == 1 and isinstance(body.get("files"), dict):
            body["files"][rng.choice(["model.bin", "a/b", "state.json"])] = deepcopy(rng.choice(VALUES))
        elif what == 2:
            body[rng.choice(["format", "step", "info", "files", "more"])] = deepcopy(rng.choice(VALUES))
        elif what == 3:
            body.pop(rng.choice(["format", "step", "info", "files"]), None)
        else:
            body["info"] = {rng.choice(["identity", "validation_loss", *NAMES]): deepcopy(rng.choice(VALUES))}


def mutate_bytes(rng: random.Random, raw: bytes) -> bytes:
    for _ in range(rng.randint(1, 4)):
        at, size = rng.randrange(len(raw)), rng.randint(1, 40)
        raw = (
            raw[:at]
            + rng.choice([rng.randbytes(1), b"", b"[" * 50, b"9" * 50, b'"'])
            + raw[at + rng.choice([0, 1, size]) :]
        )
    return raw


def test_fuzzed_manifests(folder: Path) -> None:
    """No accepted manifest names a path outside the folder or a file that is not regular."""
    good, rng, verified = (folder / "manifest.json").read_bytes(), random.Random(0), 0
    before = sorted(folder.parent.parent.rglob("*"))
    for case in range(CASES):
        (folder / "manifest.json").write_bytes(good)
        if case % 3:
            body = manifest_body(folder)
            mutate(rng, body)
            seal(folder, body)
        else:
            (folder / "manifest.json").write_bytes(mutate_bytes(rng, good))
        result: Checkpoint | None = read_or_refused(lambda: verify_checkpoint(folder))
        if result is not None:
            verified += 1
            assert all((folder / name).is_file() and not (folder / name).is_symlink() for name in result.files)
            assert type(result.step) is int and isinstance(result.info, dict)
    assert 0 < verified < CASES / 2
    assert sorted(folder.parent.parent.rglob("*")) == before


@quick
@pytest.mark.parametrize("name", NAMES)
def test_names_cannot_leave_the_folder(folder: Path, name: str) -> None:
    body = manifest_body(folder)
    body["files"][name] = body["files"]["model.bin"]
    seal(folder, body)
    assert (
        read_or_refused(lambda: verify_checkpoint(folder)) is None
        and read_or_refused(lambda: verify_checkpoint(folder, hashes=False)) is None
    )


@quick
@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", "./x", "a//b", "", ".", "..", "a\\b", "manifest.json"])
def test_names_that_cannot_be_saved(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="not a file name"):
        write_files(tmp_path, {name: b""})
    assert list(tmp_path.iterdir()) == []


MALFORMED: list[dict[str, Any]] = [
    {"format": 3}, {"format": 0}, {"format": True}, {"tensors": []}, {"tensors": None},
    {"step": "1"}, {"step": True}, {"info": None}, {"files": []}, {"files": {"a/b": {"bytes": 0}}},
    {"files": {"a/b": 3}},
]  # fmt: skip
NO_MANIFEST = [b"[" * 200_000, b"[]", b"null", b"\xff\xfe", b'{"a": NaN}', b" " * (MAX_MANIFEST_BYTES + 1)]


@quick
def test_malformed_manifests(folder: Path) -> None:
    body = manifest_body(folder)
    for change in MALFORMED:
        seal(folder, {**body, **change})
        assert read_or_refused(lambda: verify_checkpoint(folder)) is None, change
    del body["info"]
    seal(folder, body)
    assert read_or_refused(lambda: verify_checkpoint(folder)) is None
    for content in NO_MANIFEST:
        (folder / "manifest.json").write_bytes(content)
        with pytest.raises(DataError, match=r"manifest\.json"):
            verify_checkpoint(folder)
    with pytest.raises(DataError):
        verify_checkpoint(folder / "absent")


@quick
@pytest.mark.parametrize("kind", ["fifo", "folder", "endless", "link"])
def test_manifest_must_be_a_regular_file(folder: Path, kind: str) -> None:
    manifest = folder / "manifest.json"
    manifest.rename(folder / "other")
    if kind == "fifo":
        os.mkfifo(manifest)
    elif kind == "folder":
        manifest.mkdir()
    else:
        manifest.symlink_to("/dev/zero" if kind == "endless" else "other")
    assert read_or_refused(lambda: verify_checkpoint(folder)) is None


@quick
def test_large_and_deep_manifests(folder: Path) -> None:
    body = manifest_body(folder)
    deep: Any = 1
    for _ in range(300):  # as deep as Python's own recursion would bear
        deep = {"model": deep}
    record = {"bytes": 0, "sha256": HASH}
    for change in (
        {"info": {"identity": deep}},
        {"files": {f"f{n}": record for n in range(100_000)}},
        {"info": {"x": "y" * 2**24}},
    ):
        seal(folder, {**body, **change})
        assert read_or_refused(lambda: verify_checkpoint(folder)) is None
    (folder / "manifest.json").write_bytes(b"[" * 2**23)
    assert read_or_refused(lambda: verify_checkpoint(folder)) is None
