"""`SentenceTransformerEncoder`: any model of the sentence-transformers library. The extra `encoders`.

Shape letters: n texts, C latent channels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmldlm.data.encoders.base import unit_rows, write_description
from mmldlm.errors import DataError, UsageError


class SentenceTransformerEncoder:
    """A model of the sentence-transformers library, by folder or by name; M = 1.

    Vectors may be truncated to the first `channels` (Matryoshka models, arXiv 2205.13147, are trained for that) and are
    then normalised. `prompt` is put before each text: E5, for one, expects "query: " or "passage: ". `prompt_name` is
    one of the prompts that the model itself has, such as Qwen3-Embedding's "query".
    """

    kind = "sentence-transformers"
    latent_tokens = 1

    def __init__(
        self,
        name_or_folder: str,
        channels: int | None = None,
        prompt: str | None = None,
        normalise: bool = True,
        prompt_name: str | None = None,
        revision: str | None = None,
        batch_size: int = 32,
        device: str | None = None,
    ):
        """`revision` is the commit of a model given by name; `device` is the library's choice by default.

        UsageError where the library is not installed or an option does not fit the model, DataError where the model
        cannot be read.
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
        self.name, self.normalise, self.batch_size = name_or_folder, normalise, batch_size
        self.prompt = prompt if prompt is not None else self._own_prompt(prompt_name)
        dimension = self._model.encode(["dimension"], show_progress_bar=False).shape[1]
        self.channels = dimension if channels is None else channels
        if not 1 <= self.channels <= dimension:
            raise UsageError(f"--channels {channels}: {name_or_folder} has {dimension}, expected 1 to {dimension}")

    def _own_prompt(self, name: str | None) -> str | None:
        """The model's prompt of that name, or the one that the library would put before each text unasked."""
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
        return {
            "name": self.name,
            "revision": self._revision(),
            "prompt": self.prompt,
            "normalisation": "l2" if self.normalise else None,
            "dim": self.channels,
        }

    def _revision(self) -> str | None:
        """Hash of a local folder's files; the commit of a downloaded model where it is known."""
        folder = Path(self.name)
        if not folder.is_dir():
            config = getattr(getattr(self._model[0], "auto_model", None), "config", None)
            return getattr(config, "_commit_hash", None)
        digest = hashlib.sha256()
        for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """float32 [n, 1, C]; NaN where the model gives no finite vector or zeros."""
        with torch.inference_mode():
            found = self._model.encode(
                list(texts),
                prompt=self.prompt,
                show_progress_bar=False,
                convert_to_numpy=True,
                batch_size=self.batch_size,
            )
        vectors = np.asarray(found, np.float32).reshape(len(texts), -1)[:, : self.channels]
        unit = unit_rows(vectors)
        return (unit if self.normalise else np.where(np.isnan(unit), np.nan, vectors))[:, None, :]

    def save(self, folder: Path | str) -> None:
        """Records which model it is; the model's own files are not copied."""
        write_description(Path(folder), {"kind": self.kind, "normalise": self.normalise, **self.identity})

    @classmethod
    def load(cls, folder: Path, description: dict[str, Any]) -> SentenceTransformerEncoder:
        name = description["name"]
        commit = None if Path(name).is_dir() else description["revision"]
        encoder = cls(
            name,
            description["dim"],
            description["prompt"],
            description["normalise"],
            revision=commit,
            **description["working"],
        )
        found = encoder._revision()
        if found != description["revision"]:
            raise DataError(
                f"{folder / 'encoder.json'}: the model {encoder.name} has revision {found}, "
                f"expected {description['revision']}, with which the store was prepared"
            )
        return encoder
