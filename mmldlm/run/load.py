"""Load a trained run: its config, data and weights, ready to sample and evaluate."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mmldlm.checkpoint.manifest import Checkpoint, verify_checkpoint
from mmldlm.checkpoint.state import load_model_state
from mmldlm.checkpoint.store import CheckpointStore
from mmldlm.config import CONFIG_NAME, RunConfig, load_config
from mmldlm.data.mixture import open_data
from mmldlm.data.store import Store
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.diffusion.objective import Network, Objective
from mmldlm.errors import ConfigError, DataError
from mmldlm.optim.ema import WEIGHTS_LABELS, Weights
from mmldlm.run.compatibility import check_compatible, match_training_data, saved_ema, saved_tensors
from mmldlm.run.factory import build_meta_model, build_objective, set_matmul_precision
from mmldlm.utils.meta_device import materialize
from mmldlm.utils.short_repr import short_repr


@dataclass(frozen=True)
class LoadedRun:
    """A trained run, ready to sample and evaluate."""

    folder: Path
    config: RunConfig
    store: Store
    tokenizer: Tokenizer
    model: Network
    objective: Objective
    device: torch.device
    step: int
    weights: Weights  # which weights the model has
    has_ema: bool  # whether the checkpoint has an EMA besides the trained weights

    def __str__(self) -> str:
        return f"step {self.step}, {WEIGHTS_LABELS[self.weights]}"


def add_run_options(parser: ArgumentParser) -> None:
    """Add the run, and the options that replace its newest checkpoint, data store and weights, to a parser."""
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--checkpoint", type=Path, help="checkpoint folder; default: the newest valid one")
    parser.add_argument("--data", help="data store, if it is no longer at the config's data.path")
    parser.add_argument(
        "--weights",
        choices=list(WEIGHTS_LABELS),
        help="weights of a checkpoint that has both: ema or trained; default: ema, unless ema.evaluate is false",
    )


def run_config(run_dir: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the config of a run's latest start; raise `DataError` if the folder is not a run."""
    path = Path(run_dir) / CONFIG_NAME
    if not path.is_file():
        raise DataError(f"{run_dir}: not a run folder, expected {CONFIG_NAME} and checkpoints/ of `mmldlm train`")
    return load_config(path, overrides, may_extend=False)


def newest_checkpoint(run_dir: Path | str, config: RunConfig) -> Checkpoint:
    """Return the newest intact checkpoint of a run; raise `DataError` if there is none."""
    checkpoint = CheckpointStore(Path(run_dir) / "checkpoints", config.checkpoint.retention).newest(repair=False)
    if checkpoint is None:
        raise DataError(f"{run_dir}: no checkpoint in checkpoints/ yet; train first")
    return checkpoint


def load_run(
    run_dir: Path | str,
    checkpoint: Path | str | None = None,
    data: str | None = None,
    weights: Weights | None = None,
    sampling: Sequence[str] = (),
) -> LoadedRun:
    """Load a trained run for generation and evaluation.

    Args:
        run_dir: Run folder.
        checkpoint: Checkpoint folder; by default the newest intact checkpoint of the run.
        data: Path of a data store that replaces the config's data.
        weights: "ema" or "trained"; by default the EMA if the checkpoint has one, unless `ema.evaluate` is false.
        sampling: Overrides `sampling.KEY=VALUE` of the run's config.

    Raises:
        ConfigError: An override is no setting of `sampling`, or out of bounds.
        DataError: The folder is not a run, has no checkpoint or no EMA though it was requested, or the data store is
            missing or has changed.
    """
    folder = Path(run_dir)
    for override in sampling:
        if not override.startswith("sampling."):
            raise ConfigError(f"expected sampling.KEY=VALUE, found {short_repr(override)}")
    config = run_config(folder, [*([f"data.path={data}", "data.mixture={}"] if data else []), *sampling])
    saved = verify_checkpoint(Path(checkpoint)) if checkpoint else newest_checkpoint(folder, config)
    for path in config.data.mixture or [config.data.path]:
        if not Path(path).is_dir():
            raise DataError(f"{path}: the run's data store is not there; give its path with --data")
    store = match_training_data(saved, open_data(config.data.location))
    check_compatible(saved, config, store)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    set_matmul_precision(config)
    model = build_meta_model(config, store.manifest, device.type)
    materialize(model, device)
    ema = saved_ema(saved, model, config)
    if weights == "ema" and ema is None:
        raise DataError(f"{saved.path}: has no EMA of the weights (ema.decay); expected --weights trained")
    weights = weights or ("ema" if ema is not None and config.ema.evaluate else "trained")
    tensors = saved_tensors(saved, "model", config)
    # The EMA has only the parameters that were trained: frozen ones come from the model's tensors.
    load_model_state(model, tensors if ema is None or weights == "trained" else tensors.overlay(ema))
    return LoadedRun(
        folder=folder,
        config=config,
        store=store,
        tokenizer=Tokenizer.load(saved.path / "tokenizer"),
        model=model.eval(),
        objective=build_objective(config, store.manifest),
        device=device,
        step=saved.step,
        weights=weights,
        has_ema=ema is not None,
    )
