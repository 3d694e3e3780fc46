"""`LearnedEncoder`: several latents of a text by a small autoencoder, trained on the corpus.

The autoencoder maps a text's tokens to a few latents, and noised latents back to the tokens. We train the decoder by
masked denoising because the latents are read that way later: a network that generates text sees the latents and the
tokens that are not masked yet. Where many tokens are masked, only the latents can tell them, so the latents learn to
carry the text. Noise on the decoder's input (as in LDLM, arXiv 2605.07933) moves similar texts to nearby latents. It
also teaches the decoder to read latents that a diffusion model generated, which are never exact.

Such latents compare texts by wording. With a teacher, an encoder whose vectors compare texts by meaning, there is one
more latent, the last: the teacher's vector as ridge regression finds it from the text's token counts.

Shape letters: n texts, B texts of a batch, L tokens of the longest one, M latents of a text, C channels, W width, V
vocabulary, D channels of the teacher.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mmldlm.checkpoint.tensors import write_tensors
from mmldlm.data.encoders.base import LatentEncoder, make_identity, normalize_rows, write_description
from mmldlm.data.nearest import sparse_counts
from mmldlm.data.ridge import ridge, with_bias
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.errors import DataError, UsageError
from mmldlm.utils.short_repr import short_repr

if TYPE_CHECKING:
    from mmldlm.utils.progress import Progress

HEAD_WIDTH = 32
_WEIGHTS, _TOKENIZER = "learned.safetensors", "tokenizer"
_BATCH_TOKENS = 768  # of a step, with padding: its time does not depend on the lengths of the texts
_WINDOW = 4096  # texts that are sorted by length and divided into batches
_NOISE = 0.5  # standard deviation on the decoder's input, in units of the latents' root mean square
_HELD_OUT = 1000  # texts whose loss is reported, at most
_TEACHER_TEXTS = 256  # that the teacher reads between two reports
_LEARNING_RATE, _WARMUP, _CLIP_NORM = 3e-3, 0.1, 1.0


@dataclass(frozen=True)
class AutoencoderSizes:
    """Sizes of encoder and decoder, each of `depth` layers. `width` is a multiple of `HEAD_WIDTH`."""

    vocab_size: int
    latent_tokens: int
    channels: int
    width: int
    depth: int = 2


class TextEncoder(nn.Module):
    """Transformer over a text's tokens, without a causal mask. Its outputs are averaged around M points of the text."""

    def __init__(self, sizes: AutoencoderSizes):
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocab_size, sizes.width)
        self.layers = _transformer(sizes)
        self.to_latent = nn.Linear(sizes.width, sizes.channels)
        self._latent_tokens = sizes.latent_tokens
        nn.init.normal_(self.embedding.weight, std=sizes.width**-0.5)

    def forward(self, ids_BL: Tensor, padding_BL: Tensor) -> Tensor:
        """Return latents of unit norm, [B, M, C], ignoring positions with `padding_BL`."""
        hidden_BLW = self.layers(self.embed(ids_BL), src_key_padding_mask=padding_BL)
        weights_BML = point_weights(padding_BL, self._latent_tokens)
        points_BMW = weights_BML / weights_BML.sum(2, keepdim=True) @ hidden_BLW
        return F.normalize(self.to_latent(points_BMW), dim=-1)

    def embed(self, ids_BL: Tensor) -> Tensor:
        """Return embeddings of tokens with their positions (sinusoids: arXiv 1706.03762, section 3.5), [B, L, W]."""
        width = self.embedding.embedding_dim
        frequency = torch.exp(-math.log(10_000.0) * torch.arange(0, width, 2, dtype=torch.float32) / width)
        angle = torch.arange(ids_BL.shape[1], dtype=torch.float32)[:, None] * frequency
        return self.embedding(ids_BL) * width**0.5 + torch.cat([angle.sin(), angle.cos()], dim=-1)


class TextAutoencoder(nn.Module):
    """`TextEncoder`, and a transformer that predicts masked tokens from noised latents and the other tokens."""

    def __init__(self, sizes: AutoencoderSizes):
        super().__init__()
        self.encoder = TextEncoder(sizes)
        self.from_latent = nn.Linear(sizes.channels, sizes.width)
        self.layers = _transformer(sizes)
        self.bias = nn.Parameter(torch.zeros(sizes.vocab_size))

    def decode(self, latents_BMC: Tensor, ids_BL: Tensor, padding_BL: Tensor, masked_BL: Tensor) -> Tensor:
        """Return logits of the tokens at `masked_BL`, [masked, V], from latents of norm sqrt(C), perhaps with noise."""
        weights_BLM = point_weights(padding_BL, latents_BMC.shape[1]).transpose(1, 2)
        weights_BLM = weights_BLM / weights_BLM.sum(2, keepdim=True).clamp_min(1e-6)  # padding has none
        inputs = self.encoder.embed(ids_BL) + weights_BLM @ self.from_latent(latents_BMC)
        hidden = self.layers(inputs, src_key_padding_mask=padding_BL)
        return F.linear(hidden[masked_BL], self.encoder.embedding.weight, self.bias)


def point_weights(padding_BL: Tensor, latent_tokens: int) -> Tensor:
    """Return how near each token is to each of M points, the centers of M equal parts of the text: [B, M, L].

    The weight falls linearly with the distance between the token's center and the point, and is 0 for padding. It
    reaches 0 at the length of a part or of a token, whichever is longer: so every point has a token, and every token a
    point.
    """
    lengths_B11 = (~padding_BL).sum(1)[:, None, None]
    tokens_B1L = (torch.arange(padding_BL.shape[1]) + 0.5) / lengths_B11
    points_M1 = (torch.arange(latent_tokens)[:, None] + 0.5) / latent_tokens
    reach_B11 = (1 / lengths_B11).clamp_min(1 / latent_tokens)
    return (1 - (tokens_B1L - points_M1).abs() / reach_B11).clamp_min(0).masked_fill(padding_BL[:, None], 0.0)


def _transformer(sizes: AutoencoderSizes) -> nn.TransformerEncoder:
    width = sizes.width
    layer = nn.TransformerEncoderLayer(
        width, width // HEAD_WIDTH, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, sizes.depth, nn.LayerNorm(width), enable_nested_tensor=False)


def pad_tokens(tokens: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Return ids [B, L] of texts given as int64 arrays, and which positions are padding."""
    ids = pad_sequence([torch.from_numpy(text) for text in tokens], batch_first=True)
    lengths = torch.tensor([len(text) for text in tokens])
    return ids, torch.arange(ids.shape[1]) >= lengths[:, None]


def length_batches(lengths: np.ndarray, max_tokens: int = _BATCH_TOKENS) -> list[np.ndarray]:
    """Return batches of indices of texts of similar length: at most `max_tokens` with padding, or a single text."""
    order = np.argsort(lengths, kind="stable")
    batches, start = [], 0
    for stop in range(1, len(order) + 1):
        if stop == len(order) or (stop + 1 - start) * lengths[order[stop]] > max_tokens:
            batches.append(order[start:stop])
            start = stop
    return batches


def train_autoencoder(
    tokens: Sequence[np.ndarray], mask_id: int, sizes: AutoencoderSizes, steps: int, seed: int, progress: Progress
) -> TextAutoencoder:
    """Train an autoencoder on texts given as int64 arrays, none of them empty. It is deterministic on one thread.

    `seed` decides on weights, order, masks and noise.
    """
    # Modules draw their weights from the global generator, whose state is restored afterwards.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = TextAutoencoder(sizes)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, _LEARNING_RATE, total_steps=steps + 1, pct_start=_WARMUP, cycle_momentum=False
    )
    losses = []
    batches = _training_batches(np.array([len(text) for text in tokens]), np.random.default_rng(seed))
    for _ in progress.track(range(steps), "steps", steps):
        ids, padding = pad_tokens([tokens[index] for index in next(batches)])
        loss = _denoising_loss(model, ids, padding, mask_id, generator)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), _CLIP_NORM)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    last = losses[-max(1, steps // 10) :]
    progress.line(f"learned encoder: {sum(last) / len(last):.2f} nats for a masked token given the noised latents")
    return model.eval()


def _denoising_loss(
    model: TextAutoencoder, ids_BL: Tensor, padding_BL: Tensor, mask_id: int, generator: torch.Generator
) -> Tensor:
    """Return the mean nats of masked tokens, where each text has between 1 and all of its tokens masked (uniform)."""
    uniform = torch.rand(ids_BL.shape, generator=generator).masked_fill(padding_BL, 2.0)
    share = 1 - torch.rand(len(ids_BL), 1, generator=generator)  # in (0, 1]
    rank = uniform.argsort(dim=1).argsort(dim=1)
    masked = rank < (share * (~padding_BL).sum(1, keepdim=True)).ceil()
    latents = model.encoder(ids_BL, padding_BL)
    noise = torch.randn(latents.shape, generator=generator)
    noised = latents * latents.shape[-1] ** 0.5 + _NOISE * noise
    logits = model.decode(noised, ids_BL.masked_fill(masked, mask_id), padding_BL, masked)
    return F.cross_entropy(logits, ids_BL[masked])


def _training_batches(lengths: np.ndarray, draw: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield batches of indices forever, with every text once in each epoch."""
    while True:
        order = draw.permutation(len(lengths))
        for start in range(0, len(order), _WINDOW):
            window = order[start : start + _WINDOW]
            batches = length_batches(lengths[window])
            for index in draw.permutation(len(batches)):
                yield window[batches[index]]


def fit_meaning(
    teacher: LatentEncoder,
    texts: Sequence[str],
    tokens: Sequence[np.ndarray],
    shape: tuple[int, int],
    progress: Progress,
) -> Tensor:
    """Return weights [V + 1, C] from token counts and a constant to the teacher's vectors of texts, for `shape` [V, C].

    The C channels are the principal components of the vectors. It is a `DataError` if the teacher has no vector of a
    text, and a `UsageError` if it has fewer channels.
    """
    parts = [texts[start : start + _TEACHER_TEXTS] for start in range(0, len(texts), _TEACHER_TEXTS)]
    encoded = [teacher.encode(part) for part in progress.track(parts, "batches of the teacher", len(parts))]
    vectors_nD = torch.from_numpy(normalize_rows(np.concatenate(encoded).reshape(len(texts), -1))).double()
    if len(missing := vectors_nD.isnan().any(1).nonzero()):
        raise DataError(f"--teacher: has no vector of the text {short_repr(texts[int(missing[0])])}")
    if (channels := shape[1]) > vectors_nD.shape[1]:
        raise UsageError(f"--channels {channels}: the teacher has {vectors_nD.shape[1]}, expected at most these")
    centered = vectors_nD - vectors_nD.mean(0)
    components = torch.linalg.eigh(centered.T @ centered).eigenvectors[:, -channels:]
    return ridge(with_bias(sparse_counts(tokens, shape[0])), centered @ components).float().contiguous()


class LearnedEncoder(LatentEncoder):
    """The encoder of an autoencoder that was trained on the corpus, with its tokenizer. Latents have unit norm.

    With a teacher, the last latent has the meaning of the text, the others its wording. The encoder reads a text of any
    length as a whole. A text without tokens, or with characters that the tokenizer cannot encode, yields NaN.
    """

    kind = "learned"
    is_small = True

    def __init__(
        self,
        network: TextEncoder,
        tokenizer: Tokenizer,
        sizes: AutoencoderSizes,
        record: dict[str, Any],
        meaning: Tensor | None = None,
    ):
        """Wrap a trained `network`, and the weights of `fit_meaning`. `record` says how they were made."""
        self._network, self._tokenizer, self._meaning = network.eval(), tokenizer, meaning
        self._options = {"sizes": asdict(sizes), **record}
        self.latent_tokens, self.channels = sizes.latent_tokens + (meaning is not None), sizes.channels

    @classmethod
    def fit(
        cls,
        texts: Iterable[str],
        tokenizer: Tokenizer,
        shape: tuple[int, int],
        width: int,
        steps: int,
        seed: int,
        progress: Progress,
        held_out: Iterable[str] = (),
        teacher: LatentEncoder | None = None,
    ) -> LearnedEncoder:
        """Train an encoder of latents of `shape` [M, C] on `texts`, and report its loss on the texts `held_out`.

        Equal arguments give equal encoders on one thread. `width` is a multiple of `HEAD_WIDTH`. Held-out texts are cut
        to the longest training text. It is a `DataError` if no text has a token. A `teacher` adds a latent to the M.
        """
        texts = list(texts)
        read = [*zip(texts, tokenizer.encode_batch(texts), strict=True)]
        tokens = [np.array(ids, np.int64) for _, ids in read if ids]
        if not tokens:
            raise DataError("--encoder learned: the training split has no tokens, expected texts")
        sizes = AutoencoderSizes(tokenizer.vocab_size, *shape, width)
        record: dict[str, Any] = {"steps": steps, "seed": seed}
        meaning = None
        if teacher is not None:
            taught = [text for text, ids in read if ids]
            meaning = fit_meaning(teacher, taught, tokens, (tokenizer.vocab_size, shape[1]), progress)
            record["teacher"] = teacher.identity
        model = train_autoencoder(tokens, tokenizer.mask_id, sizes, steps, seed, progress)
        longest, encoded = max(map(len, tokens)), tokenizer.encode_each([*islice(held_out, _HELD_OUT)])
        others = [np.array(ids[:longest]) for ids in encoded if ids and not isinstance(ids, DataError)]
        losses, generator = [], torch.Generator().manual_seed(seed)
        with torch.inference_mode():
            for batch in length_batches(np.array([len(text) for text in others])):
                padded = pad_tokens([others[index] for index in batch])
                losses.append(float(_denoising_loss(model, *padded, tokenizer.mask_id, generator)))
        if losses:
            progress.line(f"learned encoder: {np.mean(losses):.2f} nats in {len(others)} held-out texts")
        return cls(model.encoder, tokenizer, sizes, record, meaning)

    @property
    def identity(self) -> dict[str, Any]:
        """See `LatentEncoder.identity`."""
        digest = hashlib.sha256(self._tokenizer.identity.encode())
        for name, weight in sorted(self._weights().items()):
            digest.update(name.encode() + weight.numpy().tobytes())
        return make_identity(self.kind, digest.hexdigest(), self.channels) | self._options

    def _weights(self) -> dict[str, Tensor]:
        return self._network.state_dict() | ({} if self._meaning is None else {"meaning": self._meaning})

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Return latents float32 [n, M, C] of unit norm, with NaN for texts without tokens."""
        encoded = self._tokenizer.encode_each(texts)
        tokens = [np.array([] if isinstance(ids, DataError) else ids, np.int64) for ids in encoded]
        latents = np.full((len(texts), self.latent_tokens, self.channels), np.nan, np.float32)
        encodable = np.array([index for index, text in enumerate(tokens) if len(text)], np.int64)
        with torch.inference_mode():
            for batch in length_batches(np.array([len(tokens[index]) for index in encodable])):
                rows = encodable[batch]
                padded = pad_tokens([tokens[row] for row in rows])
                latents[rows, : self._options["sizes"]["latent_tokens"]] = self._network(*padded).numpy()
                if self._meaning is not None:
                    known = (~padded[1]).float()
                    sums = torch.einsum("bl,blc->bc", known, self._meaning[padded[0]]) + self._meaning[-1]
                    latents[rows, -1] = F.normalize(sums, dim=-1).numpy()
        return latents

    def save(self, folder: Path) -> None:
        """Write the encoder to `folder`: weights, tokenizer, description."""
        write_description(folder, {"kind": self.kind, "revision": self.identity["revision"], **self._options})
        self._tokenizer.save(folder / _TOKENIZER)
        write_tensors(folder / _WEIGHTS, self._weights())

    @classmethod
    def load(cls, folder: Path, description: dict[str, Any]) -> LearnedEncoder:
        """Load the encoder that `save` wrote."""
        sizes = AutoencoderSizes(**description["sizes"])
        tokenizer = Tokenizer.load(folder / _TOKENIZER)
        with torch.device("meta"):  # sizes that the weights do not have take no memory
            network = TextEncoder(sizes)
        try:
            weights = load_file(folder / _WEIGHTS)
            shape = sizes.vocab_size + 1, sizes.channels
            if (meaning := weights.pop("meaning", None)) is not None and meaning.shape != shape:
                raise ValueError(f"meaning {[*meaning.shape]}, expected {[*shape]}")
            network.load_state_dict(weights, assign=True)
        except Exception as error:  # a missing file, safetensors' own error type, other names or shapes
            reason = " ".join(str(error).split())[:300]
            raise DataError(f"{folder / _WEIGHTS}: not the weights of a learned encoder ({reason})") from None
        record = {key: description[key] for key in ("steps", "seed")}
        if "teacher" in description:
            record["teacher"] = description["teacher"]
        encoder = cls(network, tokenizer, sizes, record, meaning)
        if (revision := encoder.identity["revision"]) != description["revision"]:
            raise DataError(
                f"{folder / _WEIGHTS}: weights and tokenizer have revision {revision}, expected "
                f"{description['revision']}, with which the store was prepared"
            )
        return encoder
