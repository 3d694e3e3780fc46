"""Times have their documented densities, and the text bound does not depend on the density."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mmldlm.config import load_config
from mmldlm.data.store import Store
from mmldlm.diffusion.gaussian import LatentConfig
from mmldlm.diffusion.masked import MaskedDiffusion, TextConfig
from mmldlm.diffusion.noise import MODES, draw_noise, mode_weights
from mmldlm.diffusion.noise_schedule import MAX_MODE_SCALE, TimeSampler
from mmldlm.errors import ConfigError
from mmldlm.loading.factory import build_objective
from tests.helpers.toy_pairs import MASK, objective, random_pairs

pytestmark = pytest.mark.quick

U = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
PAIRS = random_pairs((4,) * 100 + (9,) * 100)
SIZE = len(PAIRS.lengths)


def test_the_objective_counts_all_numbers_of_a_texts_latents(tiny_store: Path) -> None:
    manifest = Store.open(tiny_store).manifest
    manifest = replace(manifest, latent=replace(manifest.latent, tokens=4, channels=64))
    assert build_objective(load_config(None, []), manifest).latent.sampler.shift == 2


@pytest.mark.parametrize("scale", [-0.9, 0.0, 0.81, 1.29, MAX_MODE_SCALE])
def test_mode_scale_is_that_of_sd3(scale: float) -> None:
    """Times rise from 0 to 1; they are f of eq. 20 of 1 - u; the weight is their derivative, and bounded."""
    sampler = TimeSampler("mode", mode_scale=scale)
    t, weight = sampler.times(U), sampler.importance(U)
    v = 1 - U
    torch.testing.assert_close(t, 1 - v - scale * (torch.cos(math.pi / 2 * v) ** 2 - 1 + v))
    assert (t.diff() > 0).all() and t[0] < 1e-3 and t[-1] > 1 - 1e-3
    torch.testing.assert_close(t.diff() * len(U), (weight[1:] + weight[:-1]) / 2, rtol=0, atol=1e-4)
    assert weight.min() >= 0 and weight.max() <= max(1 + scale, 1 - 0.58 * scale)


@pytest.mark.parametrize("integrand", [torch.cos, torch.square, lambda t: 1 / (t + 0.01)])
def test_importance_weights_restore_uniform_means(integrand: object) -> None:
    sampler = TimeSampler("mode")
    assert callable(integrand)
    weighted = (sampler.importance(U) * integrand(sampler.times(U))).mean()
    torch.testing.assert_close(weighted, integrand(U).mean(), rtol=1e-4, atol=0)
    assert not torch.isclose(integrand(sampler.times(U)).mean(), integrand(U).mean(), rtol=1e-2)


def test_location_and_scale_are_those_of_the_logit() -> None:
    logits = torch.logit(TimeSampler("logit_normal", location=-0.5, scale=0.7).times(U))
    assert float(logits.mean()) == pytest.approx(-0.5, abs=1e-4)
    assert float(logits.std()) == pytest.approx(0.7, abs=1e-3)


@pytest.mark.parametrize(
    ("given", "numbers", "shift"), [(None, 32, 1.0), (None, 64, 1.0), (None, 1024, 4.0), (0.5, 1024, 0.5)]
)
def test_times_of_many_numbers_are_moved_toward_noise(given: float | None, numbers: int, shift: float) -> None:
    """By eq. 23 of SD3: the logit of a time moves by log s, and 0 and 1 stay."""
    sampler = LatentConfig(time_shift=given).resolve(numbers).sampler
    t, before = sampler.times(U), TimeSampler().times(U)
    torch.testing.assert_close(t.logit() - before.logit(), torch.full_like(t, math.log(shift)), rtol=0, atol=1e-6)
    assert sampler.times(torch.tensor([0.0, 1.0])).tolist() == [0.0, 1.0]
    if shift == 1:
        assert torch.equal(t, before)


def test_a_share_of_joint_is_pure_noise() -> None:
    """The share is exact in each batch. Nothing else changes."""
    weights = mode_weights({"l2t": 0.4, "t2l": 0.2, "joint": 0.4})
    for step in range(3):
        before, after = (
            draw_noise(random_pairs((4,) * 100), 0, step, 100, weights, latent=LatentConfig(pure_noise=share).sampler)
            for share in (0.0, 0.75)
        )
        is_joint, alone = before.mode == MODES.index("joint"), after.t_latent == 1
        assert int(is_joint.sum()) == 40 and int(alone.sum()) == 30 and not (alone & ~is_joint).any()
        assert torch.equal(after.t_latent[~alone], before.t_latent[~alone]) and not (before.t_latent == 1).any()
        assert torch.equal(after.t_text, before.t_text) and torch.equal(after.uniforms, before.uniforms)


@pytest.mark.parametrize("limit", [None, 3.0])
def test_the_bound_does_not_depend_on_text_time_sampling(limit: float | None) -> None:
    """A predictor whose loss is t^2 a token: 1/3 with mode sampling as with uniform times, and not without its weight.

    What is shown has no `loss.text_weight_limit`. Within 4.5 standard deviations: a token counts t^2 / (t p(t)) with
    probability t, and 1 / p is at most 1 + s.
    """
    bound = objective(text_weight_limit=limit)
    sampler = TextConfig("mode").sampler
    result = {"weighted": 0.0, "not": 0.0}
    steps = 40
    for step in range(steps):
        noise = draw_noise(PAIRS, 0, step, SIZE, mode_weights("l2t"), sampler)
        for name in result:
            drawn = noise if name == "weighted" else replace(noise, importance=torch.ones_like(noise.importance))
            noised = bound.corrupt(PAIRS, drawn)
            nll = noised.t_text[noised.layout.sample_of_token[noised.positions]].square()
            result[name] += float((noised.token_weight * nll).sum()) / len(PAIRS.tokens) / steps
    tokens = steps * len(PAIRS.tokens)
    deviation = math.sqrt(2.29 / 4 / tokens)
    assert result["weighted"] == pytest.approx(1 / 3, abs=4.5 * deviation)
    assert result["not"] < 0.3


def test_masked_mean_has_no_importance_weights() -> None:
    weights = MaskedDiffusion(MASK, "masked_mean").weights(
        torch.tensor([0.1, 0.9]), torch.tensor([5, 9]), torch.tensor([2.0, 0.3])
    )
    assert weights.tolist() == [1, 1]


@pytest.mark.parametrize("which", ["text", "latent"])
def test_stratification_is_set_per_modality(which: str) -> None:
    """Without stratification some strata stay empty; the rest of the noise is unchanged."""
    alone = {which: TimeSampler(stratified=False)}
    grid = draw_noise(PAIRS, 0, 0, SIZE, mode_weights("joint"))
    free = draw_noise(PAIRS, 0, 0, SIZE, mode_weights("joint"), **alone)
    times = {"text": (grid.t_text, free.t_text), "latent": (grid.t_latent, free.t_latent)}
    for name, (before, after) in times.items():
        strata = [len({int(t * SIZE) for t in drawn.double().tolist()}) for drawn in (before, after)]
        assert strata[0] > SIZE - 3
        assert (strata[1] < 0.8 * SIZE) if name == which else torch.equal(before, after)
    assert torch.equal(grid.mode, free.mode) and torch.equal(grid.uniforms, free.uniforms)


def test_text_and_latent_time_samplers_are_separate() -> None:
    uniform = draw_noise(PAIRS, 0, 0, SIZE, mode_weights("joint"))
    config = load_config(None, ["text.time_sampling=mode", "text.mode_scale=1.0", "latent.time_sampling=logit_normal"])
    drawn = draw_noise(PAIRS, 0, 0, SIZE, mode_weights("joint"), config.text.sampler, config.latent.sampler)
    expected = TimeSampler("mode", mode_scale=1.0).times(uniform.t_text.double())
    torch.testing.assert_close(drawn.t_text.double(), expected, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(drawn.t_latent, uniform.t_latent, atol=0.01)
    assert not torch.allclose(drawn.importance, torch.ones(SIZE))
    latent = load_config(None, ["latent.time_sampling=mode", "latent.mode_scale=0.5", "latent.stratified=false"])
    assert latent.latent.sampler == TimeSampler("mode", mode_scale=0.5, stratified=False)
    logit = load_config(None, ["latent.time_sampling=logit_normal", "latent.location=1", "latent.scale=2"])
    assert logit.latent.sampler == TimeSampler("logit_normal", location=1.0, scale=2.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("latent.location=1", "latent.location: does nothing under time_sampling: uniform, .* logit_normal"),
        ("latent.scale=2", "latent.scale: does nothing under time_sampling: uniform"),
        ("latent.mode_scale=1", "latent.mode_scale: does nothing under time_sampling: uniform, .* 1.29 or .*: mode"),
        ("text.mode_scale=1", "text.mode_scale: does nothing"),
        ("text.mode_scale=1.76", "text.mode_scale: must be below 1.75"),
        ("latent.scale=0", "latent.scale: must be above 0"),
        ("text.time_sampling=logit_normal", r"text.time_sampling: expected 'uniform' or 'mode'"),
    ],
)
def test_unused_time_settings_are_refused(settings: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, [settings])
