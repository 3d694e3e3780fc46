"""Configs read back from JSON without pydantic: `restore` accepts what `build` accepts, and nothing else."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from mmldlm.config import RunConfig, load_config
from mmldlm.errors import ConfigError
from mmldlm.settings.declaration import dump, leaves, restore
from mmldlm.settings.fields import build
from tests.helpers.paths import ROOT

pytestmark = pytest.mark.quick

RICH = (
    "mode_schedule={100: joint, 20: {l2t: 0.5, joint: 0.5}}",
    "train.batch_schedule={10: {global_batch_size: 256}}",
    "optim.warmup_bounds=[1, 2]",
    "checkpoint.keep_steps=[5, 7]",
    "freeze=[text_head]",
    "distributed.nccl={NCCL_X: 1}",
    "data.mixture={a: 0.5, b: 2}",
)
PROBES: list[Any] = [
    *(None, True, "auto", "x", 0, 1, -1, 3, 0.5, 2.0, 1e9, math.nan, math.inf, [], [1], [0.9, 0.99], [1, 2]),
    *({}, {"a": 1}, {"3": 4}, {"3": {"global_batch_size": 64}}, {"l2t": 1.0}, ["text_head"], "joint"),
]


def outcome(read: Any, tree: dict[str, Any]) -> Any:
    try:
        return read(RunConfig, tree)
    except ConfigError:
        return ConfigError


@pytest.mark.parametrize("path", [None, *sorted((ROOT / "configs").glob("*.yaml"))])
def test_every_config_survives_json(path: Path | None) -> None:
    for overrides in ((), RICH) if path is None else ((),):
        config = load_config(path, list(overrides))
        restored = restore(RunConfig, json.loads(json.dumps(dump(config))))
        assert restored == config and repr(restored) == repr(config)


def with_value(tree: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    head, _, rest = key.partition(".")
    return {**tree, head: with_value(tree[head], rest, value) if rest else value}


def test_restore_agrees_with_pydantic_on_every_setting() -> None:
    tree, refused, accepted = dump(RunConfig()), 0, 0
    for key, _ in leaves(RunConfig):
        for probe in PROBES:
            # JSON has text for the integers that are keys of maps.
            numbered = isinstance(probe, dict) and "3" in probe
            ours = outcome(restore, with_value(tree, key, probe))
            theirs = outcome(build, with_value(tree, key, {3: probe["3"]} if numbered else probe))
            if numbered and theirs is ConfigError and ours is not ConfigError:
                continue  # of settings with text as keys, for which "3" is one
            assert repr(ours) == repr(theirs), f"{key}: {probe!r}"
            refused, accepted = refused + (ours is ConfigError), accepted + (ours is not ConfigError)
    assert refused > 1000 and accepted > 200


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"train": {"steps": "x"}}, "train.steps: expected int, found 'x'"),
        ({"train": 3}, "train: expected keys below it, found 3"),
        ({"train": {"step": 3}}, "unknown key 'train.step', expected one of steps, "),
        ({"sampling": {"steps": 0}}, "sampling.steps: must be at least 1, found 0"),
        ({"schedule": {"patience": 3}}, "schedule.patience: does nothing under lr"),
        ([], r"config: expected keys below it, found \[\]"),
    ],
)
def test_messages_name_key_value_and_what_is_expected(tree: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        restore(RunConfig, tree)
