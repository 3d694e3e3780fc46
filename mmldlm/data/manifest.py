"""Manifest of a store: its contents, their provenance, and the hash of every file.

Shape letters: V vocabulary, M latent tokens of a sample, C latent channels.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.errors import DataError
from mmldlm.utils.files import FileInfo, read_regular, write_atomically
from mmldlm.utils.short_repr import short_repr

FORMAT = 1
SPLITS = ("train", "validation", "test")
KINDS = frozenset({"tokens", "offsets", "latents", "characters"})  # of arrays of a shard, besides "weights"
MANIFEST_NAME = "manifest.json"
CHECKSUM_NAME = "manifest.sha256"  # in the format of sha256sum


@dataclass(frozen=True)
class ShardInfo:
    """One shard, whose files are `NAME.SUFFIX` for every suffix in `files`."""

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

    `rms` is the root mean square of the centered latents, so that `(x - mean) / rms` has norm sqrt(C) on average.
    `max_norm` is the largest norm of a standardized latent vector, or an upper bound on it.
    """

    tokens: int
    channels: int
    mean: tuple[float, ...]
    rms: float
    max_norm: float

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> LatentInfo:
        """Create from JSON values, or raise `TypeError` or `KeyError` if they do not describe latents."""
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
        """True if samples begin with conditions (see `prepare --prefix-field`)."""
        return "prefixes" in self.tokenizer

    @property
    def mean_weight(self) -> float | None:
        """The mean weight of the training samples (see `prepare --weight-field`), or None if they have none."""
        return self.grouping.get("mean_weight")

    @property
    def compared(self) -> slice:
        """The latent tokens that compare texts: with a teacher of learned latents only the last one."""
        return slice(-1 if "teacher" in self.encoder else 0, None)

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
        """Read the manifest of a store, or raise `DataError` if it is missing, incomplete or of another format."""
        path = store / MANIFEST_NAME
        if not path.is_file():
            reason = "no such folder" if not store.exists() else f"it has no {MANIFEST_NAME}"
            raise DataError(
                f"{store}: not a data store: {reason}; expected the folder that `mmldlm prepare --out` wrote"
            )
        text, checksum = read_regular(path), store / CHECKSUM_NAME
        found = checksum_line(hashlib.sha256(text).hexdigest())
        expected = read_regular(checksum).decode(errors="replace") if checksum.is_file() else "none"
        if expected != found:  # then we cannot trust the hashes in it
            found = f"SHA-256 is {found[:12]}..., expected {expected[:12]}..."
            raise DataError(f"{path}: damaged, or its {CHECKSUM_NAME}: {found}; copy or prepare the store again")
        try:
            content = json.loads(text)
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
            manifest = cls(**{**content, **nested})
            manifest._check()
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
            raise DataError(f"{path}: {error}; expected a complete manifest of format {FORMAT}") from None
        return manifest

    def _check(self) -> None:
        """Raise `ValueError` if a field has a type or value that no store can have."""
        latent, splits, files = self.latent, self.splits.values(), dict(self.all_files())
        shards = [shard for split in splits for shard in split.shards]
        parts: list[Any] = [self, latent, *splits, *shards]
        for part in parts:
            for field in fields(part):
                value, expected = getattr(part, field.name), str(field.type)
                if type(value).__name__ != expected.partition("[")[0] or (type(value) is int and value < 0):
                    raise ValueError(f"{field.name} is {short_repr(value)}, expected {expected}, not below 0")
        kinds = KINDS if self.mean_weight is None else KINDS | {"weights"}
        sums = [np.sum([(shard.samples, shard.tokens) for shard in split.shards], 0).tolist() for split in splits]
        scale = np.array([latent.rms, latent.max_norm, *np.square(latent.mean)])
        tokenizer = files.get("tokenizer/tokenizer.json")  # absent in the description of a store
        for name, is_possible in {
            "mask_id": self.mask_id != self.pad_id and max(self.mask_id, self.pad_id) < self.vocab_size <= 1 << 24,
            "token_dtype": self.token_dtype in ("uint16", "uint32"),
            "latent_dtype": self.latent_dtype in ("float16", "float32"),
            "latent": len(latent.mean) == latent.channels and np.isfinite(scale).all() and (scale[:2] > 0).all(),
            "splits": tuple(self.splits) in ((), SPLITS) and sums == [[part.samples, part.tokens] for part in splits],
            "files": len(files) == len([*self.all_files()])
            and not any(name.startswith("/") or ".." in name.split("/") for name in files)
            and all({suffix.removesuffix(".npy") for suffix in shard.files} == kinds for shard in shards),
            "grouping": self.mean_weight is None or 0 < self.mean_weight < np.inf,
            "encoder": isinstance(self.encoder.get("name"), str),
            "tokenizer": tokenizer is None or self.tokenizer["sha256"] == tokenizer.sha256,
        }.items():
            if not is_possible:
                raise ValueError(f"{name} is {short_repr(getattr(self, name))}, which no store has")


def checksum_line(digest: str) -> str:
    """Return the content of the checksum file of a manifest with this SHA-256."""
    return f"{digest}  {MANIFEST_NAME}\n"


def shard_info(content: Mapping[str, Any]) -> ShardInfo:
    """Create a `ShardInfo` from JSON values, or raise `TypeError` or `KeyError` if they are incomplete."""
    return ShardInfo(**{**content, "files": {suffix: FileInfo(**info) for suffix, info in content["files"].items()}})


def describe_losses(tokenizer: Mapping[str, Any]) -> str:
    """Describe how much text the tokens lose, by a manifest's `tokenizer`, or return "" if it was not measured."""
    labels = {
        "unknown_tokens": "of tokens are unknown",
        "lossy_documents": "of documents are not what their tokens decode to",
    }
    return ", ".join(f"{tokenizer[key]:.1%} {label}" for key, label in labels.items() if key in tokenizer)


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest type that holds the tokens of the vocabulary."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
