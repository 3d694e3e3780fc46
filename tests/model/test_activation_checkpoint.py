"""Activation checkpointing: which blocks are recomputed, and bitwise equality."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from mmldlm.model.activation_checkpoint import KEEP_ALL, MemoryConfig
from mmldlm.model.attention import Backend
from mmldlm.model.mmdit import MMDiT, Precision
from mmldlm.model.parts import Freezable, freeze_parts
from tests.helpers.noised_batch import noised_batch
from tests.helpers.small_model import small_model

pytestmark = pytest.mark.quick

KINDS = [
    MemoryConfig("full"),
    MemoryConfig("selective"),
    MemoryConfig("every_k", every_k=2),
    MemoryConfig("full", kept_blocks=2),
]
kinds = pytest.mark.parametrize("memory", KINDS, ids=["full", "selective", "every_k", "full_but_two"])
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def loss_and_gradients(model: MMDiT, mode: Any = "joint", latent_tokens: int = 2) -> dict[str, Tensor]:
    """Return loss and gradients of one step with seed 1, and a random number drawn afterwards."""
    objective, noised = noised_batch(mode, latent_tokens)
    torch.manual_seed(1)
    device = model.latent_in.weight.device
    loss, _ = objective(model, noised.to(device), noised.counts.tolist())
    drawn_next = torch.rand(3)
    loss.backward()
    gradients = {name: part.grad for name, part in model.named_parameters() if part.grad is not None}
    return {"loss": loss.detach(), "drawn_next": drawn_next, **gradients}


@kinds
@pytest.mark.parametrize("backend", ["sdpa", "math"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    "frozen", [[], ["text_encoder", "latent_encoder", "noise_times"]], ids=["all", "inputs_frozen"]
)
def test_loss_and_gradients_are_bitwise_equal(
    memory: MemoryConfig, backend: Backend, precision: Precision, dropout: float, frozen: Sequence[Freezable]
) -> None:
    results = []
    for used in (KEEP_ALL, memory):
        model = small_model(2, backend, memory=used, precision=precision, depth=3, dropout=dropout).train()
        freeze_parts(model, frozen)
        results.append(loss_and_gradients(model))
    without, with_it = results
    assert without.keys() == with_it.keys()
    assert [name for name, value in without.items() if not torch.equal(value, with_it[name])] == []


@pytest.mark.parametrize("memory", [MemoryConfig("full"), MemoryConfig("selective")], ids=["full", "selective"])
@pytest.mark.parametrize("backend", [pytest.param(name, marks=gpu) for name in ("sdpa", "varlen", "efficient")])
def test_loss_and_gradients_on_cuda(memory: MemoryConfig, backend: Backend) -> None:
    without, with_it = (
        loss_and_gradients(small_model(2, backend, memory=used, precision="bf16", dropout=0.3, device="cuda").train())
        for used in (KEEP_ALL, memory)
    )
    assert torch.equal(without["loss"], with_it["loss"])
    for name, value in without.items():  # attention's backward adds up in any order there
        torch.testing.assert_close(value, with_it[name], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("memory", "recomputed"),
    [
        (KEEP_ALL, []),
        (MemoryConfig("full"), [0, 1, 2, 3]),
        (MemoryConfig("selective"), [0, 1, 2, 3]),
        (MemoryConfig("every_k", every_k=2), [0, 2]),
        (MemoryConfig("every_k", every_k=3), [0, 3]),
        (MemoryConfig("every_k", every_k=1), [0, 1, 2, 3]),
        (MemoryConfig("full", kept_blocks=2), [0, 1, 2]),
        (MemoryConfig("selective", kept_blocks=4), [0]),
        (MemoryConfig("every_k", every_k=3, kept_blocks=2), [0]),
        (MemoryConfig("full", kept_blocks=7), []),
    ],
    ids=str,
)
@pytest.mark.parametrize("training", [True, False])
def test_configured_blocks_are_recomputed_and_hooks_run_once(
    memory: MemoryConfig, recomputed: list[int], training: bool
) -> None:
    model = small_model(memory=memory, depth=5).train(training)
    hooked, computed = [0] * 5, [0] * 5

    def count(counts: list[int], index: int) -> Any:
        def hook(*_: object) -> None:
            counts[index] += 1

        return hook

    for index, block in enumerate(model.blocks):
        block.register_forward_pre_hook(count(hooked, index))
        block.text.head_norm.register_forward_hook(count(computed, index))
    loss_and_gradients(model, latent_tokens=1)
    assert hooked == [1] * 5
    assert computed == [2 if training and index in recomputed else 1 for index in range(5)]
