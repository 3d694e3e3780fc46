"""Our trainer with the practices of other trainers: the steps of the ladder for which there is no setting.

The loss is the trainer's own in each combination, to rounding (tests/benchmarks/test_variants.py).

Shapes: B samples, N tokens of an unpadded micro-batch, L positions of a padded sample, M latent tokens, H heads,
K width of a head, P masked tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmldlm.batch import PackedLayout
from mmldlm.config import RunConfig
from mmldlm.diffusion.objective import NoisedBatch
from mmldlm.model import mmdit
from mmldlm.model.attention import Backend
from mmldlm.trainer.trainer import StepTotals, Trainer

Practice = Literal["recompute", "reads", "head", "padding"]
IGNORED = -100  # target of a position without loss


class PaddedLayout(PackedLayout):
    """B samples of L positions each; those after a sample's own tokens are padding, which nothing attends to."""

    def __init__(self, real: PackedLayout, length: int):
        super().__init__((length,) * real.num_samples, real.latent_tokens, real.device)
        self.real_lengths = real.lengths

    @cached_property
    def keys(self) -> Tensor:
        """Mask bool [B, 1, 1, M + L] of the rows of the joint sequence that may be attended to."""
        lengths = torch.tensor(self.real_lengths, device=self.device)
        real = torch.arange(-self.latent_tokens, self.max_length, device=self.device) < lengths[:, None]
        return real[:, None, None]


def dense_attention(latent_qkv: Tensor, text_qkv: Tensor, layout: PaddedLayout) -> tuple[Tensor, Tensor]:
    """Compute `joint_attention` over rectangles, with a mask of keys."""
    samples, m, length = layout.num_samples, layout.latent_tokens, layout.max_length
    rows = [latent_qkv.unflatten(0, (samples, m)), text_qkv.unflatten(0, (samples, length))]
    q, k, v = torch.cat(rows, dim=1).permute(2, 0, 3, 1, 4).unbind()
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=layout.keys).transpose(1, 2)
    latent_out, text_out = out.split([m, length], dim=1)
    return latent_out.flatten(0, 1), text_out.flatten(0, 1)


_unpadded_attention = mmdit.joint_attention


def _attention(latent_qkv: Tensor, text_qkv: Tensor, layout: PackedLayout, backend: Backend) -> tuple[Tensor, Tensor]:
    if isinstance(layout, PaddedLayout):
        return dense_attention(latent_qkv, text_qkv, layout)
    return _unpadded_attention(latent_qkv, text_qkv, layout, backend)


mmdit.joint_attention = _attention  # the network has no place for a mask


def pad(noised: NoisedBatch, pad_id: int, length: int) -> NoisedBatch:
    """Return the micro-batch padded to B x L positions."""
    layout = noised.layout
    place = layout.sample_of_token * length + layout.position
    tokens = noised.noised_tokens.new_full((layout.num_samples * length,), pad_id)
    return replace(
        noised,
        noised_tokens=tokens.index_copy(0, place, noised.noised_tokens),
        layout=PaddedLayout(layout, length),
        positions=place.index_select(0, noised.positions),
    )


class WholeBackbone(nn.ModuleList):
    """Blocks that are recomputed all at once: a loop over them gets one block, which runs all of them.

    The names of the parameters are unchanged.
    """

    def __iter__(self) -> Iterator[Callable[..., Any]]:  # type: ignore[override]
        yield self._recomputed

    def _recomputed(self, *arguments: Any) -> Any:
        return checkpoint(self._all, *arguments, use_reentrant=False, preserve_rng_state=False)

    def _all(self, text: Tensor, latent: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        *blocks, last_block = super().__iter__()
        *others, read = arguments
        for block in blocks:
            text, latent = block(text, latent, *others)
        return last_block(text, latent, *others, read)


class OldPractice(Trainer):
    """- padding: samples are padded to the most positions, under one dense attention with a mask of keys
    - head: logits of the whole vocabulary at every position, all at once
    - reads: three losses and an accuracy are read from the device in each step, and the losses searched for NaN
    - recompute: activation checkpointing around the whole backbone
    """

    def __init__(self, config: RunConfig, practices: frozenset[Practice]):
        super().__init__(config)
        self.practices = practices
        self.read: dict[str, float] = {}

    def __enter__(self) -> OldPractice:
        super().__enter__()
        if "recompute" in self.practices:
            model = self.engine.unwrapped_model
            model.blocks = WholeBackbone(model.blocks)
        return self

    def accumulate(self, noised: Sequence[NoisedBatch]) -> Iterator[NoisedBatch]:
        manifest = self.components.store.manifest
        for batch in super().accumulate(noised):
            yield pad(batch, manifest.pad_id, manifest.max_length) if "padding" in self.practices else batch

    def loss(self, batch: NoisedBatch, totals: StepTotals) -> Tensor:
        if not self.practices & {"head", "reads"}:
            return super().loss(batch, totals)
        loss, sums = self.components.objective(self._with_logits, batch, totals.counts)
        if "reads" in self.practices:
            self._read(loss, sums)
        self.log.add(loss, sums, batch)
        return loss

    def _with_logits(
        self,
        tokens: Tensor,
        latents: Tensor,
        t_text: Tensor,
        t_latent: Tensor,
        layout: PackedLayout,
        positions: Tensor,
        targets: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Stand in for the network: return what it returns for `targets`, computed from logits."""
        rows, labels = positions, targets
        if "head" in self.practices:
            rows = torch.arange(len(tokens), device=tokens.device)
            labels = torch.full_like(tokens, IGNORED).index_copy(0, positions, targets)
        logits, latent, length_logits, *_ = self.engine.forward(tokens, latents, t_text, t_latent, layout, rows)
        nll = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
        if "reads" in self.practices:
            self._correct = (logits.detach().argmax(-1) == labels)[labels != IGNORED]
        return nll.index_select(0, positions) if "head" in self.practices else nll, latent, length_logits

    def _read(self, loss: Tensor, sums: Tensor) -> None:
        cells = self.components.objective.num_bins
        losses = {"loss": loss, "text": sums[:cells].sum(), "latent": sums[cells : 2 * cells].sum()}
        for name, value in losses.items():
            if torch.isnan(value).any().item():
                raise FloatingPointError(f"{name} is not a number")
        self.read = {name: value.item() for name, value in losses.items()}
        self.read["accuracy"] = self._correct.float().mean().item()
