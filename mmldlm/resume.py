"""What a run's checkpoint holds, what it fits together with, and how a run goes on from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmldlm.checkpoint import (
    Checkpoint,
    CheckpointStore,
    TrainState,
    load_model_state,
    load_optimizer_state,
    model_state,
    optimizer_state,
    read_tensors,
    write_tensors,
)
from mmldlm.config import RunConfig, differences, load_config
from mmldlm.data.manifest import Manifest
from mmldlm.data.shards import Store
from mmldlm.errors import ConfigError, DataError
from mmldlm.model.mmdit import DataShape
from mmldlm.schema import dump, to_yaml


def data_shape(manifest: Manifest) -> DataShape:
    return DataShape(
        vocab_size=manifest.vocab_size,
        mask_id=manifest.mask_id,
        pad_id=manifest.pad_id,
        max_length=manifest.max_length,
        latent_tokens=manifest.latent.tokens,
        latent_channels=manifest.latent.channels,
    )


def identity(config: RunConfig, store: Store) -> dict[str, Any]:
    """What a checkpoint only fits together with: network, tokenizer, latents."""
    manifest = store.manifest
    return {
        "model": asdict(config.model),
        "data": asdict(data_shape(manifest)),
        "tokenizer": manifest.tokenizer["sha256"],
        "encoder": manifest.encoder,
        "latent": asdict(config.latent),
    }


def check_fits(checkpoint: Checkpoint, config: RunConfig, store: Store) -> None:
    """`DataError` naming the first difference between what a checkpoint was made with and what is at hand."""
    saved, found = checkpoint.info.get("identity"), identity(config, store)
    if not isinstance(saved, dict):
        raise DataError(
            f"{checkpoint.path}: has no identity of network and data, expected a checkpoint of mmldlm train"
        )
    for group, values in found.items():
        before = saved.get(group)
        if before == values or _plain(before) == _plain(values):
            continue
        if isinstance(before, dict) and isinstance(values, dict):
            key = next(name for name in {**before, **values} if _plain(before.get(name)) != _plain(values.get(name)))
            before, values, group = before.get(key), values.get(key), f"{group}.{key}"
        raise DataError(f"{checkpoint.path}: {group} is {before!r} in the checkpoint, {values!r} now")


def _plain(value: Any) -> Any:
    """Tuples as the lists that JSON makes of them."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def save(
    checkpoints: CheckpointStore,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: TrainState,
    config: RunConfig,
    store: Store,
    made_by: Mapping[str, Any],
) -> Path:
    """Write a checkpoint of this moment and return its folder; `made_by` is recorded in its manifest."""
    weights, moments = model_state(model), optimizer_state(optimizer, model)
    return checkpoints.save(
        state.step,
        {
            "model.safetensors": lambda path: write_tensors(path, weights),
            "optimizer.safetensors": lambda path: write_tensors(path, moments),
            "state.json": state.to_json().encode(),
            "config.yaml": to_yaml(config).encode(),
        },
        {"identity": identity(config, store), **made_by},
        estimated_bytes=sum(tensor.nbytes for tensor in [*weights.values(), *moments.values()]),
    )


def restore(
    checkpoints: CheckpointStore,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: RunConfig,
    store: Store,
    is_main: bool,
) -> tuple[TrainState, list[str]]:
    """State to start from, loaded into model and optimizer, and what the user should know of it.

    Raises `ConfigError` for a `resume` that is nothing to resume from, `DataError` for a checkpoint that is
    damaged or belongs to another network, tokenizer or encoder.
    """
    if config.resume == "never":
        if is_main:
            checkpoints.set_aside_after(-1)
        return TrainState(), []
    found = checkpoints.newest(repair=is_main) if config.resume == "auto" else checkpoints.open(config.resume)
    if found is None:
        return TrainState(), []
    check_fits(found, config, store)
    state = TrainState.from_json(found.file("state.json").read_bytes())
    if state.step > config.train.steps:
        raise ConfigError(f"train.steps: {config.train.steps} asked for, but {found.path} is at step {state.step}")
    load_model_state(model, read_tensors(found.file("model.safetensors")))
    load_optimizer_state(optimizer, model, read_tensors(found.file("optimizer.safetensors")))
    if is_main:
        checkpoints.set_aside_after(state.step)
    changed = differences(dump(load_config(found.file("config.yaml"))), dump(config))
    return state, [f"resuming from {found.path}", *(f"changed since: {line}" for line in changed)]


def check_resume(resume: str) -> None:
    """`ConfigError` where `resume` is neither a word it may be nor a folder."""
    if resume not in ("auto", "never") and not Path(resume).is_dir():
        raise ConfigError(f"resume: expected auto, never or a checkpoint's folder, found {resume!r}")
