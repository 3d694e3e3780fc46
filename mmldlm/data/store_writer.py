"""The steps that turn a folder of shards into a store.

The manifest is written last, and one rename publishes the store.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from mmldlm import __version__
from mmldlm.data.encoders import LatentEncoder
from mmldlm.data.manifest import CHECKSUM_NAME, FORMAT, MANIFEST_NAME, LatentInfo, Manifest, token_dtype
from mmldlm.data.shard_writer import SPLITS, TOKEN_COUNTS, Contents
from mmldlm.data.store import Store
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.errors import DataError
from mmldlm.utils.files import FileInfo, file_info, fsync


def check_splits(contents: Contents) -> None:
    """Raise DataError if a split has no samples."""
    for split in SPLITS:
        if not contents.shards[split]:
            raise DataError(f"split {split} has no samples; expected more documents or larger fractions")


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
    """Write the token counts and the manifest, which is the last file of a store.

    Args:
        folder: Contains the shards, the saved tokenizer and encoder, and any other files of the store.
        provenance: The manifest's fields sources, options, problems and grouping.
        losses: Shares of what the tokens lose of the texts, see `report.loss_shares`.
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
        tokenizer={"sha256": tokenizer.identity, **losses},
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
