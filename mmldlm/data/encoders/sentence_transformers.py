"""`SentenceTransformerEncoder`: any model of the sentence-transformers library (extra `encoders`).

A store holds the model's name and revision, not the model. A stranger may have made the store or bundle and chosen that
name, so we load nothing because of it: the user must have named the model, in a preparation or by `ENCODER_VARIABLE`.

Shape letters: n texts, C latent channels.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmldlm.data.encoders.base import LatentEncoder, make_identity, normalize_rows, write_description
from mmldlm.data.tokenizer import make_deterministic
from mmldlm.errors import DataError, UsageError
from mmldlm.utils.files import write_atomically
from mmldlm.utils.versions import install_command

ENCODER_VARIABLE = "MMLDLM_ENCODER"  # name or folder of the model that the user allows to be loaded
_MODULES = {"Transformer", "Pooling", "Dense", "Normalize"}


class SentenceTransformerEncoder(LatentEncoder):
    """A model of the sentence-transformers library, given by folder or name, with M = 1.

    Vectors may be truncated to the first `channels` and are then normalized. Matryoshka models (arXiv 2205.13147) are
    trained for that.
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
        """Load the model of this name or in this folder.

        Args:
            channels: Truncate vectors to this many channels C, by default none.
            prompt: Text to put before each text. E5, for example, expects "query: " or "passage: ".
            prompt_name: Name of one of the model's own prompts, used if there is no `prompt`.
            revision: Commit of a model given by name.

        Raises:
            UsageError: The library is not installed, or an option does not suit the model.
            DataError: The model cannot be loaded.
        """
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError:
            raise UsageError(
                f"{self.kind}: this needs the library of that name: {install_command('encoders')}"
            ) from None
        is_folder = Path(name_or_folder).is_dir()
        if revision and is_folder:
            raise UsageError(f"--encoder-revision {revision}: {name_or_folder} is a folder, expected a model by name")
        try:
            _check_modules(name_or_folder, revision)
            self._model = SentenceTransformer(
                name_or_folder,
                revision=revision,
                device=device,
                trust_remote_code=False,
                local_files_only=is_folder,  # else files of a folder could name models to download
                model_kwargs={"use_safetensors": True},
            )
        except Exception as error:  # the library raises many kinds: OSError, ValueError, HTTP errors
            reason = " ".join(str(error).split())[:300]
            raise DataError(f"{self.kind}:{name_or_folder}: cannot load the model ({reason})") from None
        self._model.eval()
        if backend := getattr(self._model.tokenizer, "backend_tokenizer", None):
            make_deterministic(backend)
        self.location, self.normalize, self.batch_size = name_or_folder, normalize, batch_size
        # Where a folder is says nothing about the model, and is nobody else's business.
        self.name = Path(name_or_folder).resolve().name if is_folder else name_or_folder
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
        return make_identity(self.name, self._revision(), self.channels, self.normalize, self.prompt)

    def _revision(self) -> str | None:
        """Return a hash of a local folder's files, or the commit of a downloaded model if known."""
        if Path(self.location).is_dir():
            return _hash_folder(Path(self.location))
        config = getattr(getattr(self._model[0], "auto_model", None), "config", None)
        return getattr(config, "_commit_hash", None)

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Return latents float32 [n, 1, C], with NaN where the model returns a non-finite vector or zeros."""
        with torch.inference_mode():
            embeddings = self._model.encode(
                list(texts), prompt=self.prompt, show_progress_bar=False, batch_size=self.batch_size
            )
        vectors = np.asarray(embeddings, np.float32).reshape(len(texts), -1)[:, : self.channels]
        unit = normalize_rows(vectors)
        # Without normalization too, rows of zeros or non-finite values count as not encoded.
        return (unit if self.normalize else np.where(np.isnan(unit), np.nan, vectors))[:, None, :]

    def count_cut(self, texts: Sequence[str]) -> int:
        """See `LatentEncoder.count_cut`."""
        limit = self._model.max_seq_length or sys.maxsize
        # A token has at least a byte, and the model's own tokens at both ends are few.
        long = [text for text in ((self.prompt or "") + text for text in texts) if len(text.encode()) + 8 > limit]
        return sum(len(ids) > limit for ids in self._model.tokenizer(long, verbose=False)["input_ids"]) if long else 0

    def save(self, folder: Path) -> None:
        """Write the model's name and revision, but no model file, and note that the user named this model."""
        identity = self.identity
        write_description(folder, {"kind": self.kind, "normalise": self.normalize, **identity})
        location = str(Path(self.location).resolve()) if Path(self.location).is_dir() else self.location
        with suppress(OSError, RuntimeError):  # without a home, `ENCODER_VARIABLE` has to name it again
            _known_path().parent.mkdir(parents=True, exist_ok=True)
            known = json.dumps({**_read_known(), _known_key(identity): location}, indent=1)
            write_atomically(_known_path(), known + "\n")

    @classmethod
    def load(cls, folder: Path, description: dict[str, Any]) -> SentenceTransformerEncoder:
        """Load the encoder that `save` wrote, from the place that the user named.

        It is a `DataError` if the user has not named the model, or the place holds another one.
        """
        options, name, expected = dict(description["model_options"]), description["name"], description["revision"]
        location = options.pop("location", None) or os.environ.get(ENCODER_VARIABLE)
        location = location or _read_known().get(_known_key(description), "")
        if not location or (Path(location).is_absolute() and not Path(location).is_dir()):
            raise DataError(
                f"{folder / 'encoder.json'}: the latents are of the sentence-transformers model {name!r}, which is not "
                f"in this folder, nor {f'at {location}' if location else 'one that you have prepared data with here'}; "
                f"if you trust it, set {ENCODER_VARIABLE} to its name or folder"
            )
        # Compare a folder before loading anything of it. A name may point to another commit now: ask for the old one.
        is_folder = Path(location).is_dir()
        revision = _hash_folder(Path(location)) if is_folder else expected
        if revision == expected:
            prompt, normalize = description["prompt"], description["normalise"]
            commit = None if is_folder else expected
            encoder = cls(location, description["dim"], prompt, normalize, revision=commit, **options)
            revision, encoder.name = encoder._revision(), name
        if revision != expected:
            raise DataError(
                f"{folder / 'encoder.json'}: the model {location} has revision {revision}, expected {expected}, with "
                "which the store was prepared"
            )
        return encoder


def _check_modules(name_or_folder: str, revision: str | None) -> None:
    """Raise ValueError unless a model consists of the library's own modules, with weights in safetensors."""
    folder = Path(name_or_folder)
    path = folder / "modules.json"
    if folder.is_dir():
        if pickled := [path for path in folder.rglob("*.bin") if not [*path.parent.glob("*.safetensors")]]:
            raise ValueError(f"{pickled[0]}: pickled weights, expected safetensors")
        if (folder / "adapter_config.json").exists():
            raise ValueError("adapter_config.json: names another model, expected a whole one")
    else:
        from huggingface_hub import hf_hub_download

        with suppress(OSError, ValueError):  # a model without modules gets the library's own
            path = Path(hf_hub_download(name_or_folder, "modules.json", revision=revision))
    for module in json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []:
        # Older versions of the library import whatever is named here.
        package, _, kind = str(module["type"]).rpartition(".")
        if package.split(".")[0] != "sentence_transformers" or kind not in _MODULES:
            raise ValueError(f"modules.json: module {module['type']!r}, expected {', '.join(sorted(_MODULES))}")


def _hash_folder(folder: Path) -> str:
    digest = hashlib.sha256()
    # Names are hashed too, and relative, so that a moved folder keeps its revision.
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _known_path() -> Path:
    """Return the path of the record of the models that the user has prepared data with here, and where each is."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mmldlm" / "encoders.json"


def _read_known() -> dict[str, str]:
    with suppress(OSError, ValueError, RuntimeError):
        return dict(json.loads(_known_path().read_text(encoding="utf-8")))
    return {}


def _known_key(identity: dict[str, Any]) -> str:
    return f"{identity['name']}@{identity['revision']}"
