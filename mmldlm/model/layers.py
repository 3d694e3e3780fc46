"""Building blocks of the MMDiT: norms, rotary positions, time embedding, modulation, feed-forward.

Shape letters: B samples, N tokens of a whole unpadded micro-batch, T rows of any stream, D width,
H heads, K width of a head.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TIME_SCALE = 1000.0  # t in [0, 1] is stretched before the sinusoids, as diffusion models with 1000 steps see it


def layer_norm(x_TD: Tensor) -> Tensor:
    """Layer norm without parameters, in float32: adaLN brings scale and shift."""
    return F.layer_norm(x_TD.float(), x_TD.shape[-1:], eps=1e-6).to(x_TD.dtype)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension with a learned scale, computed in float32."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), eps=1e-6).to(x.dtype)


def rotary_angles(position_N: Tensor, head_width: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine [N, K/2] of rotary positions (RoFormer, arXiv 2104.09864, eq. 34)."""
    half = head_width // 2
    frequency = base ** (-torch.arange(half, device=position_N.device, dtype=torch.float32) / half)
    angle = position_N[:, None].float() * frequency
    return angle.cos(), angle.sin()


def rotate(x_NHK: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (k, k + K/2) of a head by the angle of its position."""
    cos, sin = (part[:, None, :] for part in rotary)
    first, second = x_NHK.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_NHK.dtype)


class TimeEmbedding(nn.Module):
    """Noise times to conditioning vectors: sinusoids in float32, then a two-layer network."""

    def __init__(self, width: int, frequencies: int = 256):
        super().__init__()
        self.frequencies = frequencies
        self.hidden = nn.Linear(frequencies, width)
        self.out = nn.Linear(width, width)

    def forward(self, t_B: Tensor) -> Tensor:
        """[B] times in [0, 1] to [B, width]."""
        half = self.frequencies // 2
        rate = torch.exp(-math.log(10_000.0) * torch.arange(half, device=t_B.device, dtype=torch.float32) / half)
        angle = TIME_SCALE * t_B.float()[:, None] * rate
        waves = torch.cat([angle.cos(), angle.sin()], dim=-1).to(self.hidden.weight.dtype)
        return self.out(F.silu(self.hidden(waves)))


class Adaptation(NamedTuple):
    """What one branch of a block gets from the noise times: each [T, D]."""

    shift: Tensor
    scale: Tensor
    gate: Tensor


class Modulation(nn.Module):
    """adaLN-zero (DiT, arXiv 2212.09748, section 3.2): conditioning to `branches` x (shift, scale, gate).

    `rank` > 0 factors the projection through that many channels: with one latent token a sample the full
    projection would be the largest part of the network and serve the fewest numbers.
    """

    def __init__(self, conditioning: int, width: int, branches: int, rank: int):
        super().__init__()
        self.branches = branches
        self.down = nn.Linear(conditioning, rank, bias=False) if rank else None
        self.up = nn.Linear(rank or conditioning, 3 * branches * width)

    def forward(self, conditioning_BT: Tensor, row_of: Tensor | None) -> list[Adaptation]:
        """One `Adaptation` a branch, rows [B] or, through `row_of` [T], one row for each token."""
        hidden = F.silu(conditioning_BT)
        if self.down is not None:
            hidden = self.down(hidden)
        table = self.up(hidden)
        if row_of is not None:
            table = table.index_select(0, row_of)
        return [Adaptation(*part.chunk(3, dim=-1)) for part in table.chunk(self.branches, dim=-1)]


def modulate(x_TD: Tensor, adaptation: Adaptation) -> Tensor:
    """Normalise, then scale and shift."""
    return layer_norm(x_TD) * (1 + adaptation.scale) + adaptation.shift


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202) or GELU network. SwiGLU takes 2/3 of the hidden width: equal parameters."""

    def __init__(self, width: int, ratio: float, kind: Literal["swiglu", "gelu"]):
        super().__init__()
        self.kind = kind
        hidden = int(width * ratio * 2 / 3) if kind == "swiglu" else int(width * ratio)
        hidden = 8 * max(1, round(hidden / 8))
        self.up = nn.Linear(width, 2 * hidden if kind == "swiglu" else hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x_TD: Tensor) -> Tensor:
        hidden = self.up(x_TD)
        if self.kind == "swiglu":
            gate, value = hidden.chunk(2, dim=-1)
            return self.down(F.silu(gate) * value)
        return self.down(F.gelu(hidden, approximate="tanh"))
