"""MMDiT (Stable Diffusion 3, arXiv 2403.03206, figure 2) over text tokens and embedding latents.

Two streams with parameters of their own meet in one joint attention a block. Nothing here knows of
modes, losses or engines: a sample's two noise times say what it is.

Shape letters: B samples, N text tokens of the whole unpadded micro-batch, M latent tokens of a sample,
D width of the text stream, E width of the latent stream, T width of the conditioning, C latent channels,
H heads, K width of a head, P positions to predict, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from mmldlm.batch import PackedLayout, pad_rows
from mmldlm.model.activation_checkpoint import KEEP_ALL, MemoryConfig, Recompute, recomputed
from mmldlm.model.attention import Backend, joint_attention
from mmldlm.model.cpu_linear import Linear
from mmldlm.model.heads import LengthHead, LossWeights, TextHead
from mmldlm.model.layers import (
    FeedForward,
    HeadNorm,
    ModulatedLinear,
    Modulation,
    ModulationOut,
    TimeEmbedding,
    rotary_angles,
)
from mmldlm.model.ops import add_gated, gather_rows, modulate
from mmldlm.model.parts import Part, part_of
from mmldlm.settings.fields import setting

Precision = Literal["fp32", "bf16", "fp16"]
DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class ModelConfig:
    depth: int = setting(4, "number of MMDiT blocks", at_least=1)
    width: int = setting(256, "width D of the text stream", at_least=8)
    latent_width: int | None = setting(None, "width E of the latent stream; null: width / 4, at least 32", at_least=8)
    num_heads: int = setting(4, "heads of the joint attention", at_least=1)
    mlp: Literal["swiglu", "gelu"] = setting("swiglu", "kind of feed-forward")
    mlp_ratio: float = setting(4.0, "feed-forward parameters as those of a GELU network this many widths wide", above=0)
    conditioning_width: int = setting(256, "width T of the noise-time embedding", at_least=8)
    modulation_rank: int = setting(64, "channels that the modulation is factored through; 0: not factored", at_least=0)
    tie_embeddings: bool = setting(True, "token embedding and text head share one matrix")
    rope_base: float = setting(10_000.0, "base of the rotary positions", above=1)
    dropout: float = setting(0.0, "dropout behind attention and feed-forward", at_least=0, below=1)

    def __post_init__(self) -> None:
        if self.width % (2 * self.num_heads):
            raise ValueError(
                f"num_heads: model.width {self.width} must be a multiple of 2 x num_heads, found {self.num_heads}"
            )

    @property
    def resolved_latent_width(self) -> int:
        return self.latent_width or max(32, self.width // 4)


@dataclass(frozen=True)
class DataShape:
    """What the model must know of the data; comes from the store's manifest."""

    vocab_size: int
    mask_id: int
    pad_id: int
    max_length: int
    latent_tokens: int
    latent_channels: int


class Prediction(NamedTuple):
    """All float32."""

    text: Tensor  # [P] negative log likelihoods where targets were given, [P, 3] with `text_terms`, else logits [P, V]
    latent: Tensor  # [B, M, C], in the configured parametrization
    length_logits: Tensor  # [B, max_length]; column i stands for length i + 1
    log_variances: Tensor | None = None  # [2] of text and latent loss, in training, where they are learned


class BlockStream(nn.Module):
    """One stream's side of a block: modulated norms, fused qkv, output projection, feed-forward."""

    def __init__(self, config: ModelConfig, width: int, recompute: Recompute):
        super().__init__()
        self.heads = config.num_heads
        joint = config.width
        self.modulation = Modulation(config.conditioning_width, width, branches=2, rank=config.modulation_rank)
        self.qkv = ModulatedLinear(width, 3 * joint, bias=False)
        self.head_norm = HeadNorm(joint // config.num_heads)
        self.out = Linear(joint, width, bias=False)
        self.mlp = FeedForward(width, config.mlp_ratio, config.mlp, keeps_activation=recompute == "full")
        self.dropout = nn.Dropout(config.dropout)

    def project(self, x_TD: Tensor, attention: ModulationOut, rows: Tensor | None) -> Tensor:
        """q, k and v [T, 3, H, K], as `normalize` takes them."""
        return self.qkv(x_TD, attention, rows).unflatten(-1, (3, self.heads, -1))

    def normalize(self, qkv_T3HK: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """q and k normalized and, with `rotary`, turned by position; [T, 3, H, K]."""
        return self.head_norm(qkv_T3HK, rotary)

    def branch(
        self, x_TD: Tensor, attended_THK: Tensor, by: list[ModulationOut], rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The stream with what it attended to [T, D], and what the feed-forward makes of it [T, D]."""
        attention, mlp = by
        x_TD = add_gated(x_TD, attention.gate, self.dropout(self.out(attended_THK.flatten(1))), rows)
        return x_TD, self.dropout(self.mlp(x_TD, mlp, rows))

    def finish(self, x_TD: Tensor, attended_THK: Tensor, by: list[ModulationOut], rows: Tensor | None) -> Tensor:
        """`branch`, its second result added to the first."""
        x_TD, hidden_TD = BlockStream.branch(self, x_TD, attended_THK, by, rows)
        return add_gated(x_TD, by[1].gate, hidden_TD, rows)


class MMDiTBlock(nn.Module):
    def __init__(self, config: ModelConfig, recompute: Recompute = "none"):
        super().__init__()
        self.recompute, self.draws = recompute, config.dropout > 0
        self.text = BlockStream(config, config.width, recompute)
        self.latent = BlockStream(config, config.resolved_latent_width, recompute)

    def forward(
        self,
        text_ND: Tensor,
        latent_TE: Tensor,
        conditioning_BT: Tensor,
        rotary: tuple[Tensor, Tensor],
        layout: PackedLayout,
        backend: Backend,
        read_P: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Text [N, D] and latents [B*M, E] to the same shapes; with `read_P` text of these tokens only, [P, D].

        All tokens are attended to in any case. Only for those that are read is there more to do after it.
        """
        arguments = text_ND, latent_TE, conditioning_BT, rotary, layout, backend
        # In here and not around the module: what an engine hooks to the module runs once, not again in backward.
        if self._recomputes("full"):
            assert read_P is None, "the last block is not recomputed"
            text, latent = recomputed(self._branches, self.draws, *arguments)
            return add_gated(*text, layout.sample_of_token), add_gated(*latent, layout.sample_of_latent)
        text_out, latent_out, text_by, latent_by = self._attended(*arguments)
        sample_of_token = layout.sample_of_token
        if read_P is not None:
            text_ND, text_out, sample_of_token = (
                rows.index_select(0, read_P) for rows in (text_ND, text_out, sample_of_token)
            )
        return (
            self.text.finish(text_ND, text_out, text_by, sample_of_token),
            self.latent.finish(latent_TE, latent_out, latent_by, layout.sample_of_latent),
        )

    def _recomputes(self, kind: Recompute) -> bool:
        return self.recompute == kind and self.training and torch.is_grad_enabled()

    def _branches(self, *arguments: Any) -> tuple[tuple[Tensor, Tensor, Tensor], ...]:
        """Of each stream what `add_gated` takes: stream, gate, branch. What comes of it is not computed again."""
        text_ND, latent_TE, layout = arguments[0], arguments[1], arguments[4]
        text_out, latent_out, text_by, latent_by = self._attended(*arguments)
        text, text_branch = self.text.branch(text_ND, text_out, text_by, layout.sample_of_token)
        latent, latent_branch = self.latent.branch(latent_TE, latent_out, latent_by, layout.sample_of_latent)
        return (text, text_by[1].gate, text_branch), (latent, latent_by[1].gate, latent_branch)

    def _attended(
        self,
        text_ND: Tensor,
        latent_TE: Tensor,
        conditioning_BT: Tensor,
        rotary: tuple[Tensor, Tensor],
        layout: PackedLayout,
        backend: Backend,
    ) -> tuple[Tensor, Tensor, list[ModulationOut], list[ModulationOut]]:
        """What text [N, H, K] and latents [B*M, H, K] attend to, and the modulation of both."""
        text_by, latent_by = self.text.modulation(conditioning_BT), self.latent.modulation(conditioning_BT)
        text_qkv = self.text.project(text_ND, text_by[0], layout.sample_of_token)
        latent_qkv = self.latent.project(latent_TE, latent_by[0], layout.sample_of_latent)
        inputs = text_qkv, latent_qkv, rotary, layout, backend
        selective = self._recomputes("selective")
        text_out, latent_out = recomputed(self._attend, False, *inputs) if selective else self._attend(*inputs)
        return text_out, latent_out, text_by, latent_by

    def _attend(
        self,
        text_qkv: Tensor,
        latent_qkv: Tensor,
        rotary: tuple[Tensor, Tensor],
        layout: PackedLayout,
        backend: Backend,
    ) -> tuple[Tensor, Tensor]:
        text, latent = self.text.normalize(text_qkv, rotary), self.latent.normalize(latent_qkv, None)
        latent_out, text_out = joint_attention(latent, text, layout, backend)
        return text_out, latent_out


class MMDiT(nn.Module):
    def __init__(
        self,
        config: ModelConfig,
        shape: DataShape,
        backend: Backend = "sdpa",
        memory: MemoryConfig = KEEP_ALL,
        precision: Precision = "fp32",
        text_terms: bool = False,
        first_weights: tuple[float, float] | None = None,
        latent_skip: bool = False,
    ):
        """What only training asks for: `text_terms` of the head beside likelihoods (`heads.chunked_token_terms`), and
        learned weights of text and latent loss, which begin as `first_weights`.

        `latent_skip`: a learned multiple of the noised latents is part of the latent prediction, as epsilon and v take.
        """
        super().__init__()
        width, latent_width, conditioning = config.width, config.resolved_latent_width, config.conditioning_width
        self.config, self.shape, self.backend, self.precision = config, shape, backend, precision
        self.token_embedding = nn.Embedding(shape.vocab_size, width)
        self.latent_in = Linear(shape.latent_channels, latent_width)
        self.latent_position = nn.Parameter(torch.empty(shape.latent_tokens, latent_width))
        self.text_time = TimeEmbedding(conditioning)
        self.latent_time = TimeEmbedding(conditioning)
        self.blocks = nn.ModuleList(
            MMDiTBlock(config, memory.of_block(index, config.depth)) for index in range(config.depth)
        )
        self.text_final = Modulation(conditioning, width, branches=1, rank=config.modulation_rank)
        self.latent_final = Modulation(conditioning, latent_width, branches=1, rank=config.modulation_rank)
        self.text_out = ModulatedLinear(width, width)
        self.text_head = TextHead(width, shape.vocab_size, (shape.mask_id, shape.pad_id), config.tie_embeddings)
        self.latent_head = Linear(latent_width, shape.latent_channels)
        self.latent_skip = Linear(conditioning, shape.latent_channels) if latent_skip else None
        self.length_head = LengthHead(latent_width, conditioning, shape.max_length)
        self.text_terms = text_terms
        self.loss_weights = None if first_weights is None else LossWeights(first_weights)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """All initialization, in float32.

        | part                                      | value                                          |
        |-------------------------------------------|------------------------------------------------|
        | matrices                                  | normal, standard deviation 1 / sqrt(inputs)    |
        | projections back into a residual stream   | the same, divided by sqrt(2 x depth)           |
        | embeddings, untied head                   | normal 0.02 (logits start near 0: loss log V)  |
        | modulation: the last map, gates included  | zero (adaLN-zero: each block starts as identity)|
        | latent head and skip, length head's last | zero: predictions start at 0                 |
        | biases, norm scales                       | 0, 1                                           |
        """
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                residual = name.endswith(("text.out", "latent.out", "mlp.down"))
                scale = (2 * self.config.depth) ** -0.5 if residual else 1.0
                nn.init.normal_(module.weight, std=scale * module.in_features**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, HeadNorm):
                nn.init.ones_(module.q)
                nn.init.ones_(module.k)
        for module in self.modules():
            if isinstance(module, Modulation):
                nn.init.zeros_(module.up.weight)
        nn.init.zeros_(self.latent_head.weight)
        if self.latent_skip is not None:
            nn.init.zeros_(self.latent_skip.weight)
        nn.init.zeros_(self.length_head.out.weight)
        nn.init.normal_(self.latent_position, std=0.02)
        nn.init.normal_(self.token_embedding.weight, std=0.02)
        if self.text_head.weight is not None:
            nn.init.normal_(self.text_head.weight, std=0.02)

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
        """Denoise both modalities; with `precision` bf16 or fp16, matrix products take that, all else is float32.

        `noised_tokens` [N], `noised_latents` [B, M, C], noise times [B] in [0, 1], `positions` [P] the
        tokens to predict (the head runs on no others), `targets` [P] their true tokens.
        """
        dtype, predicted = DTYPES[self.precision], len(positions)
        if dtype != torch.float32 and noised_latents.device.type == "cpu" and self.backend == "sdpa":
            # A CPU's kernels for half precision are made anew for each shape, which takes as long as a few products.
            layout, noised_tokens, positions = layout.padded, pad_rows(noised_tokens), pad_rows(positions)
            targets = None if targets is None else pad_rows(targets)
        # In here, so that it is the same under every engine, in training and after.
        with torch.autocast(noised_latents.device.type, dtype, enabled=dtype != torch.float32):
            latent_time = self.latent_time(t_latent)
            conditioning = self.text_time(t_text) + latent_time
            # Both streams run in float32, also where an engine holds the weights in less.
            latent_BME = self.latent_in(noised_latents.to(self.latent_in.weight.dtype)).float() + self.latent_position
            length_logits = self.length_head(latent_BME, latent_time)
            text, latent = self.token_embedding(noised_tokens).float(), latent_BME.flatten(0, 1)
            rotary = rotary_angles(layout.position, self.config.width // self.config.num_heads, self.config.rope_base)
            *blocks, last_block = self.blocks
            for block in blocks:
                text, latent = block(text, latent, conditioning, rotary, layout, self.backend)
            text, latent = last_block(text, latent, conditioning, rotary, layout, self.backend, positions)

            (text_final,), (latent_final,) = self.text_final(conditioning), self.latent_final(conditioning)
            rows, latent_rows = layout.sample_of_token.index_select(0, positions), layout.sample_of_latent
            hidden = self.text_out(text, text_final, rows)
            # The gate of a read-out is one plus what adaLN gives: at the start it must pass the gradient.
            hidden = hidden * gather_rows(1 + text_final.gate, rows)
            terms = self.training and self.text_terms
            text_pred = self.text_head(hidden, self.token_embedding.weight, targets, terms)[:predicted]
            latent_hidden = modulate(latent, latent_final.shift, latent_final.scale, latent_rows)
            latent_hidden = latent_hidden * gather_rows(1 + latent_final.gate, latent_rows)
            latent_pred = self.latent_head(latent_hidden).float().unflatten(0, noised_latents.shape[:2])
            if self.latent_skip is not None:
                # Epsilon and v hold a part of z in full precision, no norm may touch it (EDM, arXiv 2206.00364).
                # For x0 it would be a shortcut past the text: z is near its x0 at most times (docs/method.md).
                skip = self.latent_skip(conditioning).float()[:, None]
                latent_pred = latent_pred + skip * noised_latents
            if self.loss_weights is None or not self.training:
                return Prediction(text_pred, latent_pred, length_logits)
            return Prediction(text_pred, latent_pred, length_logits, self.loss_weights())


def count_parameters(model: MMDiT, trainable_only: bool = False) -> dict[str, int]:
    """Parameters by part, each counted once; a tied head matrix with the text encoder."""
    counts: dict[str, int] = dict.fromkeys(get_args(Part), 0)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or not trainable_only:
            counts[part_of(name)] = counts.get(part_of(name), 0) + parameter.numel()
    return counts
