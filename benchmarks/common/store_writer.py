"""`StoreWriter`: writes a store in one process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.data.encoders import LatentEncoder
from mmldlm.data.manifest import MANIFEST_NAME, Manifest, token_dtype
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.data.writer import ShardWriter, error_prefix, latent_info, publish, squared_deviations, write_manifest
from mmldlm.errors import DataError


class StoreWriter:
    """Writes a store at `path`. Use it as a context manager, and call `finish()` at the end.

    Until `finish()` renames it, all data is in the folder `PATH.incomplete-PID` next to `path`. The folder is removed
    if the block ends early. A killed process leaves this folder behind, and no store.
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
            path: Folder of the store.
            tokenizer: Saved with the store. Its vocabulary size determines the type of the tokens.
            encoder: Saved with the store. It determines the shape of the latents.
            latent_dtype: Type in which latents are stored.
            shard_samples: Samples per shard.
            overwrite: Whether to replace a store at `path`.
        """
        self.path = Path(path)
        self.folder = self.path.with_name(f"{self.path.name}.incomplete-{os.getpid()}")
        self.tokenizer, self.encoder = tokenizer, encoder
        self.token_dtype = token_dtype(tokenizer.vocab_size)
        self.latent_dtype = np.dtype(latent_dtype)
        self.shard_samples = shard_samples
        self.overwrite = overwrite

    def __enter__(self) -> StoreWriter:
        _check_replaceable(self.path, self.overwrite)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        shape = self.encoder.latent_tokens, self.encoder.channels
        dtypes = self.token_dtype, self.latent_dtype
        self._shards = ShardWriter(self.folder, self.tokenizer.vocab_size, shape, *dtypes, self.shard_samples)
        return self

    def __exit__(self, *error: object) -> None:
        self._shards.__exit__(*error)
        # `finish` has renamed the folder, so that there is nothing to remove after it.
        shutil.rmtree(self.folder, ignore_errors=True)

    def add(self, split: str, tokens: Sequence[np.ndarray], latents: np.ndarray, characters: Sequence[int]) -> None:
        """Append n samples.

        Args:
            split: Train, validation or test.
            tokens: Token ids of each sample.
            latents: [n, M, C] on the encoder's scale.
            characters: Length of each text.

        Raises:
            DataError: A latent is not finite in `latent_dtype`.
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
            DataError: A split has no samples, or all latents are equal.
        """
        self.tokenizer.save(self.folder / "tokenizer")
        self.encoder.save(self.folder / "encoder")
        contents = self._shards.finish()
        with error_prefix(self.path):
            latent_tokens = self.encoder.latent_tokens
            squares, largest = squared_deviations(self.folder, contents.shards["train"], contents.mean(latent_tokens))
            latent = latent_info(contents, latent_tokens, squares, largest)
        provenance = {"sources": sources, "options": options, "problems": problems, "grouping": grouping}
        manifest = write_manifest(
            self.folder, contents, latent, self.tokenizer, self.encoder, self.latent_dtype.name, provenance
        )
        publish(self.folder, self.path, self.path.with_name(f"{self.path.name}.replaced-{os.getpid()}"))
        return manifest


def _check_replaceable(path: Path, overwrite: bool) -> None:
    """Raise DataError if `path` exists and may not be replaced."""
    if path.exists() and not overwrite:
        raise DataError(f"{path}: already exists; expected a new folder, or --overwrite")
    if path.exists() and not (path / MANIFEST_NAME).is_file():
        raise DataError(f"{path}: not a data store, so --overwrite does not replace it; expected a new folder")
