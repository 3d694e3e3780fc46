"""Frozen parts: what each loss reaches, that frozen weights do not change, and refused choices."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, combinations
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from mmldlm.config import load_config
from mmldlm.data.loader import Loader
from mmldlm.data.store import Store
from mmldlm.diffusion.noise import Mode, draw_noise, mode_weights
from mmldlm.diffusion.objective import LossConfig, total_counts
from mmldlm.distributed.optimizers import build_optimizer
from mmldlm.loading.factory import build_objective
from mmldlm.model.mmdit import MMDiT, count_parameters
from mmldlm.model.parts import (
    PARTS_TRAINED_BY,
    Freezable,
    Loss,
    Part,
    check_trainable,
    freeze_parts,
    frozen_parts,
    part_of,
)
from tests.helpers.batch_sizes import constant_batch_size
from tests.helpers.noised_batch import noised_batch
from tests.helpers.small_model import build_model, small_model

pytestmark = pytest.mark.quick
PARTS: tuple[Part, ...] = get_args(Part)
FREEZABLE: tuple[Freezable, ...] = get_args(Freezable)

# The weights under which one loss is all there is.
ALONE: dict[Loss, tuple[LossConfig, tuple[Mode, ...]]] = {
    "text": (LossConfig(latent_weight=0, length_weight=0), ("l2t", "joint")),
    "latent": (LossConfig(latent_weight=1, length_weight=0), ("t2l",)),
    "length": (LossConfig(latent_weight=0, length_weight=1), ("t2l",)),
}


def parts_with_gradient(model: MMDiT, loss: Loss, mode: Mode, latent_tokens: int) -> set[Part]:
    """The parts in which the gradient of this loss alone is somewhere not zero."""
    objective, noised = noised_batch(mode, latent_tokens, loss=ALONE[loss][0])
    model.zero_grad()
    objective(model, noised, noised.counts.tolist())[0].backward()
    return {
        part_of(name)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and parameter.grad.any()
    }


@pytest.mark.parametrize(("loss", "mode"), [(loss, mode) for loss, (_, modes) in ALONE.items() for mode in modes])
@pytest.mark.parametrize("latent_tokens", [1, 3])
@pytest.mark.parametrize("config", [{}, {"depth": 1}, {"tie_embeddings": False}], ids=str)
def test_losses_reach_the_documented_parts(loss: Loss, mode: Mode, latent_tokens: int, config: dict[str, Any]) -> None:
    assert parts_with_gradient(small_model(latent_tokens, **config), loss, mode, latent_tokens) == set(
        PARTS_TRAINED_BY[loss]
    )


def test_freezing_is_refused_if_a_loss_has_no_gradient() -> None:
    """All choices of parts, against autograd's own map of a network with every weight stirred."""
    reached = {loss: parts_with_gradient(small_model(), loss, modes[0], 1) for loss, (_, modes) in ALONE.items()}
    losses: list[tuple[Loss, ...]] = [("text",), ("latent",), ("length",), ("text", "latent", "length")]
    for frozen in chain.from_iterable(combinations(PARTS, count) for count in range(len(PARTS) + 1)):
        for trained in losses:
            idle = [loss for loss in trained if reached[loss] <= set(frozen)]
            if idle:
                with pytest.raises(ValueError, match=r"^freeze: "):
                    check_trainable(frozen, dict.fromkeys(trained, ""))
            else:
                check_trainable(frozen, dict.fromkeys(trained, ""))


@pytest.mark.parametrize("config", [{}, {"tie_embeddings": False}], ids=str)
@pytest.mark.parametrize("freeze", [[], *([part] for part in FREEZABLE), ["backbone", "length_head"]], ids=str)
def test_named_parts_are_frozen(freeze: Sequence[Freezable], config: dict[str, Any]) -> None:
    model = small_model(**config)
    everything = count_parameters(model)
    assert everything == count_parameters(model, trainable_only=True)
    freeze_parts(model, freeze)
    assert count_parameters(model) == everything
    gone = {part for part in PARTS if part in freeze or ("backbone" in freeze and part.endswith("stream"))}
    trainable = count_parameters(model, trainable_only=True)
    assert trainable == {part: 0 if part in gone else count for part, count in everything.items()}


def test_the_backbone_is_the_blocks() -> None:
    model = small_model()
    freeze_parts(model, ["backbone"])
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if name.startswith("blocks.")}


@pytest.mark.parametrize("part", FREEZABLE)
def test_only_unfrozen_parameters_change(part: Freezable, tiny_store: Path) -> None:
    settings = ["model.depth=2", "model.width=32", "model.num_heads=2", "optim.lr=1e-2", "optim.weight_decay=0.5"]
    config = load_config(None, [*settings, f"freeze=[{part}]", "mode=joint", "memory.activation_checkpointing=full"])
    store = Store.open(tiny_store)
    model, objective = build_model(config, store.manifest).train(), build_objective(config, store.manifest)
    optimizer = build_optimizer(model, config.optim)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    for step, (batch,) in Loader(store, "train", config.data, 0, constant_batch_size(8, 8)).steps(0, 3):
        noised = objective.corrupt(batch, draw_noise(batch, 0, step, 8, mode_weights("joint")))
        objective(model, noised, total_counts([noised]).tolist())[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = {part_of(name) for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    assert moved == set(PARTS) - frozen_parts([part])
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert held == {id(p) for name, p in model.named_parameters() if part_of(name) not in frozen_parts([part])}


def test_the_initial_weights_do_not_depend_on_what_is_frozen(tiny_store: Path) -> None:
    manifest = Store.open(tiny_store).manifest
    free, frozen = (
        build_model(load_config(None, overrides), manifest).state_dict()
        for overrides in ([], ["freeze=[backbone, text_encoder]"])
    )
    assert all(torch.equal(value, frozen[name]) for name, value in free.items())
