"""What a run's checkpoint holds, what it fits together with, and how a run goes on from it."""

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
    check_average,
    clean_name,
    load_model_state,
    verify,
)
from mmldlm.config import RunConfig, differences, load_config, with_absolute_paths
from mmldlm.data.manifest import LatentInfo, Manifest
from mmldlm.data.store import Store
from mmldlm.distributed.optimizers import check_same_state
from mmldlm.errors import ConfigError, DataError
from mmldlm.model.mmdit import DataShape
from mmldlm.settings.fields import dump, to_yaml
from mmldlm.utils.short_repr import cut, shown

LATENTS_NAME = "latents.json"
_SKIP = "latent_skip."  # what parameters of the learned skip begin with


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
        raise DataError(f"{checkpoint.path}: {group} is {shown(before)} in the checkpoint, {shown(values)} now")
    _check_skip(checkpoint, config)


def _check_skip(checkpoint: Checkpoint, config: RunConfig) -> None:
    """Raise DataError where a checkpoint predicts x0 with a learned skip that is not zero, as older networks did.

    In a run that never trained latents it has stayed zero, and means nothing.
    """
    if config.latent.has_skip:
        return
    files = TensorFiles.open(checkpoint, "model")
    if any(bool(files[name].any()) for name in files if name.startswith(_SKIP)):
        raise DataError(
            f"{checkpoint.path}: latent.prediction x0 was trained with a learned latent_skip, which the network no "
            "longer has; expected a checkpoint without one: train the run again"
        )


def saved_tensors(checkpoint: Checkpoint, group: str, config: RunConfig) -> TensorFiles:
    """Open the tensors of a group that the network of `config` has; `check_fits` has refused what else is there."""
    files = TensorFiles.open(checkpoint, group)
    return files if config.latent.has_skip else files.where(lambda name: not name.startswith(_SKIP))


def latents_of(checkpoint: Checkpoint, store: Store) -> LatentInfo:
    """How latents were standardized in training; DataError where that is no standardization of `store`'s.

    One that was saved before checkpoints held it was trained on its store's own.
    """
    own = store.manifest.latent
    if LATENTS_NAME not in checkpoint.files:
        return own
    expected = f"expected a scale of latents [{own.tokens}, {own.channels}]"
    try:
        found = LatentInfo.read(json.loads(checkpoint.read(LATENTS_NAME)))
        shape, numbers = [found.tokens, found.channels, len(found.mean)], [*found.mean, found.rms, found.max_norm]
        if shape != [own.tokens, own.channels, own.channels] or not all(map(math.isfinite, numbers)):
            raise ValueError(f"{shape[:2]} with a mean of {shape[2]}, or numbers that are not finite")
        if not min(found.rms, found.max_norm) > 0:
            raise ValueError(f"rms {found.rms}, max_norm {found.max_norm}")
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DataError(f"{checkpoint.path / LATENTS_NAME}: {cut(str(error))}; {expected}") from None
    return found


def match_training_data(checkpoint: Checkpoint, store: Store) -> Store:
    """`store` as the checkpoint's network knows data: by its standardization, and with room for as long samples."""
    saved = checkpoint.info.get("identity")
    data = saved.get("data") if isinstance(saved, dict) else None
    longest = data.get("max_length") if isinstance(data, dict) else None
    manifest = replace(store.manifest, latent=latents_of(checkpoint, store))
    if type(longest) is int and longest > manifest.max_length:
        manifest = replace(manifest, max_length=longest)
    return store.with_manifest(manifest)


def _plain(value: Any) -> Any:
    """Tuples as the lists that JSON makes of them."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def metadata_files(config: RunConfig, store: Store) -> dict[str, bytes]:
    """What a checkpoint holds beside its tensors and `state.json`: the same throughout a run."""
    tokenizer = sorted(path for path in (store.path / "tokenizer").iterdir() if path.is_file())
    return {
        "config.yaml": to_yaml(with_absolute_paths(config)).encode(),
        LATENTS_NAME: json.dumps(asdict(store.manifest.latent)).encode(),
        **{f"tokenizer/{path.name}": path.read_bytes() for path in tokenizer},
    }


@dataclass(frozen=True)
class Restored:
    """Where a run starts from."""

    state: TrainState
    notes: list[str]  # for the user
    latents: LatentInfo  # how they are standardized: as they have been from step 0 on
    moments: Mapping[str, Tensor] | None = None  # the optimizer's state; None for a run from step 0
    average: Mapping[str, Tensor] = field(default_factory=dict)  # of the weights; those not in it begin theirs anew


def choose(checkpoints: CheckpointStore, config: RunConfig) -> Path | None:
    """The checkpoint to start from, verified; None for step 0. One rank chooses for all.

    Raises `DataError` for a checkpoint that is damaged. Damaged ones beside a good one are set aside.
    """
    if config.resume == "never":
        checkpoints.set_aside_after(-1)
        return None
    found = checkpoints.newest() if config.resume == "auto" else checkpoints.open(config.resume)
    return None if found is None else found.path


def restore(path: Path | None, model: nn.Module, config: RunConfig, store: Store) -> Restored:
    """Load the weights of the checkpoint that `choose` verified into the bare model.

    Raises `ConfigError` for one beyond `train.steps` or with the state of another optimizer, `DataError` for one that
    belongs to another network, tokenizer or encoder.
    """
    if path is None:
        return Restored(TrainState(), [], store.manifest.latent)
    found = verify(path, hashes=False)
    check_fits(found, config, store)
    state = TrainState.from_json(found.read("state.json"))
    if state.step > config.train.steps:
        raise ConfigError(f"train.steps: {config.train.steps} asked for, but {path} is at step {state.step}")
    saved = _saved_config(found)
    check_same_state(saved.optim.name, config.optim.name)
    load_model_state(model, saved_tensors(found, "model", config))
    moments, anew = _moments_of_trained(model, saved_tensors(found, "optimizer", config))
    changed = differences(dump(with_absolute_paths(saved)), dump(with_absolute_paths(config)))
    notes = [f"resuming from {path}", *(f"changed since: {line}" for line in changed)]
    if anew:
        notes.append(f"{anew} parameters train from here on, with optimizer state of their own that starts anew")
    latents = latents_of(found, store)
    if latents != store.manifest.latent:
        notes.append("latents are standardized as in the checkpoint, by other statistics than those of the data now")
    average = saved_average(found, model, config)
    if not config.ema.decay:
        if average is not None:
            notes.append("ema: the checkpoint's average of the weights ends here (ema.decay: 0)")
        return Restored(state, notes, latents, moments)
    kept = {} if average is None else average.where(_trained(model).__contains__)
    if average is None:
        notes.append("ema: the checkpoint has no average of the weights; it begins here, as the weights are now")
    elif anew:
        notes.append("ema: the average of parameters that train from here on begins as they are now")
    return Restored(state, notes, latents, moments, kept)


def saved_average(checkpoint: Checkpoint, model: nn.Module, config: RunConfig) -> TensorFiles | None:
    """The average of the trained weights, for the bare `model`; None where the checkpoint has none.

    Raises `DataError` where it is not that of what was trained.
    """
    if TensorFiles.find(checkpoint, "ema") is None:
        return None
    average = saved_tensors(checkpoint, "ema", config)
    check_average(model, average, saved_tensors(checkpoint, "optimizer", config))
    return average


def _saved_config(checkpoint: Checkpoint) -> RunConfig:
    try:
        return load_config(checkpoint.file("config.yaml"), may_extend=False)
    except ConfigError as error:
        raise DataError(f"checkpoint: {error}") from error


def _moments_of_trained(model: nn.Module, files: TensorFiles) -> tuple[Mapping[str, Tensor], int]:
    """The optimizer's state without that of parameters that are frozen now, and how many were frozen then."""
    names = {clean_name(name): parameter.requires_grad for name, parameter in model.named_parameters()}
    kept = files.where(lambda entry: names.get(entry.rpartition("/")[0], True))
    known = {entry.rpartition("/")[0] for entry in kept}
    anew = [name for name in _trained(model) if name not in known]
    return ChainMap({f"{name}/{NO_STATE}": torch.empty(0) for name in anew}, kept), len(anew)  # type: ignore[arg-type]


def _trained(model: nn.Module) -> list[str]:
    return [clean_name(name) for name, parameter in model.named_parameters() if parameter.requires_grad]


def check_resume(resume: str) -> None:
    """`ConfigError` where `resume` is neither a word it may be nor a folder."""
    if resume not in ("auto", "never") and not Path(resume).is_dir():
        raise ConfigError(f"resume: expected auto, never or a checkpoint's folder, found {shown(resume)}")
