"""Terms that only training adds: smoothing, z-loss, time weights and learned weights; logged losses have none."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mmldlm.config import load_config
from mmldlm.diffusion.gaussian import GaussianDiffusion, LatentConfig, PredictionType
from mmldlm.diffusion.noise import MODES, Mode, draw_noise, mode_weights
from mmldlm.diffusion.noise_schedule import NoiseScheduleName
from mmldlm.diffusion.objective import LossConfig, NoisedBatch, Objective, total_counts
from mmldlm.errors import ConfigError
from mmldlm.model.heads import LossWeights
from mmldlm.model.mmdit import DataShape, MMDiT, ModelConfig
from tests.helpers.small_model import initialize
from tests.helpers.toy_pairs import (
    MASK,
    PAD,
    PREDICTIONS,
    SCHEDULE_NAMES,
    VOCAB,
    WORDS,
    gaussian,
    objective,
    random_pairs,
    select,
)

pytestmark = pytest.mark.quick

LENGTHS = (3, 3, 7, 1, 5, 5, 2, 9)
PAIRS = random_pairs(LENGTHS, channels=6, latent_tokens=2)
MIXED = mode_weights({"l2t": 2, "t2l": 1, "joint": 1})


def model_of(config: LossConfig) -> MMDiT:
    torch.manual_seed(0)
    learned = config.latent_weighting == "uncertainty"
    model = MMDiT(
        ModelConfig(depth=2, width=32, num_heads=2, conditioning_width=16),
        DataShape(VOCAB, MASK, PAD, 9, 2, 6),
        text_terms=config.needs_text_terms,
        initial_loss_weights=(1.0, config.latent_weight) if learned else None,
    )
    initialize(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.startswith("loss_weights"):
                parameter += 0.1 * torch.randn_like(parameter)
    return model


def noised_by(total: Objective, rows: list[int] | None = None, mode: dict[Mode, float] = MIXED) -> NoisedBatch:
    part = PAIRS if rows is None else select(PAIRS, rows)
    return total.corrupt(part, draw_noise(part, 0, 3, len(LENGTHS), mode))


def gradients(model: MMDiT, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal_gradients(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        scale = theirs[name].norm()
        assert (ours[name] - theirs[name]).norm() <= 2e-5 * scale + 1e-9, name


# ---- label smoothing and z-loss ------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["elbo", "masked_mean"])
@pytest.mark.parametrize(
    "settings", [{"label_smoothing": 0.2}, {"z_loss": 0.01}, {"label_smoothing": 0.1, "z_loss": 0.1}]
)
def test_label_smoothing_and_z_loss_match_full_logits(settings: dict[str, float], text: str) -> None:
    """Value and gradient against plain autograd on all logits; what is shown of the text stays its likelihood."""
    total = objective(gaussian("vp_cosine", "v", "mse", 6), text=text, latent_weight=0.0, length_weight=0.0, **settings)
    model, noised = model_of(total.config), noised_by(total)
    loss, sums = total(model, noised, noised.counts.tolist())
    ours = gradients(model, loss)

    logits = model(*noised.inputs[:-1])[0]
    log_z = logits.logsumexp(-1)
    possible = logits[:, :WORDS] - log_z[:, None]
    assert set(range(VOCAB)) - set(range(WORDS)) == {MASK, PAD}
    smoothing, z = settings.get("label_smoothing", 0.0), settings.get("z_loss", 0.0)
    share = torch.full((len(log_z), WORDS), smoothing / WORDS)
    share[torch.arange(len(log_z)), noised.targets] += 1 - smoothing
    reference = -(share * possible).sum(-1) + z * log_z.square()
    tokens = float(noised.counts[: len(MODES)].sum())
    expected = (noised.token_weight * reference).sum() / tokens
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    theirs = gradients(model, expected)
    shared = {name: gradient for name, gradient in ours.items() if name in theirs}
    assert_equal_gradients(shared, theirs)

    shown = total.stats.summary(sums, noised.counts)
    nll = F.cross_entropy(logits, noised.targets, reduction="none")
    plain = float((noised.token_weight * nll).detach().sum()) / tokens
    assert shown["loss/text"] == pytest.approx(plain, rel=1e-5)
    assert ("loss/z" in shown) == (z > 0) and ("loss/label_smoothing" in shown) == (smoothing > 0)
    added = shown.get("loss/z", 0) + shown.get("loss/label_smoothing", 0)
    assert plain + added == pytest.approx(loss.item(), rel=1e-5) and abs(added) > 1e-3
    assert shown["loss/total"] == pytest.approx(loss.item(), rel=1e-5)


# ---- weights by time -----------------------------------------------------------------------------------------


def test_loss_text_weight_limit_affects_training_only() -> None:
    limited, free = (objective(text_weight_limit=limit, length_weight=0.0) for limit in (2.0, None))
    ours, theirs = noised_by(limited), noised_by(free)
    assert theirs.token_weight.max() > 2 and theirs.trained_token_weight is None
    assert torch.equal(ours.token_weight, theirs.token_weight)
    assert ours.trained_token_weight is not None
    torch.testing.assert_close(ours.trained_token_weight, theirs.token_weight.clamp_max(2))
    model = model_of(limited.config)
    results = [total(model, noised, noised.counts.tolist()) for total, noised in ((limited, ours), (free, theirs))]
    assert torch.equal(results[0][1], results[1][1]) and results[0][0] < results[1][0]
    nll, tokens = model(*ours.inputs).text, float(ours.counts[: len(MODES)].sum())
    lost = float(((theirs.token_weight - ours.trained_token_weight) * nll).sum()) / tokens
    assert float(results[1][0] - results[0][0]) == pytest.approx(lost, rel=1e-4)


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_min_snr_weighs_the_error_of_x0(schedule: NoiseScheduleName, prediction: PredictionType) -> None:
    """For every prediction type: weight x its squared error = min(SNR, gamma) x squared error of x0."""
    diffusion, gamma = gaussian(schedule, prediction, "mse"), 5.0
    diffusion.max_norm = math.inf
    t = torch.linspace(0.03, 0.97, 60, dtype=torch.float64)
    z, predicted, error = torch.randn(3, 60, 1, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x0, _ = diffusion.estimates(predicted, z, t)
    other, _ = diffusion.estimates(predicted + error, z, t)
    snr = (diffusion.noise_schedule.alpha(t) / diffusion.noise_schedule.sigma(t)).square()
    expected = snr.clamp_max(gamma) * (other - x0).square().mean((1, 2))
    weight = diffusion.min_snr_weight(t, gamma)
    torch.testing.assert_close(weight * error.square().mean((1, 2)), expected)
    ends = diffusion.min_snr_weight(torch.tensor([0.0, 1.0]), gamma)
    assert ends.isfinite().all() and ends.max() <= gamma
    if schedule != "rectified_flow":  # the paper's, section 3.4
        paper = {"x0": snr.clamp_max(gamma), "epsilon": snr.clamp_max(gamma) / snr}
        torch.testing.assert_close(weight, paper.get(prediction, snr.clamp_max(gamma) / (snr + 1)))


def test_loss_min_snr_gamma_affects_training_only() -> None:
    plain = objective(gaussian("vp_cosine", "x0", "mse", 6), length_weight=0.0, latent_weight=1.0)
    model = model_of(plain.config)
    noised = noised_by(plain, mode=mode_weights("t2l"))
    before, shown = plain(model, noised, noised.counts.tolist())
    result = []
    for gamma in (5.0, 0.5):
        config = replace(plain.config, latent_time_weighting="min_snr", min_snr_gamma=gamma)
        weighted = Objective(config, plain.text, plain.latent)
        batch = noised_by(weighted, mode=mode_weights("t2l"))
        loss, sums = weighted(model, batch, batch.counts.tolist())
        assert torch.equal(sums, shown)
        losses = plain.latent.losses(model(*batch.inputs).latent, batch.latent_target)
        expected = (plain.latent.min_snr_weight(batch.t_latent, gamma) * losses).mean()
        torch.testing.assert_close(loss, expected)
        result.append(float(loss))
    assert len({round(value, 6) for value in (float(before), *result)}) == 3
    # A pinned latent has no weight, whatever its time says.
    l2t = noised_by(Objective(config, plain.text, plain.latent), mode=mode_weights("l2t"))
    assert l2t.trained_latent_weight is not None and not l2t.trained_latent_weight.any()


@pytest.mark.parametrize("delta", [0.3, 1.0, 2.5])
def test_loss_huber_delta(delta: float) -> None:
    error = torch.tensor([-4.0, -0.5, 0.0, 0.2, 1.5, 3.0])
    diffusion = GaussianDiffusion(LatentConfig(), "huber", huber_delta=delta)
    result = diffusion.losses(error.view(1, 1, -1), torch.zeros(1, 1, 6))
    expected = torch.where(error.abs() <= delta, error**2 / 2, delta * (error.abs() - delta / 2)).mean()
    torch.testing.assert_close(result, expected.view(1))


# ---- learned weights -----------------------------------------------------------------------------------------


def learned(**settings: Any) -> Objective:
    latent = gaussian("vp_cosine", "v", "mse", 6)
    return objective(latent, latent_weighting="uncertainty", latent_weight=0.5, **settings)


def test_loss_latent_weighting_is_kendalls_sum() -> None:
    """exp(-s_text) L_text + exp(-s_latent) L_latent + (s_text + s_latent) / 2, beginning at the config's weights."""
    total = learned()
    fixed = objective(total.latent, latent_weight=0.5)
    model, noised = model_of(total.config), noised_by(total)
    loss, sums = total(model, noised, noised.counts.tolist())
    values = total.stats.summary(sums, noised.counts)
    plain = fixed.stats.summary(fixed(model, noised_by(fixed), noised.counts.tolist())[1], noised_by(fixed).counts)
    assert values["loss/text_weight"] == pytest.approx(1) and values["loss/latent_weight"] == pytest.approx(0.5)
    assert {name: values[name] for name in plain} == pytest.approx(plain)  # what is shown are plain losses
    expected = values["loss/total"] + 0.5 * math.log(1 / 0.5)
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert model.loss_weights is not None
    with torch.no_grad():
        model.loss_weights.value.copy_(torch.tensor([0.2, -0.1]))
    s = [0.2 * LossWeights.lr_multiplier, -0.1 * LossWeights.lr_multiplier]
    loss, sums = total(model, noised, noised.counts.tolist())
    values = total.stats.summary(sums, noised.counts)
    expected = math.exp(-s[0]) * values["loss/text"] + math.exp(-s[1]) * values["loss/latent"] + (s[0] + s[1]) / 2
    assert float(loss) == pytest.approx(expected + 0.01 * values["loss/length"], rel=1e-5)
    assert values["loss/latent_weight"] == pytest.approx(math.exp(-s[1]), rel=1e-5)
    gradient = gradients(model, loss)["loss_weights.value"]
    scale = LossWeights.lr_multiplier * LossWeights.grad_scale
    wanted = [scale * (0.5 - math.exp(-s[i]) * values[f"loss/{name}"]) for i, name in enumerate(("text", "latent"))]
    assert gradient.tolist() == pytest.approx(wanted, rel=1e-4, abs=1e-6 * scale)  # differences of terms near 0.5


def test_learned_weights_do_not_depend_on_micro_batches() -> None:
    total = learned(label_smoothing=0.1, z_loss=1e-3, latent_time_weighting="min_snr", text_weight_limit=3.0)
    model = model_of(total.config)
    results = []
    for cut in ([list(range(8))], [[0, 1, 2, 3], [4, 5, 6, 7]], [[slot] for slot in range(8)]):
        noised = [noised_by(total, rows) for rows in cut]
        counts = total_counts(noised)
        parts = [total(model, each, counts.tolist()) for each in noised]
        loss = torch.stack([part[0] for part in parts]).sum()
        results.append((loss.detach(), gradients(model, loss), total.stats.summary(sum(p[1] for p in parts), counts)))
    for loss, gradient, values in results[1:]:
        torch.testing.assert_close(loss, results[0][0], rtol=1e-6, atol=0)
        assert_equal_gradients(gradient, results[0][1])
        assert values == pytest.approx(results[0][2], rel=1e-5)


@pytest.mark.parametrize("mode", ["l2t", "t2l"])
def test_weight_of_an_absent_loss_is_unchanged(mode: Mode) -> None:
    total = learned()
    model, noised = model_of(total.config), noised_by(total, mode=mode_weights(mode))
    gradient = gradients(model, total(model, noised, noised.counts.tolist())[0])["loss_weights.value"]
    assert (gradient == 0).tolist() == [mode == "t2l", mode == "l2t"]


def test_learned_weights_converge_to_half_the_inverse_loss() -> None:
    """Constant losses, Adam at a usual learning rate, as many steps as a short run."""
    weights, losses = LossWeights((1.0, 0.1)), torch.tensor([6.0, 0.25])
    adam = torch.optim.Adam(weights.parameters(), lr=2e-3)
    for _ in range(700):
        adam.zero_grad()
        s = weights()
        ((-s).exp() * losses + s / 2).sum().backward()
        assert weights.value.grad is not None and weights.value.grad.norm() < 1
        adam.step()
    torch.testing.assert_close((-weights()).exp() * losses, torch.tensor([0.5, 0.5]), rtol=0.02, atol=0)


def test_training_only_terms_are_absent_in_validation() -> None:
    total = learned(label_smoothing=0.1, z_loss=1e-3, latent_time_weighting="min_snr", text_weight_limit=3.0)
    model, plain = model_of(total.config).eval(), total.for_validation()
    assert plain.config == LossConfig(latent="mse", latent_weight=0.5)
    noised = noised_by(plain)
    prediction = model(*noised.inputs)
    assert prediction.text.shape == noised.targets.shape and prediction.log_variances is None
    values = plain.stats.summary(plain(model, noised, noised.counts.tolist())[1], noised.counts)
    assert not {"loss/z", "loss/label_smoothing", "loss/latent_weight"} & values.keys()


def test_validation_measures_the_bound_of_any_text_loss() -> None:
    bound, noised = (noised_by(learned(text=text).for_validation()) for text in ("elbo", "masked_mean"))
    assert torch.equal(noised.token_weight, bound.token_weight) and torch.equal(noised.counts, bound.counts)
    assert not torch.equal(noised_by(learned(text="masked_mean")).counts, bound.counts)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["loss.huber_delta=2"], "loss.huber_delta: does nothing under latent: cosine, expected 1.0 or latent: huber"),
        (["loss.min_snr_gamma=2"], "loss.min_snr_gamma: does nothing under latent_time_weighting: none"),
        (["loss.text=masked_mean", "loss.text_weight_limit=2"], "loss.text_weight_limit: does nothing under text: mas"),
        (["loss.label_smoothing=1"], "loss.label_smoothing: must be below 1"),
        (["loss.z_loss=-1"], "loss.z_loss: must be at least 0"),
        (["loss.text_weight_limit=0"], "loss.text_weight_limit: must be above 0"),
        (["loss.latent_weighting=uncertainty", "mode=l2t"], r"loss.latent_weighting: uncertainty .* found l2t"),
        (
            ["loss.latent_weighting=uncertainty", "loss.latent_weight=0"],
            "loss.latent_weight: expected an initial weight",
        ),
        (["loss.latent_weighting=gradnorm"], r"loss.latent_weighting: expected 'fixed' or 'uncertainty'"),
    ],
)
def test_invalid_loss_settings_are_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        load_config(None, settings)
    assert "\n" not in str(refusal.value)
