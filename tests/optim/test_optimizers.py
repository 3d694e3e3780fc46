"""Closed forms of the learning rate, parameter groups, and Muon against PyTorch's Muon."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mmldlm.config import load_config
from mmldlm.distributed.capabilities import ALL_ENGINES, capability_table
from mmldlm.distributed.launcher import LauncherEnv
from mmldlm.distributed.optimizers import (
    build_optimizer,
    check_state_compatible,
    describe_optimizer,
    resolve_fused,
)
from mmldlm.errors import ConfigError
from mmldlm.optim.config import MuonConfig, OptimConfig, OptimizerName
from mmldlm.optim.param_groups import muon_matrices, parameter_groups
from mmldlm.trainer.setup import check_settings
from tests.helpers.paths import ROOT
from tests.helpers.small_model import small_model

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("tied", [True, False])
def test_only_matrices_of_linear_maps_decay(tied: bool) -> None:
    model = small_model(latent_tokens=2, tie_embeddings=tied)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, plain = (
        {names[id(parameter)] for parameter in group["params"]}  # type: ignore[attr-defined]
        for group in parameter_groups(model, 0.1)
    )
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    linear |= set() if tied else {"text_head.weight"}
    assert decayed == linear
    assert plain == set(names.values()) - linear
    assert {"token_embedding.weight", "latent_position", "blocks.0.text.head_norm.q", "latent_in.bias"} <= plain


def test_frozen_parameters_are_left_out_and_empty_groups_too() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False))
    model[0].requires_grad_(False)
    (group,) = parameter_groups(model, 0.1)
    assert group["params"] == [model[1].weight] and group["weight_decay"] == 0.1


def test_decay_shrinks_matrices_and_leaves_the_rest() -> None:
    model = small_model()
    optimizer = build_optimizer(model, OptimConfig(lr=0.1, weight_decay=0.5), "cpu")
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    after = dict(model.named_parameters())
    torch.testing.assert_close(after["text_out.weight"], before["text_out.weight"] * (1 - 0.1 * 0.5))
    for name in ("text_out.bias", "token_embedding.weight", "latent_position", "blocks.1.latent.head_norm.k"):
        assert torch.equal(after[name], before[name])


def test_fused_is_resolved_by_device() -> None:
    assert resolve_fused("auto", "cpu") and resolve_fused("auto", "cuda") and resolve_fused(True, "cuda")
    assert not resolve_fused("auto", "mps") and not resolve_fused(False, "cuda")
    with pytest.raises(ConfigError, match=r"optim\.fused.*mps.*auto"):
        resolve_fused(True, "mps")


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


MUON_SETTINGS = [
    {},
    {"muon": MuonConfig(momentum=0.8)},
    {"muon": MuonConfig(nesterov=False)},
    {"muon": MuonConfig(ns_steps=2), "weight_decay": 0.5},
    {"fused": False, "betas": (0.5, 0.9), "eps": 1e-3},
]


def set_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("settings", MUON_SETTINGS, ids=str)
def test_muon_matches_pytorch(settings: dict[str, object]) -> None:
    """Bit by bit, with every setting, while the learning rate changes."""
    config = OptimConfig(**{"name": "muon", "weight_decay": 0.1, **settings})  # type: ignore[arg-type]
    model, reference = small_model(), small_model()
    optimizer = build_optimizer(model, config, "cpu")
    matrices, muon = muon_matrices(reference), config.muon
    options = {"momentum": muon.momentum, "nesterov": muon.nesterov, "ns_steps": muon.ns_steps}
    others = parameter_groups(reference, config.weight_decay, exclude=matrices)
    apart = [
        torch.optim.Muon(matrices, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw", **options),
        torch.optim.AdamW(others, betas=config.betas, eps=config.eps, fused=config.fused == "auto"),
    ]
    for step in range(4):
        for each in (optimizer, *apart):
            for group in each.param_groups:
                group["lr"] = 0.01 * (step + 1)
        set_gradients(model, step)
        set_gradients(reference, step)
        optimizer.step()
        for each in apart:
            each.step()
    expected = dict(reference.named_parameters())
    assert all(torch.equal(parameter, expected[name]) for name, parameter in model.named_parameters())
    moved = small_model()
    assert not any(torch.equal(p, expected[name]) for name, p in moved.named_parameters())


def test_muon_has_the_matrices_of_the_blocks_and_nothing_else() -> None:
    model = small_model(latent_tokens=2, tie_embeddings=False)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    result = {names[id(parameter)] for parameter in muon_matrices(model)}
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert result == {name for name in linear if name.startswith("blocks.")}
    maps = ("qkv", "out", "mlp.up", "mlp.down", "modulation.down", "modulation.up")
    assert {name for name in result if name.startswith("blocks.0.text")} == {f"blocks.0.text.{m}.weight" for m in maps}
    optimizer = build_optimizer(model, OptimConfig(name="muon"), "cpu")
    held = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(held) == sorted(names.values())
    model.blocks.requires_grad_(False)
    assert muon_matrices(model) == []


def test_muons_updates_are_as_large_as_adamws() -> None:
    """The root mean square is near 0.2 of the learning rate, as AdamW's (arXiv 2502.16982, section 2.2)."""
    model, before = small_model(), small_model()
    optimizer = build_optimizer(model, OptimConfig(name="muon", lr=0.1, weight_decay=0), "cpu")
    set_gradients(model, 0)
    optimizer.step()
    for new, old in zip(muon_matrices(model), muon_matrices(before), strict=True):
        # Newton-Schulz leaves the singular values between about 0.7 and 1.2.
        assert float((new - old).detach().square().mean().sqrt()) == pytest.approx(0.1 * 0.2, rel=0.35)


def test_optimizer_description() -> None:
    model = small_model()
    count = sum(parameter.numel() for parameter in muon_matrices(model))
    muon = build_optimizer(model, OptimConfig(name="muon"), "cpu")
    adamw = build_optimizer(model, OptimConfig(fused=False), "cpu")
    fused = build_optimizer(model, OptimConfig(), "cpu")
    assert (
        describe_optimizer(muon)
        == f"torch.Muon for 24 matrices of {count:,} parameters, torch.AdamW, fused for the rest"
    )
    assert (describe_optimizer(adamw), describe_optimizer(fused)) == ("torch.AdamW", "torch.AdamW, fused")
    # Whether a step can be left out by a flag on the device, as PyTorch marks it.
    assert [getattr(o, "_step_supports_amp_scaling", False) for o in (muon, adamw, fused)] == [False, False, True]


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
    with pytest.raises(ConfigError, match=rf"^optim\.name: .*{name}.*expected") as refusal:
        check_settings(config, launch(engine, offloads), device)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_unsupported_features_are_refused(engine: str) -> None:
    sharded = engine == "fsdp2" or engine.startswith("zero3")
    for settings, runs in [
        (["precision=fp16"], not engine.startswith("zero")),
        (["precision=bf16"], True),
        (["compile.scope=regional"], not engine.startswith("zero3")),
        (["train.auto_micro_batch=true"], not sharded),
    ]:
        config = load_config(None, settings)
        if runs:
            check_settings(config, launch(engine), "cpu")
            continue
        key = settings[0].partition("=")[0]
        with pytest.raises(
            ConfigError, match=rf"^{key}: found \w+ under engine {engine}, where .*; expected an engine"
        ):
            check_settings(config, launch(engine), "cpu")


def test_docs_print_the_table_of_capabilities() -> None:
    assert capability_table() in (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")


def launch(engine: str, offloads: bool = False) -> LauncherEnv:
    """Return a launch of one process under `engine`."""
    sections = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    return LauncherEnv(engine, "torchrun", 0, 0, 1, 1, "", sections if offloads else None)


def test_muon_with_frozen_blocks_is_refused() -> None:
    for freeze in ("[backbone]", "[text_stream, latent_stream]"):
        with pytest.raises(ConfigError, match=r"optim\.name: muon .* backbone frozen; expected adamw"):
            load_config(None, ["optim.name=muon", f"freeze={freeze}"])
    load_config(None, ["optim.name=muon", "freeze=[text_stream]"])


@pytest.mark.parametrize("setting", ["momentum=0", "momentum=1", "ns_steps=0", "ns_steps=100", "nesterov=2"])
def test_muons_settings_have_bounds(setting: str) -> None:
    with pytest.raises(ConfigError, match=rf"optim\.muon\.{setting.partition('=')[0]}"):
        load_config(None, ["optim.name=muon", f"optim.muon.{setting}"])


def test_state_of_another_kind_is_refused() -> None:
    kinds: list[OptimizerName] = ["adamw", "deepspeed_adam", "muon"]
    for saved in kinds:
        for asked in kinds:
            if "muon" in (saved, asked) and saved != asked:
                with pytest.raises(ConfigError, match=f"the state of {saved}, from which {asked} cannot resume"):
                    check_state_compatible(saved, asked)
            else:
                check_state_compatible(saved, asked)
