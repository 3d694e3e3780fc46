"""Load a trained run: its config, data and weights, ready to sample and evaluate."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mmldlm.checkpoint import Checkpoint, CheckpointStore, load_model_state, verify
from mmldlm.config import RunConfig, load_config
from mmldlm.data.mixture import open_data
from mmldlm.data.store import Store
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.diffusion.objective import Network, Objective
from mmldlm.errors import DataError
from mmldlm.optim.ema import WORDS, Weights
from mmldlm.run.contents import check_fits, match_training_data, saved_average, saved_tensors
from mmldlm.run.factory import build_model, build_objective


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
    weights: Weights  # which of them the model has
    has_average: bool  # whether the checkpoint has both

    def __str__(self) -> str:
        return f"step {self.step}, {WORDS[self.weights]}"


def run_config(run_dir: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """The config of a run's latest start; `DataError` where the folder is no run."""
    path = Path(run_dir) / "config.yaml"
    if not path.is_file():
        raise DataError(f"{run_dir}: not a run folder, expected config.yaml and checkpoints/ of `mmldlm train`")
    return load_config(path, overrides, may_extend=False)


def newest_checkpoint(run_dir: Path | str, config: RunConfig) -> Checkpoint:
    """The newest good one of a run; `DataError` where there is none."""
    found = CheckpointStore(Path(run_dir) / "checkpoints", config.checkpoint.retention).newest(repair=False)
    if found is None:
        raise DataError(f"{run_dir}: no checkpoint in checkpoints/ yet; train first")
    return found


def load_run(
    run_dir: Path | str, checkpoint: Path | str | None = None, data: str | None = None, weights: Weights | None = None
) -> LoadedRun:
    """The newest good checkpoint of a run, or a given one; `data`, one store, replaces the config's data.

    Where `weights` says nothing, their average is taken if the checkpoint has one, unless `ema.evaluate` is false.

    Raises `DataError` where the folder is no run, has no checkpoint or no average that was asked for, or its data store
    has changed.
    """
    folder = Path(run_dir)
    config = run_config(folder, [f"data.path={data}", "data.mixture={}"] if data else [])
    found = verify(Path(checkpoint)) if checkpoint else newest_checkpoint(folder, config)
    for path in config.data.mixture or [config.data.path]:
        if not Path(path).is_dir():
            raise DataError(f"{path}: the run's data store is not there; name its place with --data")
    store = match_training_data(found, open_data(config.data.place))
    check_fits(found, config, store)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(config, store.manifest, device.type)
    average = saved_average(found, model, config)
    if weights == "ema" and average is None:
        raise DataError(f"{found.path}: has no average of the weights (ema.decay); expected --weights trained")
    weights = weights or ("ema" if average is not None and config.ema.evaluate else "trained")
    chosen = average if average is not None and weights == "ema" else {}
    load_model_state(model, ChainMap(chosen, saved_tensors(found, "model", config)))  # type: ignore[arg-type]
    return LoadedRun(
        folder=folder,
        config=config,
        store=store,
        tokenizer=Tokenizer.load(found.path / "tokenizer"),
        model=model.to(device).eval(),
        objective=build_objective(config, store.manifest),
        device=device,
        step=found.step,
        weights=weights,
        has_average=average is not None,
    )
