"""The manifest of a store: what is in it, where it came from, and the hash of every file.

Shape letters: V vocabulary, M latent tokens of a sample, C latent channels.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.errors import DataError
from mmldlm.utils.files import FileInfo, write_atomically

FORMAT = 1
MANIFEST_NAME = "manifest.json"
SEAL_NAME = "manifest.sha256"  # as sha256sum writes and reads it


@dataclass(frozen=True)
class ShardInfo:
    """One shard: its files are `NAME.SUFFIX` for every suffix in `files`."""

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
    """Shape and scale of the latents, measured on the training split (`max_norm` on all splits).

    `rms` is the root mean square of the centerd latents, so that `(x - mean) / rms` has norm sqrt(C)
    on average; `max_norm` is the largest norm of a latent vector so standardized, or a bound on it.
    """

    tokens: int
    channels: int
    mean: tuple[float, ...]
    rms: float
    max_norm: float

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> LatentInfo:
        """From JSON; TypeError or ValueError where it is none."""
        values = _checked(cls, found)
        return cls(**values | {"mean": tuple(values["mean"])})

    def standardize(self, latents: np.ndarray) -> np.ndarray:
        """float32 [..., M, C]: from the encoder's scale to unit root mean square (norm sqrt(C) on average)."""
        return (latents.astype(np.float32) - np.asarray(self.mean, np.float32)) / np.float32(self.rms)

    def restore(self, latents: np.ndarray) -> np.ndarray:
        """float32 [..., M, C]: the inverse of `standardize`."""
        return latents.astype(np.float32) * np.float32(self.rms) + np.asarray(self.mean, np.float32)


@dataclass(frozen=True)
class Manifest:
    """Everything that describes a store. `options` are the resolved ones of `mmldlm prepare`."""

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

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    def write(self, store: Path) -> None:
        """Durably, with its seal, the hash of the manifest itself. The manifest comes last."""
        content = self.to_json()
        write_atomically(store / SEAL_NAME, seal_of(hashlib.sha256(content.encode()).hexdigest()))
        write_atomically(store / MANIFEST_NAME, content)

    def all_files(self) -> Iterator[tuple[str, FileInfo]]:
        """Every file of the store but the manifest and its seal, by name."""
        for split in self.splits.values():
            for shard in split.shards:
                yield from ((f"{shard.name}.{suffix}", info) for suffix, info in shard.files.items())
        yield from self.files.items()

    @classmethod
    def read(cls, store: Path) -> Manifest:
        """The manifest of the store at `store`; DataError where it is missing, torn or of another format."""
        path = store / MANIFEST_NAME
        if not path.is_file():
            what = "no such folder" if not store.exists() else f"it has no {MANIFEST_NAME}"
            raise DataError(f"{store}: not a data store: {what}; expected the folder that `mmldlm prepare --out` wrote")
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"{path}: not valid JSON ({error}); expected the manifest of a data store") from None
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            value = found.get("format") if isinstance(found, dict) else type(found).__name__
            raise DataError(f"{path}: format is {value!r}, expected {FORMAT}; prepare the data again")
        try:
            values = _checked(cls, found)
            values["latent"] = LatentInfo.read(found["latent"])
            values["splits"] = {name: _split(split) for name, split in found["splits"].items()}
            values["files"] = {name: FileInfo(**_checked(FileInfo, info)) for name, info in found["files"].items()}
            return cls(**values)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{path}: {error}; expected a complete manifest of format {FORMAT}") from None


def seal_of(digest: str) -> str:
    """What the seal of a manifest of this SHA-256 holds."""
    return f"{digest}  {MANIFEST_NAME}\n"


def _checked(cls: type, found: Mapping[str, Any]) -> dict[str, Any]:
    """`found` with exactly the fields of the dataclass `cls`; ValueError naming the first that differ."""
    expected = _names(cls)
    if found.keys() != expected:
        if missing := sorted(expected - found.keys()):
            raise ValueError(f"key {missing[0]!r} is missing")
        raise ValueError(f"key {min(found.keys() - expected)!r} is unknown")
    return dict(found)


@cache
def _names(cls: type) -> frozenset[str]:
    return frozenset(field.name for field in fields(cls))


def shard_info(found: Mapping[str, Any]) -> ShardInfo:
    """From its JSON values; KeyError, TypeError or ValueError where they are not complete."""
    files = {suffix: FileInfo(**_checked(FileInfo, info)) for suffix, info in found["files"].items()}
    return ShardInfo(**_checked(ShardInfo, found) | {"files": files})


def _split(found: Mapping[str, Any]) -> SplitInfo:
    return SplitInfo(**_checked(SplitInfo, found) | {"shards": tuple(map(shard_info, found["shards"]))})


def token_dtype(vocab_size: int) -> np.dtype:
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
