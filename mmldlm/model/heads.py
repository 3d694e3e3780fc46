"""Heads of the network for tokens and text length, and the learned weights of the losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mmldlm.batch import ACCURACY_STRIDE
from mmldlm.model.ops import matmul_dtype, runs_on_cpu

CHUNK_ROWS = 256  # rows of logits in memory at a time: a sixth of the memory for all rows, at 1.1x the time
GPU_CHUNK_ROWS = 4096  # kernels over fewer rows are too small for a GPU
GPU_VOCAB_MULTIPLE = 128  # rows of logits are aligned, and fill the tiles of matrix products
MAX_WHOLE_LOGITS = 2**30  # a GPU keeps up to 35,000 rows of 30,522 tokens for the backward pass, 2 GiB in bf16
MASKED_LOGIT = -1e9  # logit of tokens with probability zero. It is finite, so that 0 * logit is 0

Formula = Callable[[Tensor, Tensor, Tensor], Tensor]  # takes logits [P, V], bias [V] and targets [P]


def in_chunks(formula: Formula, hidden_PD: Tensor, weight_VD: Tensor, bias_V: Tensor, targets_P: Tensor) -> Tensor:
    """Apply `formula`, `token_nll` or `token_terms`, to a linear head without materializing the logits [P, V]."""
    on_cpu = runs_on_cpu(hidden_PD)
    if on_cpu and hidden_PD.shape[0] <= CHUNK_ROWS:
        return formula(_logits(hidden_PD, weight_VD, bias_V), bias_V, targets_P)
    is_float32 = matmul_dtype(weight_VD) == torch.float32
    if on_cpu and is_float32 and formula is token_nll and hasattr(F, "linear_cross_entropy"):  # from PyTorch 2.13 on
        # Not reduced, since tokens have different weights.
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=CHUNK_ROWS)
        return F.linear_cross_entropy(
            hidden_PD, weight_VD, targets_P, linear_bias=bias_V, reduction="none", options=options
        )
    keeps = not on_cpu and torch.is_grad_enabled() and len(hidden_PD) * len(weight_VD) <= MAX_WHOLE_LOGITS
    return _Chunks.apply(formula, keeps, hidden_PD, weight_VD, bias_V, targets_P)


class _Chunks(Function):
    """A formula applied to chunks of rows. The backward pass computes the logits again, unless a GPU has kept them.

    We add up the weight's gradients in float32. Autograd would add them in the type of the products: in bf16, the sum
    of 128 chunks would have an error of 1.6 %. Here it is 0.3 %, the error of a single chunk (benchmarks/LOG.md).
    """

    @staticmethod
    def forward(
        ctx: Any, formula: Formula, keeps: bool, hidden_PD: Tensor, weight_VD: Tensor, bias_V: Tensor, targets_P: Tensor
    ) -> Tensor:
        hidden, ctx.formula, ctx.hidden_dtype = hidden_PD.to(matmul_dtype(weight_VD)), formula, hidden_PD.dtype
        weight, bias = _product_weight(weight_VD, bias_V, hidden.dtype)
        kept, values = list[Tensor](), list[Tensor]()
        for rows, targets in _row_chunks(hidden, targets_P):
            logits = F.linear(rows, weight)
            kept += [logits] * keeps
            values.append(formula(logits.float() + bias, bias, targets))
        ctx.save_for_backward(hidden, weight_VD, bias_V, targets_P, *kept)
        return torch.cat(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden_PD, weight_VD, bias_V, targets_P, *kept = ctx.saved_tensors
        weight, bias = _product_weight(weight_VD, bias_V, hidden_PD.dtype)
        hidden_grad = torch.empty_like(hidden_PD, dtype=ctx.hidden_dtype)
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[3] else None
        for index, (rows, targets, rows_grad, out) in enumerate(_row_chunks(hidden_PD, targets_P, grad, hidden_grad)):
            logits = (kept[index] if kept else F.linear(rows, weight)).detach().requires_grad_()
            with torch.enable_grad():
                values = ctx.formula(logits.float() + bias, bias, targets)
            (logits_grad,) = torch.autograd.grad(values, logits, rows_grad)
            out.copy_(logits_grad @ weight)
            if weight_grad is not None:
                weight_grad.add_(logits_grad.t() @ rows)
        if weight_grad is not None:
            weight_grad = weight_grad[: len(weight_VD)].to(weight_VD.dtype)
        return None, None, hidden_grad, weight_grad, None, None


def _row_chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same rows of all tensors, chunk by chunk."""
    rows = CHUNK_ROWS if runs_on_cpu(tensors[0]) else GPU_CHUNK_ROWS
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)


def _product_weight(weight_VD: Tensor, bias_V: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return weight and bias of the head's products. On a GPU they are padded by tokens of probability zero."""
    padding = 0 if runs_on_cpu(weight_VD) else -len(weight_VD) % GPU_VOCAB_MULTIPLE
    if not padding:
        return weight_VD.to(dtype), bias_V
    return F.pad(weight_VD.to(dtype), (0, 0, 0, padding)), F.pad(bias_V, (0, padding), value=MASKED_LOGIT)


def token_terms(logits_PV: Tensor, bias_V: Tensor, targets_P: Tensor) -> Tensor:
    """Return -log p(target), the log of the softmax's denominator, and the mean of -log p, [P, 3] in float32.

    The mean is over all tokens whose probability is not fixed to zero, that is over all tokens with bias 0.
    """
    log_z = logits_PV.logsumexp(-1)
    possible = bias_V == 0  # [V]: False for [MASK] and [PAD], whose logits would dominate the mean
    mean = (logits_PV * possible).sum(-1) / possible.sum()
    if torch.compiler.is_compiling():  # the gradient of `gather` would take three more passes over logits in float32
        is_other = torch.arange(len(bias_V), device=bias_V.device) != targets_P[:, None]
        target = logits_PV.masked_fill(is_other, 0.0).sum(-1)
    else:
        target = logits_PV.gather(1, targets_P[:, None]).squeeze(1)
    return torch.stack([log_z - target, log_z, log_z - mean], 1)


def _logits(hidden_PD: Tensor, weight_VD: Tensor, bias_V: Tensor) -> Tensor:
    return F.linear(hidden_PD, weight_VD).float() + bias_V


def token_nll(logits_PV: Tensor, _: Tensor, targets_P: Tensor) -> Tensor:
    """Return -log p(target) [P] in float32."""
    return F.cross_entropy(logits_PV, targets_P, reduction="none")


class TextHead(nn.Module):
    """Token logits. [MASK] and [PAD] have probability zero (MDLM, arXiv 2406.07524, section 3.2.3)."""

    def __init__(self, width: int, vocab_size: int, suppressed_ids: tuple[int, ...], tied: bool):
        super().__init__()
        self.weight = None if tied else nn.Parameter(torch.empty(vocab_size, width))
        bias = torch.zeros(vocab_size, device="cpu")  # has values even if the parameters are on the meta device
        bias[list(suppressed_ids)] = MASKED_LOGIT
        self.register_buffer("bias", bias, persistent=False)
        self.bias: Tensor

    def forward(
        self, hidden_PD: Tensor, embedding_VD: Tensor, targets_P: Tensor | None, terms: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return logits, or likelihoods of targets, in float32. In training also return which targets are most likely.

        Args:
            embedding_VD: Token embedding, the weight of a tied head.
            terms: With targets, return `token_terms`.

        Returns:
            Without targets, the logits [P, V] and None. With targets, their negative log likelihoods [P] or the terms
            [P, 3], and in training bool [ceil(P / ACCURACY_STRIDE)]: for every `ACCURACY_STRIDE`-th target, whether it
            is the most likely token.
        """
        weight = embedding_VD if self.weight is None else self.weight
        if targets_P is None:
            return _logits(hidden_PD, weight, self.bias), None
        if torch.compiler.is_compiling() and self.training and len(hidden_PD) * len(weight) <= MAX_WHOLE_LOGITS:
            weight, bias = _product_weight(weight, self.bias, matmul_dtype(weight))
            logits_PV = _logits(hidden_PD, weight, bias)
            best = logits_PV.detach()[::ACCURACY_STRIDE].argmax(-1)
            values = token_terms(logits_PV, bias, targets_P)
            return values if terms else values[:, 0], best == targets_P[::ACCURACY_STRIDE]
        is_best = None
        if self.training:
            rows, targets = hidden_PD[::ACCURACY_STRIDE], targets_P[::ACCURACY_STRIDE]
            with torch.no_grad(), torch.autocast("cpu", enabled=False):  # few rows
                # Detached, since autocast would otherwise reuse this cast weight, which has no gradient, for the loss.
                is_best = _logits(rows.to(weight.dtype), weight.detach(), self.bias).argmax(-1) == targets
        return in_chunks(token_terms if terms else token_nll, hidden_PD, weight, self.bias, targets_P), is_best


class LengthHead(nn.Module):
    """log p(L | noised latents, t_latent), a categorical over 1..max_length (Mask-Predict, arXiv 1904.09324).

    It reads the latent stream before the first block. After a joint attention the stream has seen the text's positions,
    and the head would learn to count tokens, but generation has no tokens yet.
    """

    def __init__(self, width: int, conditioning: int, max_length: int):
        super().__init__()
        self.time = nn.Linear(conditioning, width)
        self.hidden = nn.Linear(width, width)
        self.out = nn.Linear(width, max_length)

    def forward(self, latents_BME: Tensor, time_BT: Tensor) -> Tensor:
        """Return logits [B, max_length] in float32. Column i is length i + 1."""
        # Times 1 + time: in a sum, the noise time would hide the latent, whose variance is many times smaller.
        return self.out(F.silu(self.hidden(latents_BME)).mean(1) * (1 + self.time(time_BT))).float()


class LossWeights(nn.Module):
    """Learned log variances s of losses. The weight of a loss is exp(-s) (Kendall et al., arXiv 1705.07115, eq. 10).

    Adam changes a parameter by about the learning rate per step, whatever its loss. At ten times that rate
    (`lr_multiplier`) the weights keep up with their losses. The derivative of exp(-s) loss + s / 2 is as large as the
    loss, far above the gradients of the network, and would dominate the gradient norm in clipping. Adam is invariant to
    the scale of a gradient, so we make this gradient small (`grad_scale`).
    """

    lr_multiplier, grad_scale = 10.0, 0.01

    def __init__(self, initial_weights: tuple[float, ...]):
        super().__init__()
        self.initial = tuple(-math.log(weight) / self.lr_multiplier for weight in initial_weights)
        self.value = nn.Parameter(torch.tensor(self.initial))

    def forward(self) -> Tensor:
        """Return s, one per loss, in float32."""
        s = self.lr_multiplier * self.value.float()
        # This has the value of s, but `grad_scale` times its gradient.
        return s.detach() + self.grad_scale * (s - s.detach())
