"""Text alone compared with MDLM (Sahoo et al., arXiv 2406.07524): bits per character at equal text and CPU time.

    python -m benchmarks mdlm [--steps 600] [--seeds 0 1 2] [--out FOLDER]

Trains a plain reimplementation of MDLM's network and loss, and this package's network and objective, on the same pieces
of characters in the same order, with the same optimizer. Both take turns of a few steps in one process with one thread,
so that other work on the machine slows both alike. The bound of held-out pieces is measured several times on the way,
by the same masks for both. The latents of ours are noise at t_latent = 1, as in `mmldlm evaluate` for text alone. No
mode of the trainer pins t_latent there, so this module calls network, noise and objective itself.

Shape letters: B pieces, L characters of a piece, D width, T width of the conditioning, H heads, K width of a head,
V symbols with [MASK], P masked characters.
"""

from __future__ import annotations

import math
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.common.report import RESULTS, circumstances, plain_parser, positive, print_status, write_json
from benchmarks.learning import lowercase_letters, ngram_bits
from mmldlm.batch import Batch
from mmldlm.data.prepare.readers.python_docs import PYTHON_DOCS, read_corpus
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.diffusion.gaussian import GaussianDiffusion, LatentConfig
from mmldlm.diffusion.masked import MaskedDiffusion, TextConfig
from mmldlm.diffusion.noise import draw_noise, mode_weights
from mmldlm.diffusion.objective import LossConfig, NoisedBatch, Objective
from mmldlm.evaluation import BITS
from mmldlm.model.mmdit import DataShape, MMDiT, ModelConfig
from mmldlm.optim.ema import EmaConfig, EmaWeights, decay_at

# Sizes of both networks.
DEPTH, WIDTH, HEADS, CONDITIONING = 4, 128, 4, 128
# Training of both: MDLM's optimizer, clipping and EMA. Its rate of 3e-4 is for 110 million parameters; this is its best
# one here of 1e-3, 2e-3 and 4e-3. Its dropout is left out, as each piece is read once.
LR, WARMUP_STEPS, BETAS, CLIP_NORM, EMA = 2e-3, 100, (0.9, 0.999), 1.0, EmaConfig(decay=0.9999)
LENGTH, BATCH = 128, 16  # characters of a piece, pieces of a step
HELD_OUT_FILES = 16  # one source file in so many is held out
HELD_OUT_PIECES, HELD_OUT_SEED = 256, 1000  # pieces that are measured, and the seed of their masks
POINTS = 6  # measurements on the way
TURN = 5  # steps that a network takes at a time
LATENT_CHANNELS = 8


# --- MDLM -----------------------------------------------------------------------------------------

MASK_EPS = 1e-3  # at t = 1 a character is masked with probability 1 - eps; no time is below it


def rotate(x_BLHK: Tensor) -> Tensor:
    """Rotate queries or keys by position, channel pairs (k, k + K / 2) (RoFormer, arXiv 2104.09864, eq. 34)."""
    length, half = x_BLHK.shape[1], x_BLHK.shape[-1] // 2
    frequency = 10_000.0 ** (-torch.arange(half) / half)
    angle = (torch.arange(length)[:, None] * frequency)[:, None]  # [L, 1, K/2]
    first, second = x_BLHK.split(half, dim=-1)
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], dim=-1)


def zeros(linear: nn.Linear) -> nn.Linear:
    """Set a linear layer to zero."""
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


class DiTBlock(nn.Module):
    """Bidirectional attention and a GELU feed-forward, each modulated by adaLN-zero (DiT, arXiv 2212.09748)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(approximate="tanh"), nn.Linear(4 * WIDTH, WIDTH))
        self.modulation = zeros(nn.Linear(CONDITIONING, 6 * WIDTH))

    def forward(self, x_BLD: Tensor, conditioning_BT: Tensor) -> Tensor:
        """Return the updated stream [B, L, D]."""
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.modulation(conditioning_BT)[:, None].chunk(6, dim=-1)
        hidden = self.attention_norm(x_BLD) * (1 + scale) + shift
        q, k, v = self.qkv(hidden).unflatten(-1, (3, HEADS, -1)).unbind(2)
        heads = (rotate(q).transpose(1, 2), rotate(k).transpose(1, 2), v.transpose(1, 2))
        attended = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        x_BLD = x_BLD + gate * self.out(attended)
        return x_BLD + mlp_gate * self.mlp(self.mlp_norm(x_BLD) * (1 + mlp_scale) + mlp_shift)


class MDLM(nn.Module):
    """The DiT of MDLM with its initialization and the SUBS parameterization (section 3.2.3).

    Args:
        vocab_size: Symbols V, [MASK] included.
        mask_id: Id of [MASK].
        time_conditioned: Whether the network sees the noise level; MDLM is published with and without (appendix E.5).
    """

    def __init__(self, vocab_size: int, mask_id: int, time_conditioned: bool = True):
        super().__init__()
        self.mask_id, self.time_conditioned = mask_id, time_conditioned
        self.embedding = nn.Embedding(vocab_size, WIDTH)
        nn.init.uniform_(self.embedding.weight, -(WIDTH**-0.5), WIDTH**-0.5)
        self.time = nn.Sequential(nn.Linear(256, CONDITIONING), nn.SiLU(), nn.Linear(CONDITIONING, CONDITIONING))
        self.blocks = nn.ModuleList(DiTBlock() for _ in range(DEPTH))
        self.final_norm = nn.LayerNorm(WIDTH, bias=False)
        self.final_modulation = zeros(nn.Linear(CONDITIONING, 2 * WIDTH))
        self.head = zeros(nn.Linear(WIDTH, vocab_size))

    def forward(self, tokens_BL: Tensor, t_B: Tensor) -> Tensor:
        """Return the log probabilities of the clean symbols, [B, L, V].

        [MASK] has probability zero, and a symbol that is not masked carries over with probability one.
        """
        # The total noise of the log-linear schedule: alpha = exp(-sigma) (section 3.5).
        sigma_B = -torch.log1p(-(1 - MASK_EPS) * t_B) * self.time_conditioned
        angle = sigma_B[:, None] * 10_000.0 ** (-torch.arange(128) / 128)
        conditioning = F.silu(self.time(torch.cat([angle.cos(), angle.sin()], dim=-1)))
        x_BLD = self.embedding(tokens_BL)
        for block in self.blocks:
            x_BLD = block(x_BLD, conditioning)
        shift, scale = self.final_modulation(conditioning)[:, None].chunk(2, dim=-1)
        logits = self.head(self.final_norm(x_BLD) * (1 + scale) + shift)
        logits[..., self.mask_id] = -math.inf
        carried = torch.full_like(logits, -math.inf).scatter(-1, tokens_BL[..., None], 0.0)
        return torch.where((tokens_BL == self.mask_id)[..., None], logits.log_softmax(-1), carried)


def mdlm_loss(network: nn.Module, mask_id: int, tokens_BL: Tensor, generator: torch.Generator) -> Tensor:
    """Return MDLM's loss in nats per character, a one-sample estimate of its continuous-time bound (eq. 10).

    Times are from a low-discrepancy grid over the batch, in [eps, 1] (section 3.5 and VDM, arXiv 2107.00630).
    """
    count = len(tokens_BL)
    t_B = (torch.rand(count, generator=generator) + torch.arange(count)) / count
    t_B = MASK_EPS + (1 - MASK_EPS) * t_B
    masked = torch.rand(tokens_BL.shape, generator=generator) < (1 - MASK_EPS) * t_B[:, None]
    log_p = network(tokens_BL.masked_fill(masked, mask_id), t_B)
    # -alpha' / (1 - alpha) = 1 / t. Symbols that carry over have a loss of zero.
    return -(log_p.gather(-1, tokens_BL[..., None])[..., 0] / t_B[:, None]).mean()


# --- the two networks in training -------------------------------------------------------------------


class Arm(ABC):
    """A network with its optimizer and its EMA.

    Args:
        network: The network.
        lr: Learning rate after the warmup.

    Attributes:
        seconds: CPU seconds of training so far.
        num_parameters: Parameters of the network.
    """

    def __init__(self, network: nn.Module, lr: float):
        self.network, self.lr, self.seconds, self._step = network, lr, 0.0, 0
        weights = list(network.parameters())
        self.num_parameters = sum(weight.numel() for weight in weights)
        self._optimizer = torch.optim.AdamW(weights, betas=BETAS, weight_decay=0.0, fused=True)
        self._ema = EmaWeights(weights)

    @abstractmethod
    def loss(self, step: int, tokens_BL: Tensor) -> Tensor:
        """Return the training loss of a step."""

    @abstractmethod
    def nll(self, noised: NoisedBatch) -> Tensor:
        """Return the negative log likelihood of each masked character, [P]."""

    def train(self, batches: Iterable[Tensor]) -> None:
        """Train one step on each batch [B, L]."""
        start = time.process_time()
        for tokens_BL in batches:
            self._optimizer.param_groups[0]["lr"] = self.lr * min(1.0, (self._step + 1) / WARMUP_STEPS)
            self._optimizer.zero_grad()
            self.loss(self._step, tokens_BL).backward()
            nn.utils.clip_grad_norm_(self.network.parameters(), CLIP_NORM)
            self._optimizer.step()
            self._ema.update(torch.tensor(True), decay_at(self._step, EMA))
            self._step += 1
        self.seconds += time.process_time() - start

    def measure(self, held_out: Sequence[NoisedBatch]) -> dict[str, float]:
        """Return `bits_per_character` of the trained weights and of their EMA."""
        trained = self.bits_per_character(held_out)
        self._ema.swap()
        ema = self.bits_per_character(held_out)
        self._ema.swap()
        return {"trained": trained, "ema": ema}

    @torch.no_grad()
    def bits_per_character(self, held_out: Sequence[NoisedBatch]) -> float:
        """Return the estimate of the bound in bits per character, see `evaluation.likelihood.text_bound`."""
        nats = sum(float((batch.token_weight * self.nll(batch)).sum()) for batch in held_out)
        return nats / sum(batch.layout.num_tokens for batch in held_out) * BITS


class MdlmArm(Arm):
    """MDLM, with its own masks and loss."""

    def __init__(self, tokenizer: Tokenizer, lr: float, seed: int):
        torch.manual_seed(seed)
        self._mask_id = tokenizer.mask_id
        super().__init__(MDLM(tokenizer.mask_id + 1, tokenizer.mask_id), lr)
        self._generator = torch.Generator().manual_seed(seed)

    def loss(self, step: int, tokens_BL: Tensor) -> Tensor:
        return mdlm_loss(self.network, self._mask_id, tokens_BL, self._generator)

    def nll(self, noised: NoisedBatch) -> Tensor:
        log_p = self.network(noised.noised_tokens.view(len(noised.t_text), -1), noised.t_text).flatten(0, 1)
        return -log_p[noised.positions].gather(-1, noised.targets[:, None])[:, 0]


class OurArm(Arm):
    """This package's network and objective, with the default masks."""

    def __init__(self, tokenizer: Tokenizer, lr: float, seed: int):
        config = ModelConfig(depth=DEPTH, width=WIDTH, num_heads=HEADS, conditioning_width=CONDITIONING, latent_width=8)
        shape = DataShape(tokenizer.vocab_size, tokenizer.mask_id, tokenizer.pad_id, LENGTH, 1, LATENT_CHANNELS)
        super().__init__(MMDiT(config, shape).init_weights(seed), lr)
        self._objective, self._seed = text_objective(tokenizer), seed

    def loss(self, step: int, tokens_BL: Tensor) -> Tensor:
        noised = corrupt(self._objective, tokens_BL, self._seed, step)
        return self._objective(self.network, noised, noised.counts.tolist())[0]

    def nll(self, noised: NoisedBatch) -> Tensor:
        nll: Tensor = self.network(*noised.inputs).text
        return nll


def text_objective(tokenizer: Tokenizer) -> Objective:
    """Return the default objective; with `corrupt` only its text and length losses are not zero."""
    latent = GaussianDiffusion(LatentConfig(), "cosine", max_norm=math.inf)
    return Objective(LossConfig(), MaskedDiffusion(tokenizer.mask_id, "elbo", TextConfig().masks), latent)


def corrupt(objective: Objective, tokens_BL: Tensor, seed: int, step: int) -> NoisedBatch:
    """Mask pieces for the text loss alone: the latents are noise. One grid of times over all of them."""
    count, length = tokens_BL.shape
    slots, latents = torch.arange(count), torch.zeros(count, 1, LATENT_CHANNELS)
    batch = Batch(tokens_BL.flatten(), latents, (length,) * count, slots, slots)
    noise = draw_noise(batch, seed, step, count, mode_weights("l2t"), TextConfig().sampler)
    return objective.corrupt(batch, replace(noise, t_latent=torch.ones_like(noise.t_latent)))


# --- measuring ------------------------------------------------------------------------------------


def character_pieces(tokenizer: Tokenizer) -> tuple[Tensor, Tensor]:
    """Return the corpus `python-docs` in pieces of characters, for training and held out; int64 [n, L] each.

    It has lower-case letters and single spaces, like text8. Held-out pieces are from other source files.
    """
    parts: tuple[list[str], list[str]] = ([], [])
    for document in read_corpus(PYTHON_DOCS):
        parts[zlib.crc32(document.source.encode()) % HELD_OUT_FILES == 0].append(lowercase_letters(document.text))
    ids = (torch.tensor(tokenizer.encode_batch([" ".join(part)])[0]) for part in parts)
    train, held_out = (each[: len(each) // LENGTH * LENGTH].view(-1, LENGTH) for each in ids)
    return train, held_out


def train_in_turns(
    arms: Mapping[str, Arm], batches: Tensor, held_out: Sequence[NoisedBatch]
) -> dict[str, list[dict[str, float]]]:
    """Train the arms in turns on the same batches [steps, B, L], and return the points of each one's curve."""
    curves: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    done = 0
    for part in batches.tensor_split(POINTS):
        for turn in part.split(TURN):
            for arm in arms.values():
                arm.train(turn)
        done += len(part)
        for name, arm in arms.items():
            point = {"step": done, "characters": batches[:done].numel(), "cpu_s": arm.seconds}
            curves[name].append(point | arm.measure(held_out))
            print_status(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in curves[name][-1].items()))
    return curves


# --- the page -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """Bits per character of both networks by seed, at one place of their curves."""

    mdlm: list[float]
    ours: list[float]

    @property
    def difference(self) -> float:
        """Mean over the seeds of ours less MDLM's."""
        return mean(self.ours) - mean(self.mdlm)

    @property
    def spread(self) -> float:
        """Difference of the highest and the lowest seed, of the network where it is larger."""
        return max(max(values) - min(values) for values in (self.mdlm, self.ours))


def compare(result: Mapping[str, Any], weights: str, axis: str, place: float) -> Comparison:
    """Compare by "trained" or "ema" weights at so many "characters" or "cpu_s", by linear interpolation."""
    values: dict[str, list[float]] = {
        name: [
            float(np.interp(place, [point[axis] for point in seed[name]], [point[weights] for point in seed[name]]))
            for seed in result["seeds"].values()
        ]
        for name in ("mdlm", "ours")
    }
    return Comparison(**values)


def places(result: Mapping[str, Any], axis: str) -> list[float]:
    """Return evenly spaced places on an axis that lie on all curves; the last one is where the shortest ends."""
    curves = [curve for seed in result["seeds"].values() for curve in seed.values()]
    first, last = max(curve[0][axis] for curve in curves), min(curve[-1][axis] for curve in curves)
    return [place for part in range(1, POINTS + 1) if (place := last * part / POINTS) >= first]


def mdlm_blocks(result: Mapping[str, Any]) -> dict[str, str]:
    """Return Markdown by name: the table of both curves, and what they end with as a sentence."""
    lines = [
        "| | MDLM | ours | ours less MDLM | MDLM, EMA | ours, EMA | ours less MDLM, EMA |",
        "|---" * 7 + "|",
    ]
    titles = {"characters": lambda place: f"{place / 1e6:.2f} million characters", "cpu_s": lambda s: f"{s:.0f} CPU s"}
    for axis, title in titles.items():
        for place in places(result, axis):
            row = [title(place)]
            for weights in ("trained", "ema"):
                both = compare(result, weights, axis, place)
                row += [f"{mean(both.mdlm):.3f}", f"{mean(both.ours):.3f}", f"{both.difference:+.3f}"]
            lines.append(f"| {' | '.join(row)} |")
    ends = []
    for axis, title in titles.items():
        place = places(result, axis)[-1]
        both = compare(result, "ema", axis, place)
        side = "below" if both.difference < 0 else "above"
        ends.append(
            f"{abs(both.difference):.3f} {side} MDLM's after {title(place)} (seeds differ by {both.spread:.3f})"
        )
    millions = {name: f"{count / 1e6:.2f} million parameters" for name, count in result["parameters"].items()}
    claim = (
        f"Text alone, on characters: network and objective of this package ({millions['ours']}) compared with a "
        f"reimplementation of MDLM ({millions['mdlm']}), with the same batches, optimizer and EMA. Its bound in bits "
        f"per character under the EMA, mean of {len(result['seeds'])} seeds, is {', and '.join(ends)}."
    )
    return {"mdlm": "\n".join(lines), "mdlm-claim": claim}


# --- the command ----------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    parser = plain_parser("mdlm", "Text alone compared with MDLM, on characters.")
    add = parser.add_argument
    add("--steps", type=positive, default=600, help="training steps (%(default)s)")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--lr", type=float, default=LR, help="learning rate of both after the warmup (%(default)s)")
    add("--out", type=Path, default=RESULTS, help="folder of mdlm.json (%(default)s)")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    tokenizer = Tokenizer.characters()
    train, held_out = character_pieces(tokenizer)
    order = np.random.default_rng(0).permutation(len(held_out))[:HELD_OUT_PIECES]
    objective = text_objective(tokenizer)
    parts = held_out[order].split(4 * BATCH)
    noised = [corrupt(objective, part, seed=HELD_OUT_SEED, step=number) for number, part in enumerate(parts)]
    symbols = tokenizer.mask_id
    unigram, bigram = ngram_bits(train.numpy(), held_out[order].numpy(), symbols)
    result = {
        "benchmark": "mdlm",
        **circumstances(torch.device("cpu")),
        "what": {"steps": options.steps, "lr": options.lr, "batch": BATCH, "length": LENGTH, "symbols": symbols},
        "pieces": {"train": len(train), "held_out": len(order)},
        "unigram": unigram,
        "bigram": bigram,
        "seeds": {},
    }
    for seed in options.seeds:
        arms: dict[str, Arm] = {
            "mdlm": MdlmArm(tokenizer, options.lr, seed),
            "ours": OurArm(tokenizer, options.lr, seed),
        }
        result["parameters"] = {name: arm.num_parameters for name, arm in arms.items()}
        drawn = torch.from_numpy(np.random.default_rng(seed).permutation(len(train))[: options.steps * BATCH])
        curves = train_in_turns(arms, train[drawn].view(-1, BATCH, LENGTH), noised)
        result["seeds"][str(seed)] = curves
        write_json(result, options.out, "mdlm")
    print("\n\n".join(mdlm_blocks(result).values()))
    return 0
