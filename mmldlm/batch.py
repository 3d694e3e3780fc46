"""`Batch`: the one thing that crosses folders, and `PackedLayout`: where each sample lies in it.

Shape letters: B samples, N tokens of the whole unpadded micro-batch, M latent tokens of a sample,
C latent channels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 64  # in a multiple of which rows go where kernels are made anew for each shape


def pad_rows(values: Tensor) -> Tensor:
    """`values` [rows] and zeros behind them, up to a multiple of `ROWS`."""
    return F.pad(values, (0, -len(values) % ROWS))


class LengthGroup(NamedTuple):
    """A run of neighboring samples of equal length: samples [first, last), tokens [start, stop)."""

    first: int
    last: int
    start: int
    stop: int
    length: int


class PackedLayout:
    """How B samples of unequal length lie one behind the other in N tokens, without padding.

    The lengths are known on the host, so nothing here ever waits for a device. Index tensors are
    made on `device` on first use and kept.

    Behind the tokens there may be rows of none, so that there are R rows, a multiple of `rows`.
    """

    def __init__(self, lengths: tuple[int, ...], latent_tokens: int, device: torch.device | str = "cpu", rows: int = 1):
        assert all(length > 0 for length in lengths), f"a sample without tokens: lengths {lengths}"
        self.lengths = lengths
        self.latent_tokens = latent_tokens
        self.device = torch.device(device)
        self.rows = rows

    @property
    def num_samples(self) -> int:
        return len(self.lengths)

    @cached_property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def num_padding_rows(self) -> int:
        """R - N: rows behind the last token that belong to no sample."""
        return -self.num_tokens % self.rows

    @cached_property
    def padded(self) -> PackedLayout:
        """The same samples in a multiple of `ROWS` rows."""
        return PackedLayout(self.lengths, self.latent_tokens, self.device, ROWS)

    @cached_property
    def max_length(self) -> int:
        return max(self.lengths)

    @cached_property
    def num_pairs(self) -> int:
        """Pairs of a query and a key, latents among them."""
        return sum((length + self.latent_tokens) ** 2 for length in self.lengths)

    @cached_property
    def groups(self) -> tuple[LengthGroup, ...]:
        """Runs of equal length. A batch sorted by length has few of them."""
        groups, first, start = [], 0, 0
        for length, run in groupby(self.lengths):
            count = len(list(run))
            groups.append(LengthGroup(first, first + count, start, start + count * length, length))
            first, start = first + count, start + count * length
        return tuple(groups)

    @cached_property
    def _host(self) -> tuple[Tensor, Tensor]:
        lengths = torch.tensor(self.lengths)
        sample = torch.repeat_interleave(torch.arange(self.num_samples), lengths, output_size=self.num_tokens)
        starts = lengths.cumsum(0) - lengths
        position = torch.arange(self.num_tokens) - starts[sample]
        fill = (0, self.num_padding_rows)
        return F.pad(sample, fill, value=self.num_samples - 1), F.pad(position, fill)

    @cached_property
    def sample_of_token(self) -> Tensor:
        """int64 [R]: the sample that each token belongs to, the last one for rows of none."""
        return self._host[0].to(self.device, non_blocking=True)

    @cached_property
    def position(self) -> Tensor:
        """int64 [R]: the position of each token in its own sample, 0 for rows of none."""
        return self._host[1].to(self.device, non_blocking=True)

    @cached_property
    def sample_of_latent(self) -> Tensor | None:
        """int64 [B*M]: the sample that each latent token belongs to; None where M = 1 and rows are samples."""
        if self.latent_tokens == 1:
            return None
        rows = torch.arange(self.num_samples).repeat_interleave(self.latent_tokens)
        return rows.to(self.device, non_blocking=True)

    @cached_property
    def joint_order(self) -> Tensor:
        """int64 [B*M + N]: reads cat(latents, tokens) so that each sample's latents precede its tokens."""
        order: list[Tensor] = []
        start, latents = self.num_samples * self.latent_tokens, torch.arange(self.latent_tokens)
        for sample, length in enumerate(self.lengths):
            order += [latents + sample * self.latent_tokens, torch.arange(start, start + length)]
            start += length
        return torch.cat(order).to(self.device, non_blocking=True)

    @cached_property
    def joint_inverse(self) -> Tensor:
        """int64 [B*M + N]: undoes `joint_order`."""
        return torch.argsort(self.joint_order)

    @cached_property
    def joint_offsets(self) -> Tensor:
        """int32 [B + 1]: where each sample starts in the joint order."""
        joint = torch.tensor([0, *(length + self.latent_tokens for length in self.lengths)])
        return joint.cumsum(0).to(torch.int32).to(self.device, non_blocking=True)

    def to(self, device: torch.device | str) -> PackedLayout:
        if torch.device(device) == self.device:
            return self
        return PackedLayout(self.lengths, self.latent_tokens, device, self.rows)


@dataclass(frozen=True)
class Batch:
    """One micro-batch of samples, unpadded; sample i owns `lengths[i]` neighboring tokens."""

    tokens: Tensor  # int64 [N]
    latents: Tensor  # float32 [B, M, C], standardized to unit RMS
    lengths: tuple[int, ...]  # B, on the host
    sample_ids: Tensor  # int64 [B] on the host: row in the store's split
    slots: Tensor  # int64 [B] on the host: place in the step's global batch, which keys the noise

    @cached_property
    def layout(self) -> PackedLayout:
        return PackedLayout(self.lengths, self.latents.shape[1], self.tokens.device)

    def to(self, device: torch.device | str) -> Batch:
        """The same batch with tokens and latents on `device`; copies from pinned memory do not block."""
        return replace(
            self,
            tokens=self.tokens.to(device, non_blocking=True),
            latents=self.latents.to(device, non_blocking=True),
        )

    def pin_memory(self) -> Batch:
        return replace(self, tokens=self.tokens.pin_memory(), latents=self.latents.pin_memory())
