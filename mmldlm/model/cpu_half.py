"""Half precision on a CPU: the same network, computed faster.

`CPUHalfMMDiT` differs from `MMDiT` in three ways:

- Few shapes. oneDNN compiles a kernel for each combination of shapes of a half-precision product, which takes as long
  as a few products. So tokens and positions to predict are padded up to a multiple of `ROW_MULTIPLE` with rows that
  change nothing: few numbers of rows occur.
- Small products in float32. A half-precision product casts its weights and looks up a kernel first. With one row per
  sample, that takes two to four times as long as the product in float32.
- Attention's gradients in float32, which takes 0.3 to 0.7 of the time of PyTorch's backward in half precision.

Shape letters: those of `attention`, and R rows of the text stream, padding rows included.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mmldlm.batch import LengthGroup, PackedLayout
from mmldlm.model.attention import BACKENDS, heads_first
from mmldlm.model.heads import ACCURACY_STRIDE
from mmldlm.model.mmdit import MMDiT, Prediction

ROW_MULTIPLE = 64
FEW_ROWS = 64  # products of fewer rows are in float32


class CPUHalfMMDiT(MMDiT):
    """`MMDiT` in bf16 or fp16 on a CPU."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.backend = "cpu_half"
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.forward = partial(_few_rows_in_float32, module, module.forward)  # type: ignore[method-assign]

    def forward(
        self,
        noised_tokens: Tensor,
        noised_latents: Tensor,
        t_text: Tensor,
        t_latent: Tensor,
        layout: PackedLayout,
        positions: Tensor,
        targets: Tensor | None = None,
    ) -> Prediction:
        """See `MMDiT.forward`."""
        # Padding rows are tokens with id 0. Attention skips them, and what is predicted for them is cut off,
        # so they change neither outputs nor gradients.
        prediction = super().forward(
            pad_rows(noised_tokens),
            noised_latents,
            t_text,
            t_latent,
            RowPaddedLayout(layout.lengths, layout.latent_tokens, layout.device),
            pad_rows(positions),
            None if targets is None else pad_rows(targets),
        )
        is_best = prediction.is_best
        if is_best is not None:
            is_best = is_best[: len(positions[::ACCURACY_STRIDE])]
        return prediction._replace(text=prediction.text[: len(positions)], is_best=is_best)


def _few_rows_in_float32(linear: nn.Linear, forward: Callable[..., Tensor], x: Tensor, *args: Any) -> Tensor:
    """Return `forward(x, *args)` of a linear layer, outside autocast if `x` [..., I] has few rows."""
    few_rows = x.numel() < FEW_ROWS * x.shape[-1]
    if few_rows and x.dtype == linear.weight.dtype == torch.float32 and not torch.compiler.is_compiling():
        with torch.autocast("cpu", enabled=False):
            return forward(x, *args)
    return forward(x, *args)


def pad_rows(values: Tensor) -> Tensor:
    """Append zeros to `values` [N] up to a multiple of `ROW_MULTIPLE`."""
    return F.pad(values, (0, -len(values) % ROW_MULTIPLE))


class RowPaddedLayout(PackedLayout):
    """Layout whose tokens are followed by padding rows; the streams give them to the last sample, attention to none."""

    @cached_property
    def sample_of_token(self) -> Tensor:
        """int64 [R]: the sample of each token; the last sample for padding rows."""
        return F.pad(super().sample_of_token, (0, self._num_padding_rows), value=self.num_samples - 1)

    @cached_property
    def position(self) -> Tensor:
        """int64 [R]: the position of each token in its sample; 0 for padding rows."""
        return F.pad(super().position, (0, self._num_padding_rows))

    @property
    def _num_padding_rows(self) -> int:
        return -self.num_tokens % ROW_MULTIPLE


class _Attention(torch.autograd.Function):
    """The `sdpa` backend with a backward in float32 and zero padding rows; called with the kernel itself."""

    @staticmethod
    def forward(ctx: Any, latent_qkv: Tensor, text_qkv: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor]:
        latent_out, text_out = torch.empty_like(latent_qkv[:, 0]), torch.empty_like(text_qkv[:, 0])
        # No group covers padding rows; uninitialized memory could hold NaN.
        text_out[layout.num_tokens :] = 0
        saved: list[Tensor] = []
        for group in layout.groups:
            qkv = torch.cat(_samples(group, layout, latent_qkv, text_qkv), dim=1)
            out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*heads_first(qkv))
            for rows, part in zip(_samples(group, layout, latent_out, text_out), _parts(out, layout), strict=True):
                rows.copy_(part)
            saved += [qkv, out, logsumexp]
        ctx.layout, ctx.shapes = layout, (latent_qkv.shape, text_qkv.shape)
        ctx.save_for_backward(*saved)
        return latent_out, text_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, latent_grad: Tensor, text_grad: Tensor) -> tuple[Tensor, Tensor, None]:
        layout, saved = ctx.layout, ctx.saved_tensors
        latent_qkv_grad, text_qkv_grad = (text_grad.new_empty(shape) for shape in ctx.shapes)
        text_qkv_grad[layout.num_tokens :] = 0
        for group, qkv, out, logsumexp in zip(layout.groups, saved[::3], saved[1::3], saved[2::3], strict=True):
            grad = torch.cat(_samples(group, layout, latent_grad, text_grad), dim=1).float().transpose(1, 2)
            inputs = grad, *heads_first(qkv.float()), out.float(), logsumexp
            # The last arguments: no dropout, not causal.
            q_k_v_grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*inputs, 0.0, False)
            streams = _samples(group, layout, latent_qkv_grad, text_qkv_grad)
            for index, joint_grad in enumerate(q_k_v_grads):
                for rows, part in zip(streams, _parts(joint_grad, layout), strict=True):
                    rows[:, :, index] = part
        return latent_qkv_grad, text_qkv_grad, None


def _samples(group: LengthGroup, layout: PackedLayout, latents: Tensor, texts: Tensor) -> list[Tensor]:
    """Return views of the group's rows in both streams: [samples, M, ...] and [samples, length, ...]."""
    count, m = group.last - group.first, layout.latent_tokens
    latents, texts = latents[group.first * m : group.last * m], texts[group.start : group.stop]
    return [latents.unflatten(0, (count, m)), texts.unflatten(0, (count, group.length))]


def _parts(out: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor]:
    """Split [samples, H, S, K] into latents [samples, M, H, K] and text [samples, length, H, K]."""
    rows = out.transpose(1, 2)
    return rows[:, : layout.latent_tokens], rows[:, layout.latent_tokens :]


def _attend(latent_qkv: Tensor, text_qkv: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor]:
    # The latents are in float32 if their products have few rows.
    latent, text = _Attention.apply(latent_qkv.to(text_qkv.dtype), text_qkv, layout)
    return latent.to(latent_qkv.dtype), text


BACKENDS["cpu_half"] = _attend


def slowdown(dtype: torch.dtype) -> float:
    """Return how many times as long a product of matrices takes in `dtype` as in float32 on this CPU.

    It is measured, in some milliseconds: what instructions a CPU has does not tell. Kinds with instructions for
    bfloat16 were seen to take 0.5 and 2 times as long.
    """
    matrix = torch.ones(256, 256)

    def shortest_s(operand: Tensor) -> float:
        return min(timeit.repeat(lambda: operand @ operand, number=1, repeat=3))

    return shortest_s(matrix.to(dtype)) / shortest_s(matrix)
