"""The run configs in configs/: each loads, has the size in its comment, and combines with those of other kinds."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from mmldlm import train
from mmldlm.config import load_with_provenance
from mmldlm.model.mmdit import DataShape, MMDiT, count_parameters
from mmldlm.settings.declaration import flat_settings
from tests.helpers.paths import ROOT

CONFIGS = ROOT / "configs"
SIZES, MODES, PROFILES = ("tiny", "small", "base", "large"), ("l2t", "t2l", "joint", "mixed"), ("stable", "fast")
CLAIM = re.compile(
    r"# (\d+) million parameters, with a vocabulary of ([\d,]+), latents of (\d+) x (\d+) and texts of up to (\d+) "
)


def set_by(name: str) -> dict[str, Any]:
    """Return the values that the file itself sets, by dotted key."""
    file = CONFIGS / f"{name}.yaml"
    config, origins = load_with_provenance(file)
    return {key: flat_settings(config)[key] for key, origin in origins.items() if origin.startswith(f"{file}:")}


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_each_config_loads(name: str) -> None:
    config, _ = load_with_provenance(CONFIGS / f"{name}.yaml")
    assert config.run.dir and config.data.path
    config.train.check_batches(world_size=1)
    if name not in (*SIZES, *MODES, *PROFILES):
        return
    without = flat_settings(load_with_provenance(CONFIGS / "common.yaml")[0])
    idle = {key for key, value in set_by(name).items() if value == without[key]}
    wanted = {"memory.activation_checkpointing", "optim.lr"}  # which a size may have set; which every size names
    assert idle <= wanted, "what is so in any case says nothing"


@pytest.mark.parametrize("size", SIZES)
def test_a_size_has_the_parameters_that_its_comment_names(size: str) -> None:
    text = (CONFIGS / f"{size}.yaml").read_text(encoding="utf-8")
    claim = CLAIM.search(text)
    assert claim is not None, text
    millions, vocabulary, vectors, channels, longest = (int(number.replace(",", "")) for number in claim.groups())
    config, _ = load_with_provenance(CONFIGS / f"{size}.yaml")
    with torch.device("meta"):
        model = MMDiT(config.model, DataShape(vocabulary, 0, 1, longest, vectors, channels))
    assert sum(count_parameters(model).values()) == pytest.approx(millions * 1e6, abs=0.5e6)


def test_presets_of_different_kinds_combine(tmp_path: Path) -> None:
    """All that a file sets holds, unless a later one of the list sets it otherwise."""
    path = tmp_path / "mine.yaml"
    own = {name: set_by(name) for name in (*SIZES, *MODES, *PROFILES)}
    for names in itertools.product(SIZES, MODES, PROFILES):
        path.write_text(f"extends: [{', '.join(f'{CONFIGS}/{name}.yaml' for name in names)}]\n", encoding="utf-8")
        config, _ = load_with_provenance(path)
        size, mode, profile = (own[name] for name in names)
        expected = size | mode | profile
        assert {key: flat_settings(config)[key] for key in expected} == expected, names


def test_the_smallest_takes_its_vocabulary_from_any_store(tiny_store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--dry-run", str(CONFIGS / "tiny.yaml"), f"data.path={tiny_store}", "train.steps=2"]) == 0
    shown = capsys.readouterr().out
    assert "num_heads: 5" in shown and "total parameters" in shown
