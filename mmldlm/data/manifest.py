"""Manifest of a store: its contents, their provenance, and the hash of every file.

Shape letters: V vocabulary, M latent tokens of a sample, C latent channels.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.errors import DataError
from mmldlm.utils.files import FileInfo, read_regular, write_atomically

FORMAT = 1
SPLITS = ("train", "validation", "test")
MANIFEST_NAME = "manifest.json"
CHECKSUM_NAME = "manifest.sha256"  # in the format of sha256sum


@dataclass(frozen=True)
class ShardInfo:
    """One shard; its files are `NAME.SUFFIX` for every suffix in `files`."""

    name: str
    samples: int
    tokens: int
    files: dict[str, FileInfo]


@dataclass(frozen=True)
class SplitInfo:
    """Totals of one split and its shards, in order."""

    samples: int
    tokens: int
    characters: int
    shards: tuple[ShardInfo, ...]


@dataclass(frozen=True)
class LatentInfo:
    """Shape and scale of the latents, measured on the training split.

    `rms` is the root mean square of the centered latents, so that `(x - mean) / rms` has norm sqrt(C) on average;
    `max_norm` is the largest norm of a standardized latent vector, or an upper bound on it.
    """

    tokens: int
    channels: int
    mean: tuple[float, ...]
    rms: float
    max_norm: float

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> LatentInfo:
        """Create from JSON values; TypeError or KeyError if they do not describe latents."""
        return cls(**{**content, "mean": tuple(content["mean"])})

    def standardize(self, latents: np.ndarray) -> np.ndarray:
        """Map latents [..., M, C] to unit root mean square (norm sqrt(C) on average), float32."""
        return (latents.astype(np.float32) - np.asarray(self.mean, np.float32)) / np.float32(self.rms)

    def restore(self, latents: np.ndarray) -> np.ndarray:
        """Map standardized latents [..., M, C] back to the encoder's scale, float32."""
        return latents.astype(np.float32) * np.float32(self.rms) + np.asarray(self.mean, np.float32)


@dataclass(frozen=True)
class Manifest:
    """Complete description of a store. `options` are the resolved options of `mmldlm prepare`."""

    format: int
    created_by: str
    vocab_size: int
    mask_id: int
    pad_id: int
    max_length: int
    token_dtype: str
    latent_dtype: str
    latent: LatentInfo
    tokenizer: dict[str, Any]
    encoder: dict[str, Any]
    sources: list[dict[str, Any]]
    options: dict[str, Any]
    problems: dict[str, int]
    grouping: dict[str, Any]
    splits: dict[str, SplitInfo]
    files: dict[str, FileInfo]

    @property
    def has_prefixes(self) -> bool:
        """True if samples begin with conditions, see `prepare --prefix-field`."""
        return "prefixes" in self.tokenizer

    def to_json(self) -> str:
        """Return the content of the manifest file."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    def write(self, store: Path) -> None:
        """Write the manifest durably, after its checksum file."""
        content = self.to_json()
        # The manifest makes a folder a store, so it comes last.
        write_atomically(store / CHECKSUM_NAME, checksum_line(hashlib.sha256(content.encode()).hexdigest()))
        write_atomically(store / MANIFEST_NAME, content)

    def all_files(self) -> Iterator[tuple[str, FileInfo]]:
        """Yield (name, info) of every file of the store except the manifest and its checksum."""
        for split in self.splits.values():
            for shard in split.shards:
                yield from ((f"{shard.name}.{suffix}", info) for suffix, info in shard.files.items())
        yield from self.files.items()

    @classmethod
    def read(cls, store: Path) -> Manifest:
        """Read the manifest of the store at `store`; if missing, incomplete or of another format, raise `DataError`."""
        path = store / MANIFEST_NAME
        if not path.is_file():
            reason = "no such folder" if not store.exists() else f"it has no {MANIFEST_NAME}"
            raise DataError(
                f"{store}: not a data store: {reason}; expected the folder that `mmldlm prepare --out` wrote"
            )
        try:
            content = json.loads(read_regular(path))
        except ValueError as error:
            raise DataError(f"{path}: not valid JSON ({error}); expected the manifest of a data store") from None
        try:
            if content["format"] != FORMAT:
                raise DataError(f"{path}: format is {content['format']!r}, expected {FORMAT}; prepare the data again")
            nested = {
                "latent": LatentInfo.from_json(content["latent"]),
                "splits": {
                    name: SplitInfo(**{**split, "shards": tuple(map(shard_info, split["shards"]))})
                    for name, split in content["splits"].items()
                },
                "files": {name: FileInfo(**info) for name, info in content["files"].items()},
            }
            return cls(**{**content, **nested})
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path}: {error}; expected a complete manifest of format {FORMAT}") from None


def checksum_line(digest: str) -> str:
    """Return the content of the checksum file of a manifest with this SHA-256."""
    return f"{digest}  {MANIFEST_NAME}\n"


def shard_info(content: Mapping[str, Any]) -> ShardInfo:
    """Create a `ShardInfo` from JSON values; TypeError or KeyError if they are incomplete."""
    return ShardInfo(**{**content, "files": {suffix: FileInfo(**info) for suffix, info in content["files"].items()}})


def describe_losses(tokenizer: Mapping[str, Any]) -> str:
    """Return what tokens lose of their texts, from a manifest's `tokenizer`; "" if it was not measured."""
    labels = {
        "unknown_tokens": "of tokens are unknown",
        "lossy_documents": "of documents are not what their tokens decode to",
    }
    return ", ".join(f"{tokenizer[key]:.1%} {label}" for key, label in labels.items() if key in tokenizer)


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest type in which tokens of the vocabulary are stored."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
