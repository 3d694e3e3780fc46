"""Latent encoders: text to the latents that are diffused.

`LsaEncoder` needs nothing but the corpus; `SentenceTransformerEncoder` is the extra `encoders`; `ImportedLatents`
stands for latents that were brought along; `ChunkedEncoder` makes M latent tokens of any encoder that gives one.
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
    """M latents of a text: those that another encoder gives of M stretches of equally many words, in their order.

    Words are what white space separates. Of a text of fewer than M words, some are in several stretches.
    """

    kind = "stretches"

    def __init__(self, inner: LatentEncoder, latent_tokens: int):
        assert inner.latent_tokens == 1
        self.inner, self.latent_tokens, self.channels = inner, latent_tokens, inner.channels

    @property
    def identity(self) -> dict[str, Any]:
        return self.inner.identity | {"stretches": self.latent_tokens}

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """float32 [n, M, C]; NaN where the encoder has none for one of the stretches."""
        stretches = [stretch for text in texts for stretch in self.stretches(text)]
        return self.inner.encode(stretches).reshape(len(texts), self.latent_tokens, self.channels)

    def stretches(self, text: str) -> list[str]:
        words = text.split()
        ends = [place * len(words) // self.latent_tokens for place in range(self.latent_tokens + 1)]
        return [" ".join(words[begin : max(end, begin + 1)]) for begin, end in pairwise(ends)]

    def save(self, folder: Path | str) -> None:
        self.inner.save(Path(folder) / "inner")
        write_description(Path(folder), {"kind": self.kind, "latent_tokens": self.latent_tokens})

    @classmethod
    def load(cls, folder: Path, description: dict[str, Any]) -> ChunkedEncoder:
        return cls(load_encoder(folder / "inner", **description["working"]), description["latent_tokens"])


_KINDS: dict[str, Any] = {
    kind.kind: kind for kind in (LsaEncoder, SentenceTransformerEncoder, ImportedLatents, ChunkedEncoder)
}


def load_encoder(folder: Path | str, **working: Any) -> LatentEncoder:
    """The encoder that `save` wrote to `folder`; DataError where it is missing, damaged or not the same model.

    `working` are the batch size and the device of a `SentenceTransformerEncoder`, which changes no latent.
    """
    folder = Path(folder)
    path = folder / "encoder.json"
    if not path.is_file():
        raise DataError(f"{path}: no such file; expected the encoder folder of a data store")
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
        kind = _KINDS[description["kind"]]
        return kind.load(folder, description | {"working": working})
    except (DataError, UsageError):
        raise
    except Exception as error:  # JSON, a missing key, safetensors' own error type
        raise DataError(f"{path}: not a readable encoder ({' '.join(str(error).split())})") from None
