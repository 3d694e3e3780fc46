"""Malformed configs: each is a run config, or refused in one short line."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from mmldlm import cli
from mmldlm.config import RunConfig, load_config, require_paths
from mmldlm.distributed.launch import LauncherEnv
from mmldlm.errors import ConfigError, ExitCode, UsageError, exit_code_and_cause
from mmldlm.settings.declaration import dump, leaves
from mmldlm.settings.fields import build, to_yaml
from mmldlm.settings.yaml import parse_yaml
from mmldlm.tools.config import config_schema
from mmldlm.trainer.setup import check_settings, step_plan
from tests.helpers.user_errors import assert_user_error

LAUNCH = LauncherEnv("ddp", "torchrun", 0, 0, world_size=2, local_world_size=2, master="localhost:1")
SHARED = "run: {dir: r}\nmode: &m {l2t: 1, joint: 3}\nmode_schedule: {10: *m, 20: {<<: *m, l2t: 5}}\n"

MALFORMED: dict[str, tuple[str | bytes, list[str]]] = {
    "a map in itself": ("run: &r {dir: x, run: *r}", []),
    "a word of 100 KB": ("mode: " + "x" * 100_000, ["mode=" + "x" * 100_000]),
    "thousands of unknown keys": ("".join(f"learning_rat{n}: 1\n" for n in range(3500)), []),
    "a seed that torch cannot take": ("run: {seed: 18446744073709551616}", []),
    "a number beyond any float": ("optim: {lr: 1e309, clip_norm: .inf}\nmode: {l2t: 1e308, t2l: 1e308}", []),
    "a set": ("mode: !!set {l2t, t2l}", []),
    "base64": ("run: {dir: !!binary aGk=}", []),
    "a path with NUL": ('run: {dir: "a\\0b"}', ['run.dir="a\\0b"']),
    "minutes": ("train: {steps: 1:30}", ["train.steps=1:30"]),
    "deep": ("mode: " + "[" * 20_000, ["mode=" + "{a: " * 20_000]),
    "UTF-16": ("run: {dir: x}".encode("utf-16"), []),
    "bytes": (bytes(range(256)) * 8, []),
    "tabs": ("run:\n\tdir: x\n", []),
    "two documents": ("run: {dir: x}\n---\nrun: {dir: y}\n", []),
    "an empty assignment": (b"", ["=", "==", ".=1", "a..b=1", "run.=1", "run.dir.x=1"]),
}  # fmt: skip


def outcome(path: Path | None, overrides: list[str]) -> RunConfig | None:
    """The config, or None where it was refused in one short line."""
    try:
        config = load_config(path, overrides)
        require_paths(config, "data.path", "run.dir")
        check_settings(config, LAUNCH, "cpu")
        step_plan(config, 2)
    except (ConfigError, UsageError) as error:
        assert len(str(error).splitlines()) == 1 and len(str(error)) <= 2000, str(error)[:3000]
        return None
    return config


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_configs(tmp_path: Path, name: str) -> None:
    content, overrides = MALFORMED[name]
    path = tmp_path / "config.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    assert outcome(path, []) is None
    for each in overrides:
        assert outcome(path, [each]) is None


@pytest.mark.quick
def test_ordinary_anchors_and_merges_still_work(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(SHARED)
    config = load_config(path, ["mode_schedule.10.l2t=2"])
    assert config.mode == {"l2t": 1, "joint": 3}, "an override of one leaves the other that shares its mapping"
    assert config.mode_schedule == {10: {"l2t": 2, "joint": 3}, 20: {"l2t": 5, "joint": 3}}
    path.write_text("mode:\n  <<: [{l2t: 1}, {l2t: 2, joint: 2}]\n")
    assert load_config(path).mode == {"l2t": 1, "joint": 2}


VALUES: list[Any] = [
    None, True, "", "off", "x" * 5000, 0, -1, 0.5, 2**70, 1e308, float("inf"), float("nan"),
    [], [[]], ["backbone"] * 50, {}, {"a": {"b": {}}}, {"l2t": 1e308, "t2l": 1e308}, {1: {2: {3: 4}}}, {-5: "l2t"},
]  # fmt: skip


def test_odd_values_of_every_setting() -> None:
    """What is accepted reads back as itself, and the schema for editors accepts it, too."""
    accepted, schema = 0, Draft202012Validator(config_schema())
    for (key, _), value in itertools.product(leaves(RunConfig), VALUES):
        tree = value
        for part in reversed(key.split(".")):
            tree = {part: tree}
        try:
            config = build(RunConfig, tree)
        except ConfigError as error:
            assert len(str(error).splitlines()) == 1 and len(str(error)) <= 2000, str(error)[:3000]
            continue
        assert build(RunConfig, dump(config)) == config, tree
        assert schema.is_valid(json.loads(json.dumps(tree))), tree
        accepted += 1
    assert accepted > 100


@pytest.mark.quick
def test_a_name_that_no_folder_can_have_is_no_bug() -> None:
    with pytest.raises(OSError) as caught:
        check_settings(RunConfig(resume="y" * 300), LAUNCH, "cpu")
    assert exit_code_and_cause(caught.value)[0] == ExitCode.STORAGE


@pytest.mark.parametrize("name", ["a map in itself", "bytes"])
def test_the_command_answers_in_one_line(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    content, overrides = MALFORMED[name]
    path = tmp_path / "config.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    assert_user_error((cli.main(["train", str(path), *overrides]), capsys.readouterr().err), 64)


@pytest.mark.quick
def test_numbers_are_those_of_yaml_1_2(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "train: {steps: 010, global_batch_size: 0o10}\nrun: {seed: 0x10, dir: 2026-01-02}\noptim: {lr: 1e-4}\n"
    )
    config = load_config(path, ["model.depth=1_0"])
    sizes = (config.train.steps, config.train.global_batch_size, config.run.seed, config.model.depth)
    assert sizes == (10, 8, 16, 10) and config.optim.lr == 1e-4 and config.run.dir == "2026-01-02"
    for name in ("1e5", "0o17", "010", "1:30", "1.5", ".5", "null", "true"):
        assert build(RunConfig, parse_yaml(to_yaml(RunConfig(resume=name)), "")).resume == name


@pytest.mark.quick
def test_a_dotted_key_in_a_file_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("train.steps: 5\n")
    with pytest.raises(ConfigError, match=r"train: \{steps: 5\}"):
        load_config(path)


@pytest.mark.quick
def test_passwords_in_urls_are_neither_taken_nor_shown() -> None:
    with pytest.raises(ConfigError, match=r"^checkpoint\.mirror: ") as refused:
        load_config(None, ["checkpoint.mirror=s3://KEY:SEC/RET@bucket/runs"])
    assert "RET" not in str(refused.value)
    assert load_config(None, ["checkpoint.mirror=sftp://user@host/runs"]).checkpoint.mirror
    proxy = OSError("ProxyError: http://user:secret@proxy:3128 refused")
    assert exit_code_and_cause(proxy)[1].endswith("http://user:...@proxy:3128 refused")
