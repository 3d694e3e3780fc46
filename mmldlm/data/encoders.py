"""Latent encoders: text to the latents that are diffused.

`LsaEncoder` needs nothing but the corpus; `SentenceTransformerEncoder` is the extra `encoders`.
Shape letters: n texts, M latent tokens of a sample, C latent channels.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from mmldlm.errors import DataError, UsageError

_WORD = re.compile(r"\w+")


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
        documents = [Counter(_WORD.findall(text.lower())) for text in texts]
        frequency: Counter[str] = Counter()
        for document in documents:
            frequency.update(document.keys())
        terms = sorted(sorted(frequency), key=lambda term: -frequency[term])[:max_terms]
        if (most := min(len(terms), len(documents))) < channels:
            raise DataError(
                f"--channels {channels}: the training split has {len(documents)} texts and {len(terms)} words, "
                f"expected at most {most} channels"
            )
        document_frequency = np.array([frequency[term] for term in terms])
        idf = (np.log((1 + len(documents)) / (1 + document_frequency)) + 1).astype(np.float32)
        encoder = cls(terms, idf, np.zeros((len(terms), channels), np.float32), seed)
        ids, weights, offsets = encoder._tfidf(documents)
        rows = torch.repeat_interleave(torch.arange(len(documents)), offsets.diff())
        indices, shape = torch.stack([rows, ids]), (len(documents), len(terms))
        matrix = torch.sparse_coo_tensor(indices, weights.double(), shape, is_coalesced=True, check_invariants=True)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            right = torch.svd_lowrank(matrix, q=min(channels + 16, most), niter=4)[2][:, :channels]
        # The sign of a singular vector is arbitrary: make the largest entry positive.
        largest = right.gather(0, right.abs().argmax(0, keepdim=True))
        encoder._projection = (right * largest.sign()).float().contiguous()
        return encoder

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
        ids, weights, offsets = self._tfidf([Counter(_WORD.findall(text.lower())) for text in texts])
        projected = torch.nn.functional.embedding_bag(
            ids, self._projection, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True
        )
        return _unit_rows(projected.numpy())[:, None, :]

    def save(self, folder: Path | str) -> None:
        folder = Path(folder)
        _write_description(folder, {"kind": self.kind, "seed": self.seed, "terms": self.terms})
        arrays = {"idf": self._idf.numpy(), "projection": self._projection.numpy()}
        save_file(arrays, folder / "lsa.safetensors")

    @classmethod
    def load(cls, folder: Path, description: dict[str, Any]) -> LsaEncoder:
        arrays = load_file(folder / "lsa.safetensors")
        return cls(description["terms"], arrays["idf"], arrays["projection"], description["seed"])


class SentenceTransformerEncoder:
    """A model of the sentence-transformers library, by folder or by name; M = 1.

    Vectors may be truncated to the first `channels` (Matryoshka models are trained for that) and are
    then normalised. `prompt` is put before each text: E5, for one, expects "query: " or "passage: ".
    """

    kind = "sentence-transformers"
    latent_tokens = 1

    def __init__(
        self, name_or_folder: str, channels: int | None = None, prompt: str | None = None, normalise: bool = True
    ):
        """UsageError where the library is not installed, DataError where the model cannot be read."""
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError:
            raise UsageError(
                f"--encoder {self.kind}:{name_or_folder} needs sentence-transformers: pip install mmldlm[encoders]"
            ) from None
        try:
            self._model = SentenceTransformer(name_or_folder, trust_remote_code=False)
        except Exception as error:  # the library raises many kinds: OSError, ValueError, HTTP errors
            reason = " ".join(str(error).split())[:300]
            raise DataError(f"--encoder {self.kind}:{name_or_folder}: cannot load the model ({reason})") from None
        self._model.eval()
        self.name, self.prompt, self.normalise = name_or_folder, prompt, normalise
        dimension = self._model.encode(["dimension"], show_progress_bar=False).shape[1]
        self.channels = dimension if channels is None else channels
        if not 1 <= self.channels <= dimension:
            raise UsageError(f"--channels {channels}: {name_or_folder} has {dimension}, expected 1 to {dimension}")

    @property
    def identity(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "revision": self._revision(),
            "prompt": self.prompt,
            "normalisation": "l2" if self.normalise else None,
            "dim": self.channels,
        }

    def _revision(self) -> str | None:
        """Hash of a local folder's files; the commit of a downloaded model where it is known."""
        folder = Path(self.name)
        if not folder.is_dir():
            config = getattr(getattr(self._model[0], "auto_model", None), "config", None)
            return getattr(config, "_commit_hash", None)
        digest = hashlib.sha256()
        for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """float32 [n, 1, C]; NaN where the model gives no finite vector or zeros."""
        with torch.inference_mode():
            found = self._model.encode(
                list(texts), prompt=self.prompt, show_progress_bar=False, convert_to_numpy=True, batch_size=32
            )
        vectors = np.asarray(found, np.float32).reshape(len(texts), -1)[:, : self.channels]
        unit = _unit_rows(vectors)
        return (unit if self.normalise else np.where(np.isnan(unit), np.nan, vectors))[:, None, :]

    def save(self, folder: Path | str) -> None:
        """Records which model it is; the model's own files are not copied."""
        description = {"kind": self.kind, "normalise": self.normalise, **self.identity}
        _write_description(Path(folder), description)

    @classmethod
    def load(cls, folder: Path, description: dict[str, Any]) -> SentenceTransformerEncoder:
        encoder = cls(description["name"], description["dim"], description["prompt"], description["normalise"])
        found = encoder._revision()
        if found != description["revision"]:
            raise DataError(
                f"{folder / 'encoder.json'}: the model {encoder.name} has revision {found}, "
                f"expected {description['revision']}, with which the store was prepared"
            )
        return encoder


_KINDS = {kind.kind: kind for kind in (LsaEncoder, SentenceTransformerEncoder)}


def load_encoder(folder: Path | str) -> LatentEncoder:
    """The encoder that `save` wrote to `folder`; DataError where it is missing, damaged or not the same model."""
    folder = Path(folder)
    path = folder / "encoder.json"
    if not path.is_file():
        raise DataError(f"{path}: no such file; expected the encoder folder of a data store")
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
        kind = _KINDS[description["kind"]]
        return kind.load(folder, description)
    except (DataError, UsageError):
        raise
    except Exception as error:  # JSON, a missing key, safetensors' own error type
        raise DataError(f"{path}: not a readable encoder ({' '.join(str(error).split())})") from None


def _unit_rows(vectors: np.ndarray) -> np.ndarray:
    """Rows over their norms; NaN where that is zero or not finite."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    norms[~((norms > 1e-9) & np.isfinite(norms))] = np.nan
    return (vectors / norms).astype(np.float32)


def _write_description(folder: Path, description: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "encoder.json").write_text(json.dumps(description, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
