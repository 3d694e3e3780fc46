"""Latents to condition on, from texts by the run's encoder, or from a file.

Shape letters: n latents, M latent tokens of a sample, C latent channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mmldlm.data.encoders import ImportedLatents, LatentEncoder
from mmldlm.errors import DataError
from mmldlm.loading.load import LoadedRun


def encode_or_raise(encoder: LatentEncoder, texts: Sequence[str], hint: str = "") -> np.ndarray:
    """Encode n texts. Return latents on the encoder's scale, float32 [n, M, C].

    Raises:
        DataError: A text has no latent. `hint` is appended to the message.
    """
    latents = encoder.encode(texts)
    for text, latent in zip(texts, latents, strict=True):
        if not np.isfinite(latent).all():
            imported = isinstance(encoder, ImportedLatents)
            expected = "an encoder of texts, but the latents were imported" if imported else "words of its corpus"
            raise DataError(f"the encoder has no latent for {text!r}: expected {expected}{hint}")
    return latents


def encode_texts(run: LoadedRun, texts: Sequence[str]) -> np.ndarray:
    """Encode `texts` with the run's encoder (see `encode_or_raise`)."""
    return encode_or_raise(run.encoder, texts, ", or --latents")


def read_latents(run: LoadedRun, path: Path) -> np.ndarray:
    """Read latents on the encoder's scale from an .npy file, and check them (see `check_latents`)."""
    return check_latents(run, read_array(path, "--latents"), f"--latents: {path}")


def read_array(path: Path, name: str) -> np.ndarray:
    """Map an .npy file to memory. Raises a `DataError` that begins with `name` if it is no such file."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise DataError(f"{name}: {path} does not exist") from None
    except ValueError as error:
        raise DataError(f"{name}: {path} is not an .npy array: {error}") from None
    if not isinstance(array, np.ndarray):
        raise DataError(f"{name}: {path} is an archive of arrays, expected one .npy array")
    return array


def check_latents(run: LoadedRun, latents: np.ndarray, name: str) -> np.ndarray:
    """Return latents on the encoder's scale as float32 [n, M, C]. [n, C] is accepted if M is 1.

    Raises:
        DataError: The shape or type is wrong, or a row is not finite. The message begins with `name`.
    """
    latents = check_shape(run, latents, name)
    bad = ~np.isfinite(latents.reshape(len(latents), -1)).all(1)
    if bad.any():
        raise DataError(f"{name}: row {int(bad.argmax())} is not finite")
    return np.asarray(latents, np.float32)


def check_shape(run: LoadedRun, latents: np.ndarray, name: str) -> np.ndarray:
    """Check the shape and type of latents like `check_latents`, but not their values. Return them as [n, M, C]."""
    shape = (run.store.manifest.latent.tokens, run.store.manifest.latent.channels)
    if latents.ndim == 2 and shape[0] == 1:
        latents = latents[:, None]
    if latents.shape[1:] != shape or not len(latents) or latents.dtype.kind != "f":
        found, expected = f"{latents.dtype} {list(latents.shape)}", f"float [n, {shape[0]}, {shape[1]}]"
        raise DataError(f"{name} is {found}, expected {expected}")
    return latents
