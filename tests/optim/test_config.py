"""Settings of `optim` that contradict one another or are out of bounds are refused."""

from __future__ import annotations

import pytest

from mmldlm.config import load_config
from mmldlm.errors import ConfigError
from mmldlm.optim.config import MuonConfig, OptimConfig

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"warmup_steps": 2.5}, "warmup"),
        ({"name": "deepspeed_adam", "fused": True}, "fused: expected auto under name: deepspeed_adam, found true"),
        ({"name": "adamw", "muon": MuonConfig(ns_steps=6)}, "muon: does nothing under name: adamw"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimConfig(**settings)  # type: ignore[arg-type]


def test_muon_with_frozen_blocks_is_refused() -> None:
    for freeze in ("[backbone]", "[text_stream, latent_stream]"):
        with pytest.raises(ConfigError, match=r"optim\.name: muon .* backbone frozen; expected adamw"):
            load_config(None, ["optim.name=muon", f"freeze={freeze}"])
    load_config(None, ["optim.name=muon", "freeze=[text_stream]"])


@pytest.mark.parametrize("setting", ["momentum=0", "momentum=1", "ns_steps=0", "ns_steps=100", "nesterov=2"])
def test_muons_settings_have_bounds(setting: str) -> None:
    with pytest.raises(ConfigError, match=rf"optim\.muon\.{setting.partition('=')[0]}"):
        load_config(None, ["optim.name=muon", f"optim.muon.{setting}"])
