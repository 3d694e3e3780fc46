"""`LearnedEncoder`: several latents of a text by a small autoencoder, trained on the corpus.

Shape letters: n texts, M latent tokens of a sample, C latent channels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from mmldlm.data.encoders.autoencoder import (
    AutoencoderSizes,
    TextEncoder,
    length_batches,
    pad_tokens,
    train_autoencoder,
)
from mmldlm.data.encoders.base import make_identity, write_description
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.errors import DataError

if TYPE_CHECKING:
    from mmldlm.utils.progress import Progress

_WEIGHTS, _TOKENIZER = "learned.safetensors", "tokenizer"


class LearnedEncoder:
    """Encoder of an autoencoder that was trained on the corpus, with its tokenizer; latents have unit norm.

    It reads a text of any length as a whole. A text without tokens, or that the tokenizer cannot encode, yields NaN.
    """

    kind = "learned"

    def __init__(self, network: TextEncoder, tokenizer: Tokenizer, sizes: AutoencoderSizes, steps: int, seed: int):
        """Create from a trained `network`; `steps` and `seed` of the training are only recorded."""
        self._network, self._tokenizer = network.eval(), tokenizer
        self._options = {"sizes": asdict(sizes), "steps": steps, "seed": seed}
        self.latent_tokens, self.channels = sizes.latent_tokens, sizes.channels

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
    ) -> LearnedEncoder:
        """Train an encoder of latents of `shape` [M, C] on `texts`; deterministic for equal arguments on one thread.

        `width` is a multiple of `HEAD_WIDTH`. If no text has a token, that is a `DataError`.
        """
        tokens = [np.array(ids, np.int64) for ids in tokenizer.encode_batch(list(texts)) if ids]
        if not tokens:
            raise DataError("--encoder learned: the training split has no tokens, expected texts")
        sizes = AutoencoderSizes(tokenizer.vocab_size, *shape, width)
        model = train_autoencoder(tokens, tokenizer.mask_id, sizes, steps, seed, progress)
        return cls(model.encoder, tokenizer, sizes, steps, seed)

    @property
    def identity(self) -> dict[str, Any]:
        """See `LatentEncoder.identity`."""
        digest = hashlib.sha256(self._tokenizer.identity.encode())
        for name, weight in sorted(self._network.state_dict().items()):
            digest.update(name.encode() + weight.numpy().tobytes())
        return make_identity(self.kind, digest.hexdigest(), self.channels) | self._options

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Return latents float32 [n, M, C] of unit norm; NaN for texts without tokens."""
        tokens = [np.array(ids, np.int64) for ids in self._tokenize(texts)]
        latents = np.full((len(texts), self.latent_tokens, self.channels), np.nan, np.float32)
        encodable = np.array([index for index, text in enumerate(tokens) if len(text)], np.int64)
        with torch.inference_mode():
            for batch in length_batches(np.array([len(tokens[index]) for index in encodable])):
                rows = encodable[batch]
                latents[rows] = self._network(*pad_tokens([tokens[row] for row in rows])).numpy()
        return latents

    def _tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, none for one that the tokenizer cannot encode."""
        try:
            return self._tokenizer.encode_batch(texts)
        except DataError:
            if len(texts) == 1:
                return [[]]
            return [ids for text in texts for ids in self._tokenize([text])]

    def save(self, folder: Path | str) -> None:
        """Write the encoder to `folder`: weights, tokenizer, description."""
        folder = Path(folder)
        write_description(folder, {"kind": self.kind, "revision": self.identity["revision"], **self._options})
        self._tokenizer.save(folder / _TOKENIZER)
        save_file(self._network.state_dict(), folder / _WEIGHTS)

    @classmethod
    def load(cls, folder: Path, description: dict[str, Any]) -> LearnedEncoder:
        """Load the encoder that `save` wrote."""
        sizes = AutoencoderSizes(**description["sizes"])
        tokenizer = Tokenizer.load(folder / _TOKENIZER)
        with torch.device("meta"):  # sizes that the weights do not have take no memory
            network = TextEncoder(sizes)
        try:
            network.load_state_dict(load_file(folder / _WEIGHTS), assign=True)
        except Exception as error:  # a missing file, safetensors' own error type, other names or shapes
            reason = " ".join(str(error).split())[:300]
            raise DataError(f"{folder / _WEIGHTS}: not the weights of a learned encoder ({reason})") from None
        encoder = cls(network, tokenizer, sizes, description["steps"], description["seed"])
        if (revision := encoder.identity["revision"]) != description["revision"]:
            raise DataError(
                f"{folder / _WEIGHTS}: weights and tokenizer have revision {revision}, expected "
                f"{description['revision']}, with which the store was prepared"
            )
        return encoder
