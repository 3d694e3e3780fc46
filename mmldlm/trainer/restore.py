"""Restores the start of a run: its newest checkpoint, another one, weights of another run (`init`), or its seed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mmldlm.checkpoint.manifest import Checkpoint, verify_checkpoint
from mmldlm.checkpoint.mirror import METRICS, Mirror
from mmldlm.checkpoint.state import NO_STATE, TrainState, check_model_state, clean_name
from mmldlm.checkpoint.store import CheckpointStore
from mmldlm.checkpoint.tensors import TensorFiles, TensorSource
from mmldlm.config import CONFIG_NAME, RunConfig, diff_configs, load_config, with_absolute_paths
from mmldlm.data.manifest import LatentInfo
from mmldlm.data.store import Store
from mmldlm.distributed.optimizers import check_state_compatible
from mmldlm.errors import ConfigError, DataError
from mmldlm.loading.compatibility import check_compatible, saved_ema, saved_latent_stats
from mmldlm.loading.load import DESCRIPTION
from mmldlm.loading.warm_start import find_source, warm_start
from mmldlm.settings.declaration import dump
from mmldlm.telemetry.metrics import recorded_run_id
from mmldlm.trainer.branches import REWINDS_FILE, read_rewinds, with_rewinds
from mmldlm.trainer.setup import Components
from mmldlm.trainer.step_guard import SKIPS_FILE
from mmldlm.utils.progress import Progress

# Files of the run folder that a mirror copies. With a checkpoint, they suffice to resume, sample and draw curves.
MIRRORED_FILES = (CONFIG_NAME, "startup.json", METRICS, SKIPS_FILE, REWINDS_FILE, DESCRIPTION, "tensorboard")


@dataclass(frozen=True)
class RestoredRun:
    """State that a run starts from."""

    state: TrainState
    notes: list[str]  # lines for the user
    latents: LatentInfo  # standardization of latents, the same since step 0
    weights: TensorSource  # model weights
    moments: TensorFiles | None = None  # optimizer state, or None for a run from step 0
    ema: Mapping[str, Tensor] = field(default_factory=dict)  # EMA by name: a missing entry starts from its weight
    origin: Any = None  # which weights `init` gave the run at step 0, see `WarmStart`
    path: Path | None = None  # path of the checkpoint
    mirror: Mirror | None = None  # copies checkpoints, only on rank 0
    run_id: str | None = None  # of the run that saved the checkpoint, or None if 0.1.0 saved it


def restore_run(components: Components) -> tuple[RestoredRun, Components]:
    """Wrap the model for the engine and restore the run (collective). Raises as `restore_checkpoint` does.

    Return the state, and components that standardize latents as the run has done since step 0.
    """
    config, engine, manifest = components.config, components.engine, components.store.manifest
    store = CheckpointStore(Path(config.run.dir) / "checkpoints", config.checkpoint.retention)
    place = config.checkpoint.mirror if engine.is_main else ""
    mirror = Mirror(place, store, MIRRORED_FILES) if place else None
    with Progress(engine.is_main) as progress:
        progress.phase("verifying and reading the checkpoint", announce=False)
        restored = _open_start(components, store, mirror)
    if restored.latents != manifest.latent:  # the loader has not read any latents yet
        data = components.store.with_manifest(replace(manifest, latent=restored.latents))
        components = components.for_data(config, data)
    engine.prepare(components.model, components.optimizer, restored.weights)
    engine.check_precision()
    if restored.moments is not None:
        with engine.raise_on_all_ranks("loading of the optimizer's state"):
            engine.load_optimizer_state(restored.moments)
        if engine.is_main:
            store.set_aside_after(restored.state.step)
    if config.ema.decay:
        engine.enable_ema(restored.ema)
    state = restored.state
    if engine.loss_scale is not None and state.loss_scale is not None:
        engine.loss_scale.restore(state.loss_scale, state.steps_at_scale)
    else:
        # Without fp16, the loss scale of an earlier start must not enter the next checkpoint.
        state.loss_scale, state.steps_at_scale = None, 0
    return replace(restored, mirror=mirror), components


def _open_start(components: Components, store: CheckpointStore, mirror: Mirror | None) -> RestoredRun:
    """Open the start that rank 0 chooses by `resume` and `init`, and check that it fits the model (collective)."""
    config, engine, data, initial = components.config, components.engine, components.store, components.initial_weights
    checkpoint, source = None, dict[str, str]()
    with engine.raise_on_all_ranks("choice of the checkpoint"):
        if engine.is_main:
            checkpoint = _choose(config, store, mirror)
            source = find_source(config.init) if checkpoint is None else {}
    path, source = engine.gather((checkpoint and str(checkpoint.path), source), "choice of the checkpoint")[0]
    with engine.raise_on_all_ranks("opening of the checkpoint"):
        if path is not None:
            # Rank 0 has already compared the hashes.
            checkpoint = checkpoint or verify_checkpoint(Path(path), hashes=False)
            return restore_checkpoint(checkpoint, components.model, config, data)
        if source:
            start = warm_start(source, config, data, initial)
            return RestoredRun(TrainState(), start.notes, start.latents, start.weights, origin=start.origin)
        return RestoredRun(TrainState(), [], data.manifest.latent, initial)


def _choose(config: RunConfig, store: CheckpointStore, mirror: Mirror | None) -> Checkpoint | None:
    """Return the verified checkpoint to start from, or None.

    With `resume: auto`, damaged checkpoints are set aside and a newer one may be fetched from the mirror. Records and
    checkpoint of two different runs are a `DataError`.
    """
    resume, checkpoint, run_dir = config.resume, None, store.folder.parent
    if resume != "never":
        checkpoint = store.newest() if resume == "auto" else verify_checkpoint(Path(resume))
    if mirror is not None:
        # After a rewind, a newer copy belongs to the abandoned branch.
        is_chosen = resume != "auto" or bool(read_rewinds(run_dir))
        checkpoint = mirror.fetch_newer(checkpoint, is_chosen)
        if with_rewinds(config) != config:
            raise ConfigError(f"{run_dir}: its rewinds, just fetched, leave out samples; run the command again")
    recorded, saved = recorded_run_id(run_dir / METRICS), checkpoint and checkpoint.info.get("run_id")
    if resume == "auto" and checkpoint is not None and recorded and saved and recorded != saved:
        raise DataError(
            f"{checkpoint.path} belongs to run {saved}, expected run {recorded} as in {run_dir / METRICS}; move the "
            "files of the other run away, or start from its checkpoint by resume: PATH in a new run.dir"
        )
    if resume == "never":
        store.set_aside_after(-1)
        with suppress(FileNotFoundError):
            (run_dir / REWINDS_FILE).replace(run_dir / f"{REWINDS_FILE}.old")
    return checkpoint


def restore_checkpoint(checkpoint: Checkpoint, model: nn.Module, config: RunConfig, store: Store) -> RestoredRun:
    """Check that a verified checkpoint fits the unwrapped model. Weights and moments are not read yet.

    Raises:
        ConfigError: The checkpoint is past `train.steps` or has the state of another optimizer.
        DataError: The checkpoint belongs to another network, tokenizer or encoder.
    """
    path = checkpoint.path
    check_compatible(checkpoint, config, store)
    state = TrainState.from_json(checkpoint.file("state.json").read_bytes())
    if state.step > config.train.steps:
        raise ConfigError(f"train.steps: found {config.train.steps}, but {path} is at step {state.step}")
    try:
        saved = load_config(checkpoint.file(CONFIG_NAME), may_extend=False)
    except ConfigError as error:  # saved by another version
        raise DataError(f"checkpoint: {error}") from error
    check_state_compatible(saved.optim.name, config.optim.name)
    weights = TensorFiles.open(checkpoint, "model")
    check_model_state(model, weights)
    moments, num_new = _moments_of_trained(model, TensorFiles.open(checkpoint, "optimizer"))
    changed = diff_configs(dump(with_absolute_paths(saved)), dump(with_absolute_paths(config)))
    notes = [f"resuming from {path}", *(f"changed since: {line}" for line in changed)]
    if num_new:
        notes.append(f"{num_new} parameters train from here on and start with new optimizer state")
    latents = saved_latent_stats(checkpoint, store)
    if latents != store.manifest.latent:
        notes.append("latents are standardized as in the checkpoint, by other statistics than those of the data now")
    ema = saved_ema(checkpoint, model)
    kept: Mapping[str, Tensor] = {}
    if not config.ema.decay:
        if ema is not None:
            notes.append("ema: the checkpoint's EMA of the weights ends here (ema.decay: 0)")
    elif ema is None:
        notes.append("ema: the checkpoint has no EMA of the weights; it starts here from the present weights")
    else:
        trained = {clean_name(name) for name, parameter in model.named_parameters() if parameter.requires_grad}
        kept = ema.filter(trained.__contains__)
        if num_new:
            notes.append("ema: the EMA of parameters that train from here on starts from their present values")
    info = checkpoint.info
    return RestoredRun(state, notes, latents, weights, moments, kept, info.get("init"), path, None, info.get("run_id"))


def _moments_of_trained(model: nn.Module, files: TensorFiles) -> tuple[TensorFiles, int]:
    """Return (optimizer state without parameters frozen now, number of parameters that train from here on)."""
    names = {clean_name(name): parameter.requires_grad for name, parameter in model.named_parameters()}
    # Keep entries of unknown parameters: loading the optimizer's state reports them.
    kept = files.filter(lambda entry: names.get(entry.rpartition("/")[0], True))
    known = {entry.rpartition("/")[0] for entry in kept}
    new = [name for name, is_trained in names.items() if is_trained and name not in known]
    return kept.with_empty([f"{name}/{NO_STATE}" for name in new]), len(new)
