"""What makes a folder of shards a store: its manifest, last, and one rename. `StoreWriter` does it in one process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from mmldlm import __version__
from mmldlm.data.encoders import LatentEncoder
from mmldlm.data.manifest import FORMAT, MANIFEST_NAME, SEAL_NAME, LatentInfo, Manifest, token_dtype
from mmldlm.data.shard_writer import SPLITS, TOKEN_COUNTS, Contents, ShardWriter, latent_info, spread
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.errors import DataError
from mmldlm.utils.files import FileInfo, file_info, fsync


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

    def __enter__(self) -> StoreWriter:
        check_replaceable(self.path, self.overwrite)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        shape = self.encoder.latent_tokens, self.encoder.channels
        dtypes = self.token_dtype, self.latent_dtype
        self._shards = ShardWriter(self.folder, self.tokenizer.vocab_size, shape, *dtypes, self.shard_samples)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shards.__exit__(kind, error, trace)
        shutil.rmtree(self.folder, ignore_errors=True)

    def add(self, split: str, tokens: Sequence[np.ndarray], latents: np.ndarray, characters: Sequence[int]) -> None:
        """Append samples: `tokens` of n, raw `latents` [n, M, C], and `characters` of n texts."""
        with named(self.path):
            self._shards.add(split, tokens, latents, characters)

    def finish(
        self,
        sources: list[dict[str, Any]],
        options: dict[str, Any],
        problems: dict[str, int],
        grouping: dict[str, Any],
    ) -> Manifest:
        """Write what is left, the statistics and the manifest, and rename the folder to the store.

        DataError where a split has no samples or all latents are equal.
        """
        self.tokenizer.save(self.folder / "tokenizer")
        self.encoder.save(self.folder / "encoder")
        contents = self._shards.finish()
        with named(self.path):
            check_splits(contents)
            latent_tokens = self.encoder.latent_tokens
            measured = spread(self.folder, contents.shards, contents.mean(latent_tokens))
            latent = latent_info(contents, latent_tokens, *measured)
        described = {"sources": sources, "options": options, "problems": problems, "grouping": grouping}
        manifest = write_manifest(
            self.folder, contents, latent, self.tokenizer, self.encoder, self.latent_dtype.name, described
        )
        publish(self.folder, self.path, self.path.with_name(f"{self.path.name}.replaced-{os.getpid()}"))
        return manifest


def check_splits(contents: Contents) -> None:
    """DataError where a split has no samples."""
    for split in SPLITS:
        if not contents.shards[split]:
            raise DataError(f"split {split} has no samples; expected more documents or larger fractions")


def check_replaceable(path: Path, overwrite: bool) -> None:
    """DataError where something is at `path` that is not to be replaced."""
    if path.exists() and not overwrite:
        raise DataError(f"{path}: exists already; expected a new folder, or --overwrite")
    if path.exists() and not (path / MANIFEST_NAME).is_file():
        raise DataError(f"{path}: is no data store, so --overwrite does not replace it; expected a new folder")


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Which store an error is of."""
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
    described: dict[str, Any],
) -> Manifest:
    """Of the shards, the tokenizer, the encoder and what else lies in `folder`: the last file of a store.

    `described` are sources, options, problems and grouping.
    """
    np.save(folder / TOKEN_COUNTS, contents.token_counts, allow_pickle=False)
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
        tokenizer={"sha256": tokenizer.identity},
        encoder=encoder.identity,
        splits=contents.infos(),
        files=_other_files(folder, contents),
        **described,
    )
    manifest.write(folder)
    return manifest


def _other_files(folder: Path, contents: Contents) -> dict[str, FileInfo]:
    """All that are of no shard, but the manifest of an attempt before, and its seal."""
    known = {f"{shard.name}.{end}" for shards in contents.shards.values() for shard in shards for end in shard.files}
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if name not in known and name.removesuffix(".tmp") not in (MANIFEST_NAME, SEAL_NAME):
            fsync(path)
            found[name] = file_info(path)
    return found


def publish(folder: Path, path: Path, old: Path) -> None:
    """Put the finished folder in place; a store that was there is moved to `old` first and deleted last."""
    fsync(folder)
    if path.exists():
        path.rename(old)
    folder.rename(path)
    fsync(path.parent)
    shutil.rmtree(old, ignore_errors=True)
