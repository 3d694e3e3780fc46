"""`CausalDecoder`: texts from their latents, token by token, as GPT-2 has them.

Shape letters: B texts, M latent tokens, C latent channels, L positions, D width, V tokens and the end, K beams.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mmldlm.data.manifest import Manifest
from mmldlm.model.mmdit import ModelConfig


class Block(nn.Module):
    """Causal attention and an MLP, both after a norm."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        width, self.heads = config.width, config.num_heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        mlp = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.mlp, self.dropout = nn.Sequential(nn.LayerNorm(width), *mlp), nn.Dropout(config.dropout)

    def forward(self, x_BLD: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output, and the keys and values [2, B, heads, L, D / heads] of `past` and these positions."""
        qkv = self.qkv(self.norm(x_BLD)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        present = qkv[1:] if past is None else torch.cat([past, qkv[1:]], dim=-2)
        keys, values = present
        attended = F.scaled_dot_product_attention(qkv[0], keys, values, is_causal=past is None)
        x_BLD = x_BLD + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        return x_BLD + self.dropout(self.mlp(x_BLD)), present


class Opponent(nn.Module):
    """A network that writes texts from latents, and learns it by `nats`."""

    def nats(self, latents_BMC: Tensor, texts: Sequence[Tensor]) -> Tensor:
        """Return the loss of each position of each text [B, positions], 0 after its last."""
        raise NotImplementedError


class CausalDecoder(Opponent):
    """A causal transformer over latents, tokens and an end, with learned positions and a tied head.

    Two blocks more than the config's network, which has parameters for noise times and a latent stream instead.
    """

    def __init__(self, config: ModelConfig, manifest: Manifest):
        super().__init__()
        self.end, self.max_length = manifest.vocab_size, manifest.max_length
        self.latents = nn.Linear(manifest.latent.channels, config.width)
        self.tokens = nn.Embedding(self.end + 1, config.width)
        self.positions = nn.Embedding(manifest.latent.tokens + self.max_length, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth + 2))
        self.norm = nn.LayerNorm(config.width)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x_BLD: Tensor, past: Sequence[Tensor] = ()) -> tuple[Tensor, list[Tensor]]:
        """Return logits [B, L, V] of what follows each embedded latent or token, and the `past` of the next call.

        A call with a `past`, each block's keys and values of all positions before, is for one position.
        """
        start, present = past[0].shape[-2] if past else 0, []
        x_BLD = x_BLD + self.positions.weight[start : start + x_BLD.shape[1]]
        for number, block in enumerate(self.blocks):
            x_BLD, keys_and_values = block(x_BLD, past[number] if past else None)
            present.append(keys_and_values)
        return F.linear(self.norm(x_BLD), self.tokens.weight), present

    def text_logits(self, latents_BMC: Tensor, tokens_BL: Tensor) -> Tensor:
        """Return logits [B, 1 + L, V] of the first token and of what follows each token."""
        logits, _ = self(torch.cat([self.latents(latents_BMC), self.tokens(tokens_BL)], dim=1))
        return logits[:, latents_BMC.shape[1] - 1 :]

    def nats(self, latents_BMC: Tensor, texts: Sequence[Tensor]) -> Tensor:
        """Return nats [B, 1 + longest] of the tokens of texts and their ends, 0 after them."""
        tokens = pad_sequence(list(texts), batch_first=True, padding_value=self.end)
        ended = [F.pad(text, (0, 1), value=self.end) for text in texts]
        targets = pad_sequence(ended, batch_first=True, padding_value=-100)  # which `cross_entropy` ignores
        logits = self.text_logits(latents_BMC, tokens).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), reduction="none").view_as(targets)

    @torch.no_grad()
    def likely_tokens(
        self, latents_BMC: Tensor, texts: Sequence[list[int]], mask_id: int, count: int
    ) -> list[list[int]]:
        """Return the likeliest tokens for the one [MASK] of each text, given the tokens before it."""
        tokens_BL = pad_sequence([torch.tensor(text) for text in texts], batch_first=True, padding_value=self.end)
        places = torch.tensor([text.index(mask_id) for text in texts])
        logits_BV = self.text_logits(latents_BMC, tokens_BL)[torch.arange(len(texts)), places, : self.end]
        return logits_BV.topk(count).indices.tolist()

    @torch.no_grad()
    def generate(self, latents_BMC: Tensor, beams: int) -> list[list[list[int]]]:
        """Return for each latent K texts, those of the highest mean log-probability of tokens and end first.

        A beam search finds them, which is greedy with one beam. A text ends at the length of the store's longest.
        """
        shape = len(latents_BMC), beams
        texts_BKL = torch.empty(*shape, 0, dtype=torch.int64)
        sums_BK, lengths_BK, is_ended_BK = torch.zeros(shape), torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
        sums_BK[:, 1:] = -math.inf  # before the first token all beams are the same
        first_rows_B1 = torch.arange(0, len(latents_BMC) * beams, beams)[:, None]
        x_BLD, past = self.latents(latents_BMC.repeat_interleave(beams, dim=0)), list[Tensor]()
        for length in range(self.max_length + 1):
            logits, past = self(x_BLD, past)
            log_p_BKV = logits[:, -1].log_softmax(-1).view(*shape, -1)
            # What has ended stays as it is, one candidate among the others.
            must_end = is_ended_BK | (length == self.max_length)
            log_p_BKV[..., : self.end].masked_fill_(must_end[..., None], -math.inf)
            log_p_BKV[..., self.end].masked_fill_(is_ended_BK, 0)
            lengths_BK = lengths_BK + ~is_ended_BK
            means_BKV = (sums_BK[..., None] + log_p_BKV) / lengths_BK[..., None]
            best_BK, candidate_BK = means_BKV.flatten(1).topk(beams)
            beam_BK, token_BK = candidate_BK // (self.end + 1), candidate_BK % (self.end + 1)
            lengths_BK, is_ended_BK = lengths_BK.gather(1, beam_BK), token_BK == self.end
            sums_BK = best_BK * lengths_BK
            texts_BKL = torch.cat([texts_BKL.take_along_dim(beam_BK[..., None], 1), token_BK[..., None]], dim=-1)
            if is_ended_BK.all():
                break
            x_BLD = self.tokens(token_BK.view(-1, 1))
            past = [keys_and_values[:, (first_rows_B1 + beam_BK).flatten()] for keys_and_values in past]
        return [[text[: text.index(self.end)] for text in texts] for texts in texts_BKL.tolist()]
