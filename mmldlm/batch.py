"""Types that cross folders: `BatchSize`, `Batch` (a micro-batch), and `PackedLayout`, the positions of its samples.

Shape letters: B samples, N tokens of the unpadded micro-batch, M latent tokens per sample, C latent channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

INDEX_TENSORS = ("sample_of_token", "position", "sample_of_latent", "joint_order", "joint_inverse", "joint_offsets")
ACCURACY_STRIDE = 32  # training measures accuracy on every 32nd predicted token, which costs well under 1 % of a step


@dataclass(frozen=True)
class BatchSize:
    """Batch sizes of one optimizer step."""

    global_batch_size: int  # samples over all ranks
    micro_batch_size: int  # samples of one forward pass on one rank (with a token budget: at most)
    micro_batch_tokens: int = 0  # most text and latent tokens of one forward pass on one rank, 0 for no budget

    def accumulation(self, world_size: int) -> int:
        """Return how many micro-batches each rank has in the step (with a token budget: at most)."""
        samples = 1 if self.micro_batch_tokens else self.micro_batch_size
        return self.global_batch_size // (samples * world_size)

    @property
    def micro_batch(self) -> str:
        """Size of a micro-batch for messages, such as "32 samples" or "up to 16,384 tokens"."""
        tokens, samples = self.micro_batch_tokens, self.micro_batch_size
        return f"up to {tokens:,} tokens" if tokens else f"{samples} sample{'s' * (samples > 1)}"

    def describe(self, world_size: int) -> str:
        """Return the sizes for users, such as "128 samples = 2 processes x 32 samples x 2 micro-batches"."""
        if self.micro_batch_tokens:
            micro_batches = f"micro-batches of {self.micro_batch}"
        else:
            count = self.accumulation(world_size)
            micro_batches = f"{self.micro_batch} x {count} micro-batch{'es' * (count > 1)}"
        processes = f"{world_size} process{'es' * (world_size > 1)}"
        return f"{self.global_batch_size} samples = {processes} x {micro_batches}"


class LengthGroup(NamedTuple):
    """A run of neighboring samples of equal length: samples [first, last), tokens [start, stop)."""

    first: int
    last: int
    start: int
    stop: int
    length: int


class PackedLayout:
    """Positions of B samples of unequal length that are concatenated to N tokens.

    The lengths are known on the host, so no method synchronizes with the device. They are at least 1, except for the
    last `num_filler` samples, which no loss counts. Index tensors are created on `device` on first use and cached.
    """

    def __init__(
        self, lengths: tuple[int, ...], latent_tokens: int, device: torch.device | str = "cpu", num_filler: int = 0
    ):
        assert all(length > 0 for length in lengths[: len(lengths) - num_filler]), f"a sample without tokens: {lengths}"
        self.lengths, self.num_filler = lengths, num_filler
        self.latent_tokens = latent_tokens
        self.device = torch.device(device)

    @property
    def num_samples(self) -> int:
        """Number of samples (B)."""
        return len(self.lengths)

    @cached_property
    def num_tokens(self) -> int:
        """Number of tokens (N)."""
        return sum(self.lengths)

    @cached_property
    def max_length(self) -> int:
        """Tokens of the longest sample."""
        return max(self.lengths)

    @cached_property
    def num_pairs(self) -> int:
        """Number of (query, key) pairs in joint attention, latent tokens included."""
        return sum((length + self.latent_tokens) ** 2 for length in self.lengths)

    @cached_property
    def groups(self) -> tuple[LengthGroup, ...]:
        """Runs of samples of equal length. There are few if the batch is sorted by length."""
        groups, first, start = [], 0, 0
        for length, run in groupby(self.lengths):
            count = len(list(run))
            groups.append(LengthGroup(first, first + count, start, start + count * length, length))
            first, start = first + count, start + count * length
        return tuple(groups)

    @cached_property
    def _host_indices(self) -> tuple[Tensor, Tensor]:
        """`sample_of_token` and `position` on the host."""
        lengths = torch.tensor(self.lengths)
        sample = torch.repeat_interleave(torch.arange(self.num_samples), lengths, output_size=self.num_tokens)
        starts = lengths.cumsum(0) - lengths
        position = torch.arange(self.num_tokens) - starts[sample]
        return sample, position

    @cached_property
    def _host_joint_indices(self) -> tuple[Tensor, Tensor]:
        """`joint_order` and `joint_inverse` on the host."""
        m, sample = self.latent_tokens, self._host_indices[0]
        # A sample's first latent comes after the latents and tokens of all samples before it.
        starts = torch.tensor([0, *self.lengths[:-1]]).cumsum(0) + torch.arange(self.num_samples) * m
        latents = (starts[:, None] + torch.arange(m)).flatten()
        inverse = torch.cat([latents, torch.arange(self.num_tokens) + (sample + 1) * m])
        order = torch.empty_like(inverse)
        order[inverse] = torch.arange(len(inverse))
        return order, inverse

    @cached_property
    def sample_of_token(self) -> Tensor:
        """int64 [N]: the sample of each token."""
        return self._host_indices[0].to(self.device, non_blocking=True)

    @cached_property
    def position(self) -> Tensor:
        """int64 [N]: the position of each token in its sample."""
        return self._host_indices[1].to(self.device, non_blocking=True)

    @cached_property
    def sample_of_latent(self) -> Tensor | None:
        """int64 [B*M]: the sample of each latent token, or None if M = 1, where it would be the identity."""
        if self.latent_tokens == 1:
            return None
        samples = torch.arange(self.num_samples).repeat_interleave(self.latent_tokens)
        return samples.to(self.device, non_blocking=True)

    @cached_property
    def joint_order(self) -> Tensor:
        """int64 [B*M + N]: indices into cat(latents, tokens) that place each sample's latents before its tokens."""
        return self._host_joint_indices[0].to(self.device, non_blocking=True)

    @cached_property
    def joint_inverse(self) -> Tensor:
        """int64 [B*M + N]: the inverse permutation of `joint_order`."""
        return self._host_joint_indices[1].to(self.device, non_blocking=True)

    @cached_property
    def joint_offsets(self) -> Tensor:
        """int32 [B + 1]: cumulative sequence lengths in the joint order, from 0 to B*M + N."""
        joint = torch.tensor([0, *(length + self.latent_tokens for length in self.lengths)])
        return joint.cumsum(0).to(torch.int32).to(self.device, non_blocking=True)

    def take(self, samples: Sequence[int]) -> tuple[PackedLayout, Tensor]:
        """Return the layout of some samples, in the given order, and the places of their tokens, int64 on the host."""
        starts = torch.tensor([0, *self.lengths]).cumsum(0)
        taken = PackedLayout(tuple(self.lengths[sample] for sample in samples), self.latent_tokens)
        places = starts[list(samples)][taken.sample_of_token] + taken.position
        return taken.to(self.device), places

    def to(self, device: torch.device | str) -> PackedLayout:
        """Return the same layout with index tensors on `device`."""
        if torch.device(device) == self.device:
            return self
        return PackedLayout(self.lengths, self.latent_tokens, device, self.num_filler)

    def without_filler(self) -> PackedLayout:
        """Return the layout without filler samples, which no loss counts."""
        if not self.num_filler:
            return self
        return PackedLayout(self.lengths[: -self.num_filler], self.latent_tokens, self.device)

    def index_tensors(self) -> dict[str, Tensor]:
        """Return all index tensors by the names of their properties."""
        return {name: tensor for name in INDEX_TENSORS if (tensor := getattr(self, name)) is not None}

    def with_index_tensors(self, tensors: Mapping[str, Tensor], device: torch.device) -> PackedLayout:
        """Return the same layout with these index tensors, already on `device`, so that it need not create them."""
        layout = PackedLayout(self.lengths, self.latent_tokens, device, self.num_filler)
        vars(layout).update({name: tensors[name] for name in INDEX_TENSORS if name in tensors})
        return layout


@dataclass(frozen=True)
class Batch:
    """One unpadded micro-batch, where sample i has `lengths[i]` contiguous tokens.

    Attributes:
        tokens: int64 [N], the samples' tokens, concatenated.
        latents: float32 [B, M, C], standardized to unit RMS.
        lengths: Tokens of each of the B samples.
        sample_ids: int64 [B] on the host, index of each sample in the store's split.
        slots: int64 [B] on the host, place of each sample in the global batch, which keys its noise.
        weights: float32 [B], weights of the samples' losses, or None if all are 1.
    """

    tokens: Tensor
    latents: Tensor
    lengths: tuple[int, ...]
    sample_ids: Tensor
    slots: Tensor
    weights: Tensor | None = field(default=None, kw_only=True)

    @cached_property
    def layout(self) -> PackedLayout:
        """Layout of the samples on the device of `tokens`."""
        return PackedLayout(self.lengths, self.latents.shape[1], self.tokens.device)
