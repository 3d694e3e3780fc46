"""Configs read back from JSON without pydantic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mmldlm.config import RunConfig, load_config
from mmldlm.errors import ConfigError
from mmldlm.settings.declaration import dump, restore
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


@pytest.mark.parametrize("path", [None, *sorted((ROOT / "configs").glob("*.yaml"))])
def test_every_config_survives_json(path: Path | None) -> None:
    for overrides in ((), RICH) if path is None else ((),):
        config = load_config(path, list(overrides))
        assert restore(RunConfig, json.loads(json.dumps(dump(config)))) == config


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"sampling": {"decoding": "x"}}, "sampling.decoding: expected one of auto, .*, found 'x'"),
        ({"train": {"step": 3}}, "unknown key 'train.step', expected one of steps, "),
        ({"sampling": {"steps": 0}}, "sampling.steps: must be at least 1, found 0"),
        ({"schedule": {"patience": 3}}, "schedule.patience: does nothing under lr"),
    ],
)
def test_messages_name_key_value_and_what_is_expected(tree: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        restore(RunConfig, tree)
