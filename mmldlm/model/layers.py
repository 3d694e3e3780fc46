"""Building blocks of the MMDiT: norms, rotary positions, time embedding, modulation, feed-forward.

Shape letters: B samples, N tokens of a whole unpadded micro-batch, T rows of any stream, D width, F hidden width of a
feed-forward, H heads, K width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmldlm.model.ops import SampleRows, Stream, linear, modulated_linear, normalize_heads, runs_on_cpu, swiglu_linear

TIME_SCALE = 1000.0  # factor of t in [0, 1] before the sinusoids, so that times range as in models with 1000 steps


class HeadNorm(nn.Module):
    """RMS norm of each head's queries and keys with learned scales (QK-norm), in float32, and rotary embedding."""

    def __init__(self, head_width: int):
        super().__init__()
        self.q = nn.Parameter(torch.ones(head_width))
        self.k = nn.Parameter(torch.ones(head_width))

    def forward(self, qkv_T3HK: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """See `ops.normalize_heads`."""
        return normalize_heads(qkv_T3HK, torch.stack([self.q, self.k]).float(), rotary)


def rotary_angles(position_N: Tensor, head_width: int, base: float) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [N, K/2] of the rotary embedding (RoFormer, arXiv 2104.09864, eq. 34)."""
    half = head_width // 2
    frequency = base ** (-torch.arange(half, device=position_N.device, dtype=torch.float32) / half)
    angle = position_N[:, None].float() * frequency
    return angle.cos(), angle.sin()


class TimeEmbedding(nn.Module):
    """Embedding of noise times: sinusoids in float32, then a two-layer MLP."""

    def __init__(self, width: int, frequencies: int = 256):
        super().__init__()
        self.frequencies = frequencies
        self.hidden = nn.Linear(frequencies, width)
        self.out = nn.Linear(width, width)

    def forward(self, t_B: Tensor) -> Tensor:
        """Embed times [B] in [0, 1] as [B, width]."""
        half = self.frequencies // 2
        frequency = torch.exp(-math.log(10_000.0) * torch.arange(half, device=t_B.device, dtype=torch.float32) / half)
        angle = TIME_SCALE * t_B.float()[:, None] * frequency
        sinusoids = torch.cat([angle.cos(), angle.sin()], dim=-1).to(self.hidden.weight.dtype)
        return self.out(F.silu(self.hidden(sinusoids)))


class ModulationOut(NamedTuple):
    """Modulation of one branch by each sample's noise times."""

    shift_scale: Tensor  # [B, 2D]
    gate: Tensor  # [B, D]


class Modulation(nn.Module):
    """adaLN-zero (DiT, arXiv 2212.09748, section 3.2): `branches` x (shift, scale, gate) from the conditioning.

    `rank` > 0 factors the projection through that many channels. With one latent token per sample, the full projection
    of the latent stream would be the largest part of the network, for the fewest activations.
    """

    def __init__(self, conditioning: int, width: int, branches: int, rank: int):
        super().__init__()
        self.branches = branches
        self.down = nn.Linear(conditioning, rank, bias=False) if rank else None
        self.up = nn.Linear(rank or conditioning, 3 * branches * width)

    def forward(self, conditioning_BT: Tensor) -> list[ModulationOut]:
        """Return one `ModulationOut` per branch."""
        hidden = F.silu(conditioning_BT)
        if self.down is not None:
            hidden = self.down(hidden)
        mods = self.split(self.up(hidden))
        # On a GPU a block returns a gate. If that were a view and changed in place, it would lose FSDP2's hook.
        return mods if runs_on_cpu(hidden) else [mod._replace(gate=mod.gate.clone()) for mod in mods]

    def split(self, out: Tensor) -> list[ModulationOut]:
        """Return one `ModulationOut` per branch from the output of `up`."""
        # [B, branches x 3 x D]: shift, scale and gate of a branch are adjacent.
        parts = out.unflatten(-1, (self.branches, -1)).unbind(-2)
        width = parts[0].shape[-1] // 3
        return [ModulationOut(*part.split([2 * width, width], -1)) for part in parts]


def modulate_at_once(modulations: Sequence[Modulation], conditioning_BT: Tensor) -> list[tuple[ModulationOut, ...]]:
    """Return the outputs of all modulations in float32, by one product. All modulations have the same shape."""
    hidden = F.silu(conditioning_BT).expand(len(modulations), -1, -1)
    downs = [each.down.weight for each in modulations if each.down is not None]
    if downs:
        hidden = hidden @ torch.stack(downs).mT
    weights, biases = (torch.stack([getattr(each.up, name) for each in modulations]) for name in ("weight", "bias"))
    branches = modulations[0].split(torch.baddbmm(biases[:, None], hidden, weights.mT).float())
    return list(zip(*(map(ModulationOut, *map(torch.unbind, branch)) for branch in branches), strict=True))


class Linear(nn.Linear):
    """A linear layer by `ops.linear`."""

    def forward(self, x_TI: Tensor) -> Tensor:
        """Return [T, O]."""
        return linear(x_TI, self.weight, self.bias)


class ModulatedLinear(nn.Linear):
    """Layer norm, scaled and shifted by the modulation, then a linear layer."""

    def forward(  # type: ignore[override]
        self, stream: Stream, mod: ModulationOut, rows: SampleRows | None
    ) -> tuple[Tensor, Tensor]:
        """Return the stream [T, D] after its addition, and [T, O]. If `rows` is None, row i belongs to sample i."""
        return modulated_linear(stream, mod.shift_scale, rows, self.weight, self.bias)


class ActivatedLinear(nn.Linear):
    """Activation, then a linear layer. The input of SwiGLU has twice the channels of the layer's input."""

    def __init__(self, hidden: int, width: int, kind: Literal["swiglu", "gelu"]):
        super().__init__(hidden, width, bias=False)
        self.kind = kind

    def forward(self, hidden_TF: Tensor) -> Tensor:
        """Return [T, D] from the hidden channels [T, 2F] (SwiGLU) or [T, F] (GELU)."""
        if self.kind == "gelu":
            return linear(F.gelu(hidden_TF, approximate="tanh"), self.weight)
        return swiglu_linear(hidden_TF, self.weight)


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202) or GELU feed-forward. SwiGLU has 2/3 of the hidden width, for equal parameters."""

    def __init__(self, width: int, ratio: float, kind: Literal["swiglu", "gelu"]):
        super().__init__()
        hidden = int(width * ratio * 2 / 3) if kind == "swiglu" else int(width * ratio)
        hidden = 8 * max(1, round(hidden / 8))
        # SwiGLU's gate and value come from one product.
        self.up = ModulatedLinear(width, 2 * hidden if kind == "swiglu" else hidden, bias=False)
        self.down = ActivatedLinear(hidden, width, kind)

    def forward(self, stream: Stream, mod: ModulationOut, rows: SampleRows | None) -> tuple[Tensor, Tensor]:
        """Return the stream [T, D] after its addition, and the feed-forward's output [T, D]."""
        x_TD, hidden_TF = self.up(stream, mod, rows)
        return x_TD, self.down(hidden_TF)
