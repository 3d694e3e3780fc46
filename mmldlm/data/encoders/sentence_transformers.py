"""`SentenceTransformerEncoder`: any model of the sentence-transformers library (extra `encoders`).

Shape letters: n texts, C latent channels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmldlm.data.encoders.base import normalize_rows, write_description
from mmldlm.errors import DataError, UsageError


class SentenceTransformerEncoder:
    """A model of the sentence-transformers library, given by folder or name; M = 1.

    Vectors may be truncated to the first `channels` (Matryoshka models, arXiv 2205.13147, are trained for that) and are
    then normalized.
    """

    kind = "sentence-transformers"
    latent_tokens = 1

    def __init__(
        self,
        name_or_folder: str,
        channels: int | None = None,
        prompt: str | None = None,
        normalize: bool = True,
        prompt_name: str | None = None,
        revision: str | None = None,
        batch_size: int = 32,
        device: str | None = None,
    ):
        """Load the model.

        Args:
            name_or_folder: Name or folder of the model.
            channels: C to truncate to; by default all.
            prompt: Text to prepend to each text; E5, for example, expects "query: " or "passage: ".
            normalize: Scale vectors to unit norm.
            prompt_name: One of the model's own prompts, such as "query" of Qwen3-Embedding; used without `prompt`.
            revision: Commit of a model given by name.
            batch_size: Texts per forward pass.
            device: Device of the model; by default the library's choice.

        Raises:
            UsageError: The library is not installed, or an option does not suit the model.
            DataError: The model cannot be loaded.
        """
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError:
            raise UsageError(
                f"--encoder {self.kind}:{name_or_folder} needs sentence-transformers: pip install mmldlm[encoders]"
            ) from None
        if revision and Path(name_or_folder).is_dir():
            raise UsageError(f"--encoder-revision {revision}: {name_or_folder} is a folder, expected a model by name")
        try:
            self._model = SentenceTransformer(name_or_folder, revision=revision, device=device, trust_remote_code=False)
        except Exception as error:  # the library raises many kinds: OSError, ValueError, HTTP errors
            reason = " ".join(str(error).split())[:300]
            raise DataError(f"--encoder {self.kind}:{name_or_folder}: cannot load the model ({reason})") from None
        self._model.eval()
        self.name, self.normalize, self.batch_size = name_or_folder, normalize, batch_size
        self.prompt = prompt if prompt is not None else self._model_prompt(prompt_name)
        dimension = self._model.encode(["dimension"], show_progress_bar=False).shape[1]
        self.channels = dimension if channels is None else channels
        if not 1 <= self.channels <= dimension:
            raise UsageError(f"--channels {channels}: {name_or_folder} has {dimension}, expected 1 to {dimension}")

    def _model_prompt(self, name: str | None) -> str | None:
        """Return the model's prompt `name`, or by default the one that the library would prepend to each text."""
        prompts: dict[str, str] = {name: text for name, text in self._model.prompts.items() if text}
        if name is None:
            return prompts.get(self._model.default_prompt_name or "")
        if name not in prompts:
            raise UsageError(
                f"--prompt-name {name}: {self.name} has {', '.join(sorted(prompts)) or 'no prompts'}; "
                "expected one of these, or --prompt TEXT"
            )
        return prompts[name]

    @property
    def identity(self) -> dict[str, Any]:
        """See `LatentEncoder.identity`."""
        return {
            "name": self.name,
            "revision": self._revision(),
            "prompt": self.prompt,
            "normalisation": "l2" if self.normalize else None,
            "dim": self.channels,
        }

    def _revision(self) -> str | None:
        """Return a hash of a local folder's files, or the commit of a downloaded model if known."""
        folder = Path(self.name)
        if not folder.is_dir():
            config = getattr(getattr(self._model[0], "auto_model", None), "config", None)
            return getattr(config, "_commit_hash", None)
        digest = hashlib.sha256()
        # Names are hashed too, and relative, so that a moved folder keeps its revision.
        for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Return latents float32 [n, 1, C]; NaN where the model returns a non-finite vector or zeros."""
        with torch.inference_mode():
            embeddings = self._model.encode(
                list(texts),
                prompt=self.prompt,
                show_progress_bar=False,
                convert_to_numpy=True,
                batch_size=self.batch_size,
            )
        vectors = np.asarray(embeddings, np.float32).reshape(len(texts), -1)[:, : self.channels]
        unit = normalize_rows(vectors)
        # Without normalization too, rows of zeros or non-finite values count as not encoded.
        return (unit if self.normalize else np.where(np.isnan(unit), np.nan, vectors))[:, None, :]

    def save(self, folder: Path | str) -> None:
        """Write the name and revision of the model; its files are not copied."""
        write_description(Path(folder), {"kind": self.kind, "normalise": self.normalize, **self.identity})

    @classmethod
    def load(cls, folder: Path, description: dict[str, Any]) -> SentenceTransformerEncoder:
        """Load the encoder that `save` wrote."""
        name = description["name"]
        # A name may point to another commit now; a folder can only be compared by its hash, below.
        commit = None if Path(name).is_dir() else description["revision"]
        encoder = cls(
            name,
            description["dim"],
            description["prompt"],
            description["normalise"],
            revision=commit,
            **description["model_options"],
        )
        revision = encoder._revision()
        if revision != description["revision"]:
            raise DataError(
                f"{folder / 'encoder.json'}: the model {encoder.name} has revision {revision}, "
                f"expected {description['revision']}, with which the store was prepared"
            )
        return encoder
