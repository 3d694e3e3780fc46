"""The loss of the padded reference is the one that a loop over its samples gives, each alone and without padding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.variants import Open, Variant
from mmldlm.diffusion.objective import LossConfig
from tests.helpers.bench_runs import stirred

pytestmark = pytest.mark.quick
pytest.importorskip("mmdit", reason="mmdit is not installed: bash scripts/setup.sh --dev")


def directly(run: Open, step: int) -> Tensor:
    """MDLM's weighted sum over masked tokens, divided by all tokens, and the mean distance of trained latents."""
    (noised,) = run.verbs.corrupt(step, [run.feed.batch()])
    text, latent, trained, begin = torch.zeros(()), torch.zeros(()), 0.0, 0
    for sample, length in enumerate(noised.layout.lengths):
        one, end = slice(sample, sample + 1), begin + length
        tokens = noised.noised_tokens[begin:end]
        everywhere = torch.ones(1, length, dtype=torch.bool)
        logits, predicted = run.model(
            tokens[None], noised.noised_latents[one], noised.t_text[one], noised.t_latent[one], everywhere
        )
        for place, target, weight in zip(noised.positions, noised.targets, noised.token_weight, strict=True):
            if begin <= place < end:
                text = text - weight * logits[0, place - begin].log_softmax(-1)[target]
        truth, guess = noised.latent_target[sample].flatten(), predicted[0].flatten()
        latent = latent + noised.latent_weight[sample] * (1 - truth @ guess / (truth.norm() * guess.norm()))
        trained += float(noised.latent_weight[sample])
        begin = end
    return text / begin + LossConfig().latent_weight * latent / max(1.0, trained)


@pytest.mark.parametrize("streams", [1, 2])
def test_the_loss_of_a_batch(tiny_store: Path, tmp_path: Path, streams: int) -> None:
    with stirred(Variant("reference", "", streams=streams), tiny_store, tmp_path / "run") as run:
        for step in range(2):
            run.feed.step = step
            (noised,) = run.verbs.corrupt(step, [run.feed.batch()])
            found = run.verbs.forward(noised)
            torch.testing.assert_close(found, directly(run, step), rtol=1e-4, atol=1e-5)
            assert run.verbs.read["loss"] == float(found.detach())
