"""`MaskedInverter`: texts from an embedding by masked diffusion, as jina-ai/embedding-inversion-demo trains it.

Published as arXiv 2602.11047. Theirs, by the source at commit 7b63e9f: the embedding, through an MLP, reaches the
tokens by adaLN-Zero alone, and no noise time does. Every token is masked with probability 0.1, since the source clamps
1 - 0.999^u, at most 0.001, to 0.1 and more. The loss of a masked token weighs 1 / that probability. A text is decoded
in 8 passes, the most confident tokens first.

Ours: size, vocabulary, samples, optimizer and learning rate, and no average of the weights. Their texts all have 32
tokens, so nothing of theirs finds a length: here the true length is given.

Shape letters: B texts, M latent tokens, C latent channels, L positions, D width, V tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from benchmarks.common.causal_decoder import Block, Opponent
from mmldlm.data.manifest import Manifest
from mmldlm.model.mmdit import ModelConfig

SHARE = 0.1  # of the tokens that are masked


class ConditionedBlock(Block):
    """Attention in both directions and an MLP, each modulated and gated by the embedding (adaLN-Zero)."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.modulation = nn.Linear(config.width, 6 * config.width)

    def forward(self, x_BLD: Tensor, given_BD: Tensor, is_seen: Tensor) -> Tensor:  # type: ignore[override]
        scale, shift, gate, mlp_scale, mlp_shift, mlp_gate = self.modulation(given_BD)[:, None].chunk(6, dim=-1)
        qkv = self.qkv(self.norm(x_BLD) * (1 + scale) + shift).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        queries, keys, values = qkv
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=is_seen)
        x_BLD = x_BLD + gate * self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        norm, *mlp = self.mlp
        hidden = nn.Sequential(*mlp)(norm(x_BLD) * (1 + mlp_scale) + mlp_shift)
        return x_BLD + mlp_gate * self.dropout(hidden)


class MaskedInverter(Opponent):
    """The network, with two blocks more than the config's, which has a latent stream instead.

    Args:
        lowest, highest: The share of a text's tokens that is masked is drawn between these.
    """

    def __init__(self, config: ModelConfig, manifest: Manifest, lowest: float = SHARE, highest: float = SHARE):
        super().__init__()
        width, latent = config.width, manifest.latent
        self.lowest, self.highest, self.mask_id, self.special = lowest, highest, manifest.mask_id, [manifest.pad_id]
        self.special.append(self.mask_id)
        self.given = nn.Sequential(
            nn.Linear(latent.tokens * latent.channels, width), nn.GELU(), nn.Linear(width, width)
        )
        self.tokens = nn.Embedding(manifest.vocab_size, width)
        self.positions = nn.Embedding(manifest.max_length, width)
        self.blocks = nn.ModuleList(ConditionedBlock(config) for _ in range(config.depth + 2))
        self.norm, self.modulation = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        for name, parameter in self.named_parameters():
            if "modulation" in name:
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, latents_BMC: Tensor, tokens_BL: Tensor, is_text_BL: Tensor) -> Tensor:
        """Return logits [B, L, V]."""
        given_BD = self.given(latents_BMC.flatten(1))
        x_BLD = self.tokens(tokens_BL) + self.positions.weight[: tokens_BL.shape[1]]
        for block in self.blocks:
            x_BLD = block(x_BLD, given_BD, is_text_BL[:, None, None])
        scale, shift = self.modulation(given_BD)[:, None].chunk(2, dim=-1)
        logits = F.linear(self.norm(x_BLD) * (1 + scale) + shift, self.tokens.weight)
        return logits.index_fill(-1, torch.tensor(self.special), -1e9)

    def nats(self, latents_BMC: Tensor, texts: Sequence[Tensor]) -> Tensor:
        """Return the nats [B, longest] of masked tokens, divided by the share that is masked, and 0 elsewhere.

        Training draws the masks anew. Evaluation has the same masks in each call.
        """
        tokens_BL = pad_sequence(list(texts), batch_first=True, padding_value=-1)
        is_text_BL = tokens_BL >= 0
        with torch.random.fork_rng(enabled=not self.training):
            if not self.training:
                torch.manual_seed(0)
            share_B1 = self.lowest + (self.highest - self.lowest) * torch.rand(len(texts), 1)
            masked_BL = (torch.rand(tokens_BL.shape) < share_B1) & is_text_BL
        logits = self(latents_BMC, tokens_BL.masked_fill(masked_BL | ~is_text_BL, self.mask_id), is_text_BL)
        nats_BL = F.cross_entropy(logits.transpose(1, 2), tokens_BL.masked_fill(~masked_BL, -100), reduction="none")
        return nats_BL / share_B1

    @torch.no_grad()
    def generate(self, latents_BMC: Tensor, lengths: Sequence[int], passes: int) -> list[list[int]]:
        """Return a text of each length. Each of `passes` passes unmasks an equal part, the most confident tokens."""
        lengths_B1 = torch.tensor(lengths)[:, None]
        is_text_BL = torch.arange(max(lengths)) < lengths_B1
        tokens_BL = torch.full(is_text_BL.shape, self.mask_id)
        for done in range(1, passes + 1):
            is_masked_BL = is_text_BL & (tokens_BL == self.mask_id)
            p_BL, best_BL = self(latents_BMC, tokens_BL, is_text_BL).softmax(-1).max(-1)
            rank_BL = p_BL.masked_fill(~is_masked_BL, -1).argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
            wanted_B1 = (lengths_B1 * done / passes).ceil().long() - (is_text_BL & ~is_masked_BL).sum(1, keepdim=True)
            tokens_BL = torch.where(is_masked_BL & (rank_BL < wanted_B1), best_BL, tokens_BL)
        return [text[:length] for text, length in zip(tokens_BL.tolist(), lengths, strict=True)]
