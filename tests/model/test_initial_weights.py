"""Initial weights are a function of (seed, name, place), whatever else is drawn and in whatever parts."""

from __future__ import annotations

import math

import pytest
import torch

from mmldlm.model.heads import LossWeights
from mmldlm.model.initial_weights import _BLOCK, InitialWeights, Normal
from mmldlm.model.layers import HeadNorm, Modulation
from mmldlm.model.mmdit import DataShape, MMDiT, ModelConfig
from mmldlm.utils.meta_device import materialize
from tests.helpers.small_model import initialize

SHAPE = DataShape(512, 510, 511, 16, 2, 6)
NUMEL = 2 * _BLOCK + 77
LARGE = InitialWeights({"w": Normal(0.5)}, {"w": torch.Size([NUMEL])}, seed=3)
WHOLE = LARGE["w"]

pytestmark = pytest.mark.quick


def network(depth: int = 2) -> MMDiT:
    with torch.device("meta"):
        config = ModelConfig(depth=depth, width=64, num_heads=4, tie_embeddings=False)
        return MMDiT(config, SHAPE, initial_loss_weights=(1.0, 0.25), latent_skip=True)


@pytest.mark.parametrize(
    ("start", "stop"),
    [(0, 5), (7, 7), (_BLOCK - 3, _BLOCK + 2), (_BLOCK, 2 * _BLOCK), (13, NUMEL - 1), (2 * _BLOCK + 9, NUMEL)],
)
def test_any_part_has_the_bits_of_the_whole(start: int, stop: int) -> None:
    assert torch.equal(LARGE.read("w", start, stop), WHOLE[start:stop])


def test_names_seeds_and_blocks_are_independent() -> None:
    shapes = dict.fromkeys(("a", "b"), torch.Size([2 * _BLOCK]))
    parts = [
        InitialWeights(dict.fromkeys(shapes, Normal(1.0)), shapes, seed)[name].view(2, _BLOCK)
        for seed in (0, 1)
        for name in shapes
    ]
    correlations = torch.corrcoef(torch.cat(parts)).fill_diagonal_(0)
    assert correlations.abs().max() < 6 / math.sqrt(_BLOCK)
    assert torch.equal(InitialWeights({"b": Normal(1.0)}, shapes, 1)["b"].view(2, _BLOCK), parts[3]), "other names"


def test_weights_of_a_deeper_network_differ_by_the_residual_scale_alone() -> None:
    shallow, deep = network(2).initial_weights(0), network(8).initial_weights(0)
    for name in shallow:
        scaled = name.endswith(("text.out.weight", "latent.out.weight", "mlp.down.weight"))
        torch.testing.assert_close(deep[name] * (2 if scaled else 1), shallow[name])


def test_distributions_are_those_of_the_table() -> None:
    model = network()
    materialize(model, "cpu")
    initialize(model, seed=5)
    for name, parameter in model.named_parameters():
        module = model.get_submodule(name.rpartition(".")[0])
        if isinstance(module, HeadNorm):
            assert (parameter == 1).all()
        elif isinstance(module, LossWeights):
            assert torch.allclose(module().exp(), torch.tensor([1.0, 4.0]))
        elif (
            name.endswith(".bias")
            or name.startswith(("latent_head", "latent_skip", "length_head.out"))
            or any(module is part.up for part in model.modules() if isinstance(part, Modulation))
        ):
            assert not parameter.any(), name
        else:
            expected = 0.02 if name in ("latent_position", "token_embedding.weight", "text_head.weight") else None
            if expected is None:
                residual = name.endswith(("text.out.weight", "latent.out.weight", "mlp.down.weight"))
                expected = parameter.shape[1] ** -0.5 * (0.5 if residual else 1.0)
            assert parameter.std().item() == pytest.approx(expected, rel=6 / math.sqrt(2 * parameter.numel())), name
            assert abs(parameter.mean().item()) < 6 * expected / math.sqrt(parameter.numel()), name


def test_neither_drawing_nor_building_moves_the_callers_random_state() -> None:
    before = torch.get_rng_state()
    model = network()
    materialize(model, "cpu")
    initialize(model)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_network_on_the_meta_device_keeps_its_values() -> None:
    model = network()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.text_head.bias[510] < -1e8, "a buffer is no parameter"
    materialize(model, "cpu")
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    assert model.text_head.bias[510] < -1e8
