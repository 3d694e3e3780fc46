"""Latent encoders: map text to the latents that are diffused.

`LsaEncoder` is fitted on the corpus; `SentenceTransformerEncoder` needs the extra `encoders`; `ImportedLatents`
represents latents that were computed elsewhere; `ChunkedEncoder` turns an encoder of one latent into one of M.
Shape letters: n texts, M latent tokens of a sample, C latent channels.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.data.encoders.base import ImportedLatents, LatentEncoder, write_description
from mmldlm.data.encoders.lsa import LsaEncoder
from mmldlm.data.encoders.sentence_transformers import SentenceTransformerEncoder
from mmldlm.errors import DataError, UsageError

__all__ = [
    "ChunkedEncoder",
    "ImportedLatents",
    "LatentEncoder",
    "LsaEncoder",
    "SentenceTransformerEncoder",
    "load_encoder",
]


class ChunkedEncoder:
    """Encodes a text into M latents by another encoder, one for each of M segments of equally many words, in order.

    Words are separated by white space. If a text has fewer than M words, some are part of several segments.
    """

    kind = "stretches"

    def __init__(self, inner: LatentEncoder, latent_tokens: int):
        assert inner.latent_tokens == 1
        self.inner, self.latent_tokens, self.channels = inner, latent_tokens, inner.channels

    @property
    def identity(self) -> dict[str, Any]:
        return self.inner.identity | {"stretches": self.latent_tokens}

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Return latents float32 [n, M, C]; NaN for segments that the inner encoder cannot encode."""
        segments = [segment for text in texts for segment in self.segments(text)]
        return self.inner.encode(segments).reshape(len(texts), self.latent_tokens, self.channels)

    def segments(self, text: str) -> list[str]:
        """Split a text into M segments."""
        words = text.split()
        # In integers, so that sizes differ by at most one word.
        edges = [i * len(words) // self.latent_tokens for i in range(self.latent_tokens + 1)]
        return [" ".join(words[begin : max(end, begin + 1)]) for begin, end in pairwise(edges)]

    def save(self, folder: Path | str) -> None:
        self.inner.save(Path(folder) / "inner")
        write_description(Path(folder), {"kind": self.kind, "latent_tokens": self.latent_tokens})

    @classmethod
    def load(cls, folder: Path, description: dict[str, Any]) -> ChunkedEncoder:
        # The inner encoder may be the one that takes batch size and device.
        return cls(load_encoder(folder / "inner", **description["model_options"]), description["latent_tokens"])


_ENCODERS: dict[str, Any] = {
    encoder.kind: encoder for encoder in (LsaEncoder, SentenceTransformerEncoder, ImportedLatents, ChunkedEncoder)
}


def load_encoder(folder: Path | str, **model_options: Any) -> LatentEncoder:
    """Load the encoder that `save` wrote to `folder`.

    Args:
        folder: the `encoder` folder of a store.
        **model_options: batch size and device of a `SentenceTransformerEncoder`, which do not change its latents.

    Raises:
        DataError: the encoder is missing or damaged, or its model has changed.
    """
    folder = Path(folder)
    path = folder / "encoder.json"
    if not path.is_file():
        raise DataError(f"{path}: no such file; expected the encoder folder of a data store")
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
        encoder = _ENCODERS[description["kind"]]
        return encoder.load(folder, description | {"model_options": model_options})
    except (DataError, UsageError):
        raise
    except Exception as error:  # JSON, a missing key, safetensors' own error type
        raise DataError(f"{path}: not a readable encoder ({' '.join(str(error).split())})") from None
