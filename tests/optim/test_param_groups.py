"""Which parameters decay, which are Muon's, and that none is left out."""

from __future__ import annotations

import pytest
from torch import nn

from mmldlm.distributed.optimizers import build_optimizer
from mmldlm.optim.config import OptimConfig
from mmldlm.optim.param_groups import muon_matrices, parameter_groups
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


def test_muon_has_the_matrices_of_the_blocks_() -> None:
    model = small_model(latent_tokens=2, tie_embeddings=False)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    result = {names[id(parameter)] for parameter in muon_matrices(model)}
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert result == {name for name in linear if name.startswith("blocks.")}
    maps = ("qkv", "out", "mlp.up", "mlp.down", "modulation.down", "modulation.up")
    assert {name for name in result if name.startswith("blocks.0.text")} == {f"blocks.0.text.{m}.weight" for m in maps}
    optimizer = build_optimizer(model, OptimConfig(name="muon"))
    held = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(held) == sorted(names.values())
    model.blocks.requires_grad_(False)
    assert muon_matrices(model) == []
