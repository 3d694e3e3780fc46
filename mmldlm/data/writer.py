"""Write a store: shards that grow sample by sample, their statistics, and the manifest that makes a folder a store.

Shape letters: n samples, M latent tokens of a sample, C latent channels, V vocabulary.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

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
_MAX_ROUNDING = 0.01  # of the spread of the latents. More would change who is near to whom
_BLOCK_VALUES = 1 << 22  # of a block of rows: 32 MiB in float64


@dataclass
class Contents:
    """Totals of shards, by split. Totals of consecutive shards can be added."""

    shards: dict[str, list[ShardInfo]]
    characters: dict[str, int]
    token_counts: np.ndarray  # int64 [V], of the training split
    latent_sum: np.ndarray  # float64 [C], of the training split, over n and M
    max_length: int = 0

    def add(self, other: Contents) -> None:
        """Add the totals of the shards that come next in the store. Sums of floats depend on this order."""
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
        """Return the mean latent of the training split, float64 [C], or raise `DataError` if a split has no samples."""
        for split in SPLITS:
            if not self.shards[split]:
                raise DataError(f"split {split} has no samples; expected more documents or larger fractions")
        return self.latent_sum / (self.samples("train") * latent_tokens)


class _GrowingArray:
    """A `.npy` file that grows by rows."""

    def __init__(self, path: Path, dtype: np.dtype, row_shape: tuple[int, ...] = ()):
        self.path, self.num_rows = path, 0
        self._dtype, self._row_shape = dtype, row_shape
        self.file = path.open("wb")
        self._write_header()

    def append(self, rows: np.ndarray) -> None:
        self.file.write(np.ascontiguousarray(rows, self._dtype).data)
        self.num_rows += len(rows)

    def finish(self) -> FileInfo:
        """Write the final header, and close and hash the file."""
        # Only now do we know the number of rows. NumPy's header has the same size for any number.
        self.file.seek(0)
        self._write_header()
        self.file.close()
        fsync(self.path)
        return file_info(self.path)

    def _write_header(self) -> None:
        shape = (self.num_rows, *self._row_shape)
        header: dict[str, Any] = {"descr": self._dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self.file, header)


class ShardWriter:
    """Writes the shards of all splits into `folder`. Use it as a context manager and call `finish()` at the end.

    Only the samples of one `add` are in memory, whatever the size of a shard or of a latent.
    """

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        latent_shape: tuple[int, int],
        token_dtype: np.dtype,
        latent_dtype: np.dtype,
        shard_samples: int,
        has_weights: bool = False,
    ):
        self.folder, self.shard_samples, self.has_weights = folder, shard_samples, has_weights
        self.latent_shape, self.token_dtype, self.latent_dtype = latent_shape, token_dtype, latent_dtype
        self._contents = Contents(
            {split: [] for split in SPLITS}, dict.fromkeys(SPLITS, 0), np.zeros(vocab_size, np.int64),
            np.zeros(latent_shape[1]),
        )  # fmt: skip
        self._open: dict[str, dict[str, _GrowingArray]] = {}  # arrays of the current shard, by split

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *error: object) -> None:
        for arrays in self._open.values():
            for array in arrays.values():
                array.file.close()

    def add(
        self,
        split: str,
        tokens: Sequence[np.ndarray],
        latents: np.ndarray,
        characters: Sequence[int],
        weights: Sequence[float] = (),
    ) -> None:
        """Append n samples to a split: token ids (at least one each), and latents [n, M, C] on the encoder's scale.

        Weights are only written if the store has them.

        It is a `DataError` if a latent is not finite in the type that we store.
        """
        assert len(tokens) == len(latents) == len(characters)
        assert all(len(sample) for sample in tokens), "a sample without tokens"
        # Values beyond the range of float16 become infinite, and the check below reports them.
        with np.errstate(over="ignore"):
            stored = latents.astype(self.latent_dtype)
        if not np.isfinite(stored).all():
            raise DataError(f"a latent of split {split} is not finite as {self.latent_dtype}; try float32")
        start = 0
        while start < len(tokens):
            arrays = self._open.get(split) or self._begin_shard(split)
            part = slice(start, start + self.shard_samples - arrays["characters"].num_rows)
            # Do this before appending tokens: their count so far is where these samples start.
            ends = np.cumsum([len(sample) for sample in tokens[part]])
            arrays["offsets"].append(arrays["tokens"].num_rows + ends)
            arrays["tokens"].append(np.concatenate(tokens[part]))
            arrays["latents"].append(stored[part])
            arrays["characters"].append(np.asarray(characters[part]))
            if self.has_weights:
                arrays["weights"].append(np.asarray(weights[part]))
            start += len(ends)
            if arrays["characters"].num_rows == self.shard_samples:
                self._finish_shard(split)

    def finish(self) -> Contents:
        """Complete all open shards and return the totals."""
        for split in list(self._open):
            self._finish_shard(split)
        return self._contents

    def _begin_shard(self, split: str) -> dict[str, _GrowingArray]:
        prefix = self.folder / f"{split}-{len(self._contents.shards[split]):05d}"
        arrays = self._open[split] = {
            "tokens": _GrowingArray(Path(f"{prefix}.tokens.npy"), self.token_dtype),
            "offsets": _GrowingArray(Path(f"{prefix}.offsets.npy"), np.dtype(np.int64)),
            "latents": _GrowingArray(Path(f"{prefix}.latents.npy"), self.latent_dtype, self.latent_shape),
            "characters": _GrowingArray(Path(f"{prefix}.characters.npy"), np.dtype(np.int32)),
        }
        if self.has_weights:
            arrays["weights"] = _GrowingArray(Path(f"{prefix}.weights.npy"), np.dtype(np.float32))
        arrays["offsets"].append(np.zeros(1))  # `add` appends the end of each sample, so there are samples + 1
        return arrays

    def _finish_shard(self, split: str) -> None:
        arrays, contents = self._open.pop(split), self._contents
        files = {array.path.name.partition(".")[2]: array.finish() for array in arrays.values()}
        name = arrays["tokens"].path.name.partition(".")[0]
        info = ShardInfo(name, arrays["characters"].num_rows, arrays["tokens"].num_rows, files)
        contents.shards[split].append(info)
        # Read back in blocks of fixed size, so that sums of floats do not depend on the samples of each `add`.
        for characters in _row_blocks(self.folder, info, "characters"):
            contents.characters[split] += int(characters.sum(dtype=np.int64))
        lengths = np.diff(np.load(arrays["offsets"].path, mmap_mode="r", allow_pickle=False))
        contents.max_length = max(contents.max_length, int(lengths.max()))
        if split == "train":
            for tokens in _row_blocks(self.folder, info, "tokens"):
                contents.token_counts += np.bincount(tokens, minlength=len(contents.token_counts))
            for latents in _row_blocks(self.folder, info, "latents"):
                contents.latent_sum += latents.sum(axis=(0, 1), dtype=np.float64)


def _row_blocks(folder: Path, shard: ShardInfo, kind: str) -> Iterator[np.ndarray]:
    """Yield the rows of a shard's file in blocks of about `_BLOCK_VALUES` numbers."""
    array = np.load(folder / f"{shard.name}.{kind}.npy", mmap_mode="r", allow_pickle=False)
    step = max(1, _BLOCK_VALUES // max(1, int(np.prod(array.shape[1:], dtype=np.int64))))
    for start in range(0, len(array), step):
        yield np.asarray(array[start : start + step])


def squared_deviations(folder: Path, shards: Sequence[ShardInfo], mean: np.ndarray) -> tuple[list[float], float]:
    """Measure how far the latents in `shards` are from `mean` [C].

    This is a second pass over the data, because a single pass that subtracts the squared mean at the end would lose
    precision to cancellation.

    Returns:
        The sum of squared deviations of each shard, and the largest squared deviation of a vector.

    Raises:
        DataError: The stored type rounds the latents by more than a hundredth of their spread.
    """
    squares, largest, steps = [], 0.0, 0.0
    for shard in shards:
        total = 0.0
        for latents in _row_blocks(folder, shard, "latents"):
            deviations = np.square(latents - mean)  # [n, M, C], float64 as `mean` is
            total += float(deviations.sum())
            largest = max(largest, float(deviations.sum(axis=-1).max()))
            steps += float(np.square(np.spacing(np.abs(latents)).astype(np.float64)).sum())
        squares.append(total)
    # A rounding error is uniform within a step, so its variance is a twelfth of the step's square.
    if (rounding := (steps / 12) ** 0.5) > _MAX_ROUNDING * (spread := sum(squares) ** 0.5) > 0:
        found = f"{rounding / spread:.0%} of their spread, expected at most {_MAX_ROUNDING:.0%}"
        raise DataError(f"latents are rounded by {found}: try --latent-dtype float32, or subtract their mean first")
    return squares, largest


def latent_info(contents: Contents, latent_tokens: int, squares: Sequence[float], largest: float) -> LatentInfo:
    """Return the statistics of the stored (rounded) latents.

    `squares` and `largest` are the results of `squared_deviations` for all training shards in order. It is a
    `DataError` if all training latents are equal.
    """
    mean = contents.mean(latent_tokens)
    channels = len(mean)
    rms = float(np.sqrt(sum(squares) / (contents.samples("train") * latent_tokens * channels)))
    if not rms > 0:
        raise DataError("all training latents are equal; expected an encoder that tells texts apart")
    return LatentInfo(latent_tokens, channels, tuple(mean.tolist()), rms, float(np.sqrt(largest)) / rms)


@contextmanager
def error_prefix(path: Path) -> Iterator[None]:
    """Put the path of the store before the message of a `DataError` in the body."""
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
    losses: Mapping[str, float] | None = None,
) -> Manifest:
    """Write the token counts and then the manifest, the last file of a store, to the `folder` of all its files.

    Args:
        provenance: The fields sources, options, problems and grouping of the manifest.
        losses: How much of the texts the tokens lose (`report.loss_shares`).
    """
    np.save(folder / TOKEN_COUNTS, contents.token_counts, allow_pickle=False)
    hashed = {f"{s.name}.{suffix}" for shards in contents.shards.values() for s in shards for suffix in s.files}
    hashed |= {MANIFEST_NAME, CHECKSUM_NAME}
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        # We know the hashes of shards from writing them, and do not read them again.
        if name not in hashed and path.suffix != ".tmp":
            fsync(path)
            files[name] = file_info(path)
    train = contents.shards["train"]
    if "weights.npy" in train[0].files:
        blocks = (block for shard in train for block in _row_blocks(folder, shard, "weights"))
        mean_weight = float(sum(block.sum(dtype=np.float64) for block in blocks) / contents.samples("train"))
        if not mean_weight > 0:
            raise DataError("all weights of the training split are 0; expected some above 0")
        provenance = provenance | {"grouping": provenance["grouping"] | {"mean_weight": mean_weight}}
    prefixes = {"prefixes": True} if contents.token_counts[tokenizer.pad_id] else {}
    top, counts = int(contents.token_counts.argmax()), contents.token_counts
    is_top = next(_row_blocks(folder, contents.shards["train"][0], "tokens")) == top
    frequent = {
        "text": tokenizer.decode_batch([[top]], keep_special=True)[0],
        "share": float(counts[top] / counts.sum()),
        "repeated": float((is_top[1:] & is_top[:-1]).mean()),  # as padding is, but no word
    }
    splits = {
        split: SplitInfo(
            contents.samples(split), sum(shard.tokens for shard in shards), contents.characters[split], tuple(shards)
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
        tokenizer={"sha256": tokenizer.identity, **(losses or {}), **prefixes, "most_frequent": frequent},
        encoder=encoder.identity,
        splits=splits,
        files=files,
        **provenance,
    )
    manifest.write(folder)
    return manifest


def publish(folder: Path, path: Path, old: Path) -> None:
    """Rename the finished `folder` to `path`. A store at `path` moves to `old` first and is deleted at the end."""
    fsync(folder)
    # Two renames, as a folder cannot replace a folder with files. Between them there is no store at `path`.
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)  # left if the last publication was interrupted after its last rename
        path.rename(old)
    folder.rename(path)
    fsync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def write_description(store: Store, folder: Path) -> None:
    """Write the encoder of `store` and its manifest without samples to the existing `folder`.

    `Store.open` opens the folder as a store without splits, which is enough to generate. Names of input files may be
    private, so they are left out.
    """
    encoder = folder / "encoder"
    shutil.rmtree(encoder, ignore_errors=True)
    shutil.copytree(store.path / "encoder", encoder)
    paths = sorted(path for path in encoder.rglob("*") if path.is_file())
    files = {path.relative_to(folder).as_posix(): file_info(path) for path in paths}
    private: dict[str, Any] = {"sources": [], "options": {}, "problems": {}, "grouping": {}}
    replace(store.manifest, splits={}, files=files, **private).write(folder)
