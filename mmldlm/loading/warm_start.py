"""Warm starts (`init`): a new run takes its weights at step 0 from a trained network, or from any file of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from mmldlm.checkpoint.manifest import MANIFEST, Checkpoint, verify_checkpoint
from mmldlm.checkpoint.tensors import TensorFiles
from mmldlm.config import RunConfig, diff_configs
from mmldlm.data.manifest import LatentInfo
from mmldlm.data.store import Store
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.errors import ConfigError, DataError
from mmldlm.loading.compatibility import identity, saved_identity, saved_latent_stats
from mmldlm.loading.load import choose_weights, is_checkpoint, newest_checkpoint, run_config
from mmldlm.model.initial_weights import InitConfig, InitialWeights, Taken
from mmldlm.model.parts import frozen_parts, part_of
from mmldlm.optim.ema import WEIGHTS_LABELS
from mmldlm.utils.files import sha256
from mmldlm.utils.short_repr import display_name, truncate

_EMBEDDING = "token_embedding.weight"
_LENGTH_ROWS = "length_head.out."  # row i stands for length i + 1 in every network, so rows can be taken one by one


class WarmStart(NamedTuple):
    """Weights of a new run, and where they come from."""

    weights: InitialWeights
    latents: LatentInfo  # standardization of the latents that these weights expect
    notes: list[str]  # for the user
    origin: dict[str, Any]  # for the start-up report and checkpoints. It names no folders, since bundles contain it


def find_source(init: InitConfig) -> dict[str, str]:
    """Verify the files that `init` names, on one rank for all.

    Returns:
        With `init.from`: "checkpoint", the folder, and "manifest", the SHA-256 of its manifest. With `init.embeddings`:
        "embeddings", the SHA-256 of the file.

    Raises:
        DataError: A file is missing or damaged.
    """
    source: dict[str, str] = {}
    if init.from_:
        path = Path(init.from_)
        try:
            checkpoint = verify_checkpoint(path) if is_checkpoint(path) else newest_checkpoint(path, run_config(path))
        except DataError as error:
            raise DataError(f"init.from: {error}") from None
        source |= {"checkpoint": str(checkpoint.path), "manifest": sha256(checkpoint.path / MANIFEST)}
    if init.embeddings:
        file, _ = init.embeddings_tensor
        if not file.is_file():
            raise DataError(f"init.embeddings: {file}: no such file; expected a safetensors file")
        source["embeddings"] = sha256(file)
    return source


def warm_start(source: Mapping[str, str], config: RunConfig, store: Store, initial: InitialWeights) -> WarmStart:
    """Choose which weights to take from the result of `find_source`, without reading them.

    Raises:
        ConfigError: An entry of `init.skip` names no weight.
        DataError: A tensor does not fit.
    """
    shapes = {name: tensor.shape for name, tensor in initial.meta().items()}
    taken: dict[str, Taken] = {}
    new: dict[str, str] = {}  # the reason, by name
    latents, notes, origin = store.manifest.latent, [], dict[str, Any]()
    if "checkpoint" in source:
        path = Path(source["checkpoint"])
        checkpoint = verify_checkpoint(path, hashes=False)
        files, ema = TensorFiles.open(checkpoint, "model"), TensorFiles.find(checkpoint, "ema")
        weights = choose_weights(checkpoint, None, ema is not None, run_config(path).ema.evaluate)
        if ema is not None and weights == "ema":
            files = files.overlay(ema)
        taken, new = _match(checkpoint, files, config, store, shapes)
        notes.append(f"weights from {path}: {WEIGHTS_LABELS[weights]} of step {checkpoint.step}")
        for group in ("model", "latent"):
            differing = diff_configs(saved_identity(checkpoint)[group], identity(config, store)[group], f"{group}.")
            notes += [f"  other settings there: {display_name(line)}" for line in differing]
        if "latent_in.weight" in taken:
            # The bound on norms must hold for the latents of both, on the scale of the weights that we take.
            saved = saved_latent_stats(checkpoint, store)
            shift = float(np.linalg.norm(np.subtract(saved.mean, latents.mean)))
            max_norm = max(saved.max_norm, (latents.max_norm * latents.rms + shift) / saved.rms)
            latents = replace(saved, max_norm=max_norm)
            notes += ["  latents are standardized as there"] * (latents != store.manifest.latent)
        name, git = Path(config.init.from_ or path).resolve().name, checkpoint.info.get("git")
        origin |= {"from": name, "step": checkpoint.step, "weights": weights, "git": git}
        origin["manifest"] = source["manifest"]
    if "embeddings" in source:
        file, _ = config.init.embeddings_tensor
        table, key, _ = taken[_EMBEDDING] = _open_embeddings(config.init, store, shapes[_EMBEDDING])
        new[_EMBEDDING] = "[MASK] and [PAD], which the file lacks"
        notes.append(f"token embeddings from {file}: {display_name(key)} {list(table.meta()[key].shape)}")
        origin["embeddings"] = {"file": file.name, "tensor": key, "sha256": source["embeddings"]}
    counts = {name: taken[name].elements if name in taken else 0 for name in shapes}
    rest = {name: shape.numel() - counts[name] for name, shape in shapes.items()}
    origin |= {"taken": _sum_by_part(counts), "new": _sum_by_part(rest)}
    for title in ("taken", "new"):
        notes.append(f"  {title}: {', '.join(f'{part} {n:,}' for part, n in origin[title].items()) or 'nothing'}")
    for reason in dict.fromkeys(new.values()):
        names = [f"{name} {list(shapes[name])}" for name in shapes if new.get(name) == reason and rest[name]]
        notes += [f"  new because of {reason}: {truncate(', '.join(names), 300)}"] * bool(names)
    return WarmStart(initial.replaced(taken), latents, notes, origin)


def _match(
    checkpoint: Checkpoint, files: TensorFiles, config: RunConfig, store: Store, shapes: Mapping[str, torch.Size]
) -> tuple[dict[str, Taken], dict[str, str]]:
    """Return the tensors to take, for `InitialWeights.replaced`, and why each of the other tensors is new."""
    saved, skip = files.meta(), config.init.skip
    names, changed = [*dict.fromkeys([*shapes, *saved])], _changed_modules(checkpoint, config, store)
    for entry in skip:
        if not any(_is_named(name, entry) for name in names):
            raise ConfigError(
                f"init.skip: found {entry}, expected a part or a pattern of parameters such as {names[0]}"
            )
    taken: dict[str, Taken] = {}
    new, misfits = dict[str, str](), list[str]()
    for name in names:
        here, there = shapes.get(name), saved[name].shape if name in saved else None
        if any(_is_named(name, entry) for entry in skip):
            new[name] = "init.skip"
        elif reason := changed.get(name.partition(".")[0]):
            new[name] = reason
        elif here == there or (name.startswith(_LENGTH_ROWS) and here and there and here[1:] == there[1:]):
            taken[name] = Taken(files, name, min(shapes[name].numel(), saved[name].numel()))
            new[name] = "longer texts"  # applies to the elements that remain, if there are any
        else:
            sizes = ["missing" if shape is None else list(shape) for shape in (there, here)]
            misfits.append(f"{display_name(name)} is {sizes[0]} there and {sizes[1]} here")
    if misfits:
        raise DataError(
            f"init.from: {checkpoint.path}: {misfits[0]}, and {len(misfits) - 1} other tensors differ; expected the "
            "same network, or the names or parts of these tensors in init.skip"
        )
    return taken, new


def _changed_modules(checkpoint: Checkpoint, config: RunConfig, store: Store) -> dict[str, str]:
    """Return the modules whose weights mean nothing here, and why: another tokenizer, latents or objective."""
    saved, current = saved_identity(checkpoint), identity(config, store)
    changed = {"loss_weights": "the objective"}
    if saved["tokenizer"] != current["tokenizer"]:
        changed |= dict.fromkeys(("token_embedding", "text_head"), "another tokenizer")
    same_shape = all(saved["data"][key] == current["data"][key] for key in ("latent_tokens", "latent_channels"))
    if saved["encoder"] != current["encoder"] or not same_shape:
        changed |= dict.fromkeys(("latent_in", "latent_position", "latent_head", "latent_skip"), "other latents")
    if saved["latent"]["prediction"] != config.latent.prediction:
        changed |= dict.fromkeys(("latent_head", "latent_skip", "latent_final"), "another latent.prediction")
    return changed


def _open_embeddings(init: InitConfig, store: Store, shape: torch.Size) -> Taken:
    """Return the file of `init.embeddings`, the name of its matrix, and the number of elements."""
    (path, key), manifest = init.embeddings_tensor, store.manifest
    files = TensorFiles.of_file(path)
    tables = {name: each.shape for name, each in files.meta().items() if each.ndim == 2 and each.is_floating_point()}
    if not key:
        candidates = [_EMBEDDING] if _EMBEDDING in tables else [*tables]
        key = candidates[0] if len(candidates) == 1 else ""
    if key not in tables:
        names = truncate(", ".join(map(display_name, tables)) or "none", 300)
        raise DataError(f"init.embeddings: {path}: its matrices are {names}; expected {path}:NAME with one of them")
    rows, width = tables[key]
    # If a tokenizer has no [MASK] and [PAD], `prepare` adds them behind the other tokens.
    if width != shape[1] or rows > shape[0] or not {*range(rows, shape[0])} <= {manifest.mask_id, manifest.pad_id}:
        raise DataError(
            f"init.embeddings: {path}: {display_name(key)} is {[rows, width]}, expected {list(shape)}: the vocabulary "
            "of the data's tokenizer, and model.width"
        )
    for folder in (path.parent, path.parent / "tokenizer"):
        if (folder / "tokenizer.json").is_file() and Tokenizer.load(folder).identity != manifest.tokenizer["sha256"]:
            raise DataError(f"init.embeddings: {path}: belongs to {folder}/tokenizer.json, not the data's tokenizer")
    return Taken(files, key, rows * width)


def _is_named(name: str, entry: str) -> bool:
    """Return whether an entry of `init.skip`, that is a part or a pattern, covers a parameter."""
    return fnmatchcase(name, entry) or _part(name) in frozen_parts([entry])  # type: ignore[list-item]


def _part(name: str) -> str:
    """Return the part of a parameter, or "" for any other name that a file may contain."""
    with suppress(KeyError, IndexError):
        return part_of(name)
    return ""


def _sum_by_part(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the number of elements in each part that has any."""
    sums: dict[str, int] = {}
    for name, count in counts.items():
        if count:
            sums[_part(name)] = sums.get(_part(name), 0) + count
    return sums
