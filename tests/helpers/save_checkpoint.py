"""A checkpoint from a single process."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmldlm.checkpoint.store import CheckpointStore, FileContent, write_files


def save_checkpoint(
    store: CheckpointStore,
    step: int,
    files: Mapping[str, FileContent],
    info: Mapping[str, Any],
    needed_bytes: int = 0,
) -> Path:
    """Save a checkpoint by `begin`, `write_files` and `commit`; return its folder."""
    in_memory = sum(len(content) for content in files.values() if isinstance(content, bytes))
    temporary = store.begin(step, max(needed_bytes, in_memory))
    try:
        return store.commit(temporary, step, write_files(temporary, files), info)
    finally:
        # After the commit the folder has its final name, and nothing is left to remove.
        shutil.rmtree(temporary, ignore_errors=True)
