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

from mmldlm.model.cpu_linear import Linear
from mmldlm.model.ops import modulated_linear, normalize_heads, swiglu, swiglu_linear

TIME_SCALE = 1000.0  # t in [0, 1] is stretched before the sinusoids, as diffusion models with 1000 steps see it


class HeadNorm(nn.Module):
    """RMS norm of each head's queries and keys with a learned scale, in float32, and their rotary turn."""

    def __init__(self, head_width: int):
        super().__init__()
        self.q = nn.Parameter(torch.ones(head_width))
        self.k = nn.Parameter(torch.ones(head_width))

    def forward(self, qkv_T3HK: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        return normalize_heads(qkv_T3HK, torch.stack([self.q, self.k]).float(), rotary)


def rotary_angles(position_N: Tensor, head_width: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine [N, K/2] of rotary positions (RoFormer, arXiv 2104.09864, eq. 34)."""
    half = head_width // 2
    frequency = base ** (-torch.arange(half, device=position_N.device, dtype=torch.float32) / half)
    angle = position_N[:, None].float() * frequency
    return angle.cos(), angle.sin()


class TimeEmbedding(nn.Module):
    """Noise times to conditioning vectors: sinusoids in float32, then a two-layer network."""

    def __init__(self, width: int, frequencies: int = 256):
        super().__init__()
        self.frequencies = frequencies
        self.hidden = Linear(frequencies, width)
        self.out = Linear(width, width)

    def forward(self, t_B: Tensor) -> Tensor:
        """[B] times in [0, 1] to [B, width]."""
        half = self.frequencies // 2
        rate = torch.exp(-math.log(10_000.0) * torch.arange(half, device=t_B.device, dtype=torch.float32) / half)
        angle = TIME_SCALE * t_B.float()[:, None] * rate
        waves = torch.cat([angle.cos(), angle.sin()], dim=-1).to(self.hidden.weight.dtype)
        return self.out(F.silu(self.hidden(waves)))


class ModulationOut(NamedTuple):
    """What one branch of a block gets from the noise times of each sample: each [B, D]."""

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
        self.down = Linear(conditioning, rank, bias=False) if rank else None
        self.up = Linear(rank or conditioning, 3 * branches * width)

    def forward(self, conditioning_BT: Tensor) -> list[ModulationOut]:
        """One `ModulationOut` a branch."""
        hidden = F.silu(conditioning_BT)
        if self.down is not None:
            hidden = self.down(hidden)
        table = self.up(hidden)
        return [ModulationOut(*part.chunk(3, dim=-1)) for part in table.chunk(self.branches, dim=-1)]


class ModulatedLinear(nn.Linear):
    """A linear map of a layer norm that the noise times scale and shift."""

    def forward(self, x_TD: Tensor, by: ModulationOut, rows_T: Tensor | None) -> Tensor:  # type: ignore[override]
        return modulated_linear(x_TD, by.shift, by.scale, rows_T, self.weight, self.bias)


class Activated(Linear):
    """A linear map of an activation: SwiGLU takes twice as many channels as the map, GELU as many.

    `keeps_activation`: what the activation gives is kept until backward, not computed again. That is less work where
    its inputs are computed again in any case, since PyTorch stops before the product once it has what it had kept.
    """

    def __init__(self, hidden: int, width: int, kind: Literal["swiglu", "gelu"], keeps_activation: bool):
        super().__init__(hidden, width, bias=False)
        self.kind, self.keeps_activation = kind, keeps_activation

    def forward(self, hidden_TF: Tensor) -> Tensor:
        if self.kind == "gelu":
            return super().forward(F.gelu(hidden_TF, approximate="tanh"))
        return super().forward(swiglu(hidden_TF)) if self.keeps_activation else swiglu_linear(hidden_TF, self.weight)


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202) or GELU network. SwiGLU takes 2/3 of the hidden width: equal parameters."""

    def __init__(self, width: int, ratio: float, kind: Literal["swiglu", "gelu"], keeps_activation: bool):
        super().__init__()
        hidden = int(width * ratio * 2 / 3) if kind == "swiglu" else int(width * ratio)
        hidden = 8 * max(1, round(hidden / 8))
        self.up = ModulatedLinear(width, 2 * hidden if kind == "swiglu" else hidden, bias=False)
        self.down = Activated(hidden, width, kind, keeps_activation)

    def forward(self, x_TD: Tensor, by: ModulationOut, rows_T: Tensor | None) -> Tensor:
        return self.down(self.up(x_TD, by, rows_T))
