"""Compatibility of a checkpoint with a run: network, tokenizer, latents."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from typing import Any

from torch import nn

from mmldlm.checkpoint.manifest import Checkpoint
from mmldlm.checkpoint.state import check_ema_weights
from mmldlm.checkpoint.tensors import TensorFiles
from mmldlm.config import RunConfig
from mmldlm.data.manifest import LatentInfo, Manifest
from mmldlm.data.store import Store
from mmldlm.errors import DataError
from mmldlm.model.mmdit import DataShape
from mmldlm.utils.short_repr import short_repr, truncate

LATENTS_NAME = "latents.json"
_SKIP_PREFIX = "latent_skip."  # of the parameters of the learned skip


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
    """Return what must be equal between a checkpoint and a run: network, tokenizer and latents."""
    manifest = store.manifest
    return {
        "model": asdict(config.model),
        "data": asdict(data_shape(manifest)),
        "tokenizer": manifest.tokenizer["sha256"],
        "encoder": manifest.encoder,
        "latent": asdict(config.latent),
    }


def saved_identity(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the `identity` of the run that wrote a checkpoint; DataError if there is none."""
    saved = checkpoint.info.get("identity")
    if not isinstance(saved, dict):
        raise DataError(
            f"{checkpoint.path}: has no identity of network and data, expected a checkpoint of mmldlm train"
        )
    return saved


def check_compatible(checkpoint: Checkpoint, config: RunConfig, store: Store) -> None:
    """Raise `DataError` with the first difference in `identity` between a checkpoint and a run."""
    # The checkpoint's side went through JSON, which turns tuples into lists.
    saved, current = saved_identity(checkpoint), json.loads(json.dumps(identity(config, store)))
    for group, values in current.items():
        before = saved.get(group)
        if before == values:
            continue
        if isinstance(before, dict) and isinstance(values, dict):
            key = next(name for name in {**before, **values} if before.get(name) != values.get(name))
            before, values, group = before.get(key), values.get(key), f"{group}.{key}"
        result, expected = short_repr(before), short_repr(values)
        raise DataError(f"{checkpoint.path}: {group} is {result} in the checkpoint, {expected} now")
    _check_latent_skip(checkpoint, config)


def _check_latent_skip(checkpoint: Checkpoint, config: RunConfig) -> None:
    """Raise `DataError` if x0 is predicted with a learned skip that is not zero, as older networks did.

    In a run that never trained latents, the skip has stayed zero and has no effect.
    """
    if config.latent.has_skip:
        return
    files = TensorFiles.open(checkpoint, "model")
    if any(bool(files[name].any()) for name in files if name.startswith(_SKIP_PREFIX)):
        raise DataError(
            f"{checkpoint.path}: latent.prediction x0 was trained with a learned latent_skip, which the network no "
            "longer has; expected a checkpoint without one: train the run again"
        )


def saved_tensors(checkpoint: Checkpoint, group: str, config: RunConfig) -> TensorFiles:
    """Open the tensors of a group, without those of a learned skip if the network of `config` has none.

    `check_compatible` has made sure that dropping them changes nothing.
    """
    files = TensorFiles.open(checkpoint, group)
    return files if config.latent.has_skip else files.filter(lambda name: not name.startswith(_SKIP_PREFIX))


def saved_latent_stats(checkpoint: Checkpoint, store: Store) -> LatentInfo:
    """Return the standardization of latents that a checkpoint was trained with.

    Checkpoints from before it was saved were trained with the one of their store. A damaged file, or one of latents of
    another shape, is a `DataError`.
    """
    current = store.manifest.latent
    if LATENTS_NAME not in checkpoint.files:
        return current
    expected = f"expected a scale of latents [{current.tokens}, {current.channels}]"
    try:
        stats = LatentInfo.from_json(json.loads(checkpoint.read(LATENTS_NAME)))
        shape, numbers = [stats.tokens, stats.channels, len(stats.mean)], [*stats.mean, stats.rms, stats.max_norm]
        if shape != [current.tokens, current.channels, current.channels] or not all(map(math.isfinite, numbers)):
            raise ValueError(f"{shape[:2]} with a mean of {shape[2]}, or numbers that are not finite")
        if not min(stats.rms, stats.max_norm) > 0:
            raise ValueError(f"rms {stats.rms}, max_norm {stats.max_norm}")
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DataError(f"{checkpoint.path / LATENTS_NAME}: {truncate(str(error))}; {expected}") from None
    return stats


def match_training_data(checkpoint: Checkpoint, store: Store) -> Store:
    """Return `store` with the standardization of latents, and at least the maximal length, of the training data."""
    saved = checkpoint.info.get("identity")
    data = saved.get("data") if isinstance(saved, dict) else None
    max_length = data.get("max_length") if isinstance(data, dict) else None
    manifest = replace(store.manifest, latent=saved_latent_stats(checkpoint, store))
    # The network has the sizes of its training data: a store with shorter texts gets the larger limit.
    if type(max_length) is int and max_length > manifest.max_length:
        manifest = replace(manifest, max_length=max_length)
    return store.with_manifest(manifest)


def saved_ema(checkpoint: Checkpoint, model: nn.Module, config: RunConfig) -> TensorFiles | None:
    """Open the EMA of the trained weights for the unwrapped `model`; None if the checkpoint has none.

    Tensors that do not match the parameters that were trained are a `DataError`.
    """
    if TensorFiles.find(checkpoint, "ema") is None:
        return None
    ema = saved_tensors(checkpoint, "ema", config)
    check_ema_weights(model, ema, saved_tensors(checkpoint, "optimizer", config))
    return ema
