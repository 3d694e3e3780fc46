"""The interface of all encoders, and two encoders that compute no latents themselves.

Shape letters: n texts, M latent tokens of a sample, C latent channels.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mmldlm.errors import UsageError


class LatentEncoder(Protocol):
    """Maps texts to latents. A text that cannot be encoded yields NaN, never zeros."""

    latent_tokens: int  # M
    channels: int  # C
    is_small: bool = False  # encodes thousands of texts per second on a CPU

    @property
    def identity(self) -> dict[str, Any]:
        """JSON values that differ between encoders with different latents, e.g. name, revision, prompt and dim."""

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Return latents float32 [n, M, C]. The latents of a text must not depend on the other texts."""

    def count_cut(self, texts: Sequence[str]) -> int:
        """Return how many texts are so long that the encoder only reads their beginning."""
        return 0

    def save(self, folder: Path) -> None:
        """Write the files that `load_encoder` reads."""


class ImportedLatents(LatentEncoder):
    """Encoder of a store whose latents were computed elsewhere. It cannot encode new text.

    Latents stay as they are unless `channels` truncates them. Truncated vectors are normalized again if `normalize`.
    """

    kind = "imported"

    def __init__(
        self, name: str, revision: str, shape: tuple[int, int], channels: int | None = None, normalize: bool = True
    ):
        """Describe latents of a model.

        Args:
            revision: Tells apart latents that different sources computed with the model `name`.
            shape: [M, C] of the latents as they were computed.
            channels: Truncate to this many channels, by default none. More than C are a `UsageError`.
            normalize: Give truncated vectors norm 1.
        """
        self.name, self.revision = name, revision
        self.latent_tokens, self.source_channels = shape
        self.channels = channels or self.source_channels
        if not 1 <= self.channels <= self.source_channels:
            maximum = self.source_channels
            raise UsageError(f"--channels {channels}: the latents have {maximum}, expected 1 to {maximum}")
        # Latents that are not truncated are stored as they came, whatever their norm.
        self.normalize = normalize and self.channels < self.source_channels

    def convert(self, latents: Sequence[np.ndarray]) -> np.ndarray:
        """Return the imported latents as float32 [n, M, C], with NaN where a vector cannot be normalized."""
        converted = np.stack(latents)[..., : self.channels].astype(np.float32)
        if not self.normalize:
            return converted
        return normalize_rows(converted.reshape(-1, self.channels)).reshape(converted.shape)

    @property
    def identity(self) -> dict[str, Any]:
        """See `LatentEncoder.identity`."""
        return make_identity(self.name, self.revision, self.channels, self.normalize)

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Return NaN [n, M, C], as there is no encoder for new text."""
        return np.full((len(texts), self.latent_tokens, self.channels), np.nan, np.float32)

    def save(self, folder: Path) -> None:
        """See `LatentEncoder.save`."""
        shape = {"latent_tokens": self.latent_tokens, "source_channels": self.source_channels}
        write_description(folder, {"kind": self.kind, "normalise": self.normalize, **shape, **self.identity})

    @classmethod
    def load(cls, folder: Path, description: dict[str, Any]) -> ImportedLatents:
        """Load the encoder that `save` wrote."""
        shape = (description["latent_tokens"], description["source_channels"])
        return cls(description["name"], description["revision"], shape, description["dim"], description["normalise"])


class ChunkedEncoder(LatentEncoder):
    """Split a text into M segments with the same number of words, and encode each by another encoder.

    Words are separated by white space. If a text has fewer than M words, some words are in several segments.
    """

    kind = "stretches"

    def __init__(self, inner: LatentEncoder, latent_tokens: int):
        assert inner.latent_tokens == 1
        self.inner, self.latent_tokens, self.channels = inner, latent_tokens, inner.channels
        self.is_small = inner.is_small

    @property
    def identity(self) -> dict[str, Any]:
        """Return the identity of the inner encoder, with M."""
        return self.inner.identity | {"stretches": self.latent_tokens}

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Return latents float32 [n, M, C], with NaN for segments that the inner encoder cannot encode."""
        segments = [segment for text in texts for segment in self.segments(text)]
        return self.inner.encode(segments).reshape(len(texts), self.latent_tokens, self.channels)

    def count_cut(self, texts: Sequence[str]) -> int:
        """See `LatentEncoder.count_cut`."""
        return sum(self.inner.count_cut(self.segments(text)) > 0 for text in texts)

    def segments(self, text: str) -> list[str]:
        """Split a text into M segments."""
        words = text.split()
        # In integers, so that sizes differ by at most one word.
        edges = [i * len(words) // self.latent_tokens for i in range(self.latent_tokens + 1)]
        return [" ".join(words[begin : max(end, begin + 1)]) for begin, end in pairwise(edges)]

    def save(self, folder: Path) -> None:
        """See `LatentEncoder.save`."""
        self.inner.save(folder / "inner")
        write_description(folder, {"kind": self.kind, "latent_tokens": self.latent_tokens})


def make_identity(
    name: str, revision: str | None, channels: int, normalize: bool = True, prompt: str | None = None
) -> dict[str, Any]:
    """Return the entries of `LatentEncoder.identity` that all encoders share."""
    normalization = "l2" if normalize else None
    return {"name": name, "revision": revision, "prompt": prompt, "normalisation": normalization, "dim": channels}


def normalize_rows(vectors: np.ndarray) -> np.ndarray:
    """Divide each row by its norm, or fill it with NaN if the norm is zero or not finite."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    # NaN marks a text without a latent. Dividing by a tiny norm would return amplified noise instead.
    norms[~((norms > 1e-9) & np.isfinite(norms))] = np.nan
    return (vectors / norms).astype(np.float32)


def write_description(folder: Path, description: dict[str, Any]) -> None:
    """Write `encoder.json`, whose key `kind` selects the class that loads it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "encoder.json").write_text(json.dumps(description, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
