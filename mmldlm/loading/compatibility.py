"""Compatibility of a checkpoint with a run: network, tokenizer, latents."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from torch import nn

from mmldlm.checkpoint.manifest import Checkpoint
from mmldlm.checkpoint.state import check_ema_weights
from mmldlm.checkpoint.tensors import TensorFiles
from mmldlm.config import RunConfig
from mmldlm.data.manifest import LatentInfo, Manifest
from mmldlm.data.store import Store
from mmldlm.diffusion.gaussian import LatentConfig
from mmldlm.errors import DataError
from mmldlm.model.mmdit import DataShape, ModelConfig
from mmldlm.settings.successors import current
from mmldlm.utils.short_repr import short_repr

LATENTS_NAME = "latents.json"


def data_shape(manifest: Manifest) -> DataShape:
    """Return the sizes of the data that the network depends on."""
    return DataShape(
        vocab_size=manifest.vocab_size,
        mask_id=manifest.mask_id,
        pad_id=manifest.pad_id,
        max_length=manifest.max_length,
        latent_tokens=manifest.latent.tokens,
        latent_channels=manifest.latent.channels,
    )


def identity(config: RunConfig, store: Store) -> dict[str, Any]:
    """Return the facts that must be equal between a checkpoint and a run: network, tokenizer and latents."""
    manifest = store.manifest
    return {
        "model": asdict(config.model),
        "data": asdict(data_shape(manifest)),
        "tokenizer": manifest.tokenizer["sha256"],
        "encoder": manifest.encoder,
        "latent": asdict(config.latent),
    }


def saved_identity(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the `identity` of a checkpoint with the settings of this version. New settings have their defaults."""
    saved = current(checkpoint.info["identity"], str(checkpoint.path), is_record=True)
    defaults = {"model": asdict(ModelConfig()), "latent": asdict(LatentConfig())}
    return saved | {group: json.loads(json.dumps(values)) | saved[group] for group, values in defaults.items()}


def check_compatible(checkpoint: Checkpoint, config: RunConfig, store: Store) -> None:
    """Raise `DataError` with the first difference in `identity` between a checkpoint and a run."""
    if "time_shift" not in checkpoint.info["identity"]["latent"]:
        raise DataError(
            f"{checkpoint.path}: latent.time_shift is missing, so a version before 0.1.0 saved it: train again"
        )
    # The checkpoint's side went through JSON, which turns tuples into lists.
    saved, present = saved_identity(checkpoint), json.loads(json.dumps(identity(config, store)))
    for group, values in present.items():
        before = saved.get(group)
        if before == values:
            continue
        if isinstance(before, dict) and isinstance(values, dict):
            # A checkpoint of a newer version may have a setting that is unknown here.
            unset = object()
            key = next(name for name in {**before, **values} if before.get(name, unset) != values.get(name, unset))
            before, values, group = before.get(key, "unset"), values.get(key, "unset"), f"{group}.{key}"
        hint = f"; `mmldlm prepare --max-length {before}` divides longer texts" if group == "data.max_length" else ""
        found, expected = short_repr(values), short_repr(before)
        raise DataError(f"{checkpoint.path}: {group} is {expected} in the checkpoint, {found} now ({store.path}){hint}")


def saved_latent_stats(checkpoint: Checkpoint, store: Store) -> LatentInfo:
    """Return the latents of `store` with the standardization with which a checkpoint was trained."""
    saved = LatentInfo.from_json(json.loads(checkpoint.file(LATENTS_NAME).read_bytes()))
    numbers = np.array([saved.rms, saved.max_norm, *saved.mean], float)
    if len(saved.mean) != store.manifest.latent.channels or not np.isfinite(numbers).all() or saved.rms <= 0:
        found = f"{len(saved.mean)} channels, rms {saved.rms}"
        raise DataError(f"{checkpoint.file(LATENTS_NAME)}: expected finite means and an rms above 0, found {found}")
    return replace(store.manifest.latent, mean=saved.mean, rms=saved.rms, max_norm=saved.max_norm)


def match_training_data(checkpoint: Checkpoint, store: Store) -> Store:
    """Return `store` with the standardization of latents, and at least the maximal length, of the training data."""
    # The network has the sizes of its training data, so a store with shorter texts gets the larger limit.
    max_length = max(store.manifest.max_length, checkpoint.info["identity"]["data"]["max_length"])
    latents = saved_latent_stats(checkpoint, store)
    return store.with_manifest(replace(store.manifest, latent=latents, max_length=max_length))


def saved_ema(checkpoint: Checkpoint, model: nn.Module) -> TensorFiles | None:
    """Open the EMA of the trained weights for the unwrapped `model`. Return None if the checkpoint has no EMA.

    Raises:
        DataError: The tensors do not match the trained parameters.
    """
    ema = TensorFiles.find(checkpoint, "ema")
    if ema is not None:
        check_ema_weights(model, ema, TensorFiles.open(checkpoint, "optimizer"))
    return ema
