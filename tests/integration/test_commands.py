"""Wrong command lines end with one clear line, the documented exit code, no traceback and no files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mmldlm import cli, train
from mmldlm.utils.lock import RunLock
from tests.helpers.user_errors import assert_user_error

Command = Callable[..., object]


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["optim.lrr=1"], 64, "did you mean 'optim.lr'?"),
        (["train.steps=many"], 64, "train.steps: expected whole number"),
        (["data.path=/nowhere"], 65, "/nowhere: not a data store"),
        (["data.path="], 64, "data.path: expected"),
        (["resume=/nowhere"], 64, "resume: expected auto, never or a checkpoint's folder"),
        (["attention.backend=varlen"], 64, "attention.backend: varlen needs CUDA"),
        (["other.yaml"], 2, "other.yaml: expected key.sub=value"),
    ],
)
def test_train_refuses(
    tiny_config: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, expected: str
) -> None:
    assert_user_error((train.main([str(tiny_config), *arguments]), capsys.readouterr().err), code, expected)


@pytest.mark.parametrize("override", ["optim.lrr=1", "data.path=/nowhere", "attention.backend=varlen"])
def test_a_refused_config_creates_nothing(tiny_config: Path, tmp_path: Path, override: str) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert train.main([str(tiny_config), override]) != 0
    assert sorted(tmp_path.rglob("*")) == before


def test_missing_config_file(capsys: pytest.CaptureFixture[str]) -> None:
    status = train.main(["/nowhere/config.yaml"])
    assert_user_error((status, capsys.readouterr().err), 64, "/nowhere/config.yaml does not exist")


def test_config_by_flag_and_the_launchers_local_rank(tiny_config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--local_rank=0", "--config", str(tiny_config), "--dry-run", "train.steps=2"]) == 0
    assert "steps: 2" in capsys.readouterr().out


def test_dry_run_prints_and_creates_nothing(
    tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert train.main([str(tiny_config), "--dry-run", "train.micro_batch_size=4"]) == 0
    shown = capsys.readouterr().out
    for line in ("total parameters", "tokens per step", "FLOPs per step", "memory per process", "num_heads: 2"):
        assert line in shown
    assert "8 samples = 1 process x 4 samples x 2 micro-batches" in shown
    assert sorted(tmp_path.rglob("*")) == before


def test_the_run_folder_belongs_to_one_run(
    tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    with RunLock(tmp_path / "run"):
        status = train.main([str(tiny_config)])
    assert_user_error((status, capsys.readouterr().err), 73, "is in use by process", alone=False)
    assert not (tmp_path / "run" / "exit.json").exists()


@pytest.mark.setting("data.verify")
def test_nan_latent_in_the_store_is_named(
    tiny_config: Path, tiny_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    shutil.copytree(tiny_store, store)
    path = next(store.glob("train-*.latents.npy"))
    latents = np.load(path, mmap_mode="r+")
    latents[5] = np.nan
    latents.flush()
    status = train.main([str(tiny_config), f"data.path={store}"])
    assert_user_error((status, capsys.readouterr().err), 65, path.name, "damaged")
    assert not (tmp_path / "run").exists()
    status = train.main([str(tiny_config), f"data.path={store}", "train.steps=60", "data.verify=sizes"])
    assert_user_error((status, capsys.readouterr().err), 65, path.name, "sample 5", alone=False)
    assert json.loads((tmp_path / "run" / "exit.json").read_text())["code"] == 65


def test_truncated_store_is_named(
    tiny_config: Path, tiny_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    shutil.copytree(tiny_store, store)
    path = next(store.glob("train-*.tokens.npy"))
    path.write_bytes(path.read_bytes()[:-10])
    status = train.main([str(tiny_config), f"data.path={store}"])
    assert_user_error((status, capsys.readouterr().err), 65, path.name)


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["sample", "/nowhere", "--text", "x"], 65, "not a run folder"),
        (["evaluate", "/nowhere"], 65, "not a run folder"),
        (["prepare", "/nowhere.txt", "--out", "/tmp/never-made"], 65, "/nowhere.txt"),
        (["trian"], 2, "unknown command 'trian'"),
        (["track", "runs/own"], 2, "mmldlm track is gone, use `log.trackers="),
    ],
)
def test_commands_refuse(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, expected: str) -> None:
    assert_user_error((cli.main(arguments), capsys.readouterr().err), code, expected)


def test_empty_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").write_text("")
    status = cli.main(["prepare", str(tmp_path / "empty.txt"), "--out", str(tmp_path / "store")])
    assert_user_error((status, capsys.readouterr().err), 65, alone=False)
    assert not (tmp_path / "store").exists()


def test_usage_without_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "prepare" in capsys.readouterr().out
    assert cli.main(["--help"]) == 0


def test_errors_have_no_traceback_in_a_real_process(tiny_config: Path, command: Command) -> None:
    """In-process tests cannot see what the interpreter prints on its way out."""
    finished = command("mmldlm.train", tiny_config, "optim.lrr=1")
    assert finished.returncode == 64  # type: ignore[attr-defined]
    assert finished.stderr == (  # type: ignore[attr-defined]
        "mmldlm: error: unknown key 'optim.lrr': did you mean 'optim.lr'?\n"
    )


def test_quiet_start(tiny_config: Path, command: Command) -> None:
    """Libraries say nothing that the user did not ask for."""
    finished = command("mmldlm.train", tiny_config, "train.steps=2", "validation.every=0")
    assert finished.returncode == 0  # type: ignore[attr-defined]
    assert "WARNING" not in finished.stderr + finished.stdout  # type: ignore[attr-defined]
    assert all(line.startswith(("step ", "checkpoint ")) for line in finished.stderr.splitlines())  # type: ignore[attr-defined]
