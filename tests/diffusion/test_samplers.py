"""A perfect denoiser recovers the data with every sampler."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mmldlm.diffusion.decoding import TextDecoding
from mmldlm.diffusion.gaussian import GaussianDiffusion, LatentLoss, LatentSampler, PredictionType
from mmldlm.diffusion.masked import MaskedDiffusion
from mmldlm.diffusion.noise import Mode
from mmldlm.diffusion.noise_schedule import NoiseScheduleName
from mmldlm.diffusion.sampling import (
    Generation,
    Sampler,
    SamplingConfig,
    draw_lengths,
    length_probabilities,
    median_lengths,
)
from tests.helpers.toy_pairs import COMBINATIONS, MASK, PerfectDenoiser, blanks, gaussian, random_pairs, texts_of

pytestmark = pytest.mark.quick

TEXT = MaskedDiffusion(MASK, "elbo")
CHANNELS = 64
PAIRS = random_pairs((3, 3, 7, 1, 5), channels=CHANNELS, latent_tokens=2)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def recovered(latent: GaussianDiffusion, mode: Mode, config: SamplingConfig) -> Generation:
    denoiser = PerfectDenoiser(PAIRS, latent, any_magnitude=latent.loss_kind == "cosine")
    condition = PAIRS.latents if mode == "l2t" else torch.zeros_like(PAIRS.latents)
    start = texts_of(PAIRS) if mode == "t2l" else blanks(PAIRS.lengths)
    return Sampler(denoiser, TEXT, latent, config).generate(mode, seeded(), condition, start)


@pytest.mark.parametrize("sampler", ["ddim", "euler"])
@pytest.mark.parametrize(("schedule", "prediction", "loss"), COMBINATIONS)
def test_latents_are_recovered(
    schedule: NoiseScheduleName, prediction: PredictionType, loss: LatentLoss, sampler: LatentSampler
) -> None:
    """DDIM recovers latents to float32 precision, Euler to the error of 40 straight steps.

    Directions alone, of epsilon or v at z, do not tell how much of the start lies along the datum: about 1 / C of
    its square is chance overlap, which a cosine-trained network leaves in the sample.
    """
    made = recovered(
        gaussian(schedule, prediction, loss, CHANNELS),
        "t2l",
        SamplingConfig(t2l_steps=40, latent_sampler=sampler),
    )
    if loss != "cosine" or prediction == "x0":
        error = (made.latents - PAIRS.latents).abs().max()
        bound = 1e-5 if sampler == "ddim" else 0.02
        assert error < bound, (
            f"{schedule}: straight steps miss by {error:.3f}; the path's clock must not run without bound in t"
        )
    else:
        cosine = F.cosine_similarity(made.latents, PAIRS.latents, dim=-1)
        assert cosine.mean() > (1 - 2 / CHANNELS if prediction == "epsilon" else 0.998)
        assert made.latents.norm(dim=-1).max() < math.sqrt(CHANNELS) * 1.01


@pytest.mark.parametrize(
    "config",
    [
        SamplingConfig(steps=6),
        SamplingConfig(steps=6, temperature=0.0),
        SamplingConfig(steps=6, temperature=0.7, top_p=0.9),
        SamplingConfig(steps=6, decoding="confidence"),
        SamplingConfig(steps=6, remask=0.5),
        SamplingConfig(steps=12, remask=1.0),
        SamplingConfig(steps=6, guidance=2.5),
        SamplingConfig(steps=1),
    ],
    ids=str,
)
def test_texts_are_recovered(config: SamplingConfig) -> None:
    made = recovered(gaussian("vp_cosine", "v", "cosine", CHANNELS), "l2t", config)
    assert torch.equal(made.tokens, PAIRS.tokens)
    assert torch.equal(made.latents, PAIRS.latents)  # the condition is left as it was
    assert made.split() == [part.tolist() for part in PAIRS.tokens.split(PAIRS.lengths)]


@pytest.mark.parametrize("remask", [0.0, 0.5])
def test_forward_passes_only_in_steps_that_unmask(remask: float) -> None:
    asked = []
    latent = gaussian("vp_cosine", "v", "cosine", CHANNELS)

    def denoiser(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        asked.append(len(arguments[5]))
        return PerfectDenoiser(PAIRS, latent)(*arguments)

    config = SamplingConfig(steps=200, decoding="ancestral", remask=remask)
    made = Sampler(denoiser, TEXT, latent, config).generate("l2t", seeded(), PAIRS.latents, blanks(PAIRS.lengths))
    assert torch.equal(made.tokens, PAIRS.tokens)
    assert all(asked)
    assert sum(asked) == len(PAIRS.tokens) if remask == 0 else sum(asked) > len(PAIRS.tokens)


@pytest.mark.parametrize("order", ["together", "latents_first"])
@pytest.mark.parametrize("decoding", ["ancestral", "confidence"])
def test_both_are_recovered_from_noise(decoding: TextDecoding, order: Any) -> None:
    config = SamplingConfig(16, decoding=decoding, joint_order=order)
    made = recovered(gaussian("rectified_flow", "v", "mse", CHANNELS), "joint", config)
    assert torch.equal(made.tokens, PAIRS.tokens)
    torch.testing.assert_close(made.latents, PAIRS.latents, rtol=0, atol=1e-5)


@pytest.mark.setting("sampling.t2l_steps")
@pytest.mark.parametrize(("prediction", "passes"), [("x0", 1), ("v", 5), ("epsilon", 5)])
def test_t2l_takes_one_pass_where_the_network_predicts_latents(prediction: PredictionType, passes: int) -> None:
    latent, seen = gaussian("vp_cosine", prediction, "mse", CHANNELS), []

    def denoiser(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        seen.append(arguments[3])
        return PerfectDenoiser(PAIRS, latent)(*arguments)

    for config, expected in (
        (SamplingConfig(5, latent_sampler="euler"), passes),
        (SamplingConfig(5, t2l_steps=3, latent_sampler="euler"), 3),
    ):
        seen.clear()
        made = Sampler(denoiser, TEXT, latent, config).generate("t2l", seeded(), PAIRS.latents, texts_of(PAIRS))
        assert len(seen) == expected
        if expected == 1:
            torch.testing.assert_close(made.latents, PAIRS.latents)


def test_latents_come_before_the_text_that_is_given_them() -> None:
    latent, seen = gaussian("vp_cosine", "v", "mse", CHANNELS), []
    perfect = PerfectDenoiser(PAIRS, latent)

    def denoiser(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens, latents, t_text, t_latent, layout = arguments[:5]
        if t_latent.any():
            assert (tokens == TEXT.mask_id).all() and (t_text == 1).all()
        else:
            torch.testing.assert_close(latents, perfect.find(layout, latents).latents, rtol=0, atol=1e-5)
        seen.append((float(t_latent[0]), float(t_text[0])))
        return perfect(*arguments)

    config = SamplingConfig(4, joint_order="latents_first", joint_latents="drawn")
    made = Sampler(denoiser, TEXT, latent, config).generate("joint", seeded(), PAIRS.latents, blanks(PAIRS.lengths))
    assert torch.equal(made.tokens, PAIRS.tokens)
    assert seen[:4] == [(1, 1), (0.75, 1), (0.5, 1), (0.25, 1)]
    assert [latent for latent, _ in seen[4:]] == [0] * len(seen[4:])
    assert [text for _, text in seen[4:]] == sorted((text for _, text in seen[4:]), reverse=True)


def test_a_text_that_comes_first_is_written_without_a_latent() -> None:
    """All its passes see the same noise at t = 1, and those of the latent after them see the text."""
    latent, seen = gaussian("vp_cosine", "v", "mse", CHANNELS), []
    perfect = PerfectDenoiser(PAIRS, latent)

    def denoiser(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens, latents, t_text, t_latent = arguments[:4]
        if not seen:
            seen.append(latents)
        if t_text.any():
            assert (t_latent == 1).all() and torch.equal(latents, seen[0])
        else:
            assert (tokens != TEXT.mask_id).all()
        seen.append((float(t_text[0]), float(t_latent[0])))
        return perfect(*arguments)

    config = SamplingConfig(4, joint_order="text_first", t2l_steps=2)
    made = Sampler(denoiser, TEXT, latent, config).generate("joint", seeded(), PAIRS.latents, blanks(PAIRS.lengths))
    assert made.tokens.shape == PAIRS.tokens.shape and (made.tokens != TEXT.mask_id).all()
    assert seen[-2:] == [(0, 1), (0, 0.5)] and all(text > 0 for text, _ in seen[1:-2])


def test_the_latents_of_joint_are_at_last_those_of_its_text() -> None:
    """Where no text belongs to what was drawn: the network writes the same texts whatever the latents are."""
    latent = gaussian("vp_cosine", "x0", "mse", CHANNELS)

    def denoiser(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        text, prediction, lengths = PerfectDenoiser(PAIRS, latent)(*arguments)
        is_known = bool((arguments[0] != TEXT.mask_id).all())
        return text, prediction if is_known else -prediction, lengths

    made = {}
    for which in ("drawn", "of_text"):
        config = SamplingConfig(4, joint_latents=which)  # type: ignore[arg-type]
        made[which] = Sampler(denoiser, TEXT, latent, config).generate(
            "joint", seeded(), PAIRS.latents, blanks(PAIRS.lengths)
        )
        assert torch.equal(made[which].tokens, PAIRS.tokens)
    torch.testing.assert_close(made["drawn"].latents, -PAIRS.latents, rtol=0, atol=1e-5)
    torch.testing.assert_close(made["of_text"].latents, PAIRS.latents, rtol=0, atol=1e-5)
    assert made["of_text"].passes == made["drawn"].passes + len(PAIRS.lengths)
    together = SamplingConfig(4, joint_order="together")
    assert recovered(latent, "joint", together).passes == 4 * len(PAIRS.lengths)


def test_guidance_of_an_idle_condition_changes_nothing() -> None:
    made = recovered(gaussian("vp_cosine", "x0", "mse", CHANNELS), "t2l", SamplingConfig(t2l_steps=8, guidance=3.0))
    torch.testing.assert_close(made.latents, PAIRS.latents, rtol=0, atol=1e-4)


def test_guidance_scale_ignores_norms() -> None:
    x0, other = (F.normalize(each, dim=-1) * 4 for each in torch.randn(2, 5, 1, 16, generator=seeded()))
    latent, t = gaussian("vp_cosine", "x0", "cosine", 16), torch.linspace(0.1, 1, 5)
    expected = other + 2 * (x0 - other)
    for factor in (0.1, 1.0, 7.0):
        torch.testing.assert_close(latent.guide(factor * x0, other / factor, t, 2.0), expected)
    raw = gaussian("vp_cosine", "x0", "mse", 16).guide(3 * x0, other, t, 2.0)
    torch.testing.assert_close(raw, other + 2 * (3 * x0 - other))  # where the loss knows lengths, they stay


@pytest.mark.parametrize(
    ("guidance", "expected"),
    [
        (0.0, (1 / 3, 1 / 3, 1 / 3)),
        (1.0, (1 / 2, 1 / 4, 1 / 4)),
        (2.0, (2 / 3, 1 / 6, 1 / 6)),
        (3.0, (8 / 10, 1 / 10, 1 / 10)),
    ],
)
def test_guided_texts_follow_the_power_of_their_condition(guidance: float, expected: tuple[float, ...]) -> None:
    """p(text | latent)^scale p(text)^(1 - scale), normalized: by hand for a uniform p(text)."""
    text = MaskedDiffusion(3, "elbo")

    def denoiser(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        p = torch.tensor([1 / 2, 1 / 4, 1 / 4, 0] if (arguments[3] == 0).all() else [1 / 3, 1 / 3, 1 / 3, 0])
        return p.clamp_min(1e-30).log().expand(len(arguments[5]), -1), arguments[1], torch.zeros(1)

    config = SamplingConfig(steps=1, temperature=1.0, guidance=guidance)
    latents, latent = torch.zeros(2000, 1, 4), gaussian("vp_cosine", "v", "cosine", 4)
    made = Sampler(denoiser, text, latent, config).generate("l2t", seeded(), latents, [[3]] * 2000)
    torch.testing.assert_close(made.log_p, torch.tensor(expected).double().log()[made.tokens], rtol=1e-5, atol=1e-5)
    assert set(made.tokens.tolist()) == {0, 1, 2}


def test_each_mode_has_its_decoding_and_temperature() -> None:
    auto = SamplingConfig()
    asked = [("l2t", 1), ("l2t", 4), ("joint", 1), ("joint", 4)]
    assert [auto.resolve_decoding(*each) for each in asked] == ["confidence"] * 2 + ["ancestral", "confidence"]
    assert [auto.resolve_temperature(*each) for each in asked] == [0, 0, 0.6, 0]
    assert [auto.resolve_temperature(*each, count=3) for each in asked] == [0.6] * 4
    together = SamplingConfig(joint_order="together")
    assert together.resolve_decoding("joint", 4) == "ancestral" and together.resolve_temperature("joint", 4) == 0.6
    first = SamplingConfig(joint_order="text_first")
    assert first.resolve_decoding("joint", 4) == "ancestral" and first.resolve_temperature("joint", 4) == 0.8
    assert SamplingConfig(remask=0.5).resolve_decoding("l2t", 4) == "ancestral"
    for decoding in ("ancestral", "confidence"):
        given = SamplingConfig(decoding=decoding, temperature=0.3)
        assert {given.resolve_decoding(*each) for each in asked} == {decoding}
        assert {given.resolve_temperature(*each) for each in asked} == {0.3}


def test_generation_is_a_function_of_the_seed() -> None:
    latent = gaussian("vp_cosine", "epsilon", "cosine", CHANNELS)

    def noisy(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        text, prediction, lengths = PerfectDenoiser(PAIRS, latent)(*arguments)
        return 0.01 * text, prediction, lengths

    def made(seed: int) -> Generation:
        generator = torch.Generator().manual_seed(seed)
        empty = torch.zeros_like(PAIRS.latents)
        return Sampler(noisy, TEXT, latent, SamplingConfig(4, 1.0, decoding="ancestral")).generate(
            "joint", generator, empty, blanks(PAIRS.lengths)
        )

    assert torch.equal(made(1).tokens, made(1).tokens) and torch.equal(made(1).latents, made(1).latents)
    assert not torch.equal(made(1).tokens, made(2).tokens)
    assert not torch.equal(made(1).latents, made(2).latents)


def test_lengths_are_drawn_from_the_length_head() -> None:
    def model(tokens: torch.Tensor, latents: torch.Tensor, *_: object) -> tuple[None, None, torch.Tensor]:
        assert (tokens == MASK).all()
        logits = torch.full((len(latents), 9), float("-inf"))
        logits[:, [2, 6]] = torch.tensor([0.8, 0.2]).log()
        return None, None, logits

    drawn = draw_lengths(model, MASK, torch.zeros(5000, 1, 4), seeded())
    assert set(drawn) == {3, 7}
    assert abs(drawn.count(3) / 5000 - 0.8) < 4.5 * (0.8 * 0.2 / 5000) ** 0.5
    given = length_probabilities(model, MASK, torch.zeros(3, 1, 4), 0.0)
    assert median_lengths(given).tolist() == [3, 3, 3]


def test_confidence_with_remasking_is_refused() -> None:
    with pytest.raises(ValueError, match="remask"):
        SamplingConfig(decoding="confidence", remask=0.1)
