"""Latent encoders: map text to the latents that are diffused.

`LsaEncoder` and `LearnedEncoder` are fitted on the corpus. `SentenceTransformerEncoder` needs the extra `encoders`.
`ImportedLatents` represents latents that were computed elsewhere. `ChunkedEncoder` turns an encoder of one latent per
text into an encoder of M.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mmldlm.data.encoders.base import ChunkedEncoder, ImportedLatents, LatentEncoder
from mmldlm.data.encoders.learned import LearnedEncoder
from mmldlm.data.encoders.lsa import LsaEncoder
from mmldlm.data.encoders.sentence_transformers import SentenceTransformerEncoder
from mmldlm.errors import DataError, UsageError
from mmldlm.utils.files import read_regular
from mmldlm.utils.short_repr import short_repr

_ENCODERS: dict[str, Any] = {
    encoder.kind: encoder for encoder in (LsaEncoder, LearnedEncoder, SentenceTransformerEncoder, ImportedLatents)
}


def load_encoder(folder: Path, **model_options: Any) -> LatentEncoder:
    """Load the encoder that `save` wrote to the `encoder` folder of a store.

    `model_options` are batch size, device and location of a `SentenceTransformerEncoder`, which change no latents. It
    is a `DataError` if the encoder is missing or damaged, or its model has changed.
    """
    path, description = folder / "encoder.json", read_description(folder)
    try:
        if description["kind"] == ChunkedEncoder.kind:
            return ChunkedEncoder(load_encoder(folder / "inner", **model_options), description["latent_tokens"])
        encoder = _ENCODERS[description["kind"]]
        return encoder.load(folder, description | {"model_options": model_options})
    except (DataError, UsageError):
        raise
    except Exception as error:  # a missing key, safetensors' own error type
        raise DataError(f"{path}: not a readable encoder ({' '.join(str(error).split())})") from None


def read_description(folder: Path) -> dict[str, Any]:
    """Read `encoder.json`, whose key `kind` names the encoder, or raise `DataError` if it is missing or damaged."""
    path = folder / "encoder.json"
    if not path.is_file():
        raise DataError(f"{path}: no such file; expected the encoder folder of a data store")
    try:
        description = json.loads(read_regular(path))
        if description["kind"] not in (*_ENCODERS, ChunkedEncoder.kind):
            raise ValueError(f"kind {short_repr(description['kind'])}")
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise DataError(f"{path}: not a readable encoder ({' '.join(str(error).split())})") from None
    return description
