"""Optimizers and features that an engine cannot run are refused by key; the docs have the same table."""

from __future__ import annotations

import pytest
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from mmldlm.config import load_config
from mmldlm.distributed.capabilities import ALL_ENGINES, capability_table
from mmldlm.distributed.deepspeed_file import DeepSpeedFile
from mmldlm.distributed.launch import LauncherEnv
from mmldlm.errors import ConfigError
from mmldlm.optim.config import OptimizerName
from mmldlm.trainer.setup import check_settings
from tests.helpers.paths import ROOT

pytestmark = pytest.mark.quick


def launch(engine: str, offloads: bool = False) -> LauncherEnv:
    """Return a launch of one process under `engine`."""
    zero = DeepSpeedZeroConfig(stage=2, offload_optimizer={"device": "cpu" if offloads else "none"})
    return LauncherEnv(engine, "torchrun", 0, 0, 1, 1, "", DeepSpeedFile("", {}, zero, ()))


@pytest.mark.parametrize("engine", ALL_ENGINES)
@pytest.mark.parametrize("name", ["adamw", "muon", "deepspeed_adam"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_unsupported_optimizers_are_refused(name: OptimizerName, engine: str, device: str) -> None:
    zero, offloads = engine.startswith("zero"), engine.endswith("offload")
    runs = {"adamw": True, "muon": not zero, "deepspeed_adam": offloads or (zero and device == "cuda")}[name]
    config = load_config(None, [f"optim.name={name}"])
    if runs:
        check_settings(config, launch(engine, offloads), device)
        return
    with pytest.raises(ConfigError, match=rf"^optim\.name: .*{name}") as refusal:
        check_settings(config, launch(engine, offloads), device)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_unsupported_features_are_refused(engine: str) -> None:
    for settings, runs in [
        (["precision=fp16"], not engine.startswith("zero")),
        (["precision=bf16"], True),
        (["compile.scope=regional"], not engine.startswith("zero3")),
        (["train.auto_micro_batch=true"], not engine.startswith(("fsdp2", "zero3"))),
    ]:
        config = load_config(None, settings)
        if runs:
            check_settings(config, launch(engine), "cpu")
            continue
        key = settings[0].partition("=")[0]
        with pytest.raises(ConfigError) as refusal:
            check_settings(config, launch(engine), "cpu")
        assert str(refusal.value).startswith(f"{key}: ") and engine in str(refusal.value)


def test_docs_print_the_table_of_capabilities() -> None:
    assert capability_table() in (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
