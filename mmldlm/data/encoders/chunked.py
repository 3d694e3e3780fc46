"""`ChunkedEncoder`: M latents of a text by an encoder of one latent.

Shape letters: n texts, M latent tokens of a sample, C latent channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.data.encoders.base import LatentEncoder, write_description


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
        """Return the identity of the inner encoder, with M."""
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
        """Write the encoder and its inner one to `folder`."""
        self.inner.save(Path(folder) / "inner")
        write_description(Path(folder), {"kind": self.kind, "latent_tokens": self.latent_tokens})
