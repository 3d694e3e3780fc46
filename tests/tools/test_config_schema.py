"""configs/schema.json, by which editors complete and check the keys of a config; jsonschema reads it as they do."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from mmldlm import cli
from mmldlm.config import RunConfig, load_config
from mmldlm.errors import ConfigError
from mmldlm.settings.declaration import dump, leaves
from mmldlm.settings.fields import build
from mmldlm.settings.yaml import parse_yaml
from mmldlm.tools.config import config_schema
from tests.helpers.paths import ROOT

pytestmark = pytest.mark.quick

PRESETS = sorted((ROOT / "configs").glob("*.yaml"))
SCHEMA = config_schema()
VALIDATOR = Draft202012Validator(SCHEMA)


def is_valid(tree: dict[Any, Any]) -> bool:
    return bool(VALIDATOR.is_valid(json.loads(json.dumps(tree))))  # JSON has no integer keys


def property_of(key: str) -> dict[str, Any]:
    result: dict[str, Any] = SCHEMA
    for part in key.split("."):
        result = result["properties"][part]
        result = {**SCHEMA["$defs"][result["$ref"].rpartition("/")[2]], **result} if "$ref" in result else result
    return result


def test_the_file_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "--schema"]) == 0
    printed = capsys.readouterr().out
    assert printed == (ROOT / "configs" / "schema.json").read_text(encoding="utf-8"), (
        "run: mmldlm config --schema > configs/schema.json"
    )
    Draft202012Validator.check_schema(json.loads(printed))


def test_every_key_has_description_default_and_bounds() -> None:
    defaults = json.loads(json.dumps(dump(RunConfig())))
    for key, field in leaves(RunConfig):
        entry, default = property_of(key), defaults
        for part in key.split("."):
            default = default[part]
        assert entry["description"].startswith(field.metadata["doc"]) and entry["default"] == default, key
        text = json.dumps(entry)
        bounds = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
        assert all(
            f'"{name}": {field.metadata[bound]}' in text for bound, name in bounds.items() if bound in field.metadata
        )
    objects = [SCHEMA, *SCHEMA["$defs"].values()]
    assert all(entry["additionalProperties"] is False for entry in objects)


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.name)
def test_presets_are_valid_and_name_the_schema(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# yaml-language-server: $schema=schema.json\n")
    assert is_valid(parse_yaml(text, path.name))


def examples() -> Iterator[tuple[str, dict[str, Any]]]:
    """Configs in README and docs: code blocks that are YAML with a key of a run config."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = page.read_text(encoding="utf-8")
        blocks = re.findall(r"<<'YAML'\n(.*?)\nYAML", text, re.S) + re.findall(r"(?:^    .*\n)+", text, re.M)
        blocks += re.findall(r"^```yaml\n(.*?)^```$", text, re.S | re.M)
        for block in blocks:
            try:
                tree = parse_yaml(textwrap.dedent(block), page.name)
            except ConfigError:
                continue
            if isinstance(tree, dict) and tree.keys() & SCHEMA["properties"].keys():
                yield page.name, tree


def test_examples_of_the_docs_are_valid() -> None:
    pages = [page for page, tree in examples() if is_valid(tree)]
    assert pages == [page for page, _ in examples()] and {"settings.md", "data.md", "tutorial.md", "mixture.md"} <= set(
        pages
    )


@pytest.mark.parametrize(
    "tree",
    [
        {"optimm": {"lr": 1e-3}},
        {"optim": {"lrr": 1e-3}},
        {"optim": {"lr": "1e-3"}},
        {"optim": {"lr": True}},
        {"optim": {"lr": 0}},
        {"optim": {"betas": [0.9]}},
        {"optim": {"warmup_steps": -1}},
        {"train": {"steps": 1.5}},
        {"train": {"batch_schedule": {5: {"steps": 4}}}},
        {"latent": {"prediction": "eps"}},
        {"mode": "l2x"},
        {"freeze": ["texthead"]},
        {"model": 5},
    ],
    ids=str,
)
def test_schema_and_trainer_refuse_the_same(tree: dict[str, Any]) -> None:
    assert not is_valid(tree)
    with pytest.raises(ConfigError):
        build(RunConfig, tree)


def test_a_whole_config_is_valid() -> None:
    config = load_config(None, ["mode_schedule={0: l2t, 9: {l2t: 1, joint: 3}}"])
    assert is_valid(dump(config)) and is_valid({"extends": "base.yaml"}) and is_valid({"extends": ["a", "b"]})
    assert not is_valid({"extends": 5})


@pytest.mark.parametrize("arguments", [["--changed"], ["--diff"], ["configs/tiny.yaml"], ["optim.lr=1"]])
def test_the_schema_takes_no_other_argument(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "--schema", *arguments]) == 2
    assert f"--schema: expected no other argument, found {arguments[0]}" in capsys.readouterr().err
