"""MMDiT (Stable Diffusion 3, arXiv 2403.03206, figure 2) over text tokens and embedding latents.

Two streams with separate parameters share one joint attention per block. The network knows nothing of modes, losses or
engines: the two noise times of a sample determine its mode (t = 0 is data, t = 1 is pure noise).

Shape letters: B samples, N text tokens of the whole unpadded micro-batch, M latent tokens of a sample,
D width of the text stream, E width of the latent stream, T width of the conditioning (in names of streams: rows of any
stream), C latent channels, H heads, K width of a head, P positions to predict, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor, nn

from mmldlm.batch import PackedLayout
from mmldlm.model.activation_checkpoint import KEEP_ALL, MemoryConfig, checkpoint_blocks
from mmldlm.model.attention import Backend, JointRows, attend_jointly, joint_attention, rows_to_attend
from mmldlm.model.heads import LengthHead, LossWeights, TextHead
from mmldlm.model.initial_weights import InitialWeights, Normal
from mmldlm.model.layers import (
    FeedForward,
    HeadNorm,
    Linear,
    ModulatedLinear,
    Modulation,
    ModulationOut,
    TimeEmbedding,
    modulate_at_once,
    rotary_angles,
)
from mmldlm.model.ops import SampleRows, Stream, gather_rows, gpu_kernels, load_gpu_kernels, modulated, runs_on_cpu
from mmldlm.model.parts import Part, part_of
from mmldlm.settings.declaration import setting

Precision = Literal["fp32", "bf16", "fp16"]
DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and variants of the network."""

    depth: int = setting(
        4, "number of MMDiT blocks", at_least=1, advice="Change it together with the width; configs/ has four sizes"
    )
    width: int = setting(256, "width D of the text stream", at_least=8)
    latent_width: int | None = setting(
        None,
        "width E of the latent stream; null: the channels of a latent vector, but at least 32 and width / 4, "
        "and at most width",
        at_least=8,
        advice="A stream that is narrower than the latents cannot pass them on. With many latent tokens it may be "
        "wider than the default",
    )
    num_heads: int = setting(
        4, "heads of the joint attention", at_least=1, advice="Heads of 64 channels are usual: width / 64"
    )
    mlp: Literal["swiglu", "gelu"] = setting("swiglu", "type of feed-forward network")
    mlp_ratio: float = setting(
        4.0,
        "hidden width of the feed-forward network, as a multiple of its stream's width. swiglu takes 2/3 of "
        "that, which gives it as many parameters as gelu",
        above=0,
    )
    conditioning_width: int = setting(256, "width T of the noise-time embedding", at_least=8)
    modulation_rank: int = setting(64, "rank of the modulation's factored projection; 0: one full matrix", at_least=0)
    tie_embeddings: bool = setting(True, "share one matrix between token embedding and text head")
    rope_base: float = setting(10_000.0, "base of the rotary position embedding", above=1)
    dropout: float = setting(
        0.0,
        "dropout after attention and feed-forward",
        at_least=0,
        below=1,
        advice="Use it for a small corpus that is read many times, if the held-out loss rises. The curve then depends "
        "on the number of processes",
    )

    def __post_init__(self) -> None:
        if self.width % (2 * self.num_heads):
            raise ValueError(
                f"num_heads: model.width {self.width} must be a multiple of 2 x num_heads, found {self.num_heads}"
            )

    @property
    def head_width(self) -> int:
        """Width K of a head."""
        return self.width // self.num_heads

    def resolve_latent_width(self, channels: int) -> int:
        """Return the width E of the latent stream for latents of so many channels."""
        return self.latent_width or max(32, self.width // 4, min(self.width, channels))


@dataclass(frozen=True)
class DataShape:
    """Sizes and token ids that the data determine, from the store's manifest."""

    vocab_size: int
    mask_id: int
    pad_id: int
    max_length: int
    latent_tokens: int
    latent_channels: int


class Prediction(NamedTuple):
    """Outputs of the network, all in float32."""

    text: Tensor  # logits [P, V], or, with targets, negative log likelihoods [P] or (with `text_terms`) [P, 3]
    latent: Tensor  # [B, M, C], of the configured prediction type
    length_logits: Tensor  # [B, max_length], column i is length i + 1
    log_variances: Tensor | None = None  # [2] of text and latent loss, only in training and if they are learned
    is_best: Tensor | None = None  # bool [ceil(P / 32)], only in training, see `TextHead.forward`


# Embedded noise times [B, T], or the modulations of attention and feed-forward, for text and latents.
Conditioning: TypeAlias = Tensor | tuple[Sequence[ModulationOut], Sequence[ModulationOut]]


class BlockStream(nn.Module):
    """One stream's part of a block: adaLN modulation, q, k and v, output projection and feed-forward."""

    def __init__(self, config: ModelConfig, width: int):
        super().__init__()
        self.heads = config.num_heads
        # Channels of q, k and v of both streams, since one attention joins them.
        joint = config.width
        self.modulation = Modulation(config.conditioning_width, width, branches=2, rank=config.modulation_rank)
        self.qkv = ModulatedLinear(width, 3 * joint, bias=False)
        self.head_norm = HeadNorm(config.head_width)
        self.out = Linear(joint, width, bias=False)
        self.mlp = FeedForward(width, config.mlp_ratio, config.mlp)
        self.dropout = nn.Dropout(config.dropout)

    def project(self, stream: Stream, mod: ModulationOut, rows: SampleRows | None) -> tuple[Tensor, Tensor]:
        """Return the stream [T, D] after its addition, and q, k and v [T, 3, H, K] of the modulated stream."""
        x_TD, qkv = self.qkv(stream, mod, rows)
        return x_TD, qkv.unflatten(-1, (3, self.heads, -1))

    def residual(
        self, x_TD: Tensor, attn_THK: Tensor, mods: Sequence[ModulationOut], rows: SampleRows | None, adds: bool
    ) -> Stream:
        """Return the stream with the gated outputs of attention and feed-forward. `adds`: add the second output now."""
        attended = Stream(x_TD, self.dropout(self.out(attn_THK.flatten(1))), mods[0].gate)
        x_TD, mlp_TD = self.mlp(attended, mods[1], rows)
        stream = Stream(x_TD, self.dropout(mlp_TD), mods[1].gate)
        return Stream(stream.added(rows)) if adds else stream


class Rows(NamedTuple):
    """Where the rows of both streams belong. Only the last block has `kept`: it keeps the tokens to predict."""

    text: SampleRows
    latent: SampleRows | None  # None if a sample has one latent token: row i belongs to sample i
    rotary: tuple[Tensor, Tensor]  # cosine and sine [N, K/2] of the tokens' positions
    attended: PackedLayout | JointRows  # see `rows_to_attend`
    backend: Backend
    kept: tuple[Tensor, SampleRows] | None = None  # positions int64 [P] of tokens, and their samples. None: all tokens


class MMDiTBlock(nn.Module):
    """Joint attention over both streams, then a feed-forward network for each (arXiv 2403.03206, figure 2b).

    The next reader of a stream makes the last addition to it: on a GPU the kernel of a norm adds in passing.
    """

    # Whether backward recomputes `forward` from its inputs. Then the block makes all additions, to keep fewer inputs.
    keeps_inputs_alone = False

    def __init__(self, config: ModelConfig, latent_width: int):
        super().__init__()
        self.text = BlockStream(config, config.width)
        self.latent = BlockStream(config, latent_width)

    def forward(self, text: Stream, latent: Stream, conditioning: Conditioning, rows: Rows) -> tuple[Stream, Stream]:
        """Update both streams: text [N, D], or [P, D] of the tokens to keep, and latents [B*M, E]."""
        if isinstance(conditioning, Tensor):
            conditioning = self.text.modulation(conditioning), self.latent.modulation(conditioning)
        text_mods, latent_mods = conditioning
        text_ND, text_qkv = self.text.project(text, text_mods[0], rows.text)
        latent_TE, latent_qkv = self.latent.project(latent, latent_mods[0], rows.latent)
        text_attn, latent_attn = self.attention(text_qkv, latent_qkv, rows)
        text_rows = rows.text
        if rows.kept is not None:  # nothing attends to the last block's outputs, so only predicted tokens continue
            positions_P, text_rows = rows.kept
            text_ND, text_attn = text_ND.index_select(0, positions_P), text_attn.index_select(0, positions_P)
        adds = self.keeps_inputs_alone or runs_on_cpu(text_ND)
        text = self.text.residual(text_ND, text_attn, text_mods, text_rows, adds)
        return text, self.latent.residual(latent_TE, latent_attn, latent_mods, rows.latent, adds)

    def attention(self, text_qkv: Tensor, latent_qkv: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return the joint attention's outputs for text [N, H, K] and latents [B*M, H, K], with QK-norm.

        Text positions are rotary. Latent tokens have learned positions (`MMDiT.latent_position`).
        """
        if isinstance(rows.attended, JointRows) and (kernels := gpu_kernels(text_qkv)):
            latent, text = self.latent.head_norm, self.text.head_norm
            inputs = (latent_qkv, text_qkv, latent.q, latent.k, text.q, text.k, *rows.rotary, rows.attended.inverse)
            q, k, v = kernels.JointHeads.apply(*inputs)
            return attend_jointly(q, k, v, rows.attended, rows.backend, len(latent_qkv))[::-1]
        text_qkv, latent_qkv = self.text.head_norm(text_qkv, rows.rotary), self.latent.head_norm(latent_qkv, None)
        latent_out, text_out = joint_attention(latent_qkv, text_qkv, rows.attended, rows.backend)
        return text_out, latent_out


class MMDiT(nn.Module):
    """The denoiser of both modalities, with heads for tokens, latents and text lengths.

    Its parameters have arbitrary values, or none on the meta device, until `initial_weights` or others are loaded.

    Args:
        shape: What the data determine.
        text_terms: In training, return `heads.token_terms` instead of likelihoods alone.
        initial_loss_weights: Initial values of the learned weights of text and latent loss. None: not learned.
        latent_skip: Add a learned multiple of the noised latents to the latent prediction, for epsilon and v.
    """

    shards_blocks = False  # whether only a block's own `forward` sees the whole weights of the block

    def __init__(
        self,
        config: ModelConfig,
        shape: DataShape,
        backend: Backend = "sdpa",
        memory: MemoryConfig = KEEP_ALL,
        precision: Precision = "fp32",
        text_terms: bool = False,
        initial_loss_weights: tuple[float, float] | None = None,
        latent_skip: bool = False,
    ):
        super().__init__()
        width, conditioning = config.width, config.conditioning_width
        latent_width = config.resolve_latent_width(shape.latent_channels)
        self.config, self.shape, self.backend, self.precision = config, shape, backend, precision
        # Without `_weight` the embedding would draw weights. On the meta device PyTorch imports its compiler for that,
        # which takes seconds.
        self.token_embedding = nn.Embedding(shape.vocab_size, width, _weight=torch.empty(shape.vocab_size, width))
        self.latent_in = nn.Linear(shape.latent_channels, latent_width)
        self.latent_position = nn.Parameter(torch.empty(shape.latent_tokens, latent_width))
        self.text_time = TimeEmbedding(conditioning)
        self.latent_time = TimeEmbedding(conditioning)
        self.blocks = nn.ModuleList(MMDiTBlock(config, latent_width) for _ in range(config.depth))
        checkpoint_blocks(self.blocks, memory, uses_rng=config.dropout > 0)
        self.text_final = Modulation(conditioning, width, branches=1, rank=config.modulation_rank)
        self.latent_final = Modulation(conditioning, latent_width, branches=1, rank=config.modulation_rank)
        self.text_out = ModulatedLinear(width, width)
        self.text_head = TextHead(width, shape.vocab_size, (shape.mask_id, shape.pad_id), config.tie_embeddings)
        self.latent_head = nn.Linear(latent_width, shape.latent_channels)
        self.latent_skip = nn.Linear(conditioning, shape.latent_channels) if latent_skip else None
        self.length_head = LengthHead(latent_width, conditioning, shape.max_length)
        self.text_terms = text_terms
        self.loss_weights = None if initial_loss_weights is None else LossWeights(initial_loss_weights)

    def initial_weights(self, seed: int) -> InitialWeights:
        """Return the initial values of all parameters.

        | part                                            | value                                            |
        |-------------------------------------------------|--------------------------------------------------|
        | matrices                                        | normal, standard deviation 1 / sqrt(inputs)      |
        | projections back into a residual stream         | the same, divided by sqrt(2 x depth)             |
        | embeddings, untied head                         | normal, 0.02 (logits start near 0: loss log V)   |
        | last layer of the modulation, gates included    | zero (adaLN-zero: each block starts as identity) |
        | latent head and skip, last layer of length head | zero: predictions start at 0                     |
        | biases, norm scales                             | 0, 1                                             |
        """
        shapes = {name: parameter.shape for name, parameter in self.named_parameters()}
        return InitialWeights({name: self._initial_distribution(name) for name in shapes}, shapes, seed)

    def _initial_distribution(self, name: str) -> Normal:
        owner, _, leaf = name.rpartition(".")
        module, parent = self.get_submodule(owner), self.get_submodule(owner.rpartition(".")[0])
        if isinstance(module, HeadNorm):
            return Normal(mean=1.0)
        if isinstance(module, LossWeights):
            return Normal(mean=module.initial)
        if name in ("latent_position", "token_embedding.weight", "text_head.weight"):
            return Normal(0.02)
        is_zero = owner in ("latent_head", "latent_skip", "length_head.out")
        if leaf == "bias" or is_zero or (isinstance(parent, Modulation) and module is parent.up):
            return Normal()
        assert isinstance(module, nn.Linear), name
        residual = owner.endswith(("text.out", "latent.out", "mlp.down"))
        return Normal(((2 * self.config.depth) ** -0.5 if residual else 1.0) * module.in_features**-0.5)

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
        """Denoise both modalities. Matrix products run in `precision`, everything else in float32.

        Args:
            noised_tokens: int64 [N].
            noised_latents: float32 [B, M, C].
            t_text: Noise times of the tokens, [B] in [0, 1].
            t_latent: Noise times of the latents, [B] in [0, 1].
            layout: The samples of the tokens.
            positions: int64 [P], the tokens to predict. The text head runs on these alone.
            targets: int64 [P], their true tokens. If given, the text head returns likelihoods instead of logits.
        """
        dtype = DTYPES[self.precision]
        # We enter autocast here, so that it is the same under every engine, in training and in inference. Triton
        # launches kernels on the current device.
        autocast = torch.autocast(noised_latents.device.type, dtype, enabled=dtype != torch.float32)
        with torch.cuda.device(noised_latents.get_device()), autocast:
            if noised_latents.is_cuda:
                load_gpu_kernels(noised_latents.device)
            latent_time_BT = self.latent_time(t_latent)
            conditioning_BT = self.text_time(t_text) + latent_time_BT
            # Both streams run in float32, also under engines that hold the weights in half precision.
            latent_BME = self.latent_in(noised_latents.to(self.latent_in.weight.dtype)).float() + self.latent_position
            # The length head sees neither the blocks nor t_text: generation draws a length before there is any text.
            length_logits = self.length_head(latent_BME, latent_time_BT)
            text = Stream(self.token_embedding(noised_tokens).float())
            latent = Stream(latent_BME.flatten(0, 1))
            rows = self._rows(layout)
            predicted = SampleRows.of(rows.text.ids.index_select(0, positions), layout.num_samples)
            *blocks, last_block = zip(self.blocks, self._block_conditioning(conditioning_BT), strict=True)
            for block, conditioning in blocks:
                text, latent = block(text, latent, conditioning, rows)
            text, latent = last_block[0](text, latent, last_block[1], rows._replace(kept=(positions, predicted)))

            text_pred, is_best = self.predict_text(text, conditioning_BT, predicted, targets)
            latent_pred = self._predict_latents(latent, conditioning_BT, rows.latent, noised_latents)
            log_variances = None if self.loss_weights is None or not self.training else self.loss_weights()
            return Prediction(text_pred, latent_pred, length_logits, log_variances, is_best)

    def _rows(self, layout: PackedLayout) -> Rows:
        """Return where the rows of a micro-batch belong."""
        count, latents = layout.num_samples, layout.sample_of_latent
        return Rows(
            text=SampleRows.of(layout.sample_of_token, count),
            latent=None if latents is None else SampleRows.of(latents, count),
            rotary=rotary_angles(layout.position, self.config.head_width, self.config.rope_base),
            attended=rows_to_attend(self.backend, layout, self.shape.max_length),
            backend=self.backend,
        )

    def _block_conditioning(self, conditioning_BT: Tensor) -> Sequence[Conditioning]:
        """Return the conditioning of each block. On a GPU one product for all blocks saves many small kernels."""
        if self.shards_blocks or runs_on_cpu(conditioning_BT):
            return [conditioning_BT for _ in self.blocks]
        blocks: list[MMDiTBlock] = [*self.blocks]
        text = modulate_at_once([block.text.modulation for block in blocks], conditioning_BT)
        latent = modulate_at_once([block.latent.modulation for block in blocks], conditioning_BT)
        return list(zip(text, latent, strict=True))

    # The final gates are 1 + adaLN's gate, since gradients must pass at initialization, where adaLN's gate is zero.

    def predict_text(
        self, text: Stream, conditioning_BT: Tensor, rows: SampleRows, targets_P: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return `Prediction.text` and `is_best`. `rows` has the samples of the tokens to predict."""
        (final,) = self.text_final(conditioning_BT)
        hidden_PD = self.text_out(text, final, rows)[1] * gather_rows(1 + final.gate, rows)
        # Validation's objective takes likelihoods alone (`Objective.for_validation`).
        terms = self.training and self.text_terms
        return self.text_head(hidden_PD, self.token_embedding.weight, targets_P, terms)

    def _predict_latents(
        self, latent: Stream, conditioning_BT: Tensor, rows: SampleRows | None, noised_BMC: Tensor
    ) -> Tensor:
        """Return `Prediction.latent`. `rows` has the samples of the latent tokens."""
        (final,) = self.latent_final(conditioning_BT)
        hidden_TE = modulated(latent, final.shift_scale, rows)[1] * gather_rows(1 + final.gate, rows)
        # A copy, since a view that is changed in place would lose FSDP2's hook, which starts the backward pass.
        latent_BMC: Tensor = self.latent_head(hidden_TE).unflatten(0, noised_BMC.shape[:2]).to(torch.float32, copy=True)
        if self.latent_skip is None:
            return latent_BMC
        # Epsilon and v contain a multiple of z in full precision, which no norm may touch (EDM, arXiv 2206.00364). For
        # x0 the skip would be a shortcut past the text, since z is close to x0 at most times (docs/method.md).
        return latent_BMC + self.latent_skip(conditioning_BT).float()[:, None] * noised_BMC


def count_parameters(model: MMDiT, trainable_only: bool = False) -> dict[str, int]:
    """Return the number of parameters of each part. A tied head matrix counts for the text encoder alone."""
    counts: dict[str, int] = dict.fromkeys(get_args(Part), 0)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or not trainable_only:
            counts[part_of(name)] = counts.get(part_of(name), 0) + parameter.numel()
    return counts
