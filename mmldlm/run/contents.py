"""Contents of a run's checkpoints, their compatibility with a run, and how a run is restored from them."""

from __future__ import annotations

import json
import math
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmldlm.checkpoint import (
    NO_STATE,
    Checkpoint,
    CheckpointStore,
    TensorFiles,
    TrainState,
    check_ema_weights,
    clean_name,
    load_model_state,
    verify_checkpoint,
)
from mmldlm.config import RunConfig, diff_configs, load_config, with_absolute_paths
from mmldlm.data.manifest import LatentInfo, Manifest
from mmldlm.data.store import Store
from mmldlm.distributed.optimizers import check_state_compatible
from mmldlm.errors import ConfigError, DataError
from mmldlm.model.mmdit import DataShape
from mmldlm.settings.fields import dump, to_yaml
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


def check_compatible(checkpoint: Checkpoint, config: RunConfig, store: Store) -> None:
    """Raise `DataError` with the first difference in `identity` between a checkpoint and a run."""
    saved, current = checkpoint.info.get("identity"), identity(config, store)
    if not isinstance(saved, dict):
        raise DataError(
            f"{checkpoint.path}: has no identity of network and data, expected a checkpoint of mmldlm train"
        )
    for group, values in current.items():
        before = saved.get(group)
        if before == values or _tuples_to_lists(before) == _tuples_to_lists(values):
            continue
        if isinstance(before, dict) and isinstance(values, dict):
            old, new = _tuples_to_lists(before), _tuples_to_lists(values)
            key = next(name for name in {**before, **values} if old.get(name) != new.get(name))
            before, values, group = before.get(key), values.get(key), f"{group}.{key}"
        found, expected = short_repr(before), short_repr(values)
        raise DataError(f"{checkpoint.path}: {group} is {found} in the checkpoint, {expected} now")
    _check_latent_skip(checkpoint, config)


def _check_latent_skip(checkpoint: Checkpoint, config: RunConfig) -> None:
    """Raise `DataError` if a checkpoint predicts x0 with a learned skip that is not zero, as older networks did.

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

    Checkpoints from before it was saved were trained with the one of their store.

    Raises:
        DataError: the file is damaged or belongs to latents of another shape.
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
    if type(max_length) is int and max_length > manifest.max_length:
        manifest = replace(manifest, max_length=max_length)
    return store.with_manifest(manifest)


def _tuples_to_lists(value: Any) -> Any:
    """Return `value` with tuples as lists, as JSON stores them."""
    if isinstance(value, dict):
        return {key: _tuples_to_lists(item) for key, item in value.items()}
    return [_tuples_to_lists(item) for item in value] if isinstance(value, (list, tuple)) else value


def metadata_files(config: RunConfig, store: Store) -> dict[str, bytes]:
    """Return the checkpoint files besides tensors and `state.json`, by name; they are constant over a run."""
    tokenizer = sorted(path for path in (store.path / "tokenizer").iterdir() if path.is_file())
    return {
        "config.yaml": to_yaml(with_absolute_paths(config)).encode(),
        LATENTS_NAME: json.dumps(asdict(store.manifest.latent)).encode(),
        **{f"tokenizer/{path.name}": path.read_bytes() for path in tokenizer},
    }


@dataclass(frozen=True)
class RestoredRun:
    """State that a run starts from."""

    state: TrainState
    notes: list[str]  # for the user
    latents: LatentInfo  # standardization of latents since step 0
    moments: Mapping[str, Tensor] | None = None  # optimizer state; None for a run from step 0
    ema: Mapping[str, Tensor] = field(default_factory=dict)  # EMA by name; missing ones start from the weights


def choose_checkpoint(checkpoints: CheckpointStore, config: RunConfig) -> Path | None:
    """Return the verified checkpoint to start from, or None for step 0; one rank chooses for all.

    With `resume: auto`, damaged checkpoints are moved aside if there is an intact one.

    Raises:
        DataError: the checkpoint is damaged.
    """
    if config.resume == "never":
        checkpoints.set_aside_after(-1)
        return None
    checkpoint = checkpoints.newest() if config.resume == "auto" else checkpoints.open(config.resume)
    return None if checkpoint is None else checkpoint.path


def restore(path: Path | None, model: nn.Module, config: RunConfig, store: Store) -> RestoredRun:
    """Load the weights of the checkpoint that `choose_checkpoint` verified into the unwrapped model.

    Args:
        path: Checkpoint folder; None to start from step 0.
        model: Model without the engine's wrapper.
        config: Config of the run.
        store: Opened data of the run.

    Raises:
        ConfigError: the checkpoint is beyond `train.steps` or has the state of another optimizer.
        DataError: the checkpoint belongs to another network, tokenizer or encoder.
    """
    if path is None:
        return RestoredRun(TrainState(), [], store.manifest.latent)
    checkpoint = verify_checkpoint(path, hashes=False)
    check_compatible(checkpoint, config, store)
    state = TrainState.from_json(checkpoint.read("state.json"))
    if state.step > config.train.steps:
        raise ConfigError(f"train.steps: found {config.train.steps}, but {path} is at step {state.step}")
    saved = _saved_config(checkpoint)
    check_state_compatible(saved.optim.name, config.optim.name)
    load_model_state(model, saved_tensors(checkpoint, "model", config))
    moments, num_new = _moments_of_trained(model, saved_tensors(checkpoint, "optimizer", config))
    changed = diff_configs(dump(with_absolute_paths(saved)), dump(with_absolute_paths(config)))
    notes = [f"resuming from {path}", *(f"changed since: {line}" for line in changed)]
    if num_new:
        notes.append(f"{num_new} parameters train from here on, with new optimizer state")
    latents = saved_latent_stats(checkpoint, store)
    if latents != store.manifest.latent:
        notes.append("latents are standardized as in the checkpoint, by other statistics than those of the data now")
    ema = saved_ema(checkpoint, model, config)
    if not config.ema.decay:
        if ema is not None:
            notes.append("ema: the checkpoint's EMA of the weights ends here (ema.decay: 0)")
        return RestoredRun(state, notes, latents, moments)
    kept = {} if ema is None else ema.filter(_trained_names(model).__contains__)
    if ema is None:
        notes.append("ema: the checkpoint has no EMA of the weights; it starts here from the present weights")
    elif num_new:
        notes.append("ema: the EMA of parameters that train from here on starts from their present values")
    return RestoredRun(state, notes, latents, moments, kept)


def saved_ema(checkpoint: Checkpoint, model: nn.Module, config: RunConfig) -> TensorFiles | None:
    """Open the EMA of the trained weights for the unwrapped `model`; None if the checkpoint has none.

    Raises:
        DataError: its tensors do not match the parameters that were trained.
    """
    if TensorFiles.find(checkpoint, "ema") is None:
        return None
    ema = saved_tensors(checkpoint, "ema", config)
    check_ema_weights(model, ema, saved_tensors(checkpoint, "optimizer", config))
    return ema


def _saved_config(checkpoint: Checkpoint) -> RunConfig:
    try:
        return load_config(checkpoint.file("config.yaml"), may_extend=False)
    except ConfigError as error:
        raise DataError(f"checkpoint: {error}") from error


def _moments_of_trained(model: nn.Module, files: TensorFiles) -> tuple[Mapping[str, Tensor], int]:
    """Return the optimizer state without parameters that are frozen now, and the number of newly trained ones."""
    names = {clean_name(name): parameter.requires_grad for name, parameter in model.named_parameters()}
    kept = files.filter(lambda entry: names.get(entry.rpartition("/")[0], True))
    known = {entry.rpartition("/")[0] for entry in kept}
    new = [name for name in _trained_names(model) if name not in known]
    return ChainMap({f"{name}/{NO_STATE}": torch.empty(0) for name in new}, kept), len(new)  # type: ignore[arg-type]


def _trained_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters that are trained, without prefixes of wrappers."""
    return [clean_name(name) for name, parameter in model.named_parameters() if parameter.requires_grad]


def check_resume(resume: str) -> None:
    """Raise `ConfigError` unless `resume` is auto, never or a folder."""
    if resume not in ("auto", "never") and not Path(resume).is_dir():
        raise ConfigError(f"resume: expected auto, never or a checkpoint's folder, found {short_repr(resume)}")
