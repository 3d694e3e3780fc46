"""The network: gradients, heads, initial state, precision and configuration."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mmldlm.diffusion.noise import MODES, Mode
from mmldlm.errors import ConfigError
from mmldlm.model.layers import TIME_SCALE, TimeEmbedding, rotary_angles
from mmldlm.model.mmdit import DataShape, MMDiT, ModelConfig, count_parameters
from mmldlm.model.ops import normalize_heads
from mmldlm.settings.fields import build
from tests.helpers.noised_batch import LENGTHS, noised_batch
from tests.helpers.small_model import CHANNELS, MASK, MAX_LENGTH, PAD, Inputs, initialize, random_inputs, small_model

pytestmark = pytest.mark.quick

CONFIGS: list[dict[str, object]] = [
    {},
    {"tie_embeddings": False},
    {"mlp": "gelu"},
    {"modulation_rank": 0},
    {"latent_width": 16, "depth": 1},
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("latent_tokens", [1, 3])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("stir", [0.0, 0.1], ids=["initial", "stirred"])
def test_every_parameter_has_a_gradient_in_every_mode(
    mode: Mode, latent_tokens: int, config: dict[str, object], stir: float
) -> None:
    model = small_model(latent_tokens, stir=stir, **config)
    objective, noised = noised_batch(mode, latent_tokens)
    loss, _ = objective(model, noised, noised.counts.tolist())
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert [name for name, gradient in gradients.items() if gradient is None] == []
    assert all(bool(gradient.isfinite().all()) for gradient in gradients.values() if gradient is not None)


@pytest.mark.parametrize("latent_tokens", [1, 3])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_parameter_is_used_in_joint_training(latent_tokens: int, config: dict[str, object]) -> None:
    model = small_model(latent_tokens, **config)
    objective, noised = noised_batch("joint", latent_tokens)
    objective(model, noised, noised.counts.tolist())[0].backward()
    idle = [name for name, part in model.named_parameters() if part.grad is None or not part.grad.any()]
    assert idle == []


@pytest.mark.parametrize("tied", [True, False])
def test_losses_of_the_initial_network(tied: bool) -> None:
    torch.manual_seed(0)
    shape = DataShape(512, 510, 511, MAX_LENGTH, 2, CHANNELS)
    model = initialize(MMDiT(ModelConfig(depth=2, width=64, num_heads=4, tie_embeddings=tied), shape))
    inputs = random_inputs((16,) * 32, 2)
    targets = torch.randint(0, 510, (len(inputs.tokens),))
    positions = torch.arange(len(targets))
    prediction = model(inputs.tokens, inputs.latents, inputs.t_text, inputs.t_latent, inputs.layout, positions, targets)
    assert prediction.text.mean().item() == pytest.approx(math.log(510), abs=0.05)
    assert (prediction.latent == 0).all() and (prediction.length_logits == 0).all()


def test_initial_blocks_are_the_identity() -> None:
    model = small_model(stir=0.0)
    inputs = random_inputs(LENGTHS)
    before = model.token_embedding(inputs.tokens)
    states: list[Tensor] = []
    model.blocks[-1].register_forward_hook(lambda _, __, out: states.append(out[0].x))
    inputs.run(model)
    assert torch.equal(states[0], before)


def test_initialization_is_a_function_of_the_seed() -> None:
    first, second = small_model(stir=0.0).state_dict(), small_model(stir=0.0).state_dict()
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_length_logits_see_neither_tokens_nor_text_length() -> None:
    model = small_model(latent_tokens=2)
    inputs = random_inputs(LENGTHS, 2)
    other = Inputs(
        torch.full((11,), MASK), inputs.latents, torch.rand(len(LENGTHS)), inputs.t_latent, lengths=(1, 6, 1, 3)
    )
    assert torch.equal(inputs.run(model).length_logits, other.run(model).length_logits)
    moved = Inputs(inputs.tokens, inputs.latents + 1, inputs.t_text, inputs.t_latent, LENGTHS)
    assert not torch.allclose(inputs.run(model).length_logits, moved.run(model).length_logits)


def test_mask_and_pad_have_probability_zero() -> None:
    p = random_inputs(LENGTHS).run(small_model()).text.softmax(-1)
    assert (p[:, [MASK, PAD]] == 0).all()
    assert (p[:, :MASK] > 0).all()
    torch.testing.assert_close(p.sum(-1), torch.ones(len(p)))


def test_only_requested_positions_are_predicted() -> None:
    model, inputs = small_model(), random_inputs(LENGTHS)
    positions = torch.tensor([7, 0, 12])
    asked = model(inputs.tokens, inputs.latents, inputs.t_text, inputs.t_latent, inputs.layout, positions)
    torch.testing.assert_close(asked.text, inputs.run(model).text[positions])


def test_likelihoods_are_those_of_the_logits() -> None:
    model, inputs = small_model(), random_inputs(LENGTHS)
    positions, targets = torch.tensor([7, 0, 12]), torch.tensor([3, 20, 3])
    nll = model(inputs.tokens, inputs.latents, inputs.t_text, inputs.t_latent, inputs.layout, positions, targets).text
    torch.testing.assert_close(nll, F.cross_entropy(inputs.run(model).text[positions], targets, reduction="none"))


def test_text_depends_on_token_order_and_noise_times() -> None:
    model, inputs = small_model(), random_inputs((6,))
    logits = inputs.run(model).text
    swapped = Inputs(inputs.tokens.flip(0), inputs.latents, inputs.t_text, inputs.t_latent, (6,)).run(model).text
    assert not torch.allclose(swapped.flip(0), logits, atol=1e-3)
    for changed in ({"t_text": inputs.t_text / 2}, {"t_latent": inputs.t_latent / 2}):
        other = Inputs(**{**vars(inputs), **changed}).run(model)
        assert not torch.allclose(other.text, logits, atol=1e-3)


def test_times_are_embedded_in_float32_at_a_thousand_steps() -> None:
    embedding = TimeEmbedding(8)
    seen: list[Tensor] = []
    embedding.hidden.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    t = torch.tensor([0.0, 0.001, 0.5, 0.999, 1.0])
    embedding(t)
    rate = 10_000.0 ** -(torch.arange(128, dtype=torch.float64) / 128)
    angle = TIME_SCALE * t.double()[:, None] * rate
    expected = torch.cat([angle.cos(), angle.sin()], -1)
    torch.testing.assert_close(seen[0].double(), expected, rtol=0, atol=1e-3)
    with torch.autocast("cpu", torch.bfloat16):
        embedding(t)
    torch.testing.assert_close(seen[1].double(), expected, rtol=0, atol=1e-3)


def test_rotary_products_depend_on_distance_only() -> None:
    qkv = torch.randn(1, 3, 1, 8, generator=torch.Generator().manual_seed(0))
    q, k = F.rms_norm(qkv[0, :2], (8,))

    def product(at: int, other: int) -> float:
        def turned(index: int, position: int) -> Tensor:
            angles = rotary_angles(torch.tensor([position]), 8, 10_000.0)
            return normalize_heads(qkv, torch.ones(2, 8), angles)[0, index]

        return float((turned(0, at) * turned(1, other)).sum())

    assert product(5, 2) == pytest.approx(product(105, 102), abs=1e-4)
    assert product(0, 0) == pytest.approx(float((q * k).sum()), abs=1e-6)
    assert product(5, 2) != pytest.approx(product(2, 5), abs=1e-3)


def test_bf16_autocast_stays_close_to_float32() -> None:
    inputs = random_inputs(LENGTHS, 2)
    exact, rough = (inputs.run(small_model(latent_tokens=2, precision=kind)) for kind in ("fp32", "bf16"))
    for name in ("text", "latent", "length_logits"):
        one, other = getattr(rough, name), getattr(exact, name)
        assert one.dtype == torch.float32
        if name == "text":
            one, other = one[:, :MASK], other[:, :MASK]
        assert 0 < (one - other).norm() < 0.03 * other.norm()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_parameters_are_counted_once(config: dict[str, object]) -> None:
    model = small_model(**config)
    counts = count_parameters(model)
    assert sum(counts.values()) == sum(parameter.numel() for parameter in model.parameters())
    head = [model.text_head] if model.text_head.weight is not None else []
    modules = {
        "text_encoder": [model.token_embedding],
        "latent_encoder": [model.latent_in],
        "noise_times": [model.text_time, model.latent_time],
        "text_stream": [block.text for block in model.blocks],
        "latent_stream": [block.latent for block in model.blocks],
        "text_head": [model.text_out, model.text_final, *head],
        "latent_head": [model.latent_head, model.latent_skip, model.latent_final],
        "length_head": [model.length_head],
    }
    expected = {part: sum(p.numel() for m in owners for p in m.parameters()) for part, owners in modules.items()}
    expected["latent_encoder"] += model.latent_position.numel()
    assert counts == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": 96, "num_heads": 5}, r"num_heads.*96.*5"),
        ({"width": 36, "num_heads": 4}, r"num_heads.*36.*4"),  # an odd head could not be turned by position
        ({"num_heads": 0}, r"num_heads: must be at least 1, found 0"),
        ({"depth": 0}, r"depth: must be at least 1"),
        ({"dropout": 1.0}, r"dropout: must be below 1"),
        ({"mlp": "relu"}, r"mlp: expected 'swiglu' or 'gelu'"),
        ({"widht": 64}, r"unknown key 'widht'.*'width'"),
    ],
    ids=str,
)
def test_invalid_networks_are_refused_by_key(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(ModelConfig, settings)
