"""Writing a store: shards that grow by samples, their statistics, and the manifest that makes a folder a store.

Shape letters: n samples, M latent tokens of a sample, C latent channels, V vocabulary.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np

from mmldlm import __version__
from mmldlm.data.encoders import LatentEncoder
from mmldlm.data.manifest import (
    CHECKSUM_NAME,
    FORMAT,
    MANIFEST_NAME,
    SPLITS,
    LatentInfo,
    Manifest,
    ShardInfo,
    SplitInfo,
    shard_info,
    token_dtype,
)
from mmldlm.data.store import Store
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.errors import DataError
from mmldlm.utils.files import FileInfo, file_info, fsync

TOKEN_COUNTS = "token_counts.npy"
_BLOCK_VALUES = 1 << 22  # of a block of rows: 32 MiB in float64


# --- shards ---------------------------------------------------------------------------------------


@dataclass
class Contents:
    """Totals of shards, by split; totals of consecutive shards can be added."""

    shards: dict[str, list[ShardInfo]]
    characters: dict[str, int]
    token_counts: np.ndarray  # int64 [V], of the training split
    latent_sum: np.ndarray  # float64 [C], of the training split, over n and M
    max_length: int = 0

    @classmethod
    def empty(cls, vocab_size: int, channels: int) -> Contents:
        """Return the totals of no shards."""
        shards: dict[str, list[ShardInfo]] = {split: [] for split in SPLITS}
        return cls(shards, dict.fromkeys(SPLITS, 0), np.zeros(vocab_size, np.int64), np.zeros(channels))

    def add(self, other: Contents) -> None:
        """Add the totals of the shards that follow in the store; sums of floats depend on this order."""
        for split in SPLITS:
            self.shards[split] += other.shards[split]
            self.characters[split] += other.characters[split]
        self.token_counts += other.token_counts
        self.latent_sum += other.latent_sum
        self.max_length = max(self.max_length, other.max_length)

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the token counts to `folder` and return the other totals as JSON values."""
        np.save(folder / TOKEN_COUNTS, self.token_counts, allow_pickle=False)
        return {
            "shards": {split: [asdict(shard) for shard in shards] for split, shards in self.shards.items()},
            "characters": self.characters,
            "latent_sum": self.latent_sum.tolist(),
            "max_length": self.max_length,
        }

    @classmethod
    def load(cls, folder: Path, saved: dict[str, Any]) -> Contents:
        """Return the totals that `save` wrote to `folder` and returned as `saved`."""
        shards = {split: list(map(shard_info, shards)) for split, shards in saved["shards"].items()}
        counts = np.load(folder / TOKEN_COUNTS, allow_pickle=False)
        return cls(shards, saved["characters"], counts, np.array(saved["latent_sum"]), saved["max_length"])

    def samples(self, split: str) -> int:
        """Return the number of samples of a split."""
        return sum(shard.samples for shard in self.shards[split])

    def mean(self, latent_tokens: int) -> np.ndarray:
        """Return the mean latent vector of the training split, float64 [C]; a split without samples is a DataError."""
        for split in SPLITS:
            if not self.shards[split]:
                raise DataError(f"split {split} has no samples; expected more documents or larger fractions")
        return self.latent_sum / (self.samples("train") * latent_tokens)


class ShardWriter:
    """Writes the shards of all splits into `folder`; use as a context manager and call `finish()` at the end.

    Memory use is bounded by the samples of one `add`, whatever the size of a shard or of a latent.
    """

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        latent_shape: tuple[int, int],
        token_dtype: np.dtype,
        latent_dtype: np.dtype,
        shard_samples: int,
    ):
        self.folder, self.shard_samples, self.latent_dtype = folder, shard_samples, latent_dtype
        self._rows: dict[str, tuple[np.dtype, tuple[int, ...]]] = {
            "tokens": (token_dtype, ()),
            "offsets": (np.dtype(np.int64), ()),
            "latents": (latent_dtype, latent_shape),
            "characters": (np.dtype(np.int32), ()),
        }
        self._contents = Contents.empty(vocab_size, latent_shape[1])
        self._open: dict[str, _Shard] = {}

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *error: object) -> None:
        for shard in self._open.values():
            shard.close()

    def add(self, split: str, tokens: Sequence[np.ndarray], latents: np.ndarray, characters: Sequence[int]) -> None:
        """Append n samples, of ids (at least one each) and latents [n, M, C] on the encoder's scale, to a split.

        A latent that is not finite in the type in which it is stored is a `DataError`.
        """
        assert len(tokens) == len(latents) == len(characters)
        assert all(len(sample) for sample in tokens), "a sample without tokens"
        # Values beyond the range of float16 become infinite, which the check below reports by name.
        with np.errstate(over="ignore"):
            stored = latents.astype(self.latent_dtype)
        if not np.isfinite(stored).all():
            raise DataError(f"a latent of split {split} is not finite as {self.latent_dtype}; try float32")
        start = 0
        while start < len(tokens):
            if split not in self._open:
                name = f"{split}-{len(self._contents.shards[split]):05d}"
                self._open[split] = _Shard(self.folder, name, self._rows)
            shard = self._open[split]
            part = slice(start, start + self.shard_samples - shard.samples)
            shard.add(tokens[part], stored[part], characters[part])
            start += len(tokens[part])
            if shard.samples == self.shard_samples:
                self._close(split)

    def finish(self) -> Contents:
        """Complete all open shards and return the totals."""
        for split in list(self._open):
            self._close(split)
        return self._contents

    def _close(self, split: str) -> None:
        shard, contents = self._open.pop(split), self._contents
        info = shard.finish()
        contents.shards[split].append(info)
        contents.characters[split] += shard.characters
        contents.max_length = max(contents.max_length, shard.max_length)
        # Read back in blocks of fixed size: sums of floats then do not depend on how many samples each `add` brought.
        if split == "train":
            for tokens in _row_blocks(self.folder, info, "tokens"):
                contents.token_counts += np.bincount(tokens, minlength=len(contents.token_counts))
            for latents in _row_blocks(self.folder, info, "latents"):
                contents.latent_sum += latents.sum(axis=(0, 1), dtype=np.float64)


@dataclass
class _Shard:
    """The four open files of a shard that is being written."""

    folder: Path
    name: str
    rows: dict[str, tuple[np.dtype, tuple[int, ...]]]  # type and shape of a row, by kind of file
    samples: int = 0
    characters: int = 0
    max_length: int = 0
    _files: dict[str, BinaryIO] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for kind in self.rows:
            self._files[kind] = self._path(kind).open("wb")
            self._counts[kind] = 0
            self._write_header(kind)
        # The first offset; `add` appends the end of each sample, so there are samples + 1.
        self._append("offsets", np.zeros(1))

    def add(self, tokens: Sequence[np.ndarray], latents: np.ndarray, characters: Sequence[int]) -> None:
        lengths = np.array([len(sample) for sample in tokens], np.int64)
        # Before the tokens are appended: their count so far is the start of these samples.
        self._append("offsets", self._counts["tokens"] + np.cumsum(lengths))
        self._append("tokens", np.concatenate(tokens))
        self._append("latents", latents)
        self._append("characters", np.asarray(characters))
        self.samples += len(tokens)
        self.characters += sum(characters)
        self.max_length = max(self.max_length, int(lengths.max()))

    def finish(self) -> ShardInfo:
        """Write the final headers, close and hash the files."""
        # The number of rows is known only now; numpy's header has the same size for any number.
        for kind, file in self._files.items():
            file.seek(0)
            self._write_header(kind)
        self.close()
        files: dict[str, FileInfo] = {}
        for kind in self.rows:
            fsync(self._path(kind))
            files[f"{kind}.npy"] = file_info(self._path(kind))
        return ShardInfo(self.name, self.samples, self._counts["tokens"], files)

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _path(self, kind: str) -> Path:
        return self.folder / f"{self.name}.{kind}.npy"

    def _append(self, kind: str, rows: np.ndarray) -> None:
        self._files[kind].write(np.ascontiguousarray(rows, self.rows[kind][0]).data)
        self._counts[kind] += len(rows)

    def _write_header(self, kind: str) -> None:
        dtype, shape = self.rows[kind]
        header: dict[str, Any] = {"descr": dtype.str, "fortran_order": False, "shape": (self._counts[kind], *shape)}
        np.lib.format.write_array_header_1_0(self._files[kind], header)


def _row_blocks(folder: Path, shard: ShardInfo, kind: str) -> Iterator[np.ndarray]:
    """Yield the rows of a shard's file in blocks of about `_BLOCK_VALUES` numbers."""
    array = np.load(folder / f"{shard.name}.{kind}.npy", mmap_mode="r", allow_pickle=False)
    step = max(1, _BLOCK_VALUES // max(1, int(np.prod(array.shape[1:], dtype=np.int64))))
    for start in range(0, len(array), step):
        yield np.asarray(array[start : start + step])


def squared_deviations(folder: Path, shards: Sequence[ShardInfo], mean: np.ndarray) -> tuple[list[float], float]:
    """Return squared deviations of the latents in `shards` from `mean` [C]: each shard's sum, and the largest vector's.

    This is a second pass over the data: one pass that subtracts the squared mean at the end would lose precision to
    cancellation.
    """
    squares, largest = [], 0.0
    for shard in shards:
        total = 0.0
        for latents in _row_blocks(folder, shard, "latents"):
            deviations = np.square(latents - mean)  # [n, M, C], float64 as `mean` is
            total += float(deviations.sum())
            largest = max(largest, float(deviations.sum(axis=-1).max()))
        squares.append(total)
    return squares, largest


def latent_info(contents: Contents, latent_tokens: int, squares: Sequence[float], largest: float) -> LatentInfo:
    """Return the statistics of the stored (rounded) latents.

    `squares` and `largest` are those of `squared_deviations`, of all training shards in order. If all training latents
    are equal, that is a `DataError`.
    """
    mean = contents.mean(latent_tokens)
    channels = len(mean)
    rms = float(np.sqrt(sum(squares) / (contents.samples("train") * latent_tokens * channels)))
    if not rms > 0:
        raise DataError("all training latents are equal; expected an encoder that tells texts apart")
    return LatentInfo(latent_tokens, channels, tuple(mean.tolist()), rms, float(np.sqrt(largest)) / rms)


# --- the store ------------------------------------------------------------------------------------


@contextmanager
def error_prefix(path: Path) -> Iterator[None]:
    """Prefix the message of a DataError in the body with the path of the store."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{path}: {error}") from error.__cause__


def write_manifest(
    folder: Path,
    contents: Contents,
    latent: LatentInfo,
    tokenizer: Tokenizer,
    encoder: LatentEncoder,
    latent_dtype: str,
    provenance: dict[str, Any],
    losses: Mapping[str, float] = MappingProxyType({}),
) -> Manifest:
    """Write the token counts and the manifest, which is the last file of a store, to the `folder` of all its files.

    `provenance` has the manifest's fields sources, options, problems and grouping, `losses` the shares of what the
    tokens lose of the texts (`report.loss_shares`).
    """
    np.save(folder / TOKEN_COUNTS, contents.token_counts, allow_pickle=False)
    shard_files = {f"{s.name}.{suffix}" for shards in contents.shards.values() for s in shards for suffix in s.files}
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        # The hashes of shards are known from writing them; they are not read again.
        if name not in shard_files and name.removesuffix(".tmp") not in (MANIFEST_NAME, CHECKSUM_NAME):
            fsync(path)
            files[name] = file_info(path)
    splits = {
        split: SplitInfo(
            samples=contents.samples(split),
            tokens=sum(shard.tokens for shard in shards),
            characters=contents.characters[split],
            shards=tuple(shards),
        )
        for split, shards in contents.shards.items()
    }
    manifest = Manifest(
        format=FORMAT,
        created_by=f"mmldlm {__version__}",
        vocab_size=tokenizer.vocab_size,
        mask_id=tokenizer.mask_id,
        pad_id=tokenizer.pad_id,
        max_length=contents.max_length,
        token_dtype=token_dtype(tokenizer.vocab_size).name,
        latent_dtype=latent_dtype,
        latent=latent,
        tokenizer={"sha256": tokenizer.identity, **losses},
        encoder=encoder.identity,
        splits=splits,
        files=files,
        **provenance,
    )
    manifest.write(folder)
    return manifest


def publish(folder: Path, path: Path, old: Path) -> None:
    """Rename the finished `folder` to `path`; a store at `path` is first moved to `old` and deleted at the end."""
    fsync(folder)
    # Two renames, as a folder cannot be renamed onto one with files. Between them there is no store at `path`.
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)  # left by a publication that was interrupted behind its last rename
        path.rename(old)
    folder.rename(path)
    fsync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def write_description(store: Store, folder: Path) -> None:
    """Write the encoder of `store` and its manifest without samples to the existing `folder`.

    `Store.open` opens the folder as a store without splits, which suffices to generate. Names of input files, which may
    be private, are left out.
    """
    encoder = folder / "encoder"
    shutil.rmtree(encoder, ignore_errors=True)
    shutil.copytree(store.path / "encoder", encoder)
    paths = sorted(path for path in encoder.rglob("*") if path.is_file())
    files = {path.relative_to(folder).as_posix(): file_info(path) for path in paths}
    private: dict[str, Any] = {"sources": [], "options": {}, "problems": {}, "grouping": {}}
    replace(store.manifest, splits={}, files=files, **private).write(folder)
