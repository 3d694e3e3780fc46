"""The chunked head on masked positions equals full logits with cross entropy, in value and gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mmldlm.model import heads
from mmldlm.model.heads import CHUNK_ROWS, MASKED_LOGIT, chunked_token_nll, chunked_token_terms

pytestmark = pytest.mark.quick

WIDTH, VOCAB = 24, 101
fused_exists = hasattr(F, "linear_cross_entropy")


@pytest.fixture(params=["fused", "checkpointed"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Either way of never holding all logits: PyTorch's own (2.13 and later) or recomputed chunks."""
    if request.param == "fused" and not fused_exists:
        pytest.skip("torch.nn.functional.linear_cross_entropy came with PyTorch 2.13")
    if request.param == "checkpointed" and fused_exists:
        monkeypatch.delattr(F, "linear_cross_entropy")
    return str(request.param)


def leaves(rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, WIDTH, generator=generator).requires_grad_()
    weight = (0.3 * torch.randn(VOCAB, WIDTH, generator=generator)).requires_grad_()
    bias = torch.zeros(VOCAB)
    bias[-2:] = MASKED_LOGIT
    return hidden, weight, bias, torch.randint(0, VOCAB - 2, (rows,), generator=generator)


def full(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.T).float() + bias, targets, reduction="none")


@pytest.mark.parametrize("rows", [0, 1, CHUNK_ROWS, CHUNK_ROWS + 1, 3 * CHUNK_ROWS + 7])
def test_chunks_equal_full_logits(path: str, rows: int) -> None:
    hidden, weight, bias, targets = leaves(rows)
    weigh = torch.rand(rows, generator=torch.Generator().manual_seed(1))  # each row has a weight of its own
    results = []
    for nll_of in (chunked_token_nll, full):
        nll = nll_of(hidden, weight, bias, targets)
        results.append((nll, *torch.autograd.grad((nll * weigh).sum(), [hidden, weight])))
    for chunked, whole in zip(*results, strict=True):
        assert chunked.dtype == torch.float32 and chunked.shape == whole.shape
        torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=1e-5)


def test_chunks_equal_full_logits_under_autocast(path: str) -> None:
    hidden, weight, bias, targets = leaves(2 * CHUNK_ROWS + 3)
    results = []
    for nll_of in (chunked_token_nll, full):
        with torch.autocast("cpu", torch.bfloat16):
            nll = nll_of(hidden, weight, bias, targets)
        results.append((nll, *torch.autograd.grad(nll.sum(), [hidden, weight])))
    for chunked, whole in zip(*results, strict=True):
        assert chunked.dtype == torch.float32
        assert (chunked - whole).norm() <= 0.02 * whole.norm()


def rows_of_logits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows of logits each call makes, from here on."""
    rows: list[int] = []
    logits = heads._logits

    def counted(hidden: Tensor, *rest: Tensor) -> Tensor:
        rows.append(len(hidden))
        return logits(hidden, *rest)

    monkeypatch.setattr(heads, "_logits", counted)
    return rows


def test_no_more_than_a_chunk_of_logits_is_ever_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the fallback, whose logits pass through `_logits`."""
    if fused_exists:
        monkeypatch.delattr(F, "linear_cross_entropy")
    rows = rows_of_logits(monkeypatch)
    chunked_token_nll(*leaves(4 * CHUNK_ROWS)).sum().backward()
    assert max(rows) <= CHUNK_ROWS
    assert len(rows) == 8  # forward, and once more for the backward


def full_terms(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    logits = (hidden @ weight.T).float() + bias
    log_p = logits.log_softmax(-1)
    nll = -log_p.gather(1, targets[:, None]).squeeze(1)
    return torch.stack([nll, logits.exp().sum(-1).log(), -log_p[:, : VOCAB - 2].mean(-1)], 1)


@pytest.mark.parametrize("rows", [0, 1, CHUNK_ROWS, 3 * CHUNK_ROWS + 7])
def test_chunked_terms_equal_those_of_full_logits(rows: int) -> None:
    """Likelihood, denominator and mean over all possible tokens, with their gradients."""
    hidden, weight, bias, targets = leaves(rows)
    weigh = torch.rand(rows, 3, generator=torch.Generator().manual_seed(1))
    results = []
    for terms_of in (chunked_token_terms, full_terms):
        terms = terms_of(hidden, weight, bias, targets)
        results.append((terms, *torch.autograd.grad((terms.square() * weigh).sum(), [hidden, weight])))
    for chunked, whole in zip(*results, strict=True):
        assert chunked.dtype == torch.float32 and chunked.shape == whole.shape
        torch.testing.assert_close(chunked, whole, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(results[0][0][:, 0], chunked_token_nll(hidden, weight, bias, targets))


def test_terms_never_make_more_than_a_chunk_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of_logits(monkeypatch)
    chunked_token_terms(*leaves(4 * CHUNK_ROWS)).sum().backward()
    assert max(rows) <= CHUNK_ROWS and len(rows) == 8


def test_terms_are_float32_under_autocast() -> None:
    inputs = leaves(2 * CHUNK_ROWS + 3)
    with torch.autocast("cpu", torch.bfloat16):
        terms = chunked_token_terms(*inputs)
    assert terms.dtype == torch.float32
    assert (terms - full_terms(*inputs)).norm() <= 0.02 * terms.norm()
