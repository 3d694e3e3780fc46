"""The chunked head on masked positions equals full logits with cross entropy, in value and gradient."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mmldlm.batch import ACCURACY_STRIDE
from mmldlm.model.heads import (
    CHUNK_ROWS,
    GPU_CHUNK_ROWS,
    GPU_VOCAB_MULTIPLE,
    MASKED_LOGIT,
    Formula,
    LengthHead,
    TextHead,
    in_chunks,
    token_nll,
    token_terms,
)
from mmldlm.model.ops import assume_device

pytestmark = pytest.mark.quick

WIDTH, VOCAB = 24, 101
chunked_token_nll, chunked_token_terms = partial(in_chunks, token_nll), partial(in_chunks, token_terms)


@pytest.fixture(params=["cpu", "cpu before PyTorch 2.13", "cuda"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Never holding all logits: on a CPU by PyTorch in fp32 and by chunks in bf16, on GPUs by chunks of their own."""
    monkeypatch.setattr("mmldlm.model.heads.GPU_CHUNK_ROWS", CHUNK_ROWS)
    device, _, version = request.param.partition(" before ")
    if version:
        monkeypatch.delattr(F, "linear_cross_entropy", raising=False)
        monkeypatch.delattr(torch.nn, "LinearCrossEntropyOptions", raising=False)
    with assume_device(device):
        yield str(device)


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


@pytest.mark.parametrize("kind", ["nll", "terms"])
def test_error_of_the_weight_gradient_does_not_grow_with_the_chunks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """128 chunks whose gradients were added in bf16 had an error of 1.6 %."""
    hidden, weight, bias, targets = leaves(8192)
    weigh = torch.rand(8192, generator=torch.Generator().manual_seed(1))
    (expected,) = torch.autograd.grad((full(hidden, weight, bias, targets) * weigh).sum(), weight)

    def error(chunk_rows: int) -> float:
        monkeypatch.setattr("mmldlm.model.heads.CHUNK_ROWS", chunk_rows)
        with torch.autocast("cpu", torch.bfloat16):
            values = (chunked_token_nll if kind == "nll" else chunked_token_terms)(hidden, weight, bias, targets)
        nll = values if kind == "nll" else values[:, 0]
        (gradient,) = torch.autograd.grad((nll * weigh).sum(), weight)
        return float((gradient - expected).norm() / expected.norm())

    assert error(64) < 1.1 * error(8191) < 0.006


class LogitRows(TorchDispatchMode):
    """Record the number of rows of every tensor with one column per token of the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dim() == 2 and result.shape[1] == VOCAB:
            self.rows.add(len(result))
        return result


@pytest.mark.parametrize("formula", [token_nll, token_terms])
def test_at_most_one_chunk_of_logits_exists(formula: Formula) -> None:
    inputs = leaves(4 * CHUNK_ROWS)
    with LogitRows() as logits, torch.autocast("cpu", torch.bfloat16):  # in fp32, logits are PyTorch's own affair
        in_chunks(formula, *inputs).sum().backward()
    assert max(logits.rows) == CHUNK_ROWS


def test_a_gpu_pads_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 4,096 rows whose logits have a multiple of 128 columns, and none without padding."""
    shapes = set()

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if function is torch.ops.aten.mm.default and result.shape[1] != WIDTH:
                shapes.add(tuple(result.shape))
            return result

    inputs = leaves(GPU_CHUNK_ROWS + 5)
    with assume_device("cuda"), Products(), torch.autocast("cpu", torch.bfloat16):
        chunked_token_nll(*inputs).sum().backward()
    assert shapes == {(rows, GPU_VOCAB_MULTIPLE) for rows in (GPU_CHUNK_ROWS, 5)}
    weight = inputs[1]
    assert weight.grad is not None and weight.grad.shape == (VOCAB, WIDTH)


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


def test_terms_are_float32_under_autocast() -> None:
    inputs = leaves(2 * CHUNK_ROWS + 3)
    with torch.autocast("cpu", torch.bfloat16):
        terms = chunked_token_terms(*inputs)
    assert terms.dtype == torch.float32
    assert (terms - full_terms(*inputs)).norm() <= 0.02 * terms.norm()


@pytest.mark.parametrize("terms", [False, True])
@pytest.mark.parametrize("rows", [0, 1, ACCURACY_STRIDE + 1, 3 * CHUNK_ROWS + 7])
def test_every_32nd_best_token_is_compared_in_training(path: str, rows: int, terms: bool) -> None:
    hidden, weight, bias, targets = leaves(rows)
    best = (hidden @ weight.T + bias).argmax(-1)
    targets = torch.where(torch.arange(rows) % 3 == 0, targets, best)
    head = TextHead(WIDTH, VOCAB, (VOCAB - 2, VOCAB - 1), tied=True)
    values, is_best = head(hidden, weight, targets, terms)
    assert is_best is not None and is_best.tolist() == (best == targets)[::ACCURACY_STRIDE].tolist()
    assert not is_best.requires_grad
    alone, none = head.eval()(hidden, weight, targets, terms)
    assert none is None and torch.equal(alone, values), "measuring changes no bit of the loss"


def test_lengths_follow_from_the_mean_of_the_latent_tokens() -> None:
    """Two latent tokens of one kind say what one says, and two of different kinds what is between them."""
    torch.manual_seed(0)
    head, time = LengthHead(8, 4, 20), torch.randn(3, 4)
    one, other = torch.randn(2, 3, 1, 8)
    torch.testing.assert_close(head(one.expand(-1, 5, -1), time), head(one, time))
    between = (head(one, time) + head(other, time)) / 2
    torch.testing.assert_close(head(torch.cat([one, other], 1), time), between)
