"""`LsaEncoder`: latent semantic analysis, which needs no pretrained model.

Shape letters: n texts, V words, C latent channels.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file

from mmldlm.checkpoint.tensors import write_tensors
from mmldlm.data.encoders.base import LatentEncoder, make_identity, normalize_rows, write_description
from mmldlm.errors import DataError
from mmldlm.utils.progress import print_status

_WORD = re.compile(r"\w+")
# Five letters in a row of scripts without spaces: Thai, Lao, Burmese, Khmer, Japanese, Chinese.
_UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u9fff]{5}")
_BLOCK_TEXTS = 4096
_MAX_TERMS = 20_000
_CHANNELS = 64


class LsaEncoder(LatentEncoder):
    """Latent semantic analysis: sublinear TF-IDF of lower-cased words, projected by a truncated SVD.

    A latent is a topic vector of unit norm, relative to the corpus that the encoder was fitted on. A text without any
    known word yields NaN.
    """

    kind = "lsa"
    is_small = True
    latent_tokens = 1

    def __init__(self, terms: list[str], idf: np.ndarray, projection: np.ndarray, seed: int):
        """Create from `terms` (V words), `idf` float32 [V] and `projection` float32 [V, C]. `seed` is only recorded."""
        self.terms, self.seed = terms, seed
        self.channels = projection.shape[1]
        self._ids = {term: i for i, term in enumerate(terms)}
        self._idf, self._projection = torch.from_numpy(idf), torch.from_numpy(projection)

    @classmethod
    def fit(cls, texts: Iterable[str], channels: int | None = None, seed: int = 0) -> LsaEncoder:
        """Fit an encoder to `texts`. Equal texts and an equal `seed` (of the randomized SVD) give equal encoders.

        `channels` is C, the rank of the SVD. The default is 64, or fewer, with a notice, if the corpus is small. It is
        a `DataError` if `channels` exceeds the number of texts or words, or the texts have no spaces between words.
        """
        texts = list(texts)
        frequency = Counter(word for text in texts for word in _words(text))
        if len(unspaced := [word for word in frequency if _UNSPACED.search(word)]) > len(frequency) / 5:
            raise DataError(
                f"--encoder lsa: reads words between spaces, found {min(unspaced)[:20]!r}; expected such words, or "
                "--encoder learned or sentence-transformers:NAME"
            )
        # The most frequent words, ties in alphabetical order, so that the order of the texts does not matter.
        terms = sorted(sorted(frequency), key=lambda term: -frequency[term])[:_MAX_TERMS]
        max_channels = min(len(terms), len(texts))
        if channels is None and 0 < max_channels < _CHANNELS:
            print_status(
                f"--channels {max_channels}: the training split has only {len(texts)} texts and {len(terms)} words"
            )
            channels = max_channels
        elif (channels := channels or _CHANNELS) > max_channels:
            raise DataError(
                f"--channels {channels}: the training split has {len(texts)} texts and {len(terms)} words, "
                f"expected at most {max_channels} channels"
            )
        encoder = cls(terms, _idf(terms, frequency, len(texts)), np.zeros((len(terms), channels), np.float32), seed)
        matrix = encoder._matrix(texts)
        # `svd_lowrank` draws from the global generator, whose state is restored afterwards.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            right = torch.svd_lowrank(matrix, q=min(channels + 16, max_channels), niter=4)[2][:, :channels]
        # The sign of a singular vector is arbitrary: make the largest entry positive.
        largest = right.gather(0, right.abs().argmax(0, keepdim=True))
        encoder._projection = (right * largest.sign()).float().contiguous()
        return encoder

    def _matrix(self, texts: Sequence[str]) -> torch.Tensor:
        """Return the TF-IDF matrix, sparse float64 [n, V], in blocks, as words need far more memory than weights."""
        blocks = (texts[start : start + _BLOCK_TEXTS] for start in range(0, len(texts), _BLOCK_TEXTS))
        ids, weights, starts = zip(*(self._tfidf([*map(_words, block)]) for block in blocks), strict=True)
        counts = torch.cat([offsets.diff() for offsets in starts])
        rows = torch.repeat_interleave(torch.arange(len(texts)), counts)
        indices, values = torch.stack([rows, torch.cat(ids)]), torch.cat(weights).double()
        # Entries are in order of text and term, each once: they are coalesced already.
        shape = len(texts), len(self.terms)
        return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True, check_invariants=True)

    def _tfidf(self, documents: Sequence[Counter[str]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return term ids and weights [entries] of all documents, and the offset of each document [n + 1]."""
        ids, counts, offsets = [], [], [0]
        for document in documents:
            entries = sorted((self._ids[term], count) for term, count in document.items() if term in self._ids)
            ids += [term for term, _ in entries]
            counts += [count for _, count in entries]
            offsets.append(len(ids))
        term_ids = torch.tensor(ids, dtype=torch.int64)
        starts = torch.tensor(offsets)
        # Entries of all documents in one array, each with the row of its document: no loop over documents.
        weights = (torch.tensor(counts, dtype=torch.float32).log() + 1) * self._idf[term_ids]
        rows = torch.repeat_interleave(torch.arange(len(documents)), starts.diff())
        norms = torch.zeros(len(documents)).index_add_(0, rows, weights.square()).sqrt()
        # A document without known terms has norm 0, but no entry that is divided by it.
        return term_ids, weights / norms[rows], starts

    @property
    def identity(self) -> dict[str, Any]:
        """See `LatentEncoder.identity`."""
        digest = hashlib.sha256("\n".join(self.terms).encode())
        digest.update(self._idf.numpy().tobytes() + self._projection.numpy().tobytes())
        return make_identity("lsa", digest.hexdigest(), self.channels) | {"terms": len(self.terms), "seed": self.seed}

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Return latents float32 [n, 1, C] of unit norm, with NaN for texts without a known word."""
        ids, weights, offsets = self._tfidf([_words(text) for text in texts])
        # The weighted sum of the terms' rows, [n, C]: the sparse matrix [n, V] times the projection [V, C].
        projected = torch.nn.functional.embedding_bag(
            ids, self._projection, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True
        )
        return normalize_rows(projected.numpy())[:, None, :]

    def save(self, folder: Path) -> None:
        """See `LatentEncoder.save`."""
        write_description(folder, {"kind": self.kind, "seed": self.seed, "terms": self.terms})
        write_tensors(folder / "lsa.safetensors", {"idf": self._idf, "projection": self._projection})

    @classmethod
    def load(cls, folder: Path, description: dict[str, Any]) -> LsaEncoder:
        """Load the encoder that `save` wrote."""
        arrays = load_file(folder / "lsa.safetensors")
        return cls(description["terms"], arrays["idf"], arrays["projection"], description["seed"])


def tfidf(texts: Sequence[str]) -> torch.Tensor:
    """Return the TF-IDF matrix of texts by all of their words, sparse float64 [n, V], with rows of unit norm or 0."""
    frequency = Counter(word for text in texts for word in _words(text))
    terms = sorted(frequency)
    return LsaEncoder(terms, _idf(terms, frequency, len(texts)), np.zeros((len(terms), 0)), 0)._matrix(texts)


def _idf(terms: Sequence[str], frequency: Counter[str], num_texts: int) -> np.ndarray:
    """Return the inverse document frequency of terms, float32 [V], smoothed as by one text with every term."""
    document_frequency = np.array([frequency[term] for term in terms])
    return (np.log((1 + num_texts) / (1 + document_frequency)) + 1).astype(np.float32)


def _words(text: str) -> Counter[str]:
    return Counter(_WORD.findall(text.lower()))
