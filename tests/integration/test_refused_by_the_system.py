"""Whatever the system refuses, a command ends in one line that names a path, and leaves no temporary files."""

from __future__ import annotations

import errno
import io
import os
import pathlib
import shutil
from pathlib import Path
from typing import Any

import pytest

from mmldlm import cli
from tests.helpers.sample_corpus import write_corpus
from tests.helpers.user_errors import assert_user_error

COMMANDS: dict[str, list[str]] = {
    "train": ["train", "{config}", "train.steps=1", "validation.every=0"],
    "prepare": ["prepare", "{corpus}", "--out", "{out}", "--vocab-size", "300", "--tokenizer", "bpe"],
    "sample": ["sample", "{run}", "--mode", "joint", "--out", "{out}.jsonl", "-n", "2"],
    "evaluate": ["evaluate", "{run}", "--out", "{out}", "--texts", "1", "--samples", "4", "--modes", "t2l"],
    "export": ["export", "{run}", "{out}"],
    "merge": ["checkpoints", "merge", "{run}", "{run}", "--out", "{out}"],
    "rewind": ["rewind", "{run}", "--before", "5"],
    "compare": ["compare", "{run}", "--figures", "{out}"],
    "new": ["new", "{out}"],
}


def refuse(monkeypatch: pytest.MonkeyPatch, kind: str, root: Path) -> None:
    """Have the system refuse what writers need below `root`; a write itself has no name in its error."""
    opened = io.open

    def fail(number: int, *named: object) -> Any:
        raise OSError(number, os.strerror(number), *map(str, named))

    def open_to_read(path: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
        is_write = isinstance(path, (str, Path)) and str(path).startswith(str(root)) and set(mode) & set("wax+")
        return fail(errno.EMFILE, path) if is_write else opened(path, mode, *rest, **options)

    if kind == "no more files":
        for module in (io, pathlib.io):  # type: ignore[attr-defined]
            monkeypatch.setattr(module, "open", open_to_read)
        monkeypatch.setattr("builtins.open", open_to_read)
    elif kind == "a full disk":
        monkeypatch.setattr(os, "fsync", lambda descriptor: fail(errno.ENOSPC))
    else:
        make = os.mkdir
        monkeypatch.setattr(
            os, "mkdir", lambda path, *rest: fail(errno.EACCES, path) if str(root) in str(path) else make(path, *rest)
        )


@pytest.mark.parametrize("kind", ["no more files", "a full disk", "no rights"])
@pytest.mark.parametrize("name", COMMANDS)
def test_one_line_with_a_path(
    name: str,
    kind: str,
    short_run_dir: Path,
    tiny_config: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = {
        "run": shutil.copytree(short_run_dir, tmp_path / "copy"),
        "config": tiny_config,
        "corpus": write_corpus(tmp_path / "corpus.txt", 60),
        "out": tmp_path / "out",
    }
    before = {path for path in tmp_path.rglob("*") if ".tmp" in path.name}
    with monkeypatch.context() as patch:
        refuse(patch, kind, tmp_path)
        status = cli.main([word.format(**places) for word in COMMANDS[name]])
    errors = capsys.readouterr().err
    if status == 0:  # it has needed nothing of the kind
        assert (name, kind) in {("sample", "no rights"), ("new", "a full disk"), ("compare", "a full disk")}
        return
    assert_user_error((status, errors), 74, str(tmp_path), alone=False)
    assert {path for path in tmp_path.rglob("*") if ".tmp" in path.name} == before


@pytest.mark.parametrize(
    "number", [errno.EACCES, errno.EMFILE, errno.ETIMEDOUT, errno.EFBIG, errno.ELOOP, errno.ENOENT]
)
def test_no_errno_is_a_traceback(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Any, *rest: object) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(os, "mkdir", refused)
    assert_user_error(
        (cli.main(["new", str(tmp_path / "out")]), capsys.readouterr().err), 74, str(tmp_path), os.strerror(number)
    )


@pytest.mark.parametrize(
    "arguments", [["train", "{config}", "run.dir={loop}"], ["monitor", "{loop}"], ["new", "{loop}"]]
)
def test_a_link_to_itself(
    arguments: list[str], tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    status = cli.main([word.format(config=tiny_config, loop=loop) for word in arguments])
    assert_user_error((status, capsys.readouterr().err), status, str(loop), alone=False)
    assert status in (65, 74)
