"""Micro-batches filled up to few sizes: no number of the trainer has filler, and what is recorded computes them all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from mmldlm.batch import Batch, PackedLayout
from mmldlm.diffusion.gaussian import GaussianDiffusion, LatentConfig
from mmldlm.diffusion.masked import MaskedDiffusion
from mmldlm.diffusion.noise import Mode, draw_noise, mode_weights
from mmldlm.diffusion.objective import LossConfig, NoisedBatch, Objective
from mmldlm.model.activation_checkpoint import KEEP_ALL, MemoryConfig
from mmldlm.model.heads import LossWeights
from mmldlm.model.mmdit import MMDiT
from mmldlm.model.ops import assume_device
from mmldlm.run.factory import StaticSizes
from mmldlm.utils.packed_tensors import PackedTensors
from tests.helpers.small_model import MASK, MAX_LENGTH, PAD, random_inputs, small_model

SIZES = StaticSizes(MAX_LENGTH)
BUDGET = 128  # the smallest multiples: 128 tokens and 128 masked tokens
MIXED = {"joint": 1.0, "l2t": 1.0, "t2l": 1.0}


@pytest.fixture
def gpu_operators() -> Iterator[None]:
    """The operators of a GPU, on the CPU."""
    with assume_device("cuda"):
        yield


def objective_of(loss: LossConfig, text: Any = "elbo") -> Objective:
    masked = MaskedDiffusion(MASK, text, "independent", prefix_end=PAD)
    return Objective(loss, masked, GaussianDiffusion(LatentConfig(), loss.latent), 5, accuracy=True)


def network(loss: LossConfig, latent_tokens: int = 1, memory: MemoryConfig = KEEP_ALL) -> MMDiT:
    model = small_model(latent_tokens, "math", memory=memory).train()
    model.text_terms = loss.needs_text_terms
    model.loss_weights = LossWeights((1.0, 10.0)) if loss.latent_weighting == "uncertainty" else None
    return model


def micro_batch(
    objective: Objective,
    lengths: Sequence[int],
    latent_tokens: int = 1,
    mode: Mode | dict[Mode, float] = "joint",
    seed: int = 0,
) -> NoisedBatch:
    inputs, slots = random_inputs(tuple(lengths), latent_tokens, seed), torch.arange(len(lengths))
    tokens = inputs.tokens.clamp_max(MASK - 1)
    if lengths[-1] > 2:
        tokens[-2] = PAD  # the last sample has a prefix, and one token of text
    batch = Batch(tokens, inputs.latents, tuple(lengths), slots, slots)
    return objective.corrupt(batch, draw_noise(batch, seed, 3, len(lengths), mode_weights(mode)))


def results(objective: Objective, model: MMDiT, batch: NoisedBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss, sums = objective(model, batch, (3 * batch.counts).tolist())
    loss.backward()
    gradients = {name: part.grad for name, part in model.named_parameters() if part.grad is not None}
    return loss.detach(), sums, gradients


@pytest.mark.quick
@pytest.mark.parametrize(
    ("loss", "options"),
    [
        ({}, {}),
        ({}, {"latent_tokens": 3}),
        ({}, {"lengths": (1,)}),
        ({}, {"mode": "t2l"}),
        ({}, {"mode": "l2t"}),
        ({"latent": "mse"}, {"mode": MIXED, "text": "masked_mean"}),
        ({"latent_weighting": "uncertainty", "latent": "normalized_mse"}, {"mode": MIXED}),
        ({"label_smoothing": 0.1, "z_loss": 1e-3, "text_weight_limit": 3.0, "latent_time_weighting": "min_snr"}, {}),
        ({}, {"memory": MemoryConfig("selective")}),
        ({"latent_weighting": "uncertainty"}, {"memory": MemoryConfig("full"), "latent_tokens": 3}),
    ],
    ids=str,
)
def test_filler_changes_no_loss_sum_or_gradient(
    gpu_operators: None, loss: dict[str, Any], options: dict[str, Any]
) -> None:
    config, latent_tokens = LossConfig(**loss), options.get("latent_tokens", 1)
    objective = objective_of(config, options.get("text", "elbo"))
    model = network(config, latent_tokens, options.get("memory", KEEP_ALL))
    lengths = options.get("lengths", (1, 2, 2, 5, 9, 16, 16, 16))
    plain = micro_batch(objective, lengths, latent_tokens, options.get("mode", "joint"))
    (filled,) = SIZES.fill([plain], BUDGET)
    assert len(filled.noised_tokens) == 128 and len(filled.positions) == (128 if len(plain.positions) else 0)
    assert filled.layout.num_samples == len(lengths) + 8
    assert filled.layout.without_filler().lengths == plain.layout.lengths
    expected, actual = results(objective, model, plain), results(objective, model, filled)
    torch.testing.assert_close(actual[:2], expected[:2], rtol=1e-6, atol=1e-6)
    assert expected[2].keys() == actual[2].keys()
    for name, gradient in expected[2].items():
        assert (actual[2][name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-9, name


@pytest.mark.quick
def test_what_is_filled_stays_and_a_layout_has_no_other_empty_sample() -> None:
    objective = objective_of(LossConfig())
    plain = [micro_batch(objective, lengths) for lengths in ((3, 4, 5), (7,) * 8, (16,) * 9)]
    filled = SIZES.fill(plain, BUDGET)
    assert {batch.layout.num_samples for batch in filled} == {9 + 8}, "of the step's largest micro-batch"
    assert filled[1].layout.lengths == (7,) * 8 + (16,) * 4 + (8,) + (0,) * 4
    assert [len(batch.noised_tokens) for batch in filled] == [128, 128, 256]
    assert all(one is other for one, other in zip(SIZES.fill(filled, BUDGET), filled, strict=True))
    for name in ("counts", "sample_ids"):
        assert torch.equal(getattr(filled[0], name), getattr(plain[0], name))
    with pytest.raises(AssertionError, match="without tokens"):
        PackedLayout((0, 2), 1)


# ---- what is recorded once -----------------------------------------------------------------------------------------

WAITS = ("_local_scalar_dense", "nonzero", "aten.item")


@pytest.mark.quick
@pytest.mark.parametrize(("divisors", "weighting"), [("tensor", "uncertainty"), ("numbers", "fixed")])
def test_a_recorded_step_computes_the_other_micro_batches_of_its_sizes(
    gpu_operators: None, divisors: str, weighting: Any
) -> None:
    """Operators are recorded as a GPU's graph has them: what Python computed from the first micro-batch stays.

    With numbers instead of a tensor as divisors the replayed losses are wrong, so the test would see such a number.
    """
    config = LossConfig(latent_weighting=weighting)
    objective, model = objective_of(config), network(config)
    shapes = (1, 5, 9, 16, 16, 16, 16), (9, 9, 9, 9, 9, 9, 10), (14, 14, 15, 15, 16, 16, 16)
    batches = [micro_batch(objective, lengths, mode=MIXED, seed=seed) for seed, lengths in enumerate(shapes)]
    first, *others = SIZES.fill(batches, BUDGET)
    assert all(batch.packed.places == first.packed.places for batch in others)
    names = dict(model.named_parameters())

    def step(buffer: Tensor, divisors: Any, *weights: Tensor) -> tuple[Tensor, ...]:
        packed = PackedTensors(buffer, first.packed.places)
        batch = NoisedBatch.from_packed(packed, first.layout, first.counts, first.sample_ids)
        values = dict(zip(names, weights, strict=True))
        loss, sums = objective(lambda *x: torch.func.functional_call(model, values, x), batch, divisors)
        return loss.detach(), sums, *torch.autograd.grad(loss, weights)

    def arguments(batch: NoisedBatch) -> tuple[Any, ...]:
        totals = (3 * batch.counts).tolist()
        by = objective.divisors(totals, batch) if divisors == "tensor" else totals
        return batch.packed.buffer, by, *names.values()

    recorded = make_fx(step)(*arguments(first))
    operators = [str(node.target) for node in recorded.graph.nodes]
    assert not [name for name in operators if any(wait in name for wait in WAITS)]
    for batch in (first, *others):
        with torch.no_grad():
            replayed = recorded(*arguments(batch))
        same = [torch.equal(one, other) for one, other in zip(replayed, step(*arguments(batch)), strict=True)]
        assert all(same) or (divisors == "numbers" and batch is not first and not same[0])
