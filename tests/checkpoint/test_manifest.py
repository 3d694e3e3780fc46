"""A checkpoint is as it was written, or refused by the name of what changed; its manifest leads nowhere outside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mmldlm.checkpoint.manifest import MANIFEST, verify_checkpoint
from mmldlm.checkpoint.retention import Retention
from mmldlm.checkpoint.store import CheckpointStore, write_files
from mmldlm.errors import DataError
from tests.helpers.changed_checkpoints import manifest_body, seal
from tests.helpers.save_checkpoint import save_checkpoint

ESCAPING = ["../outside", "/etc/hostname", "a/../../outside", "./x", "a//b", "", ".", "..", "a\\b", MANIFEST]
UNREADABLE = ["a\nb", "a\0b", "\x1b[2J", "\u2028", "x" * 300]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "outside").write_bytes(b"secret")
    store = CheckpointStore(tmp_path / "checkpoints", Retention(last=1))
    return save_checkpoint(store, 1, {"model.bin": bytes(range(256)), "a/b": b"", "state.json": b"{}"}, {"info": 1.5})


CHANGES: dict[str, Callable[[bytes, int], bytes]] = {
    "a bit": lambda data, at: data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :],
    "a byte less": lambda data, at: data[:at] + data[at + 1 :],
    "a byte more": lambda data, at: data[:at] + b" " + data[at:],
    "an end": lambda data, at: data[:at],
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_changed_byte_is_refused_by_name(folder: Path, change: str) -> None:
    """Of the manifest as of every file that it names."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.name for path in files} == {"b", MANIFEST, "model.bin", "state.json"}
    for path in files:
        data = path.read_bytes()
        for at in range(len(data)):
            path.write_bytes(CHANGES[change](data, at))
            with pytest.raises(DataError, match=path.name) as refused:
                verify_checkpoint(folder)
            assert len(str(refused.value).splitlines()) == 1
        path.write_bytes(data)
    assert verify_checkpoint(folder).step == 1, "it is the changes that were refused"


@pytest.mark.parametrize("name", ["model.bin", "a/b", MANIFEST])
def test_a_file_that_is_missing_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(DataError, match=str(folder / name)):
        verify_checkpoint(folder, hashes=False)
    with pytest.raises(DataError, match=MANIFEST):
        verify_checkpoint(folder / "absent")


@pytest.mark.parametrize("name", [*ESCAPING, *UNREADABLE])
def test_names_cannot_leave_the_folder(folder: Path, tmp_path: Path, name: str) -> None:
    body = manifest_body(folder)
    body["files"][name] = body["files"]["model.bin"]
    seal(folder, body)
    for hashes in (True, False):
        with pytest.raises(DataError, match="not a file name inside a checkpoint"):
            verify_checkpoint(folder, hashes)
    with pytest.raises(DataError, match="not a file name"):
        write_files(tmp_path, {name: b""})


def test_another_format_is_refused_in_one_line(folder: Path) -> None:
    seal(folder, {**manifest_body(folder), "format": 1})
    with pytest.raises(DataError, match=r"manifest\.json.* 1.* 2"):
        verify_checkpoint(folder)
