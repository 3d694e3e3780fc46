"""`StoreWriter`: writes a store in one process; and the steps that turn a folder of shards into a store.

The manifest is written last, and one rename publishes the store.
"""

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
from mmldlm.data.manifest import CHECKSUM_NAME, FORMAT, MANIFEST_NAME, LatentInfo, Manifest, token_dtype
from mmldlm.data.shard_writer import SPLITS, TOKEN_COUNTS, Contents, ShardWriter, latent_info, squared_deviations
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.errors import DataError
from mmldlm.utils.files import FileInfo, file_info, fsync


class StoreWriter:
    """Writes a store at `path`; use as a context manager and call `finish()` at the end.

    Until `finish()` renames it, all data is in the folder `PATH.incomplete-PID` next to `path`, which is removed if the
    block ends early. A killed process leaves that folder behind, and no store.
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
        """Create a writer.

        Args:
            path: folder of the store.
            tokenizer: saved with the store; its vocabulary size determines the type of the tokens.
            encoder: saved with the store; determines the shape of the latents.
            latent_dtype: type in which latents are stored.
            shard_samples: samples per shard.
            overwrite: replace a store at `path`.
        """
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
        # After `finish` the folder has been renamed, and there is nothing to remove.
        shutil.rmtree(self.folder, ignore_errors=True)

    def add(self, split: str, tokens: Sequence[np.ndarray], latents: np.ndarray, characters: Sequence[int]) -> None:
        """Append n samples.

        Args:
            split: train, validation or test.
            tokens: ids of each sample.
            latents: [n, M, C] on the encoder's scale.
            characters: length of each text.

        Raises:
            DataError: a latent is not finite in `latent_dtype`.
        """
        with error_prefix(self.path):
            self._shards.add(split, tokens, latents, characters)

    def finish(
        self,
        sources: list[dict[str, Any]],
        options: dict[str, Any],
        problems: dict[str, int],
        grouping: dict[str, Any],
    ) -> Manifest:
        """Write the last shards, the statistics and the manifest, and rename the folder to the store.

        Raises:
            DataError: a split has no samples, or all latents are equal.
        """
        self.tokenizer.save(self.folder / "tokenizer")
        self.encoder.save(self.folder / "encoder")
        contents = self._shards.finish()
        with error_prefix(self.path):
            check_splits(contents)
            latent_tokens = self.encoder.latent_tokens
            squares, largest = squared_deviations(self.folder, contents.shards, contents.mean(latent_tokens))
            latent = latent_info(contents, latent_tokens, squares, largest)
        provenance = {"sources": sources, "options": options, "problems": problems, "grouping": grouping}
        manifest = write_manifest(
            self.folder, contents, latent, self.tokenizer, self.encoder, self.latent_dtype.name, provenance
        )
        publish(self.folder, self.path, self.path.with_name(f"{self.path.name}.replaced-{os.getpid()}"))
        return manifest


def check_splits(contents: Contents) -> None:
    """Raise DataError if a split has no samples."""
    for split in SPLITS:
        if not contents.shards[split]:
            raise DataError(f"split {split} has no samples; expected more documents or larger fractions")


def check_replaceable(path: Path, overwrite: bool) -> None:
    """Raise DataError if `path` exists and may not be replaced."""
    if path.exists() and not overwrite:
        raise DataError(f"{path}: already exists; expected a new folder, or --overwrite")
    if path.exists() and not (path / MANIFEST_NAME).is_file():
        raise DataError(f"{path}: not a data store, so --overwrite does not replace it; expected a new folder")


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
) -> Manifest:
    """Write the token counts and the manifest, which is the last file of a store.

    Args:
        folder: contains the shards, the saved tokenizer and encoder, and any other files of the store.
        contents: of the shards.
        latent: statistics of the latents.
        tokenizer: described in the manifest.
        encoder: described in the manifest.
        latent_dtype: name of the type in which latents are stored.
        provenance: the manifest's fields sources, options, problems and grouping.
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
        splits=contents.split_infos(),
        files=_other_files(folder, contents),
        **provenance,
    )
    manifest.write(folder)
    return manifest


def _other_files(folder: Path, contents: Contents) -> dict[str, FileInfo]:
    """Hash the files of no shard, except a manifest and its checksum that an earlier attempt left behind."""
    shards = [shard for split in contents.shards.values() for shard in split]
    shard_files = {f"{shard.name}.{suffix}" for shard in shards for suffix in shard.files}
    infos = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        # The hashes of shards are known from writing them; they are not read again.
        if name not in shard_files and name.removesuffix(".tmp") not in (MANIFEST_NAME, CHECKSUM_NAME):
            fsync(path)
            infos[name] = file_info(path)
    return infos


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
