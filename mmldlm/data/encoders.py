"""Latent encoders: text to the latents that are diffused.

`LsaEncoder` needs nothing but the corpus; `SentenceTransformerEncoder` is the extra `encoders`; `ImportedLatents`
stands for latents that were brought along; `StretchEncoder` makes M latent tokens of any encoder that gives one.
Shape letters: n texts, M latent tokens of a sample, C latent channels.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from mmldlm.data.encoder_files import unit_rows, write_description
from mmldlm.data.imported_latents import ImportedLatents
from mmldlm.data.sentence_encoder import SentenceTransformerEncoder
from mmldlm.errors import DataError, UsageError

__all__ = [
    "ImportedLatents",
    "LatentEncoder",
    "LsaEncoder",
    "SentenceTransformerEncoder",
    "StretchEncoder",
    "load_encoder",
]

_WORD = re.compile(r"\w+")
_AT_ONCE = 4096  # texts


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


class LsaEncoder:
    """Latent semantic analysis: sublinear TF-IDF of lower-cased words, projected by a truncated SVD.

    A topic vector of the corpus that it was fitted on; rows have unit norm. A text without any known
    word yields NaN.
    """

    kind = "lsa"
    latent_tokens = 1

    def __init__(self, terms: list[str], idf: np.ndarray, projection: np.ndarray, seed: int):
        """`terms` of V words, `idf` float32 [V], `projection` float32 [V, C]; `seed` is recorded only."""
        self.terms, self.seed = terms, seed
        self.channels = projection.shape[1]
        self._ids = {term: i for i, term in enumerate(terms)}
        self._idf, self._projection = torch.from_numpy(idf), torch.from_numpy(projection)

    @classmethod
    def fit(cls, texts: Iterable[str], channels: int = 64, seed: int = 0, max_terms: int = 20_000) -> LsaEncoder:
        """Fit to `texts` with the `max_terms` words that most of them use; the same for the same texts and seed.

        DataError where the corpus has fewer texts or words than `channels`.
        """
        texts = list(texts)
        frequency: Counter[str] = Counter()
        for text in texts:
            frequency.update(_words(text).keys())
        terms = sorted(sorted(frequency), key=lambda term: -frequency[term])[:max_terms]
        if (most := min(len(terms), len(texts))) < channels:
            raise DataError(
                f"--channels {channels}: the training split has {len(texts)} texts and {len(terms)} words, "
                f"expected at most {most} channels"
            )
        document_frequency = np.array([frequency[term] for term in terms])
        idf = (np.log((1 + len(texts)) / (1 + document_frequency)) + 1).astype(np.float32)
        encoder = cls(terms, idf, np.zeros((len(terms), channels), np.float32), seed)
        matrix = encoder._matrix(texts)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            right = torch.svd_lowrank(matrix, q=min(channels + 16, most), niter=4)[2][:, :channels]
        # The sign of a singular vector is arbitrary: make the largest entry positive.
        largest = right.gather(0, right.abs().argmax(0, keepdim=True))
        encoder._projection = (right * largest.sign()).float().contiguous()
        return encoder

    def _matrix(self, texts: Sequence[str]) -> torch.Tensor:
        """Sparse float64 [n, V]; made of some texts at a time, whose words take far more room than their weights."""
        ids, weights, counts = [], [], []
        for start in range(0, len(texts), _AT_ONCE):
            some = self._tfidf([_words(text) for text in texts[start : start + _AT_ONCE]])
            ids.append(some[0])
            weights.append(some[1].double())
            counts.append(some[2].diff())
        rows = torch.repeat_interleave(torch.arange(len(texts)), torch.cat(counts))
        indices, shape = torch.stack([rows, torch.cat(ids)]), (len(texts), len(self.terms))
        return torch.sparse_coo_tensor(indices, torch.cat(weights), shape, is_coalesced=True, check_invariants=True)

    def _tfidf(self, documents: Sequence[Counter[str]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Term ids and weights [entries] of all documents, and where each document begins [n + 1]."""
        ids, counts, offsets = [], [], [0]
        known = self._ids
        for document in documents:
            found = sorted((known[term], count) for term, count in document.items() if term in known)
            ids += [term for term, _ in found]
            counts += [count for _, count in found]
            offsets.append(len(ids))
        term_ids = torch.tensor(ids, dtype=torch.int64)
        starts = torch.tensor(offsets)
        weights = (torch.tensor(counts, dtype=torch.float32).log() + 1) * self._idf[term_ids]
        rows = torch.repeat_interleave(torch.arange(len(documents)), starts.diff())
        norms = torch.zeros(len(documents)).index_add_(0, rows, weights.square()).sqrt()
        return term_ids, weights / norms[rows], starts

    @property
    def identity(self) -> dict[str, Any]:
        digest = hashlib.sha256("\n".join(self.terms).encode())
        digest.update(self._idf.numpy().tobytes() + self._projection.numpy().tobytes())
        return {
            "name": "lsa",
            "revision": digest.hexdigest(),
            "prompt": None,
            "normalisation": "l2",
            "dim": self.channels,
            "terms": len(self.terms),
            "seed": self.seed,
        }

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """float32 [n, 1, C] of unit norm; NaN where a text has no known word."""
        ids, weights, offsets = self._tfidf([_words(text) for text in texts])
        projected = torch.nn.functional.embedding_bag(
            ids, self._projection, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True
        )
        return unit_rows(projected.numpy())[:, None, :]

    def save(self, folder: Path | str) -> None:
        folder = Path(folder)
        write_description(folder, {"kind": self.kind, "seed": self.seed, "terms": self.terms})
        arrays = {"idf": self._idf.numpy(), "projection": self._projection.numpy()}
        save_file(arrays, folder / "lsa.safetensors")

    @classmethod
    def load(cls, folder: Path, description: dict[str, Any]) -> LsaEncoder:
        arrays = load_file(folder / "lsa.safetensors")
        return cls(description["terms"], arrays["idf"], arrays["projection"], description["seed"])


class StretchEncoder:
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
    def load(cls, folder: Path, description: dict[str, Any]) -> StretchEncoder:
        return cls(load_encoder(folder / "inner", **description["working"]), description["latent_tokens"])


_KINDS: dict[str, Any] = {
    kind.kind: kind for kind in (LsaEncoder, SentenceTransformerEncoder, ImportedLatents, StretchEncoder)
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


def _words(text: str) -> Counter[str]:
    return Counter(_WORD.findall(text.lower()))
