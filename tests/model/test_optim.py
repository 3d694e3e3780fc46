"""The learning rate's closed forms and the optimizer's parameter groups."""

from __future__ import annotations

import math

import pytest
import torch
from small_model import small_model
from torch import nn

from mmldlm.errors import ConfigError
from mmldlm.optim import (
    OptimConfig,
    ScheduleConfig,
    build_optimizer,
    lr_at,
    parameter_groups,
    resolve_fused,
    resolved_warmup,
)

pytestmark = pytest.mark.quick

PEAK = 3e-3


@pytest.mark.parametrize("warmup", [0, 10, 0.1, 0.25])
@pytest.mark.parametrize("course", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("floor", [0.0, 0.1, 1.0])
def test_learning_rate_has_its_closed_form(warmup: float, course: str, floor: float) -> None:
    total = 100
    optim, schedule = OptimConfig(lr=PEAK, warmup_steps=warmup), ScheduleConfig(course, floor)  # type: ignore[arg-type]
    rates = [lr_at(step, total, optim, schedule) for step in range(total)]
    steps = {0: 0, 10: 10, 0.1: 10, 0.25: 25}[warmup]
    assert resolved_warmup(optim, total) == steps
    assert rates[:steps] == pytest.approx([PEAK * (step + 1) / steps for step in range(steps)])
    progress = [i / (total - 1 - steps) for i in range(total - steps)]
    share = {
        "constant": [1.0 for _ in progress],
        "linear": [1 - p * (1 - floor) for p in progress],
        "cosine": [floor + (1 - floor) * math.cos(math.pi * p / 2) ** 2 for p in progress],
    }[course]
    assert rates[steps:] == pytest.approx([PEAK * s for s in share])
    assert rates[steps] == pytest.approx(PEAK)
    assert max(rates) <= PEAK * (1 + 1e-12)
    if course != "constant":
        assert rates[-1] == pytest.approx(PEAK * floor)
        assert lr_at(10 * total, total, optim, schedule) == pytest.approx(PEAK * floor)


@pytest.mark.parametrize("total", [1, 2, 5])
def test_short_runs_have_a_positive_rate_somewhere(total: int) -> None:
    for warmup in (0, 0.02, 0.5, 100):
        rates = [lr_at(s, total, OptimConfig(lr=PEAK, warmup_steps=warmup), ScheduleConfig()) for s in range(total)]
        assert all(0 < rate <= PEAK * (1 + 1e-12) for rate in rates)


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


@pytest.mark.parametrize(("settings", "message"), [({"betas": (0.9, 1.0)}, "betas"), ({"warmup_steps": 2.5}, "warmup")])
def test_impossible_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimConfig(**settings)  # type: ignore[arg-type]
