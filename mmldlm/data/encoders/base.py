"""What all latent encoders share: their protocol, their files, and the encoder of latents computed elsewhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mmldlm.errors import UsageError


class LatentEncoder(Protocol):
    """Text to latents. A text that cannot be encoded yields a row of NaN, never zeros."""

    latent_tokens: int  # M
    channels: int  # C

    @property
    def identity(self) -> dict[str, Any]:
        """At least name, revision, prompt, normalisation and dim, all JSON values."""

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """float32 [n, M, C]; each row depends on its own text only."""

    def save(self, folder: Path | str) -> None:
        """Write what `load_encoder` needs."""


class ImportedLatents:
    """The encoder of a store whose latents were brought along. It has none for any other text.

    Latents stay as they are, unless `channels` truncates them: then each vector is normalised again, if `normalise`.
    """

    kind = "imported"

    def __init__(
        self,
        name: str,
        revision: str,
        shape: tuple[int, int],
        channels: int | None = None,
        normalise: bool = True,
    ):
        """`name` is what made them and `revision` tells their sources apart; `shape` is that of the sources, [M, C]."""
        self.name, self.revision = name, revision
        self.latent_tokens, self.source_channels = shape
        self.channels = channels or self.source_channels
        if not 1 <= self.channels <= self.source_channels:
            most = self.source_channels
            raise UsageError(f"--channels {channels}: the latents have {most}, expected 1 to {most}")
        self.normalise = normalise and self.channels < self.source_channels

    def take(self, latents: Sequence[np.ndarray]) -> np.ndarray:
        """float32 [n, M, C] of the sources' [M, C]; NaN where one is not finite, or cannot be normalised."""
        found = np.stack(latents)[..., : self.channels].astype(np.float32)
        return unit_rows(found.reshape(-1, self.channels)).reshape(found.shape) if self.normalise else found

    @property
    def identity(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "revision": self.revision,
            "prompt": None,
            "normalisation": "l2" if self.normalise else None,
            "dim": self.channels,
        }

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """NaN [n, M, C]: there is no encoder for new text."""
        return np.full((len(texts), self.latent_tokens, self.channels), np.nan, np.float32)

    def save(self, folder: Path | str) -> None:
        shape = {"latent_tokens": self.latent_tokens, "source_channels": self.source_channels}
        write_description(Path(folder), {"kind": self.kind, "normalise": self.normalise, **shape, **self.identity})

    @classmethod
    def load(cls, folder: Path, description: dict[str, Any]) -> ImportedLatents:
        del folder
        shape = (description["latent_tokens"], description["source_channels"])
        return cls(description["name"], description["revision"], shape, description["dim"], description["normalise"])


def unit_rows(vectors: np.ndarray) -> np.ndarray:
    """Rows over their norms; NaN where that is zero or not finite."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    norms[~((norms > 1e-9) & np.isfinite(norms))] = np.nan
    return (vectors / norms).astype(np.float32)


def write_description(folder: Path, description: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "encoder.json").write_text(json.dumps(description, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
