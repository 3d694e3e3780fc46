"""Decoding: tokens follow the softmax, a text depends on its own stream alone, and no step waits for the device."""

from __future__ import annotations

import math
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmldlm.batch import PackedLayout
from mmldlm.diffusion.decoding import AncestralDecoder, ConfidenceDecoder, draw_tokens, token_probabilities
from mmldlm.diffusion.masked import MaskedDiffusion
from mmldlm.diffusion.noise import Mode, SampleStreams
from mmldlm.diffusion.sampling import Generation, Sampler, SamplingConfig
from mmldlm.model.attention import Backend
from mmldlm.model.heads import MASKED_LOGIT
from mmldlm.model.mmdit import DataShape, MMDiT, ModelConfig
from tests.helpers.small_model import initialize
from tests.helpers.toy_pairs import MASK, PAD, VOCAB, WORDS, blanks, gaussian

pytestmark = pytest.mark.quick

TEXT, LATENT = MaskedDiffusion(MASK, "elbo"), gaussian("vp_cosine", "v", "mse")
LAST = 1 - 2.0**-53  # the largest number below 1


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def uniforms(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=seeded(), dtype=torch.float64)


def assert_follows(drawn: Tensor, p: Tensor) -> None:
    """Pearson's chi-square of the counts, within 4.5 standard deviations; no token with probability 0 is drawn."""
    counts, expected = drawn.bincount(minlength=len(p)).double(), p * len(drawn)
    possible = p > 0
    assert not counts[~possible].any()
    statistic = ((counts - expected)[possible].square() / expected[possible]).sum()
    freedom = int(possible.sum()) - 1
    assert abs(statistic - freedom) < 4.5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("top_p", [1.0, 0.8])
@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 2.0])
def test_tokens_follow_the_softmax(temperature: float, top_p: float) -> None:
    count, logits = 200_000, torch.randn(40, generator=seeded())
    logits[[0, 17, 39]] = MASKED_LOGIT  # the first, one between, the last
    p = (logits.double() / temperature).exp()
    if top_p < 1:
        mass = p.sort(descending=True).values.cumsum(0) / p.sum()
        p[p < p.sort(descending=True).values[int((mass < top_p).sum())]] = 0
    p /= p.sum()
    drawn, log_p = draw_tokens(logits.expand(count, -1), uniforms(count), temperature, top_p)
    assert_follows(drawn, p)
    torch.testing.assert_close(log_p, p.log()[drawn])


def test_the_ends_of_the_unit_interval_draw_possible_tokens() -> None:
    logits = torch.tensor([[MASKED_LOGIT, 1.0, MASKED_LOGIT, 3.0, MASKED_LOGIT]]).repeat(2, 1)
    drawn, _ = draw_tokens(logits, torch.tensor([0.0, LAST], dtype=torch.float64), 1.0, 1.0)
    assert drawn.tolist() == [1, 3]


def test_logits_that_are_not_numbers_give_a_token_of_the_vocabulary() -> None:
    """An index outside of it would end the process on a GPU."""
    drawn, _ = draw_tokens(torch.full((3, 5), torch.nan), uniforms(3), 1.0, 1.0)
    assert ((drawn >= 0) & (drawn < 5)).all()


def test_the_likeliest_token_at_temperature_0() -> None:
    logits = torch.tensor([[5.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.1, 0.0]])
    drawn, confidence = draw_tokens(logits, torch.full((3,), LAST, dtype=torch.float64), 0.0, 1.0)
    assert drawn.tolist() == [0, 0, 1]
    assert confidence[0] > confidence[1] > confidence[2]  # of temperature 1: decoding by confidence needs an order


def test_top_p_and_temperature() -> None:
    p = torch.tensor([[0.15, 0.5, 0.05, 0.3]], dtype=torch.float64)

    def truncated(temperature: float, top_p: float) -> Tensor:
        return token_probabilities(p.log(), temperature, top_p)

    torch.testing.assert_close(truncated(1.0, 0.6), torch.tensor([[0.0, 0.625, 0.0, 0.375]], dtype=torch.float64))
    torch.testing.assert_close(truncated(1.0, 0.1), torch.tensor([[0.0, 1.0, 0.0, 0.0]], dtype=torch.float64))
    torch.testing.assert_close(truncated(0.5, 1.0), p.square() / p.square().sum())


# --- which tokens ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("remask", [0.0, 0.7])
def test_numbers_of_unmasked_tokens_stay_uniform(remask: float) -> None:
    """The number that decides whether a token is unmasked also draws the token: below p, any value is as likely."""
    times = torch.linspace(1, 0, 5).tolist()
    decoder = AncestralDecoder(TEXT, times, uniforms(4, 50_000), remask, torch.device("cpu"))
    logits = torch.randn(WORDS, generator=seeded())
    for step in range(4):
        rows = decoder.rows(step, torch.empty(0))
        numbers = decoder.uniforms(step, rows)
        assert len(numbers) == len(rows)
        ordered = numbers.sort().values
        deviation = (ordered - torch.linspace(0, 1, len(ordered), dtype=torch.float64)).abs().max()
        assert deviation < 2.2 * len(ordered) ** -0.5 and ordered[-1] < 1  # Kolmogorov-Smirnov, p = 1e-4
        drawn, _ = draw_tokens(logits.expand(len(numbers), -1), numbers, 1.0, 1.0)
        assert_follows(drawn, logits.double().softmax(0))


def plain_confidence_step(
    tokens: Tensor, drawn: Tensor, confidence: Tensor, s: float, lengths: list[int], commit: float | None
) -> Tensor:
    """MaskGIT with a threshold, one sample after the other; ties by position."""
    result = tokens.clone()
    for rows in torch.arange(len(tokens)).split(lengths):
        masked = [int(row) for row in rows if tokens[row] == MASK]
        count = max(0 if commit is None else 1, len(masked) - round(s * len(rows)))
        certain = [row for row in masked if commit is not None and math.exp(confidence[row]) > commit]
        for row in [*sorted(masked, key=lambda row: -float(confidence[row]))[:count], *certain]:
            result[row] = drawn[row]
    return result


@pytest.mark.parametrize("commit", [None, 0.3, 0.9, 1.0])
def test_confidence_unmasks_as_the_formula_says(commit: float | None) -> None:
    lengths, steps = [7, 1, 30, 2, 16], 11
    layout, generator = PackedLayout(tuple(lengths), 1), seeded()
    times, numbers = torch.linspace(1, 0, steps + 1).tolist(), uniforms(steps, sum(lengths))
    decoder = ConfidenceDecoder(TEXT, times, numbers, layout, commit)
    tokens = torch.full((sum(lengths),), MASK)
    for step, (_, s) in enumerate(pairwise(times)):
        drawn = torch.randint(0, WORDS, tokens.shape, generator=generator)
        # Many ties, and certain tokens, whose log probability is 0 of either sign.
        confidence = torch.randint(-3, 1, tokens.shape, generator=generator) * 0.7
        rows = decoder.rows(step, tokens)
        expected = plain_confidence_step(tokens, drawn, confidence, s, lengths, commit)
        assert torch.equal(rows, (tokens == MASK).nonzero().squeeze(1))
        assert torch.equal(decoder.uniforms(step, rows), numbers[step, rows])
        tokens = decoder.update(step, tokens, rows, drawn[rows], confidence[rows])
        assert torch.equal(tokens, expected)
    assert not (tokens == MASK).any()


@pytest.mark.setting("sampling.commit")
def test_finished_texts_take_no_more_passes() -> None:
    """A network that is sure of the second text alone: that one takes one pass, and the others one per token."""
    asked: list[tuple[int, ...]] = []

    def model(tokens: Tensor, latents: Tensor, t_text: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        layout, positions = rest[1], rest[2]
        asked.append(layout.lengths)
        masked = layout.sample_of_token[tokens == MASK].bincount(minlength=layout.num_samples)
        assert torch.equal(t_text, masked / torch.tensor(layout.lengths))
        sure = latents[layout.sample_of_token[positions], 0, 0] == 1
        return 30.0 * sure[:, None] * F.one_hot(layout.position[positions], WORDS), latents

    def generated(**settings: Any) -> Generation:
        asked.clear()
        config = SamplingConfig(32, decoding="confidence", **settings)
        latents = torch.tensor([0.0, 1.0, 0.0])[:, None, None].expand(-1, 1, 16)
        return Sampler(model, TEXT, LATENT, config).generate("l2t", seeded(), latents, blanks((3, 5, 2)))  # type: ignore[arg-type]

    made = generated()
    assert not (made.tokens == MASK).any()
    assert asked == [(3, 5, 2), (3, 2), (3,)] and made.passes == 6
    slow = generated(commit=1.0)
    assert slow.passes == 3 + 5 + 2 and slow.split()[1] == made.split()[1]
    assert generated(commit=1e-9).passes == 3, "every token is above a threshold of nearly 0"


# --- whole generations ----------------------------------------------------------------------------------


def self_contained(tokens: Tensor, latents: Tensor, t_text: Tensor, t_latent: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Logits that are a rough function of position, of the text around it, and of the sample's latent."""
    layout, positions = rest[0], rest[1]
    known = torch.where(tokens == MASK, 0, tokens + 1)
    sums = torch.zeros(layout.num_samples, dtype=torch.int64).index_add_(0, layout.sample_of_token, known)
    sample = layout.sample_of_token[positions]
    phase = layout.position[positions] + 7 * sums[sample] + (100 * latents[sample, 0, 0]).long()
    logits = 3 * torch.sin(0.37 * phase[:, None] * (1 + torch.arange(VOCAB)))
    logits[:, [MASK, PAD]] = MASKED_LOGIT
    return logits, 0.9 * latents


CONFIGS = [
    SamplingConfig(steps=6, decoding="ancestral"),
    SamplingConfig(steps=6, decoding="confidence", temperature=0.7, top_p=0.9),
    SamplingConfig(steps=9, decoding="ancestral", remask=0.8, temperature=1.5),
]
ANCESTRAL = [config for config in CONFIGS if config.decoding == "ancestral"]


def texts_of(slots: list[int], mode: Mode, config: SamplingConfig, seed: int = 3) -> dict[int, list[int]]:
    lengths = tuple(4 + 5 * slot for slot in slots)
    latents = torch.randn(8, 1, 16, generator=seeded())[slots]
    streams = SampleStreams(seed, 0, torch.tensor(slots))
    made = Sampler(self_contained, TEXT, LATENT, config).generate(mode, streams, latents, blanks(lengths))  # type: ignore[arg-type]
    return dict(zip(slots, made.split(), strict=True))


@pytest.mark.parametrize("mode", ["l2t", "joint"])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_text_does_not_depend_on_its_batch(config: SamplingConfig, mode: Mode) -> None:
    together = texts_of([5, 0, 3, 7], mode, config)
    for slot, text in together.items():
        assert texts_of([slot], mode, config) == {slot: text}
    assert texts_of([5, 0, 3, 7], mode, config) == together
    assert texts_of([5, 0, 3, 7], mode, config, seed=4) != together


class Exchanges(TorchDispatchMode):
    """Counts operators with tensors of the host and of the device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        devices = {leaf.device.type for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)}
        self.count += len(devices) > 1
        return out


class Finished(Exception):
    """Ends a generation after its last step: no result can be read from the meta device."""


@pytest.mark.parametrize("backend", ["sdpa", "varlen"])
@pytest.mark.parametrize("mode", ["l2t", "joint"])
@pytest.mark.parametrize("config", [*ANCESTRAL, SamplingConfig(6, 0.0, decoding="ancestral")], ids=str)
def test_no_ancestral_step_waits_for_the_device(
    config: SamplingConfig, mode: Mode, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The meta device has no values: whatever reads one on the host raises. And no step copies to it or from it."""
    # meta has no autocast.
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: False)
    shape = DataShape(VOCAB, MASK, PAD, 40, 1, 16)
    model = MMDiT(ModelConfig(depth=1, width=32, num_heads=2), shape, backend).eval().to("meta")
    counts: list[int] = []
    exchanges = Exchanges()

    def on_step(tokens: Tensor, lengths: tuple[int, ...], t: float) -> None:
        counts.append(exchanges.count)
        if t == 0:
            raise Finished

    latents, streams = torch.empty(3, 1, 16, device="meta"), SampleStreams(0, 0, torch.arange(3))
    with pytest.raises(Finished), exchanges:
        Sampler(model, TEXT, LATENT, config, on_step=on_step).generate(mode, streams, latents, blanks((9, 4, 40)))
    # The index tensors of a layout are copied when they are first used.
    assert len(counts) == 1 + config.steps and counts[1] == counts[-1] > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("config", ANCESTRAL, ids=str)
def test_no_ancestral_step_synchronizes_a_gpu(config: SamplingConfig) -> None:
    model = MMDiT(ModelConfig(depth=1, width=32, num_heads=2), DataShape(VOCAB, MASK, PAD, 40, 1, 16))
    initialize(model).eval().to("cuda")

    def on_step(tokens: Tensor, lengths: tuple[int, ...], t: float) -> None:
        # The first step makes what later ones keep, and the result is read after the last one.
        torch.cuda.set_sync_debug_mode("error" if 0 < t < 1 else "default")

    streams, latents = SampleStreams(0, 0, torch.arange(3)), torch.zeros(3, 1, 16, device="cuda")
    try:
        made = Sampler(model, TEXT, LATENT, config, on_step=on_step).generate(
            "joint", streams, latents, blanks((9, 4, 40))
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not (made.tokens == MASK).any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_equal_logits_give_equal_tokens_on_a_gpu(top_p: float) -> None:
    logits, numbers = 4 * torch.randn(4096, 30_522, generator=seeded()), uniforms(4096)
    (here, here_p), (there, there_p) = (
        draw_tokens(logits.to(device), numbers.to(device), 0.8, top_p) for device in ("cpu", "cuda")
    )
    assert torch.equal(here, there.cpu())
    torch.testing.assert_close(here_p, there_p.cpu())


def test_numbers_are_those_of_the_sample() -> None:
    """Whatever the other samples are, and the same for one step as for the first of several."""
    both = SampleStreams(1, 2, torch.tensor([4, 9])).uniform(3, (5, 2))
    assert both.shape == (3, 7) and both.dtype == torch.float64
    assert torch.equal(both[:, 5:], SampleStreams(1, 2, torch.tensor([9])).uniform(3, (2,)))
    assert torch.equal(both[:1, 5:], SampleStreams(1, 2, torch.tensor([9])).uniform(1, (2,)))
    assert len(np.unique(both)) == both.numel()
