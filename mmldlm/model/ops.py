"""Element-wise operations of a block: each as a plain formula, under an autograd function that saves memory.

Plain autograd saves every intermediate result. The autograd functions save their inputs alone and recompute the rest in
backward, which also takes fewer passes over memory. Each function stands above its formula. `torch.compile` runs the
formula, since the compiler itself chooses which results to save. All functions compute in float32, whatever the type of
their inputs, except that SwiGLU rounds SiLU to the type of its input before the product. On a CPU all but SwiGLU
process the rows in chunks that fit into a core's cache together with their results.

Shape letters: B samples, T rows of a stream, D width, F hidden width, O outputs of a layer, H heads, K width of a head.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from importlib import import_module
from typing import Any, NamedTuple, ParamSpec

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

log = logging.getLogger(__name__)

EPSILON = 1e-6
CHUNK_NUMEL = 2**17  # elements per chunk and thread: 512 KiB in float32
TILE_ROWS = 16  # rows of a tile. One program of a kernel processes a tile, and writes one row of sums to add up
_assumed_device: str | None = None  # not a `ContextVar`, which would break compiled regions in two
_gpu_kernels: dict[str, Any] = {}  # by type of device: the module, once `load_gpu_kernels` has run one of its kernels
P = ParamSpec("P")


@cache
def load_gpu_kernels(device: torch.device) -> None:
    """Load the kernels of a GPU and run one, once in a process. If Triton does not run, the formulas are used."""
    try:
        kernels = import_module("mmldlm.model.gpu_kernels")
        ones = torch.ones(1, 32, device=device)
        kernels.add_norm([*[ones[:, :16]] * 3, ones], torch.float32)
    except Exception as error:  # no Triton, no C compiler, an old GPU: errors of many types
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        log.warning("Triton does not run here (%s): norms and heads take more passes over memory", reason)
    else:
        _gpu_kernels[device.type] = kernels


def gpu_kernels(x: Tensor) -> Any:
    """Return the module of kernels if they run on the device of `x`, otherwise None."""
    return None if runs_on_cpu(x) else _gpu_kernels.get(x.device.type)


def memory_saving(function: type[Function]) -> Callable[[Callable[P, Tensor]], Callable[P, Tensor]]:
    """Return a decorator of a plain formula. `function` replaces the formula, unless `torch.compile` traces it."""

    def decorate(formula: Callable[P, Tensor]) -> Callable[P, Tensor]:
        @wraps(formula)
        def call(*args: P.args, **kwargs: P.kwargs) -> Tensor:
            if torch.compiler.is_compiling():
                return formula(*args, **kwargs)
            return function.apply(*args, **kwargs)

        return call

    return decorate


@contextmanager
def assume_device(device_type: str) -> Iterator[None]:
    """Compute with the operators for a device of `device_type`, for tests on a CPU."""
    global _assumed_device
    before, _assumed_device = _assumed_device, device_type
    try:
        yield
    finally:
        _assumed_device = before


def runs_on_cpu(x: Tensor) -> bool:
    """Return whether computations with `x` are on a CPU. Within `assume_device` the assumed device counts."""
    return (_assumed_device or x.device.type) == "cpu"


class SampleRows(NamedTuple):
    """The sample of each row of a stream, in ascending order, and on a GPU the tiles of the rows.

    A tile has up to `TILE_ROWS` rows of one sample, and some tiles are empty. On a GPU `index_add_` would add the rows
    of a sample by atomic operations on the same memory, in an order that differs between runs. Sums over a tile, and
    sums from one offset to the next, always have the same order.
    """

    # On a CPU all but `ids` are None.
    ids: Tensor  # int64 [T], the sample of each row
    offsets: Tensor | None = None  # int64 [B + 1], first rows of the samples, then T
    tiles: Tensor | None = None  # int64 [T // TILE_ROWS + B], the sample of each tile
    tile_offsets: Tensor | None = None  # int64 [B + 1], first tiles of the samples, then the number of tiles

    @classmethod
    def of(cls, index_T: Tensor, num_samples: int) -> SampleRows:
        """Return the rows whose samples are `index_T`, without waiting for the device."""
        if runs_on_cpu(index_T):
            return cls(index_T)
        samples = torch.arange(num_samples + 1, device=index_T.device)
        offsets = torch.searchsorted(index_T, samples)
        # Sample b has at least as many tiles as its rows need, wherever they begin.
        tile_offsets = offsets // TILE_ROWS + samples
        tiles = torch.arange(len(index_T) // TILE_ROWS + num_samples, device=index_T.device)
        return cls(index_T, offsets, torch.searchsorted(tile_offsets, tiles, right=True) - 1, tile_offsets)


def _sums(values_TD: Tensor, offsets: Tensor) -> Tensor:
    """Return on a GPU the sums [B, D] of the rows from one offset to the next, in float32."""
    # `unsafe` skips a check of the offsets, which would wait for the device.
    return torch.segment_reduce(values_TD.float(), "sum", offsets=offsets, axis=0, initial=0, unsafe=True)


class _GatherRows(Function):
    @staticmethod
    def forward(ctx: Any, table_BD: Tensor, index_T: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(offsets)
        return table_BD.index_select(0, index_T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        return _sums(grad_TD, *ctx.saved_tensors).to(grad_TD.dtype), None, None


def gather_rows(table_BD: Tensor, rows: SampleRows | None) -> Tensor:
    """Return the table entry of each row's sample, [T, D]. If `rows` is None, row i belongs to sample i."""
    if rows is None:
        return table_BD
    if rows.offsets is None:
        return table_BD.index_select(0, rows.ids)
    return _GatherRows.apply(table_BD, rows.ids, rows.offsets)


def _add_to_samples(sums_BD: Tensor | None, rows: SampleRows | None, values_TD: Tensor, num_samples: int) -> Tensor:
    """Add each row's values to the sum of its sample, the adjoint of `gather_rows`. `sums_BD` None stands for zeros."""
    if not runs_on_cpu(values_TD):  # one chunk
        return values_TD.float() if rows is None or rows.offsets is None else _sums(values_TD, rows.offsets)
    if sums_BD is None:
        sums_BD = values_TD.new_zeros(num_samples, values_TD.shape[1], dtype=torch.float32)
    return sums_BD.add_(values_TD) if rows is None else sums_BD.index_add_(0, rows.ids, values_TD)


def _row_chunks(*tensors: Any) -> Iterable[tuple[Any, ...]]:
    """Yield the same rows of all tensors, on a CPU in chunks, otherwise, or if a tensor is None, all at once."""
    first = tensors[0]
    if not runs_on_cpu(first) or any(tensor is None for tensor in tensors):
        return [tensors]
    size = CHUNK_NUMEL * torch.get_num_threads()
    if first.numel() <= size:
        return [tensors]
    rows = max(1, size * len(first) // first.numel())
    parts = (
        map(SampleRows, each.ids.split(rows)) if isinstance(each, SampleRows) else each.split(rows) for each in tensors
    )
    return zip(*parts, strict=True)


def _scale_and_shift(
    normal_TD: Tensor, shift_BD: Tensor, scale_BD: Tensor, rows: SampleRows | None, dtype: torch.dtype
) -> Tensor:
    """Return normal * scale + shift of each row's sample, in `dtype`."""
    out_TD = torch.empty_like(normal_TD, dtype=dtype)
    for normal, chunk_rows, out in _row_chunks(normal_TD, rows, out_TD):
        torch.addcmul(gather_rows(shift_BD, chunk_rows), normal, gather_rows(scale_BD, chunk_rows), out=out)
    return out_TD


def matmul_dtype(x: Tensor) -> torch.dtype:
    """Return the type of a matrix product with `x`: under autocast its type, otherwise the type of `x`."""
    device_type = x.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype


def modulate(x_TD: Tensor, shift_scale_B2D: Tensor, rows: SampleRows | None) -> Tensor:
    """Return layer_norm(x) * (1 + scale) + shift [T, D] in float32, with scale and shift of each row's sample."""
    normal = F.layer_norm(x_TD.float(), x_TD.shape[-1:], eps=EPSILON)
    shift, scale = gather_rows(shift_scale_B2D.float(), rows).chunk(2, dim=-1)
    return normal * (scale + 1) + shift


class _ModulatedLinear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        shift_scale_B2D: Tensor,
        rows: SampleRows | None,
        weight_OD: Tensor,
        bias_O: Tensor | None,
    ) -> Tensor:
        # The normalized rows in float32, and their reciprocal standard deviations [T, 1].
        normal, _, rstd = torch.native_layer_norm(x_TD.float(), x_TD.shape[-1:], None, None, EPSILON)
        shift, scale = shift_scale_B2D.float().chunk(2, dim=-1)
        scale = scale + 1
        ctx.save_for_backward(normal, rstd, shift, scale, weight_OD)
        ctx.rows, ctx.dtypes = rows, (x_TD.dtype, shift_scale_B2D.dtype)
        modulated = _scale_and_shift(normal, shift, scale, rows, matmul_dtype(weight_OD))
        return F.linear(modulated, weight_OD, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        normal, rstd, shift, scale, weight = ctx.saved_tensors
        rows, (x_dtype, mod_dtype) = ctx.rows, ctx.dtypes
        weight_grad = bias_grad = None
        if ctx.needs_input_grad[3]:
            # We recompute the layer's input from `normal`, so that we need not save it as well.
            weight_grad = _weight_grad(grad_TO, _scale_and_shift(normal, shift, scale, rows, grad_TO.dtype), weight)
        if ctx.needs_input_grad[4]:
            bias_grad = grad_TO.sum(0).to(weight.dtype)
        # Autocast covers the forward pass only, so we set the types of products in backward explicitly.
        grad = grad_TO @ weight.to(grad_TO.dtype)
        x_grad, shift_grad, scale_grad = _modulation_backward(grad, normal, rstd, scale, rows)
        mod_grad = torch.cat([shift_grad, scale_grad], dim=-1).to(mod_dtype)
        return x_grad.to(x_dtype), mod_grad, None, weight_grad, bias_grad


def _modulation_backward(
    grad_TD: Tensor, normal_TD: Tensor, rstd_T1: Tensor, scale_BD: Tensor, rows: SampleRows | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, shift and scale from the gradient of the modulated layer norm."""
    x_grad_TD, width = torch.empty_like(normal_TD), normal_TD.shape[-1:]
    shift_grad = scale_grad = None
    for grad_chunk, normal, rstd, chunk_rows, out in _row_chunks(grad_TD, normal_TD, rstd_T1, rows, x_grad_TD):
        grad = grad_chunk.float()
        shift_grad = _add_to_samples(shift_grad, chunk_rows, grad, len(scale_BD))
        scale_grad = _add_to_samples(scale_grad, chunk_rows, grad * normal, len(scale_BD))
        # We take layer norm's gradient at the normalized rows, whose mean is 0 and rstd 1, and multiply it by rstd. The
        # operator takes half the passes over memory of a formula.
        mean = normal.new_zeros(len(normal), 1)
        unit_grad, *_ = torch.ops.aten.native_layer_norm_backward(
            grad * gather_rows(scale_BD, chunk_rows), normal, width, mean, mean + 1, None, None, [True, False, False]
        )
        torch.mul(unit_grad, rstd, out=out)
    assert shift_grad is not None and scale_grad is not None
    return x_grad_TD, shift_grad, scale_grad


def _weight_grad(grad_TO: Tensor, input_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """Return the gradient of `weight_OI` in `F.linear(input_TI, weight_OI)`."""
    return (grad_TO.t() @ input_TI.to(grad_TO.dtype)).to(weight_OI.dtype)


class _HalfPrecisionLinear(Function):
    """`F.linear` on a GPU in half precision. Its product for the weight gradient returns float32 without rounding."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor) -> Tensor:
        weight = weight_OI.to(x_TI.dtype)
        ctx.save_for_backward(x_TI, weight)
        return F.linear(x_TI, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor, Tensor | None]:
        x_TI, weight = ctx.saved_tensors
        weight_grad = torch.mm(grad_TO.t(), x_TI, out_dtype=torch.float32) if ctx.needs_input_grad[1] else None
        return grad_TO @ weight, weight_grad


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return `F.linear(x_TI, weight_OI, bias_O)`, on a GPU in half precision by `_HalfPrecisionLinear`."""
    dtype = matmul_dtype(weight_OI)
    if x_TI.is_cuda and bias_O is None and dtype != weight_OI.dtype == torch.float32:
        return _HalfPrecisionLinear.apply(x_TI.to(dtype), weight_OI)
    return F.linear(x_TI, weight_OI, bias_O)


@memory_saving(_ModulatedLinear)
def _modulated_linear(
    x_TD: Tensor, shift_scale_B2D: Tensor, rows: SampleRows | None, weight_OD: Tensor, bias_O: Tensor | None
) -> Tensor:
    return F.linear(modulate(x_TD, shift_scale_B2D, rows), weight_OD, bias_O)


class _AddGated(Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, gate_BD: Tensor, branch_TD: Tensor, rows: SampleRows | None) -> Tensor:
        ctx.save_for_backward(gate_BD, branch_TD)
        ctx.rows, gate = rows, gate_BD.float()
        out_TD = torch.empty_like(x_TD)
        for x, branch, chunk_rows, out in _row_chunks(x_TD, branch_TD, rows, out_TD):
            torch.addcmul(x, gather_rows(gate, chunk_rows), branch.float(), out=out)
        return out_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        gate_BD, branch_TD = ctx.saved_tensors
        gate = gate_BD.float()
        gate_grad, branch_grad = None, torch.empty_like(branch_TD)
        for grad_chunk, branch, rows, out in _row_chunks(grad, branch_TD, ctx.rows, branch_grad):
            gate_grad = _add_to_samples(gate_grad, rows, grad_chunk * branch, len(gate))
            torch.mul(grad_chunk, gather_rows(gate, rows), out=out)
        assert gate_grad is not None
        return grad, gate_grad.to(gate_BD.dtype), branch_grad, None


@memory_saving(_AddGated)
def add_gated(x_TD: Tensor, gate_BD: Tensor, branch_TD: Tensor, rows: SampleRows | None) -> Tensor:
    """Return x + gate * branch, with the gate of each row's sample. x and the result are [T, D] in float32."""
    return x_TD + gather_rows(gate_BD.float(), rows) * branch_TD.float()


class Stream(NamedTuple):
    """A residual stream, and the output of a branch that the next reader of the stream adds to it."""

    x: Tensor  # [T, D] in float32
    branch: Tensor | None = None  # [T, D], or None if nothing is left to add
    gate: Tensor | None = None  # [B, D]: the gate of each sample

    def added(self, rows: SampleRows | None) -> Tensor:
        """Return the stream [T, D] after the addition."""
        if self.branch is None or self.gate is None:
            return self.x
        return add_gated(self.x, self.gate, self.branch, rows)


class _AddNorm(Function):
    """`Stream.added` and `modulate` together. On a GPU this is one pass over memory each way."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        x_TD, branch_TD, gate_BD, shift_scale_B2D, *places, dtype = args
        if kernels := gpu_kernels(x_TD):
            y_TD, out_TD = kernels.add_norm([*args[:4], *places[1:3]], dtype)
        else:
            rows = SampleRows(*places) if places else None
            y_TD = add_gated(x_TD, gate_BD, branch_TD, rows)
            out_TD = modulate(y_TD, shift_scale_B2D, rows).to(dtype)
        ctx.save_for_backward(y_TD, *args[1:-1])
        return y_TD, out_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, y_grad: Tensor, out_grad: Tensor) -> tuple[Tensor | None, ...]:
        y, branch, gate, shift_scale, *places = ctx.saved_tensors
        if kernels := gpu_kernels(y):
            grads, saved = [y_grad.contiguous(), out_grad.contiguous()], [y, branch, gate, shift_scale, *places[1:3]]
            x_grad, branch_grad, sums = kernels.add_norm_backward(grads, saved)
            mod_grad, gate_grad = (_sums(sums, places[3]) if places else sums).tensor_split([shift_scale.shape[1]], 1)
        else:
            rows = SampleRows(*places) if places else None
            normal, _, rstd = torch.native_layer_norm(y, y.shape[-1:], None, None, EPSILON)
            scale = shift_scale.float().chunk(2, dim=-1)[1] + 1
            x_grad, *mod_grads = _modulation_backward(out_grad, normal, rstd, scale, rows)
            mod_grad, x_grad = torch.cat(mod_grads, dim=-1), x_grad + y_grad
            gate_grad = _add_to_samples(None, rows, x_grad * branch, len(gate))
            branch_grad = (x_grad * gather_rows(gate.float(), rows)).to(branch.dtype)
        gate_grad, mod_grad = gate_grad.to(gate.dtype), mod_grad.to(shift_scale.dtype)
        return x_grad, branch_grad, gate_grad, mod_grad, *(None for _ in places), None


def modulated(
    stream: Stream, shift_scale_B2D: Tensor, rows: SampleRows | None, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Return the stream [T, D] after its addition, and its modulated layer norm (`modulate`) [T, D] in `dtype`."""
    # Of `_AddNorm` without its kernel, PyTorch 2.11 compiles wrong gradients in float32, where `float` copies nothing.
    if runs_on_cpu(stream.x) or (torch.compiler.is_compiling() and gpu_kernels(stream.x) is None):
        x_TD = stream.added(rows)
        return x_TD, modulate(x_TD, shift_scale_B2D, rows).to(dtype)
    x, branch, gate = stream
    if branch is None:  # happens once in a step, and is not worth another kernel
        branch, gate = x.detach(), torch.zeros_like(shift_scale_B2D[:, : x.shape[1]])
    y_TD, out_TD = _AddNorm.apply(x, branch, gate, shift_scale_B2D, *(rows or ()), dtype)
    return y_TD, out_TD


def modulated_linear(
    stream: Stream, shift_scale_B2D: Tensor, rows: SampleRows | None, weight_OD: Tensor, bias_O: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the stream [T, D] after its addition, and the linear layer [T, O] of its modulated layer norm."""
    if runs_on_cpu(stream.x):  # one [T, D] is saved for the backward passes of norm and layer
        x_TD = stream.added(rows)
        return x_TD, _modulated_linear(x_TD, shift_scale_B2D, rows, weight_OD, bias_O)
    x_TD, out_TD = modulated(stream, shift_scale_B2D, rows, matmul_dtype(weight_OD))
    return x_TD, linear(out_TD, weight_OD, bias_O)


class _SwiGLULinear(Function):
    @staticmethod
    def forward(ctx: Any, hidden_T2F: Tensor, weight_OF: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_T2F, weight_OF)
        gate, value = hidden_T2F.chunk(2, dim=-1)
        return F.linear(F.silu(gate).mul_(value), weight_OF)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        gate, value = hidden.chunk(2, dim=-1)
        silu, weight_grad = F.silu(gate), None
        if ctx.needs_input_grad[1]:
            weight_grad = _weight_grad(grad_TO, silu * value, weight)
        grad = grad_TO @ weight.to(grad_TO.dtype)
        hidden_grad = torch.empty_like(hidden)
        gate_grad, value_grad = hidden_grad.chunk(2, dim=-1)
        torch.mul(grad, silu, out=value_grad)
        # We do not need `silu` any more, so the gradient of SiLU's output goes into its memory.
        torch.ops.aten.silu_backward.grad_input(torch.mul(grad, value, out=silu), gate, grad_input=gate_grad)
        return hidden_grad, weight_grad


@memory_saving(_SwiGLULinear)
def swiglu_linear(hidden_T2F: Tensor, weight_OF: Tensor) -> Tensor:
    """Return the linear layer [T, O] of SwiGLU: SiLU of the first half of the channels times the second half.

    See arXiv 2002.05202, eq. 6.
    """
    gate, value = hidden_T2F.chunk(2, dim=-1)
    return linear(F.silu(gate) * value, weight_OF)


class _NormalizeHeads(Function):
    @staticmethod
    def forward(ctx: Any, qkv_T3HK: Tensor, weight_2K: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        cos, sin = (None, None) if rotary is None else (angle[:, None, None] for angle in rotary)
        ctx.save_for_backward(qkv_T3HK, weight_2K, cos, sin)
        out_T3HK = torch.empty_like(qkv_T3HK)
        for qkv, cosine, sine, out in _row_chunks(qkv_T3HK, cos, sin, out_T3HK):
            out[:, 2] = qkv[:, 2]
            qk = qkv[:, :2].float()
            _apply_rotary((qk * _inverse_rms(qk)).mul_(weight_2K[:, None]), cosine, sine, out[:, :2])
        return out_T3HK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T3HK: Tensor) -> tuple[Tensor, Tensor, None]:
        qkv_T3HK, weight, cos, sin = ctx.saved_tensors
        inverse_sin = None if sin is None else -sin  # the adjoint of a rotation turns back
        weight_grad, qkv_grad_T3HK = torch.zeros_like(weight), torch.empty_like(qkv_T3HK)
        for qkv, grad, cosine, sine, qkv_grad in _row_chunks(qkv_T3HK, grad_T3HK, cos, inverse_sin, qkv_grad_T3HK):
            qk = qkv[:, :2].float()
            rstd = _inverse_rms(qk)
            normal = qk * rstd
            qk_grad = torch.empty_like(normal)
            _apply_rotary(grad[:, :2].float(), cosine, sine, qk_grad)
            # We sum rows first. On a CPU a sum over two dimensions that are not adjacent takes eight times as long.
            weight_grad += (qk_grad * normal).flatten(1).sum(0).view(qk.shape[1:]).sum(1)
            qk_grad.mul_(weight[:, None])
            # The gradient of RMS norm drops the component along the normalized vector, and is scaled by rstd.
            projection = torch.linalg.vecdot(qk_grad, normal).unsqueeze(-1) / qk.shape[-1]
            qkv_grad[:, 2] = grad[:, 2]
            torch.mul(qk_grad.addcmul_(normal, projection, value=-1), rstd, out=qkv_grad[:, :2])
        return qkv_grad_T3HK, weight_grad, None


def _inverse_rms(x: Tensor) -> Tensor:
    """Return 1 / sqrt(mean(x^2) + epsilon) over the last dimension, which is kept."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(EPSILON).rsqrt_()


def _apply_rotary(x_T2HK: Tensor, cos: Tensor | None, sin: Tensor | None, out: Tensor) -> None:
    """Write `x` (float32) to `out`, rotated if cosine and sine are given."""
    if cos is None or sin is None:
        out.copy_(x_T2HK)
        return
    # In half precision each of the two updates would round. With a float32 buffer we round once.
    rotated = out if out.dtype == torch.float32 else torch.empty_like(x_T2HK)
    first, second = x_T2HK.chunk(2, dim=-1)
    first_out, second_out = rotated.chunk(2, dim=-1)
    torch.mul(first, cos, out=first_out).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=second_out).addcmul_(first, sin)
    if rotated is not out:
        out.copy_(rotated)


@memory_saving(_NormalizeHeads)
def normalize_heads(qkv_T3HK: Tensor, weight_2K: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
    """Normalize q and k to unit root mean square, scale them (arXiv 2302.05442), and rotate them. v is unchanged.

    Args:
        qkv_T3HK: q, k and v [T, 3, H, K].
        weight_2K: Learned scales of q and k.
        rotary: Cosine and sine [T, K/2] of each row's position. They rotate each pair of channels (k, k + K/2) of a
            head (RoFormer, arXiv 2104.09864, eq. 34). None: no rotation.

    Returns:
        q, k and v [T, 3, H, K] in the type of `qkv_T3HK`.
    """
    qk = F.rms_norm(qkv_T3HK[:, :2].float(), qkv_T3HK.shape[-1:], eps=EPSILON) * weight_2K[:, None]
    if rotary is not None:
        cos, sin = (angle[:, None, None, None] for angle in rotary)
        halves, sign = qk.unflatten(-1, (2, -1)), torch.arange(-1, 2, 2, device=qk.device)[:, None]
        qk = (halves * cos + halves.flip(-2) * (sign * sin)).flatten(-2)
    return torch.cat([qk.to(qkv_T3HK.dtype), qkv_T3HK[:, 2:]], dim=1)
