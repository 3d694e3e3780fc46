"""Old practice is slower, not different; the padded reference computes the loss of a loop over its samples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

from benchmarks.common.task import Task, typical_batches
from benchmarks.common.variants import Open, Practice, Variant, opened
from mmldlm.data.sampler import SampleOrder
from mmldlm.data.store import Store
from mmldlm.diffusion.objective import LossConfig

PRACTICES: tuple[str, ...] = get_args(Practice)
BATCH = 8


def task_on(store: Path) -> Task:
    return Task(store=str(store), width=64, depth=2, heads=1, batch=BATCH, precision="fp32")


@contextmanager
def perturbed(variant: Variant, store: Path, folder: Path) -> Iterator[Open]:
    """Open the variant with weights that are a function of their names: initial blocks are the identity."""
    split = Store.open(store).split("train")
    rows = typical_batches(SampleOrder(split.lengths, seed=0), split, BATCH, 2)
    with opened(variant, task_on(store), rows, folder) as run:
        with torch.no_grad():
            for name, parameter in run.model.named_parameters():
                seed = int.from_bytes(name.encode()[-7:], "big") % 2**31
                parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        yield run


def loss_and_gradients(run: Open) -> dict[str, Tensor]:
    values: dict[str, Tensor] = {}
    for step in range(2):
        run.feed.step = step
        noised = run.trainer.corrupt(step, [run.feed.batch()])
        totals = run.trainer.sync(step, noised)
        for batch in run.trainer.accumulate(noised):
            values[f"loss {step}"], _ = run.trainer.compute(batch, totals.denominators)
    return values | {name: p.grad for name, p in run.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("old", [*([each] for each in PRACTICES), PRACTICES], ids="+".join)
def test_old_practice_keeps_loss_and_gradients(tiny_store: Path, tmp_path: Path, old: tuple[str, ...]) -> None:
    with perturbed(Variant("trainer", ""), tiny_store, tmp_path / "trainer") as run:
        expected = loss_and_gradients(run)
    with perturbed(Variant("old", "", frozenset(old)), tiny_store, tmp_path / "old") as run:
        values = loss_and_gradients(run)
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(values[name], value, rtol=1e-4, atol=1e-5 * float(value.abs().max()), msg=name)


def loss_by_samples(run: Open, step: int) -> Tensor:
    """MDLM's weighted sum over masked tokens, divided by all tokens, and the mean distance of trained latents."""
    (noised,) = run.trainer.corrupt(step, [run.feed.batch()])
    text, latent, trained, start = torch.zeros(()), torch.zeros(()), 0.0, 0
    for sample, length in enumerate(noised.layout.lengths):
        one, end = slice(sample, sample + 1), start + length
        everywhere = torch.ones(1, length, dtype=torch.bool)
        logits, predicted = run.model(
            noised.noised_tokens[None, start:end],
            noised.noised_latents[one],
            noised.t_text[one],
            noised.t_latent[one],
            everywhere,
        )
        for position, target, weight in zip(noised.positions, noised.targets, noised.token_weight, strict=True):
            if start <= position < end:
                text = text - weight * logits[0, position - start].log_softmax(-1)[target]
        truth, guess = noised.latent_target[sample].flatten(), predicted[0].flatten()
        latent = latent + noised.latent_weight[sample] * (1 - truth @ guess / (truth.norm() * guess.norm()))
        trained += float(noised.latent_weight[sample])
        start = end
    return text / start + LossConfig().latent_weight * latent / max(1.0, trained)


@pytest.mark.parametrize("streams", [1, 2])
def test_loss_of_the_reference(tiny_store: Path, tmp_path: Path, streams: int) -> None:
    pytest.importorskip("mmdit", reason="mmdit is not installed: bash scripts/setup.sh --dev")
    with perturbed(Variant("reference", "", streams=streams), tiny_store, tmp_path / "run") as run:
        for step in range(2):
            run.feed.step = step
            (noised,) = run.trainer.corrupt(step, [run.feed.batch()])
            loss = run.trainer.loss(noised)
            torch.testing.assert_close(loss, loss_by_samples(run, step), rtol=1e-4, atol=1e-5)
            assert run.trainer.read["loss"] == float(loss.detach())
