"""Checks of one run on this node alone: its config, data store, folder and disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch

from mmldlm.config import RunConfig, load_config, require
from mmldlm.data.mixture import open_data
from mmldlm.data.store import Store
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.errors import ConfigError, DataError, ExitCode
from mmldlm.model.attention import AttentionConfig
from mmldlm.model.mmdit import count_parameters
from mmldlm.run.factory import build_model
from mmldlm.tools.doctor.findings import Finding, fail, ok
from mmldlm.utils.files import token

GIB = 2**30
CHECKPOINT_BYTES_PER_PARAMETER = 12  # float32: the weight and two moments; Muon's matrices have one


def check_config(path: str, overrides: Sequence[str]) -> tuple[RunConfig | None, Finding]:
    try:
        config = load_config(path, overrides)
        require(config, "data.path", "run.dir")
    except ConfigError as error:
        return None, fail("config", str(error), "docs/settings.md lists the keys")
    return config, ok("config", path)


def check_store(config: RunConfig) -> tuple[Store | None, Finding]:
    try:
        store = open_data(config.data.place)
        Tokenizer.load(store.path / "tokenizer")
    except (DataError, OSError) as error:
        remedy = "copy the store to every node, or set data.path to where this node has it"
        return None, fail("data store", str(error), remedy, ExitCode.DATA)
    places = ", ".join(str(source.path) for source in store.sources)
    return store, ok("data store", f"{places}, {len(store.split('train')):,} samples to train on")


def parameter_count(config: RunConfig, store: Store) -> int:
    """Of the configured network, which is built without storage."""
    with torch.device("meta"):
        model = build_model(replace(config, attention=AttentionConfig("sdpa")), store.manifest, "cpu")
    return sum(count_parameters(model).values())


def check_disk(config: RunConfig, store: Store | None, min_free_gib: float) -> Finding:
    """Room at run.dir for all checkpoints that the run will hold at once, and for `min_free_gib` at least."""
    folder = Path(config.run.dir)
    free = shutil.disk_usage(_nearest(folder)).free
    needed, what = min_free_gib * GIB, "--min-free-gib"
    if store is not None:
        count = config.checkpoint.retention.most(config.train.steps) + 1  # a new one is complete before an old one goes
        checkpoints = count * parameter_count(config, store) * CHECKPOINT_BYTES_PER_PARAMETER
        with suppress(OSError):  # a run that is going on removes some meanwhile
            checkpoints -= sum(file.stat().st_size for file in (folder / "checkpoints").glob("step-*/*"))
        if checkpoints > needed:
            needed, what = checkpoints, f"{count} checkpoints"
    found = f"{free / GIB:,.1f} GiB free at {folder}, {needed / GIB:,.1f} needed for {what}"
    if free < needed:
        return fail("disk", found, "free some, set run.dir to another disk, or lower checkpoint.keep_last")
    return ok("disk", found)


def check_folder(run_dir: Path) -> Finding:
    """Whether a file can be written into run.dir; nothing stays behind."""
    try:
        with folder_for_now(run_dir), token(run_dir):
            return ok("run.dir", f"{run_dir.resolve()} can be written")
    except OSError as error:
        return fail("run.dir", f"cannot write {run_dir.resolve()}: {error.strerror}", "set run.dir to another folder")


@contextmanager
def folder_for_now(path: Path) -> Iterator[None]:
    """`path` is there within; folders that were made for it are removed afterwards, unless they are in use by then."""
    made = [folder for folder in [path, *path.parents] if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with suppress(OSError):
            for folder in made:
                folder.rmdir()


def _nearest(path: Path) -> Path:
    """`path` or the nearest folder above it that exists."""
    return next(folder for folder in [path, *path.resolve().parents] if folder.exists())
