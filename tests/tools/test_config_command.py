"""`mmldlm config`: the values that a run uses, their origins, and the differences of two configs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mmldlm import cli
from mmldlm.config import RunConfig, load_config, write_config
from mmldlm.settings.declaration import leaves
from mmldlm.settings.fields import build
from mmldlm.settings.yaml import parse_yaml
from tests.helpers.user_errors import assert_user_error

pytestmark = pytest.mark.quick
KEYS = [key for key, _ in leaves(RunConfig)]


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A config that extends another, which has anchors, merges, a map, odd names and values at their defaults."""
    (tmp_path / "base.yaml").write_text(
        "# a comment\n"
        "optim: &shared\n"
        "  lr: 2\n"
        "  muon:\n"
        "    momentum: 0.5\n"
        "  name: muon\n"
        "mode_schedule: {5: l2t, 9: {joint: 2, t2l: 1}}\n"
        "run: {dir: 'a: b # c', seed: 0}\n"
    )
    (tmp_path / "mine.yaml").write_text(
        "extends: base.yaml\n"
        "train:\n"
        "  steps: 7\n"
        "checkpoint:\n"
        "  <<:\n"
        "    keep_last: 5\n"
        "    keep_every: 4\n"
        "  keep_last: 6\n"
        "optim: {lr: 3}\n"
    )
    return tmp_path / "mine.yaml"


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert cli.main(["config", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def origins(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, str]:
    result: dict[str, Any] = json.loads(shown(capsys, "--json", *arguments))
    return {key: entry["origin"] for key, entry in result.items()}


def test_origins_of_values(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, overrides = (
        mine.with_name("base.yaml"),
        ["model.depth=2", "mode.joint=0.5", "optim.eps=1e-6", "log={every: 2}"],
    )
    result = origins(capsys, mine, *overrides)
    assert list(result) == KEYS
    expected = {
        "optim.lr": f"{mine}:9",
        "optim.muon.momentum": f"{base}:5",
        "optim.name": f"{base}:6",
        "mode_schedule": f"{base}:7",
        "run.dir": f"{base}:8",
        "run.seed": f"{base}:8",
        "train.steps": f"{mine}:3",
        "checkpoint.keep_last": f"{mine}:8",
        "checkpoint.keep_every": f"{mine}:7",
        **dict.fromkeys(["model.depth", "mode", "optim.eps", "log.every"], "command line"),
    }
    assert {key: origin for key, origin in result.items() if origin != "default"} == expected


def test_command_line_group_replaces_the_files(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = origins(capsys, mine, "optim={betas: [0.5, 0.9]}")
    assert result["optim.betas"] == "command line" and result["optim.lr"] == result["optim.muon.momentum"] == "default"


def test_the_tree_reads_back_as_the_config(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, mine, "optim.weight_decay=0")
    config = load_config(mine, ["optim.weight_decay=0"])
    assert build(RunConfig, parse_yaml(text, "shown")) == config
    lines = {line.split(":")[0].strip(): line for line in text.splitlines()}
    assert lines["weight_decay"].endswith("  # command line") and lines["betas"].endswith("  # default")
    assert lines["momentum"] == f"    {'momentum: 0.5':<{lines['lr'].index('#') - 4}}# {mine.with_name('base.yaml')}:5"
    values = {key: entry["value"] for key, entry in json.loads(shown(capsys, "--json", mine)).items()}
    assert values["optim.lr"] == 3 and values["run.dir"] == "a: b # c" and values["optim.betas"] == [0.9, 0.98]


def test_changed_hides_defaults(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(mine, ["log.every=10"])
    result = json.loads(shown(capsys, "--changed", "--json", mine, "log.every=10"))
    assert result.keys() == {
        "run.dir", "mode_schedule", "optim.name", "optim.lr", "optim.muon.momentum", "train.steps",
        "checkpoint.keep_last", "checkpoint.keep_every",
    }  # fmt: skip
    text = shown(capsys, mine, "log.every=10", "--changed")
    assert build(RunConfig, parse_yaml(text, "shown")) == config and "# default" not in text
    empty = mine.with_name("empty.yaml")
    empty.write_text("{}")
    assert (
        shown(capsys, "--changed", empty).strip() == ""
        and json.loads(shown(capsys, "--changed", "--json", empty)) == {}
    )


def test_diff_of_files_and_run_folders(mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    write_config(load_config(mine, ["optim.betas=[0.5, 0.9]", "mode=joint"]), run)
    assert shown(capsys, "--diff", mine, run) == (
        "mode: {l2t: 0.5, t2l: 0.25, joint: 0.25} -> joint\noptim.betas: [0.9, 0.98] -> [0.5, 0.9]\n"
    )
    backwards = json.loads(shown(capsys, "--diff", run, mine, "--json"))
    assert backwards["mode"] == ["joint", {"l2t": 0.5, "t2l": 0.25, "joint": 0.25}] and len(backwards) == 2
    assert shown(capsys, "--diff", mine, mine) == "" and json.loads(shown(capsys, "--diff", "--json", run, run)) == {}
    assert {key: entry["origin"] for key, entry in json.loads(shown(capsys, "--json", run)).items()}.keys() == set(KEYS)


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        ([], 2, "expected one config (file or run folder), found 0: none"),
        (["{mine}", "{mine}"], 2, "expected one config (file or run folder), found 2"),
        (["--diff", "{mine}"], 2, "expected two configs (file or run folder), found 1"),
        (["--diff", "{mine}", "{mine}", "optim.lr=1"], 2, "--diff: expected two configs alone, found optim.lr=1"),
        (["--diff", "--changed", "{mine}", "{mine}"], 2, "--diff: expected two configs alone, found --changed"),
        (["{mine}", "optim.lrr=1"], 64, "did you mean 'optim.lr'?"),
        (["/nowhere.yaml"], 64, "config file /nowhere.yaml does not exist"),
        (["--diff", "{mine}", "/nowhere.yaml"], 64, "config file /nowhere.yaml does not exist"),
        (["/"], 64, "expected a config file or a run folder, found a folder with no config.yaml"),
    ],
)
def test_refusals(
    mine: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, expected: str
) -> None:
    status = cli.main(["config", *(argument.format(mine=mine) for argument in arguments)])
    output = capsys.readouterr()
    assert output.out == ""
    assert_user_error((status, output.err), code, expected)


def test_closed_pipe_is_no_error(mine: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "mmldlm.cli", "config", str(mine)]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, env=os.environ)
    os.close(writer)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")
