"""Old practice is slower, not different: on the same weights and samples its loss and gradients are the trainer's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.counting import Counts, counts_of
from benchmarks.old_practice import Practice
from benchmarks.variants import Open, Variant, opened
from mmldlm.data.store import Store
from mmldlm.model.heads import CHUNK_ROWS
from tests.helpers.bench_runs import stirred, task_on

pytestmark = pytest.mark.quick
PRACTICES: tuple[str, ...] = get_args(Practice)
TRAINER = Variant("trainer", "")


def loss_and_gradients(run: Open) -> dict[str, Tensor]:
    """Of both micro-batches."""
    found: dict[str, Tensor] = {}
    for step in range(2):
        run.feed.step = step
        (noised,), totals = run.verbs.corrupt(step, [run.feed.batch()])
        loss, sums = run.verbs.forward(noised, totals)
        run.verbs.backward(loss)
        found |= {f"loss {step}": loss.detach(), f"sums {step}": sums}
    return found | {name: p.grad for name, p in run.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("old", [*([each] for each in PRACTICES), PRACTICES], ids="+".join)
def test_the_loss_and_every_gradient_stay(tiny_store: Path, tmp_path: Path, old: tuple[str, ...]) -> None:
    with stirred(TRAINER, tiny_store, tmp_path / "trainer") as run:
        expected = loss_and_gradients(run)
    with stirred(Variant("old", "", frozenset(old)), tiny_store, tmp_path / "old") as run:
        found = loss_and_gradients(run)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5 * float(value.abs().max()), msg=name)


def counts(store: Path, folder: Path, *old: str) -> Counts:
    with stirred(Variant("counted", "", frozenset(old)), store, folder) as run:
        return counts_of(run, range(2), Store.open(store).manifest.vocab_size, "cpu")


def test_each_practice_costs_what_it_says(tiny_store: Path, tmp_path: Path) -> None:
    manifest = Store.open(tiny_store).manifest
    none = counts(tiny_store, tmp_path / "none")
    assert none.fill == 1 and none.host_syncs == 0
    padding = counts(tiny_store, tmp_path / "padding", "padding")
    assert padding.fill < 0.9 and padding.logit_rows == none.logit_rows
    head = counts(tiny_store, tmp_path / "head", "head")
    assert head.logit_rows > none.logit_rows and head.fill == 1
    both = counts(tiny_store, tmp_path / "both", "head", "padding")
    assert both.logit_rows == 8 * manifest.max_length  # all positions of 8 samples
    reads = counts(tiny_store, tmp_path / "reads", "reads")
    assert reads.host_syncs == none.host_syncs + 8  # three losses twice, which of the rows count, the accuracy
    loop = counts(tiny_store, tmp_path / "adamw", "adamw")
    assert loop.operators > none.operators and loop.host_syncs == 1  # the norm, by which the host decides then
    recompute = counts(tiny_store, tmp_path / "recompute", "recompute")
    assert recompute.operators > 1.15 * none.operators and recompute.logit_rows == none.logit_rows


def test_rows_of_logits_are_masked_tokens_in_chunks_too(tiny_store: Path, tmp_path: Path) -> None:
    store = Store.open(tiny_store)
    task = replace(task_on(tiny_store), batch=64)
    with opened(TRAINER, task, [np.arange(64)], tmp_path / "run") as run:
        (noised,), _ = run.verbs.corrupt(0, [run.feed.batch()])
        assert len(noised.positions) > CHUNK_ROWS
        assert counts_of(run, range(1), store.manifest.vocab_size, "cpu").logit_rows == len(noised.positions)
