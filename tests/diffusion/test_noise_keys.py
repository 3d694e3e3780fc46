"""Training noise is a function of (seed, step, slot): no split of a step into micro-batches or ranks changes it."""

from __future__ import annotations

import pytest
import torch

from mmldlm.diffusion.noise import MODES, Mode, Noise, draw_noise, mode_weights
from mmldlm.diffusion.noise_schedule import MIN_TEXT_TIME, TimeSampler
from tests.helpers.toy_pairs import MASK, objective, random_pairs, select

pytestmark = pytest.mark.quick

LENGTHS = (3, 3, 8, 1, 5, 5, 2, 13)
PAIRS = random_pairs(LENGTHS, latent_tokens=2)
SIZE = len(LENGTHS)
MIXED = mode_weights({"l2t": 2, "t2l": 1, "joint": 1})


def by_slot(noise: Noise, slots: list[int], lengths: tuple[int, ...]) -> dict[int, list[object]]:
    rows = zip(
        slots, noise.mode, noise.t_text, noise.t_latent, noise.uniforms.split(lengths), noise.epsilon, strict=True
    )
    return {slot: [part.tolist() for part in parts] for slot, *parts in rows}


@pytest.mark.parametrize(
    "samplers",
    [(), (TimeSampler("mode"), TimeSampler("logit_normal")), (TimeSampler(stratified=False),) * 2],
    ids=["uniform", "shaped", "alone"],
)
@pytest.mark.parametrize(
    "micro_batches",
    [
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[7, 6, 5, 4], [3, 2, 1, 0]],
        [[5], [2, 7], [0, 3, 4], [6, 1]],
        [[slot] for slot in range(SIZE)],
    ],
    ids=str,
)
def test_any_split_and_order_gives_each_sample_the_same_noise(
    micro_batches: list[list[int]], samplers: tuple[TimeSampler, ...]
) -> None:
    whole = by_slot(draw_noise(PAIRS, 5, 17, SIZE, MIXED, *samplers), list(range(SIZE)), LENGTHS)
    parts: dict[int, list[object]] = {}
    for rows in micro_batches:
        part = select(PAIRS, rows)
        parts |= by_slot(draw_noise(part, 5, 17, SIZE, MIXED, *samplers), rows, part.lengths)
    assert parts == whole


def test_seed_step_and_slot_each_change_the_noise() -> None:
    def drawn(seed: int, step: int) -> Noise:
        return draw_noise(PAIRS, seed, step, SIZE, MIXED)

    first = drawn(0, 0)
    for other in (drawn(1, 0), drawn(0, 1), drawn(2**40, 0), drawn(0, 2**33)):
        assert not torch.equal(first.epsilon, other.epsilon)
        assert not torch.equal(first.uniforms, other.uniforms)
        assert not torch.equal(first.t_text, other.t_text)
    rows = {tuple(row.flatten().tolist()) for row in first.epsilon}
    assert len(rows) == SIZE


@pytest.mark.parametrize("size", [8, 60])
def test_times_are_stratified_over_the_global_batch(size: int) -> None:
    pairs = random_pairs((2,) * size)
    for step in range(5):
        noise = draw_noise(pairs, 0, step, size, mode_weights("joint"))
        for times in (noise.t_text, noise.t_latent):
            # All lie at one offset in their strata, so a shift by it puts each in the middle of its own.
            offset = (times[-1].double() * size) % 1
            strata = ((times.double() * size - offset).round() % size).sort().values
            assert strata.tolist() == list(range(size)) or times.min() <= MIN_TEXT_TIME
        assert noise.t_text.min() >= torch.tensor(MIN_TEXT_TIME)


def test_times_of_the_modalities_are_independent() -> None:
    """Correlations of t_text, t_latent, mode and slot stay within 5 / sqrt(n)."""
    size = 4000
    pairs = random_pairs((1,) * size, channels=1)
    noise = draw_noise(pairs, 0, 0, size, mode_weights({"joint": 1, "l2t": 1e-9}))
    columns = torch.stack([noise.t_text, noise.t_latent, torch.arange(size).float()])
    off_diagonal = torch.corrcoef(columns) - torch.eye(3)
    assert off_diagonal.abs().max() < 5 / size**0.5


@pytest.mark.parametrize(
    "weights", [{"l2t": 0.5, "t2l": 0.5}, {"l2t": 2, "t2l": 1, "joint": 1}, {"joint": 1}, {"t2l": 3, "joint": 7}]
)
def test_mode_frequencies_match_their_weights(weights: dict[Mode, float]) -> None:
    size = 40
    pairs, shares = random_pairs((1,) * size), mode_weights(weights)
    total = torch.zeros(len(MODES))
    for step in range(25):
        counts = draw_noise(pairs, 0, step, size, shares).mode.bincount(minlength=len(MODES))
        for name, count in zip(MODES, counts.tolist(), strict=True):
            assert abs(count - size * shares[name]) < 1  # a grid, not dice
            assert count == 0 or shares[name] > 0
        total += counts
    expected = torch.tensor([shares[name] for name in MODES]) * total.sum()
    torch.testing.assert_close(total, expected, rtol=0.03, atol=0.0)


def test_a_pinned_modality_is_clean_and_has_no_weight() -> None:
    trained = objective()
    l2t = trained.corrupt(PAIRS, draw_noise(PAIRS, 0, 0, SIZE, mode_weights("l2t")))
    assert (l2t.t_latent == 0).all() and (l2t.latent_weight == 0).all()
    assert torch.equal(l2t.noised_latents, PAIRS.latents)
    assert (l2t.token_weight > 0).all() and len(l2t.positions) > 0
    t2l = trained.corrupt(PAIRS, draw_noise(PAIRS, 0, 0, SIZE, mode_weights("t2l")))
    assert (t2l.t_text == 0).all() and len(t2l.positions) == 0
    assert torch.equal(t2l.noised_tokens, PAIRS.tokens)
    assert (t2l.latent_weight == 1).all()
    joint = trained.corrupt(PAIRS, draw_noise(PAIRS, 0, 0, SIZE, mode_weights("joint")))
    assert (joint.t_text > 0).all() and (joint.t_latent > 0).all()
    assert torch.equal(joint.targets, PAIRS.tokens[joint.noised_tokens == MASK])


@pytest.mark.parametrize("bad", [{"l2t": -1, "joint": 2}, {"l2t": 0}, {}, {"text": 1}, "both"])
def test_impossible_mode_weights_are_refused(bad: dict[str, float] | str) -> None:
    with pytest.raises(ValueError):
        mode_weights(bad)
