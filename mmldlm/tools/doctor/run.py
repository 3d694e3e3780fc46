"""Checks of a run on this node: its config, data store, folder and disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch

from mmldlm.config import RunConfig, load_config, require_paths
from mmldlm.data.mixture import open_data
from mmldlm.data.store import Store
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.errors import ConfigError, DataError, ExitCode
from mmldlm.model.attention import AttentionConfig
from mmldlm.model.mmdit import count_parameters
from mmldlm.run.factory import build_model
from mmldlm.tools.doctor.findings import Finding, fail, ok
from mmldlm.utils.files import probe_file

GIB = 2**30
CHECKPOINT_BYTES_PER_PARAMETER = 12  # float32: weight and two moments; matrices under Muon have only one moment


def check_config(path: str, overrides: Sequence[str]) -> tuple[RunConfig | None, Finding]:
    """Load the config; return it, or None, and the finding."""
    try:
        config = load_config(path, overrides)
        require_paths(config, "data.path", "run.dir")
    except ConfigError as error:
        return None, fail("config", str(error), "docs/settings.md lists the keys")
    return config, ok("config", path)


def check_store(config: RunConfig) -> tuple[Store | None, Finding]:
    """Open the data store and its tokenizer; return the store, or None, and the finding."""
    try:
        store = open_data(config.data.location)
        Tokenizer.load(store.path / "tokenizer")
    except (DataError, OSError) as error:
        remedy = "copy the store to every node, or set data.path to where this node has it"
        return None, fail("data store", str(error), remedy, ExitCode.DATA)
    paths = ", ".join(str(source.path) for source in store.sources)
    return store, ok("data store", f"{paths}, {len(store.split('train')):,} samples to train on")


def parameter_count(config: RunConfig, store: Store) -> int:
    """Return the number of parameters of the configured network, which is built on the meta device."""
    with torch.device("meta"):
        model = build_model(replace(config, attention=AttentionConfig("sdpa")), store.manifest, "cpu")
    return sum(count_parameters(model).values())


def check_disk(config: RunConfig, store: Store | None, min_free_gib: float) -> Finding:
    """Check the free space at run.dir: for the most checkpoints that the run keeps at once, and `min_free_gib`."""
    folder = Path(config.run.dir)
    free = shutil.disk_usage(_nearest_existing(folder)).free
    needed, reason = min_free_gib * GIB, "--min-free-gib"
    if store is not None:
        count = (
            config.checkpoint.retention.max_checkpoints(config.train.steps) + 1
        )  # a new one is complete before an old one is removed
        checkpoints = count * parameter_count(config, store) * CHECKPOINT_BYTES_PER_PARAMETER
        with suppress(OSError):  # a running run may remove some in the meantime
            checkpoints -= sum(file.stat().st_size for file in (folder / "checkpoints").glob("step-*/*"))
        if checkpoints > needed:
            needed, reason = checkpoints, f"{count} checkpoints"
    found = f"{free / GIB:,.1f} GiB free at {folder}, {needed / GIB:,.1f} needed for {reason}"
    if free < needed:
        return fail("disk", found, "free some, set run.dir to another disk, or lower checkpoint.keep_last")
    return ok("disk", found)


def check_folder(run_dir: Path) -> Finding:
    """Check that a file can be written into run.dir; nothing is left behind."""
    try:
        with temporary_folder(run_dir), probe_file(run_dir):
            return ok("run.dir", f"{run_dir.resolve()} can be written")
    except OSError as error:
        return fail("run.dir", f"cannot write {run_dir.resolve()}: {error.strerror}", "set run.dir to another folder")


@contextmanager
def temporary_folder(path: Path) -> Iterator[None]:
    """Create the folder `path` and its parents; on exit remove those that were created, unless they are in use."""
    created = [folder for folder in [path, *path.parents] if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with suppress(OSError):
            for folder in created:
                folder.rmdir()


def _nearest_existing(path: Path) -> Path:
    """Return `path` or the nearest parent folder that exists."""
    return next(folder for folder in [path, *path.resolve().parents] if folder.exists())
