"""`StoreWriter`: shards go into a temporary folder that becomes the store in one rename."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from mmldlm import __version__
from mmldlm.data.encoders import LatentEncoder
from mmldlm.data.manifest import (
    FORMAT,
    MANIFEST_NAME,
    LatentInfo,
    Manifest,
    ShardInfo,
    SplitInfo,
    token_dtype,
)
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.errors import DataError
from mmldlm.files import FileInfo, file_info, fsync

SPLITS = ("train", "validation", "test")


@dataclass
class _Pending:
    """Samples of one split that wait for their shard to fill, and what has been written of it."""

    tokens: list[np.ndarray] = field(default_factory=list)
    latents: list[np.ndarray] = field(default_factory=list)
    characters: list[int] = field(default_factory=list)
    written: list[ShardInfo] = field(default_factory=list)
    total_characters: int = 0


class StoreWriter:
    """Writes a store at `path`; use as a context manager and call `finish()` at the end.

    Until `finish()` renames it, everything lies in `PATH.incomplete-PID` beside `path`, which is
    removed when the block ends early. A killed process leaves that folder behind, and no store.
    """

    def __init__(
        self,
        path: Path | str,
        tokenizer: Tokenizer,
        encoder: LatentEncoder,
        latent_dtype: str = "float16",
        shard_samples: int = 100_000,
        overwrite: bool = False,
    ):
        self.path = Path(path)
        self.folder = self.path.with_name(f"{self.path.name}.incomplete-{os.getpid()}")
        self.tokenizer, self.encoder = tokenizer, encoder
        self.token_dtype = token_dtype(tokenizer.vocab_size)
        self.latent_dtype = np.dtype(latent_dtype)
        self.shard_samples = shard_samples
        self.overwrite = overwrite
        self._pending = {split: _Pending() for split in SPLITS}

    def __enter__(self) -> StoreWriter:
        if self.path.exists() and not self.overwrite:
            raise DataError(f"{self.path}: exists already; expected a new folder, or --overwrite")
        if self.path.exists() and not (self.path / MANIFEST_NAME).is_file():
            raise DataError(f"{self.path}: is no data store, so --overwrite does not replace it; expected a new folder")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def add(self, split: str, tokens: Sequence[np.ndarray], latents: np.ndarray, characters: Sequence[int]) -> None:
        """Append samples: `tokens` of n, raw `latents` [n, M, C], and `characters` of n texts."""
        assert len(tokens) == len(latents) == len(characters)
        assert all(len(sample) for sample in tokens), "a sample without tokens"
        pending = self._pending[split]
        stored = latents.astype(self.latent_dtype)
        if not np.isfinite(stored).all():
            raise DataError(f"{self.path}: a latent of split {split} is not finite as {self.latent_dtype}; try float32")
        pending.tokens += [np.asarray(sample, self.token_dtype) for sample in tokens]
        pending.latents += list(stored)
        pending.characters += characters
        while len(pending.tokens) >= self.shard_samples:
            self._flush(split, self.shard_samples)

    def _flush(self, split: str, count: int) -> None:
        pending = self._pending[split]
        name = f"{split}-{len(pending.written):05d}"
        lengths = [len(sample) for sample in pending.tokens[:count]]
        arrays = {
            "tokens": np.concatenate(pending.tokens[:count]),
            "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            "latents": np.stack(pending.latents[:count]),
            "characters": np.asarray(pending.characters[:count], np.int32),
        }
        files = {}
        for kind, array in arrays.items():
            path = self.folder / f"{name}.{kind}.npy"
            np.save(path, array, allow_pickle=False)
            fsync(path)
            files[f"{kind}.npy"] = file_info(path)
        pending.written.append(ShardInfo(name, count, sum(lengths), files))
        pending.total_characters += sum(pending.characters[:count])
        del pending.tokens[:count], pending.latents[:count], pending.characters[:count]

    def finish(
        self,
        sources: list[dict[str, Any]],
        options: dict[str, Any],
        problems: dict[str, int],
        grouping: dict[str, Any],
        extra_files: dict[str, str] | None = None,
    ) -> Manifest:
        """Write what is left, the statistics and the manifest, and rename the folder to the store.

        `extra_files` are texts by name. DataError where a split has no samples or all latents are equal.
        """
        for split, pending in self._pending.items():
            if pending.tokens:
                self._flush(split, len(pending.tokens))
            if not pending.written:
                raise DataError(
                    f"{self.path}: split {split} has no samples; expected more documents or larger fractions"
                )
        self.tokenizer.save(self.folder / "tokenizer")
        self.encoder.save(self.folder / "encoder")
        for name, text in (extra_files or {}).items():
            (self.folder / name).write_text(text, encoding="utf-8")
        counts = sum(
            np.bincount(tokens, minlength=self.tokenizer.vocab_size) for tokens in self._arrays("tokens", "train")
        )
        np.save(self.folder / "token_counts.npy", np.asarray(counts, np.int64), allow_pickle=False)
        lengths = [np.diff(offsets).max() for split in SPLITS for offsets in self._arrays("offsets", split)]
        manifest = Manifest(
            format=FORMAT,
            created_by=f"mmldlm {__version__}",
            vocab_size=self.tokenizer.vocab_size,
            mask_id=self.tokenizer.mask_id,
            pad_id=self.tokenizer.pad_id,
            max_length=int(max(lengths)),
            token_dtype=self.token_dtype.name,
            latent_dtype=self.latent_dtype.name,
            latent=self._latent_info(),
            tokenizer={"sha256": self.tokenizer.identity},
            encoder=self.encoder.identity,
            sources=sources,
            options=options,
            problems=problems,
            grouping=grouping,
            splits={
                split: SplitInfo(
                    samples=sum(shard.samples for shard in pending.written),
                    tokens=sum(shard.tokens for shard in pending.written),
                    characters=pending.total_characters,
                    shards=tuple(pending.written),
                )
                for split, pending in self._pending.items()
            },
            files=self._other_files(),
        )
        manifest.write(self.folder)
        self._publish()
        return manifest

    def _arrays(self, kind: str, split: str) -> Iterator[np.ndarray]:
        for shard in self._pending[split].written:
            yield np.load(self.folder / f"{shard.name}.{kind}.npy", mmap_mode="r", allow_pickle=False)

    def _latent_info(self) -> LatentInfo:
        """Statistics of what was stored, after rounding; two passes, because a difference of squares cancels."""
        shape = (self.encoder.latent_tokens, self.encoder.channels)
        total, count = np.zeros(shape[1]), 0
        for latents in self._arrays("latents", "train"):
            total += latents.sum(axis=(0, 1), dtype=np.float64)
            count += latents.shape[0] * latents.shape[1]
        mean = total / count
        square = sum(float(np.square(latents - mean).sum()) for latents in self._arrays("latents", "train"))
        rms = float(np.sqrt(square / (count * shape[1])))
        if not rms > 0:
            raise DataError(f"{self.path}: all training latents are equal; expected an encoder that tells texts apart")
        largest = max(
            float(np.square(latents - mean).sum(axis=-1).max())
            for split in SPLITS
            for latents in self._arrays("latents", split)
        )
        return LatentInfo(*shape, mean=tuple(mean.tolist()), rms=rms, max_norm=float(np.sqrt(largest)) / rms)

    def _other_files(self) -> dict[str, FileInfo]:
        shards = {f"{shard.name}.{end}" for p in self._pending.values() for shard in p.written for end in shard.files}
        found = {}
        for path in sorted(path for path in self.folder.rglob("*") if path.is_file()):
            name = path.relative_to(self.folder).as_posix()
            if name not in shards:
                fsync(path)
                found[name] = file_info(path)
        return found

    def _publish(self) -> None:
        """Put the finished folder in place; an old store is moved away first and deleted last."""
        old = self.path.with_name(f"{self.path.name}.replaced-{os.getpid()}")
        if self.path.exists():
            self.path.rename(old)
        self.folder.rename(self.path)
        fsync(self.path.parent)
        shutil.rmtree(old, ignore_errors=True)
