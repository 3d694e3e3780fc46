"""Micro-batches filled up to few sizes: no number of the trainer has filler, and what is recorded computes them all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from mmldlm import train
from mmldlm.batch import Batch, BatchSize, PackedLayout
from mmldlm.data.batch_schedule import deal
from mmldlm.diffusion.corruption import OF_MASKED, StaticSizes
from mmldlm.diffusion.objective import LossConfig, NoisedBatch
from mmldlm.model.activation_checkpoint import MemoryConfig
from mmldlm.model.heads import LossWeights
from mmldlm.model.mmdit import MMDiT
from mmldlm.model.ops import assume_device
from mmldlm.trainer.trainer import Trainer
from mmldlm.utils.packed_tensors import PackedTensors
from tests.helpers.engine_runs import record_list
from tests.helpers.noised_batch import noised_batch
from tests.helpers.small_model import MAX_LENGTH, small_model

quick = pytest.mark.quick
SIZES, BUDGET = StaticSizes(MAX_LENGTH), 128  # multiples of 128 tokens, the smallest
MIXED = {"joint": 1, "l2t": 1, "t2l": 1}
LEARNED = LossConfig(latent_weighting="uncertainty", latent="normalized_mse")
TERMS = LossConfig(label_smoothing=0.1, z_loss=1e-3, text_weight_limit=3.0, latent_time_weighting="min_snr")


def network(loss: LossConfig, latent_tokens: int = 1, memory: Any = "none") -> MMDiT:
    model = small_model(latent_tokens, "math", memory=MemoryConfig(memory)).train()
    model.text_terms = loss.needs_text_terms
    model.loss_weights = LossWeights((1.0, 10.0)) if loss.latent_weighting == "uncertainty" else None
    return model


@quick
@pytest.mark.parametrize("lengths", [(1, 2, 2, 5, 9, 16, 16, 16), (1,)])
@pytest.mark.parametrize(
    ("mode", "loss", "latent_tokens", "memory"),
    [
        ("t2l", LossConfig(), 1, "none"),
        ("l2t", LossConfig(), 3, "full"),
        (MIXED, LossConfig(text="masked_mean", latent="mse"), 1, "selective"),
        (MIXED, LEARNED, 1, "none"),
        ("joint", TERMS, 3, "full"),
    ],
)
def test_filler_changes_no_loss_sum_or_gradient(
    lengths: tuple[int, ...], mode: Any, loss: LossConfig, latent_tokens: int, memory: Any
) -> None:
    objective, plain = noised_batch(mode, latent_tokens, lengths, loss, accuracy=True)
    (filled,) = SIZES.fill([plain], BUDGET)
    assert len(filled.noised_tokens) == 128 and len(filled.positions) == (128 if len(plain.positions) else 0)
    assert filled.layout.without_filler().lengths == lengths and filled.layout.num_samples == len(lengths) + 8
    model, counts = network(loss, latent_tokens, memory), (3 * plain.counts).tolist()
    results = []
    for batch, totals in ((plain, counts), (filled, objective.divisors(counts, filled))):
        model.zero_grad()
        with assume_device("cuda"):
            value, sums = objective(model, batch, totals)
            value.backward()
        results.append((value.detach(), sums, *(part.grad for part in model.parameters() if part.grad is not None)))
    torch.testing.assert_close(results[1][:2], results[0][:2], rtol=1e-6, atol=1e-6)
    for one, other in zip(results[0][2:], results[1][2:], strict=True):
        assert (one - other).norm() <= 1e-5 * one.norm() + 1e-9


@quick
def test_sizes_are_those_of_a_step_and_what_is_filled_stays() -> None:
    filled = SIZES.fill([noised_batch("joint", 1, of)[1] for of in ((3, 4, 5), (7,) * 8, (16,) * 9)], BUDGET)
    assert [len(batch.noised_tokens) for batch in filled] == [128, 128, 256]
    assert filled[1].layout.lengths == (7,) * 8 + (16,) * 4 + (8,) + (0,) * 4
    assert {batch.layout.num_samples for batch in filled} == {9 + 8}
    assert all(one is other for one, other in zip(SIZES.fill(filled, BUDGET), filled, strict=True))
    with pytest.raises(AssertionError, match="without tokens"):
        PackedLayout((0, 2), 1)


@quick
@pytest.mark.parametrize(("kind", "samples", "most"), [("documents", 256, 40), ("sentences", 2048, 8)])
def test_few_sizes_with_little_filler_hold_real_lengths(kind: str, samples: int, most: int) -> None:
    path, rng = Path(__file__).parents[2] / "benchmarks/data/lengths.json", np.random.default_rng(0)
    histogram = np.minimum(json.loads(path.read_text())[kind]["lengths"], 256) * (2 if kind == "documents" else 1)
    sizes, counts, fields_of = set(), [], [field.name for field in fields(NoisedBatch)]
    for _ in range(200):
        lengths = rng.choice(histogram, samples)
        masked = np.ceil(rng.permutation(samples) / samples * lengths).astype(int)
        step = []
        for slots in deal(lengths, BatchSize(samples, samples, 32_768), 1, 1):  # micro-batches that have shapes alone
            of, masks = tuple(lengths[slots[:, 0]].tolist()), int(masked[slots].sum())
            rows = {"noised_tokens": sum(of)} | dict.fromkeys(OF_MASKED, masks)
            values: Any = {name: torch.empty(rows.get(name, len(of)), device="meta") for name in fields_of}
            step.append(NoisedBatch(**{**values, "layout": PackedLayout(of, 1)}))
        for plain, filled in zip(step, StaticSizes(512).fill(step, 32_768), strict=True):
            sizes.add((len(filled.noised_tokens), len(filled.positions), len(filled.t_text)))
            counts.append([len(x) for each in (plain, filled) for x in (each.noised_tokens, each.positions)])
    tokens, masks, filled_tokens, filled_masks = np.sum(counts, axis=0)
    assert len(sizes) <= most and tokens >= 0.97 * filled_tokens and masks >= 0.94 * filled_masks


@quick
@pytest.mark.parametrize(("divisors", "loss"), [("tensor", LEARNED), ("numbers", LossConfig())])
def test_a_recorded_step_computes_the_other_micro_batches_of_its_sizes(divisors: str, loss: LossConfig) -> None:
    """As in a GPU's graph, what Python computed from the first micro-batch stays: the test sees it of divisors."""
    lengths = (1, 5, 9, 16, 16, 16, 16), (9, 9, 9, 9, 10), (14, 14, 15, 15, 16, 16, 16)
    batches = [noised_batch(MIXED, 1, of, loss, accuracy=True) for of in lengths]
    objective, (first, *others) = batches[0][0], SIZES.fill([batch for _, batch in batches], BUDGET)
    assert all(batch.packed.places == first.packed.places for batch in others)
    names = dict((model := network(loss)).named_parameters())

    def step(batch: NoisedBatch, totals: Any, *weights: Tensor) -> tuple[Tensor, ...]:
        values = dict(zip(names, weights, strict=True))
        value, sums = objective(lambda *x: torch.func.functional_call(model, values, x), batch, totals)
        return value.detach(), sums, *torch.autograd.grad(value, weights)

    def step_on(buffer: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        packed = PackedTensors(buffer, first.packed.places)
        return step(NoisedBatch.from_packed(packed, first.layout, first.counts, first.sample_ids), *arguments)

    with assume_device("cuda"):
        for index, batch in enumerate((first, *others)):
            counts = (3 * batch.counts).tolist()
            arguments = objective.divisors(counts, batch) if divisors == "tensor" else counts, *names.values()
            if index == 0:
                recorded = make_fx(step_on)(batch.packed.buffer, *arguments)
            with torch.no_grad():
                replayed = recorded(batch.packed.buffer, *arguments)
            same = [torch.equal(one, other) for one, other in zip(replayed, step(batch, *arguments), strict=True)]
            assert all(same) or (divisors == "numbers" and index > 0 and not same[0])
    assert not [x for x in recorded.graph.nodes if "local_scalar" in str(x.target) or "nonzero" in str(x.target)]


class Filled(Trainer):
    def corrupt(self, step: int, micro_batches: Sequence[Batch]) -> list[NoisedBatch]:
        corruption = replace(self.components.corruption, sizes=StaticSizes(32))
        self.components = replace(self.components, corruption=corruption)
        noised = super().corrupt(step, micro_batches)
        assert {len(batch.noised_tokens) for batch in noised} == {128}
        return noised


def test_a_run_with_filler_logs_what_it_does_without(tiny_config: Path, tmp_path: Path) -> None:
    settings = "attention.backend=math", "train.micro_batch_tokens=60", "loss.latent_weighting=uncertainty"
    for name, trainer in (("plain", Trainer), ("filled", Filled)):
        assert train.main([str(tiny_config), *settings, f"run.dir={tmp_path / name}"], trainer_cls=trainer) == 0
    for records in zip(record_list(tmp_path / "plain"), record_list(tmp_path / "filled"), strict=True):
        flops = [record["speed/tflops_per_s"] * record["speed/step_s"] for record in records]
        names = [name for name in records[0] if name.startswith(("loss/", "accuracy/", "data/", "optim/"))]
        plain, filled = ([record[name] for name in names] for record in records)
        assert filled == pytest.approx(plain, rel=1e-4) and flops[0] == pytest.approx(flops[1]), names
