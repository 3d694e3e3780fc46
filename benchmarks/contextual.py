"""Latents of as many vectors as tokens (CCDD, arXiv 2510.03206) against text alone, at equal parameters and tokens.

    python -m benchmarks contextual [--seeds 0 1 2] [--steps 900]

All samples have L tokens, like the packed samples of the paper, so M = L latent tokens fit the layout as it is. The
latents are hidden states of a frozen masked language model, the network of the text arm under another seed: reduced to
C principal components, each with unit variance. They have the rotary positions of their tokens.

Two arms, with the same pieces, masks and numbers of parameters:

- text: one latent token of pure noise, which says nothing, in a narrow stream; other parameters are the text stream's.
- latents: t_latent and t_text are drawn independently, as in this trainer's `joint` mode.

The latents z are a function of the text x, so a text given its noised latents is no measure of the text. With the
latents' diffusion from t = 1 down to a time s > 0 as part of the model, for any path t_latent(t_text) that ends at s,

    -log p(x) <= text term given the latents along the path + 1/2 int_s^1 |dSNR/dt| E|z - zhat(z_t, x_t, t)|^2 dt

(VDM, arXiv 2107.00630, section 5; the KL divergence at t = 1 is 0, as alpha(1) = 0). s = 1 is the bound of text alone.
The code that the paper's authors published reports the exponential of the text term alone, along t_latent = t_text.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.common.report import RESULTS, circumstances, plain_parser, positive, print_status, write_json
from mmldlm.batch import Batch, PackedLayout
from mmldlm.data.prepare.documents import Document
from mmldlm.data.prepare.readers.python_docs import read_python_docs
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.diffusion.gaussian import GaussianDiffusion, LatentConfig
from mmldlm.diffusion.masked import MaskedDiffusion, TextConfig
from mmldlm.diffusion.noise import Noise, draw_noise, mode_weights
from mmldlm.diffusion.objective import LossConfig, NoisedBatch, Objective
from mmldlm.evaluation.statistics import BITS
from mmldlm.model.attention import Backend, JointRows, joint_attention
from mmldlm.model.cpu_half import CPUHalfMMDiT
from mmldlm.model.mmdit import DataShape, MMDiT, MMDiTBlock, ModelConfig, count_parameters
from mmldlm.optim.config import OptimConfig
from mmldlm.optim.lr_schedule import ScheduleConfig, lr_at
from mmldlm.optim.param_groups import parameter_groups

LENGTH = 32  # tokens of a sample (L)
CHANNELS = 8  # of a latent (C)
VOCAB = 512
BATCH = 64  # samples of a step
HELD_OUT_EVERY = 16  # one piece in 16 is held out
EVALUATED = 384  # held-out samples
TIMES = 4  # noise times for each of them
ENCODER_SEED, EVALUATION_SEED = 1000, 2000
OPTIM = OptimConfig(lr=1e-3)
DEPTH = 3
# Equal parameters, see `test_arms_have_equal_parameters`: one stream of 128 channels and a small one, or two of 96.
TEXT_MODEL = ModelConfig(DEPTH, width=128, latent_width=32, conditioning_width=128, modulation_rank=32)
JOINT_MODEL = ModelConfig(DEPTH, width=96, latent_width=96, conditioning_width=128, modulation_rank=32)
LEAST_TIMES = (0.3, 0.5, 0.7, 0.9)  # s of the bounds, beside 1
Times = Callable[[Tensor, Tensor], Tensor]  # t_latent from t_text and from independent times; all [B]
ARMS: dict[str, Times] = {
    "text": lambda t_text, _: torch.ones_like(t_text),
    "latents": lambda _, t_latent: t_latent,
}


class AlignedBlock(MMDiTBlock):
    """A block whose latent tokens have the rotary positions of the text tokens; for M = L in all samples."""

    def attention(
        self,
        text_qkv: Tensor,
        latent_qkv: Tensor,
        rotary: tuple[Tensor, Tensor],
        attended: PackedLayout | JointRows,
        backend: Backend,
    ) -> tuple[Tensor, Tensor]:
        # The rotary angles may have more rows than there are tokens, see `CPUHalfMMDiT`.
        cosine, sine = (angles[: len(latent_qkv)] for angles in rotary)
        text_qkv, latent_qkv = self.text.normalize(text_qkv, rotary), self.latent.normalize(latent_qkv, (cosine, sine))
        latent_out, text_out = joint_attention(latent_qkv, text_qkv, attended, backend)
        return text_out, latent_out


class AlignedMMDiT(CPUHalfMMDiT):
    """The network of the arms with latents."""

    block_type = AlignedBlock


def network(arm: str, tokenizer: Tokenizer, seed: int) -> MMDiT:
    """Return the network of an arm with its initial weights, in bf16."""
    tokens = 1 if arm == "text" else LENGTH
    shape = DataShape(tokenizer.vocab_size, tokenizer.mask_id, tokenizer.pad_id, LENGTH, tokens, CHANNELS)
    if arm == "text":
        return CPUHalfMMDiT(TEXT_MODEL, shape, precision="bf16").init_weights(seed)
    return AlignedMMDiT(JOINT_MODEL, shape, precision="bf16").init_weights(seed)


# --- data -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pieces:
    """Samples of L tokens, int64 [n, L], with their latents, float32 [n, L, C]."""

    tokens: Tensor
    latents: Tensor

    def batch(self, ids: np.ndarray) -> Batch:
        """Return the samples `ids`, int64 [B], as a micro-batch."""
        samples, slots = torch.from_numpy(ids), torch.arange(len(ids))
        return Batch(self.tokens[samples].flatten(), self.latents[samples], (LENGTH,) * len(ids), samples, slots)


def read_corpus() -> tuple[Tokenizer, Tensor, Tensor]:
    """Return the tokenizer of the embedded corpus and its pieces for training and evaluation, int64 [n, L]."""
    texts = [f"{document.text}\n" for document in read_python_docs() if isinstance(document, Document)]
    tokenizer = Tokenizer.train(texts, VOCAB)
    stream = torch.tensor(list(chain.from_iterable(tokenizer.encode_batch(texts))))
    pieces = stream[: len(stream) // LENGTH * LENGTH].view(-1, LENGTH)
    held_out = torch.arange(len(pieces)) % HELD_OUT_EVERY == 0
    return tokenizer, pieces[~held_out], pieces[held_out][:: len(pieces[held_out]) // EVALUATED][:EVALUATED]


@torch.no_grad()
def hidden_states(model: MMDiT, tokens: Tensor) -> Tensor:
    """Return the text stream before the last block, float32 [n, L, D], for clean tokens [n, L] without a latent."""
    states: list[Tensor] = []
    hook = model.blocks[-2].register_forward_hook(lambda *call: states.append(call[-1][0]))
    for part in tokens.split(512):
        zeros = torch.zeros(len(part))
        layout = PackedLayout((LENGTH,) * len(part), 1)
        latents = torch.zeros(len(part), 1, CHANNELS)
        model(part.flatten(), latents, zeros, zeros + 1, layout, torch.zeros(1, dtype=torch.long))
    hook.remove()
    return torch.cat(states).unflatten(0, tokens.shape)


class Encoder:
    """The frozen encoder: principal components of hidden states, fitted on training pieces [n, L]."""

    def __init__(self, model: MMDiT, tokens: Tensor):
        self.model = model.eval()
        states = hidden_states(model, tokens).flatten(0, 1).double()
        self.mean = states.mean(0)
        variances, directions = torch.linalg.eigh((states - self.mean).T.cov())
        kept = slice(-CHANNELS, None)
        self.projection = directions[:, kept] / variances[kept].sqrt()
        self.explained = float(variances[kept].sum() / variances.sum())

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return latents [n, L, C] of tokens [n, L]; each channel has mean 0 and variance 1 on the fitted pieces."""
        parts = [(hidden_states(self.model, part) - self.mean) @ self.projection for part in tokens.split(4096)]
        return torch.cat(parts).float()


# --- training -------------------------------------------------------------------------------------


def build_objective(arm: str, mask_id: int) -> Objective:
    """Return the objective: squared errors of latents with their weight in the bound at t = 1, C / 2 for each token."""
    weight = 0.0 if arm == "text" else CHANNELS / 2
    losses = LossConfig(latent="mse", latent_weight=weight, length_weight=0.0)
    return Objective(losses, MaskedDiffusion(mask_id, "elbo"), GaussianDiffusion(LatentConfig(), "mse"))


def corrupt(objective: Objective, latent_time: Times, arm: str, batch: Batch, noise: Noise) -> NoisedBatch:
    """Noise a micro-batch, its latents at `latent_time`; the noise of the text is the same in all arms."""
    noise = replace(noise, t_latent=latent_time(noise.t_text, noise.t_latent))
    if arm == "text":
        batch, noise = replace(batch, latents=batch.latents[:, :1]), replace(noise, epsilon=noise.epsilon[:, :1])
    return objective.corrupt(batch, noise)


def draw(batch: Batch, seed: int, step: int, count: int) -> Noise:
    """Return noise of a micro-batch with both noise times drawn, stratified over `count` slots."""
    samplers = TextConfig().sampler, LatentConfig().sampler
    return draw_noise(batch, seed, step, count, mode_weights("joint"), *samplers)


def orders(count: int, seed: int) -> Iterator[np.ndarray]:
    """Yield the samples of each step, int64 [B], in epochs of their own random order."""
    generator = np.random.default_rng(seed)
    while True:
        order = generator.permutation(count)
        yield from order[: count // BATCH * BATCH].reshape(-1, BATCH)


def train(arm: str, tokenizer: Tokenizer, pieces: Pieces, steps: int, seed: int) -> MMDiT:
    """Return the trained network of an arm."""
    model, objective = network(arm, tokenizer, seed), build_objective(arm, tokenizer.mask_id)
    optimizer = torch.optim.AdamW(parameter_groups(model, OPTIM.weight_decay), OPTIM.lr, OPTIM.betas, fused=True)
    losses = []
    for step, ids in zip(range(steps), orders(len(pieces.tokens), seed), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, steps, OPTIM, ScheduleConfig())
        batch = pieces.batch(ids)
        noised = corrupt(objective, ARMS[arm], arm, batch, draw(batch, seed, step, BATCH))
        loss, _ = objective(model, noised, noised.counts.tolist())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), OPTIM.clip_norm)
        optimizer.step()
        losses.append(float(loss.detach()))
        if (step + 1) % 100 == 0:
            print_status(f"{arm}, seed {seed}, step {step + 1}: loss {mean(losses[-100:]):.3f}")
    return model.eval()


# --- measuring ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """A trained network of an arm and the held-out pieces, with the same noise for all arms."""

    arm: str
    model: MMDiT
    objective: Objective
    pieces: Pieces

    @torch.no_grad()
    def text_bits(self, latent_time: Times) -> float:
        """Return the text term in bits per token, with the latents of each sample at `latent_time`."""
        nats = 0.0
        for batch, noise in self._draws():
            noised = corrupt(self.objective, latent_time, self.arm, batch, noise)
            nll, *_ = self.model(*noised.inputs)
            nats += float((nll.double() * noised.token_weight).sum())
        return self._bits(nats)

    @torch.no_grad()
    def latent_bits(self, text_time: Callable[[Tensor], Tensor], least: float) -> float:
        """Return the latent term in bits per token, from t = 1 to `least`, with the text at `text_time` of t [B]."""
        nats, latent = 0.0, self.objective.latent
        for batch, noise in self._draws():
            t = least + (1 - least) * noise.t_latent
            noised = self.objective.corrupt(batch, replace(noise, t_latent=t, t_text=text_time(t)))
            _, predicted, *_ = self.model(*noised.inputs)
            estimate, _ = latent.estimates(predicted, noised.noised_latents, t)
            error = (batch.latents - estimate).double().square().flatten(1).sum(1)
            nats += float(((1 - least) * latent.path.snr_slope(t.double()) / 2 * error).sum())
        return self._bits(nats)

    def results(self) -> dict[str, Any]:
        """Return text terms and bounds of -log p(text), all in bits per token."""
        alone = {"text alone": self.text_bits(lambda t, _: torch.ones_like(t))}
        if self.arm == "text":
            return alone
        return {
            **alone,
            "text, t_latent = t_text": self.text_bits(lambda t, _: t),
            "text, t_latent = 0": self.text_bits(lambda t, _: torch.zeros_like(t)),
            # A text of n masks loses one at t = n / L, given z at that time; below, the latents go on with n - 1 masks.
            "together": [
                self._bound(
                    lambda t, _, s=s: ((t * LENGTH).ceil() / LENGTH).clamp_min(s),
                    lambda t: (t - 1 / LENGTH).clamp_min(0),
                    s,
                )
                for s in LEAST_TIMES
            ],
            "latents first": [
                self._bound(lambda t, _, s=s: torch.full_like(t, s), torch.ones_like, s) for s in LEAST_TIMES
            ],
        }

    def _bound(self, latent_time: Times, text_time: Callable[[Tensor], Tensor], least: float) -> dict[str, float]:
        text, latent = self.text_bits(latent_time), self.latent_bits(text_time, least)
        return {"s": least, "text": text, "latent": latent, "bound": text + latent}

    def _draws(self) -> Iterator[tuple[Batch, Noise]]:
        count = len(self.pieces.tokens)
        for number in range(TIMES):
            batch = self.pieces.batch(np.arange(count))
            yield batch, draw(batch, EVALUATION_SEED, number, count)

    def _bits(self, nats: float) -> float:
        return nats / (TIMES * len(self.pieces.tokens) * LENGTH) * BITS


# --- the table and the command --------------------------------------------------------------------


def terms(seed: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[float, float | None]]:
    """Return the text term and the latent term, if it is counted, of one seed, in bits per token by title."""
    text, found = seed["text"]["text alone"], seed["latents"]
    made: dict[str, tuple[float, float | None]] = {
        "**text-only network**": (text, 0.0),
        "**network with latents**: text alone, s = 1": (found["text alone"], 0.0),
    }
    for order in ("latents first", "together"):
        made |= {f"{order}, s = {row['s']:g}": (row["text"], row["latent"]) for row in reversed(found[order])}
    made["t_latent = t_text, as the paper's code measures"] = found["text, t_latent = t_text"], None
    made["clean latents"] = found["text, t_latent = 0"], None
    return made


def contextual_blocks(result: Mapping[str, Any]) -> dict[str, str]:
    """Return the Markdown table by its name."""
    seeds = [terms(seed) for seed in result["seeds"].values()]
    alone = [next(iter(seed.values()))[0] for seed in seeds]
    titles = ("text", "latents", "bound", "difference from the text-only network", "perplexity")
    lines = [f"| bits per token ({len(seeds)} seeds) | {' | '.join(titles)} |", "|---" * 6 + "|"]
    for number, title in enumerate(seeds[0]):
        text = mean(seed[title][0] for seed in seeds)
        latents = [seed[title][1] for seed in seeds]
        if None in latents:
            cells = [f"{text:.2f}", "not counted", "none", "", f"({2**text:.1f})"]
        else:
            bounds = [seed[title][0] + latent for seed, latent in zip(seeds, latents, strict=True)]
            differences = [bound - base for bound, base in zip(bounds, alone, strict=True)]
            error = stdev(differences) / len(seeds) ** 0.5 if len(seeds) > 1 else float("nan")
            change = f"{mean(differences):+.2f} ± {error:.2f}" if number else ""
            cells = [f"{text:.2f}", f"{mean(latents):.2f}", f"{mean(bounds):.2f}", change, f"{2 ** mean(bounds):.1f}"]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return {"contextual": "\n".join(lines)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = plain_parser("contextual", "Latents of as many vectors as tokens against text alone.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=positive, default=900, help="of each network (%(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of contextual.json (%(default)s)")
    options = parser.parse_args(argv)
    tokenizer, tokens, held_out = read_corpus()
    none = torch.zeros(len(tokens), LENGTH, CHANNELS)  # the text arm has noise alone
    encoder = Encoder(train("text", tokenizer, Pieces(tokens, none), options.steps, ENCODER_SEED), tokens[:4096])
    training, evaluation = Pieces(tokens, encoder(tokens)), Pieces(held_out, encoder(held_out))
    result: dict[str, Any] = {
        "benchmark": "contextual",
        **circumstances(torch.device("cpu")),
        "steps": options.steps,
        "samples": {"train": len(tokens), "held out": len(held_out), "tokens": LENGTH},
        "parameters": {arm: sum(count_parameters(network(arm, tokenizer, 0)).values()) for arm in ARMS},
        "latents": {"channels": CHANNELS, "explained": encoder.explained},
        "cpu_s": {},
        "seeds": {},
    }
    for seed in options.seeds:
        found = {}
        for arm in ARMS:
            start = time.process_time()
            model = train(arm, tokenizer, training, options.steps, seed)
            spent = time.process_time() - start
            found[arm] = Measured(arm, model, build_objective(arm, tokenizer.mask_id), evaluation).results()
            result["cpu_s"].setdefault(arm, []).append(spent)
            print_status(f"{arm}, seed {seed}: {spent:.0f} CPU s, {json.dumps(found[arm])}")
        result["seeds"][str(seed)] = found
        write_json(result, options.out, "contextual")
    print(contextual_blocks(result)["contextual"])
    return 0
