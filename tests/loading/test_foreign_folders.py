"""Bundles and run folders of strangers: nothing in them makes a command wait, leads outside or ends in a traceback."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

import mmldlm
from mmldlm import cli
from mmldlm.errors import DataError
from tests.helpers.changed_checkpoints import manifest_body, replace_file, seal
from tests.helpers.user_errors import assert_user_error

TERABYTE = 1 << 40
Run = Callable[..., tuple[int, str]]


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raise where the body takes longer, as one that reads a pipe would for ever."""

    def stop(number: int, frame: object) -> None:
        raise AssertionError(f"no answer within {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def run_command(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: object) -> tuple[int, str]:
        capsys.readouterr()
        with at_most(20):
            status = cli.main([*map(str, arguments)])
        return status, capsys.readouterr().err

    return run


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, short_run_dir: Path) -> Path:
    out = tmp_path_factory.mktemp("exported") / "bundle"
    assert cli.main(["export", str(short_run_dir), str(out)]) == 0
    return out


@pytest.fixture
def bundle(tmp_path: Path, exported: Path) -> Path:
    return shutil.copytree(exported, tmp_path / "bundle")


def plant(path: Path, kind: str) -> tuple[int, bytes]:
    """Put something at `path` that is no plain file of its folder; return the size and content for its manifest."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "sparse":
        with path.open("wb") as file:
            file.truncate(TERABYTE)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    else:
        path.symlink_to("/etc/passwd")
        return path.stat().st_size, path.read_bytes()
    return TERABYTE if kind == "sparse" else 0, b""


PLANTED = ["pipe", "endless", "sparse", "outside"]


@pytest.mark.parametrize("kind", PLANTED)
@pytest.mark.parametrize("name", ["README.md", "tokenizer/tokenizer.json", "config.json", "manifest.json"])
def test_a_bundle_has_plain_files_of_its_own(bundle: Path, run_command: Run, name: str, kind: str) -> None:
    body = manifest_body(bundle)
    size, content = plant(bundle / name, kind)
    if name != "manifest.json":
        body["files"][name] = {"bytes": size, "sha256": hashlib.sha256(content).hexdigest()}
        seal(bundle, body)
    for arguments in (["verify", bundle], ["sample", bundle, "--mode", "joint"]):
        assert_user_error(run_command(*arguments), 65)


def test_what_the_manifest_does_not_name_leads_nowhere(bundle: Path) -> None:
    (bundle / "data" / "encoder" / "inner").symlink_to("/etc")
    with pytest.raises(DataError, match="inner"):
        mmldlm.load(bundle)


def test_links_that_are_allowed(bundle: Path, short_run_dir: Path, tmp_path: Path) -> None:
    """To a run, to its checkpoints, to one of them; and the files that huggingface_hub links into a snapshot."""
    (tmp_path / "run").symlink_to(short_run_dir)
    assert mmldlm.load(tmp_path / "run").run.step == 20
    shutil.copytree(short_run_dir, tmp_path / "own")
    (tmp_path / "own" / "checkpoints").rename(tmp_path / "large_disk")
    (tmp_path / "own" / "checkpoints").symlink_to(tmp_path / "large_disk")
    newest = next((tmp_path / "large_disk").glob("step-*"))
    newest.rename(tmp_path / "archived")
    newest.symlink_to(tmp_path / "archived")
    assert mmldlm.load(tmp_path / "own").run.step == 20
    blobs, snapshot = tmp_path / "models--us--it" / "blobs", tmp_path / "models--us--it" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    for number, path in enumerate([path for path in bundle.rglob("*") if path.is_file()]):
        path.rename(blobs / str(number))
        link = snapshot / path.relative_to(bundle)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blobs / str(number), link.parent))
    assert mmldlm.load(snapshot).run.step == 20


def with_value(content: bytes, value: object, *keys: str) -> bytes:
    """JSON with another value at a key."""
    tree = node = json.loads(content)
    for key in keys[:-1]:
        node = node[key]
    node[keys[-1]] = value
    return json.dumps(tree).encode()


def with_nan(content: bytes) -> bytes:
    return save({name: torch.full_like(tensor, math.nan) for name, tensor in load(content).items()})


FORGED: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "a deep config": ("config.json", lambda _: b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "a list as config": ("config.json", lambda _: b"[1]"),
    "a group that is a number": ("config.json", lambda old: with_value(old, 5, "model")),
    "a list as mode": ("config.json", lambda old: with_value(old, [1], "mode")),
    "years of steps": ("config.json", lambda old: with_value(old, 10**9, "sampling", "steps")),
    "years of search": ("config.json", lambda old: with_value(old, 10**9, "sampling", "search")),
    "weights that are NaN": ("model.safetensors", with_nan),
    "latents that are a list": ("latents.json", lambda _: b"[1]"),
    "latents without scale": ("latents.json", lambda old: with_value(old, 0, "rms")),
    "fewer channels": ("latents.json", lambda old: with_value(old, [0.0], "mean")),
    "a deep store": ("data/manifest.json", lambda _: b"[" * 100_000),
    "another tokenizer": ("tokenizer/tokenizer.json", lambda old: old.replace(b'space": false', b'space": true')),
    "no files": ("manifest.json", lambda old: with_value(old, [], "files")),
    "an odd file": ("manifest.json", lambda old: with_value(old, 5, "files", "README.md")),
    "no info": ("manifest.json", lambda old: with_value(old, {}, "info")),
    "odd tensors": ("manifest.json", lambda old: with_value(old, 3, "tensors", "model")),
    "unlisted weights": ("manifest.json", lambda old: with_value(old, {}, "files")),
    "a huge manifest": ("manifest.json", lambda old: with_value(old, "a" * (65 << 20), "info")),
}


@pytest.mark.parametrize("kind", FORGED)
def test_forged_bundles_are_refused_in_one_line(bundle: Path, kind: str) -> None:
    name, change = FORGED[kind]
    changed = change((bundle / name).read_bytes())
    if name == "manifest.json":
        seal(bundle, {key: value for key, value in json.loads(changed).items() if key != "sha256"})
    else:
        replace_file(bundle, name, changed)
    with at_most(20), pytest.raises(DataError) as refused:
        mmldlm.load(bundle)
    assert len(str(refused.value).splitlines()) == 1 and str(bundle) in str(refused.value)


@pytest.mark.parametrize("content", [b"[1]", b"{" * 100_000])
def test_an_odd_evaluation_is_named(short_run_dir: Path, tmp_path: Path, run_command: Run, content: bytes) -> None:
    run = shutil.copytree(short_run_dir, tmp_path / "run")
    (run / "evaluation.json").write_bytes(content)
    assert_user_error(run_command("export", run, tmp_path / "out"), 65, "evaluation.json")


@pytest.mark.parametrize("kind", PLANTED)
@pytest.mark.parametrize("name", ["metrics.jsonl", "startup.json", "exit.json", "config.yaml", "run.lock"])
def test_readers_of_runs_read_plain_files_alone(
    short_run_dir: Path, tmp_path: Path, run_command: Run, name: str, kind: str
) -> None:
    run = shutil.copytree(short_run_dir, tmp_path / "run")
    plant(run / name, kind)
    for arguments in (
        ["compare", run, "--json"],
        ["monitor", run, "--once"],
        ["compare", run, short_run_dir],
        ["verify", run],
        ["checkpoints", "list", run],
    ):
        status, errors = run_command(*arguments)
        assert "Traceback" not in errors and "root:" not in errors
        assert status in (0, 64, 65, 69, 74) and len(errors.splitlines()) <= 1, (arguments, errors)
