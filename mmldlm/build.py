"""From a run config and a data store to the objects that train, sample and evaluate share."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mmldlm.checkpoint import Checkpoint, CheckpointStore, load_model_state, read_tensors
from mmldlm.config import RunConfig, load_config
from mmldlm.data.manifest import Manifest
from mmldlm.data.shards import Store
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.diffusion.gaussian import GaussianDiffusion
from mmldlm.diffusion.masked import MaskedDiffusion
from mmldlm.diffusion.objective import Objective
from mmldlm.errors import DataError
from mmldlm.model.attention import resolve_backend
from mmldlm.model.mmdit import DataShape, MMDiT

log = logging.getLogger(__name__)


def data_shape(manifest: Manifest) -> DataShape:
    return DataShape(
        vocab_size=manifest.vocab_size,
        mask_id=manifest.mask_id,
        pad_id=manifest.pad_id,
        max_length=manifest.max_length,
        latent_tokens=manifest.latent.tokens,
        latent_channels=manifest.latent.channels,
    )


def build_model(config: RunConfig, manifest: Manifest, device_type: str) -> MMDiT:
    """The network with its initial weights, a function of `run.seed` alone."""
    backend = resolve_backend(config.attention.backend, device_type, config.precision == "bf16")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.run.seed)
        return MMDiT(config.model, data_shape(manifest), backend)


def build_objective(config: RunConfig, manifest: Manifest) -> Objective:
    return Objective(
        config.loss,
        MaskedDiffusion(manifest.mask_id, config.loss.text),
        GaussianDiffusion(config.latent, config.loss.latent, manifest.latent.max_norm),
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


@dataclass(frozen=True)
class LoadedRun:
    """A trained run, ready to sample and evaluate."""

    folder: Path
    config: RunConfig
    store: Store
    tokenizer: Tokenizer
    model: MMDiT
    objective: Objective
    device: torch.device
    step: int

    @property
    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.config.precision == "bf16")


def load_run(run_dir: Path | str, checkpoint: Path | str | None = None, data: str | None = None) -> LoadedRun:
    """The newest good checkpoint of a run, or a given one; `data` replaces the config's data.path.

    Raises `DataError` where the folder is no run, has no checkpoint, or its data store has changed.
    """
    folder = Path(run_dir)
    if not (folder / "config.yaml").is_file():
        raise DataError(f"{folder}: not a run folder, expected config.yaml and checkpoints/ of `mmldlm train`")
    config = load_config(folder / "config.yaml", [f"data.path={data}"] if data else [])
    checkpoints = CheckpointStore(folder / "checkpoints", config.checkpoint.keep_last)
    found = checkpoints.open(checkpoint) if checkpoint else checkpoints.newest(repair=False)
    if found is None:
        raise DataError(f"{folder}: no checkpoint in checkpoints/ yet; train first")
    store = Store.open(config.data.path)
    check_fits(found, config, store)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(config, store.manifest, device.type)
    load_model_state(model, read_tensors(found.file("model.safetensors")))
    return LoadedRun(
        folder=folder,
        config=config,
        store=store,
        tokenizer=Tokenizer.load(store.path / "tokenizer"),
        model=model.to(device).eval(),
        objective=build_objective(config, store.manifest),
        device=device,
        step=found.step,
    )
