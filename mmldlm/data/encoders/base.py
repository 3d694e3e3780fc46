"""`LatentEncoder`: the interface of all encoders; and `ImportedLatents`, for latents that were computed elsewhere.

Shape letters: n texts, M latent tokens of a sample, C latent channels.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mmldlm.errors import UsageError


class LatentEncoder(Protocol):
    """Maps texts to latents. A text that cannot be encoded yields NaN, never zeros."""

    latent_tokens: int  # M
    channels: int  # C

    @property
    def identity(self) -> dict[str, Any]:
        """JSON values that differ between encoders with other latents, such as name, revision, prompt, and dim."""

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Return latents float32 [n, M, C]; the latents of a text do not depend on other texts."""

    def save(self, folder: Path | str) -> None:
        """Write the files that `load_encoder` reads."""


class ImportedLatents:
    """Encoder of a store whose latents were computed elsewhere; it cannot encode new text.

    Latents are not changed unless `channels` truncates them; each vector is then normalized again if `normalize`.
    """

    kind = "imported"

    def __init__(
        self,
        name: str,
        revision: str,
        shape: tuple[int, int],
        channels: int | None = None,
        normalize: bool = True,
    ):
        """Create an encoder.

        Args:
            name: Name of the model that computed the latents.
            revision: Distinguishes sources of latents.
            shape: [M, C] of the source latents.
            channels: C to truncate to; by default all. More than there are is a `UsageError`.
            normalize: Scale truncated vectors to unit norm.
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
        """Return source latents as float32 [n, M, C]; NaN for a vector that is not finite or cannot be normalized."""
        converted = np.stack(latents)[..., : self.channels].astype(np.float32)
        if not self.normalize:
            return converted
        return normalize_rows(converted.reshape(-1, self.channels)).reshape(converted.shape)

    @property
    def identity(self) -> dict[str, Any]:
        """See `LatentEncoder.identity`."""
        return {
            "name": self.name,
            "revision": self.revision,
            "prompt": None,
            "normalisation": "l2" if self.normalize else None,
            "dim": self.channels,
        }

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Return NaN [n, M, C], as there is no encoder for new text."""
        return np.full((len(texts), self.latent_tokens, self.channels), np.nan, np.float32)

    def save(self, folder: Path | str) -> None:
        """Write the encoder to `folder`."""
        shape = {"latent_tokens": self.latent_tokens, "source_channels": self.source_channels}
        write_description(Path(folder), {"kind": self.kind, "normalise": self.normalize, **shape, **self.identity})

    @classmethod
    def load(cls, folder: Path, description: dict[str, Any]) -> ImportedLatents:
        """Load the encoder that `save` wrote."""
        del folder
        shape = (description["latent_tokens"], description["source_channels"])
        return cls(description["name"], description["revision"], shape, description["dim"], description["normalise"])


def normalize_rows(vectors: np.ndarray) -> np.ndarray:
    """Divide each row by its norm; NaN if the norm is zero or not finite."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    # NaN marks a text without a latent; dividing by a tiny norm would return amplified noise instead.
    norms[~((norms > 1e-9) & np.isfinite(norms))] = np.nan
    return (vectors / norms).astype(np.float32)


def write_description(folder: Path, description: dict[str, Any]) -> None:
    """Write `encoder.json`; its key `kind` selects the class that loads it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "encoder.json").write_text(json.dumps(description, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
