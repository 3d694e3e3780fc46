"""Rewinds: which samples a run skips since then, and where the run folder keeps its abandoned steps."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmldlm.checkpoint.retention import Retention
from mmldlm.checkpoint.store import CheckpointStore
from mmldlm.config import CONFIG_NAME, RunConfig
from mmldlm.errors import DataError
from mmldlm.utils.files import write_atomically

REWINDS_FILE = "rewinds.jsonl"
# With these files, tools that read curves take a branch for a run folder.
_BRANCH_FILES = ("metrics.jsonl", CONFIG_NAME, "startup.json")


def read_rewinds(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rewinds of a run, in order: {"before", "step", "samples", "branch"}.

    A torn last line comes from an interrupted rewind and is ignored. Any other damaged line is a `DataError`.
    """
    path, rewinds = run_dir / REWINDS_FILE, list[dict[str, Any]]()
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    for number, line in enumerate(lines, start=1):
        try:
            rewinds.append({key: json.loads(line)[key] for key in ("before", "step", "samples", "branch")})
        except (ValueError, LookupError, TypeError):
            if number < len(lines) or line.endswith(b"\n"):
                raise DataError(
                    f"{path}, line {number}: is no rewind; expected the keys before, step, samples and branch"
                ) from None
    return rewinds


def with_rewinds(config: RunConfig) -> RunConfig:
    """Add the samples that a run's rewinds leave out to its config. With `resume: never` there are none."""
    if config.resume == "never" or not config.run.dir:
        return config
    left_out = [*config.data.skip_samples]
    for rewind in read_rewinds(Path(config.run.dir)):
        left_out += [sample for sample in rewind["samples"] if sample not in left_out]
    return replace(config, data=replace(config.data, skip_samples=left_out))


def leave_branch(run_dir: Path, before: int, samples: Sequence[str]) -> dict[str, Any]:
    """Make the next start of a run continue from before a step and without some samples.

    The caller must hold the run's lock. Curves are copied to `branches/`, and checkpoints since that step become
    `superseded-*`. Return the rewind, in the form of `read_rewinds`.
    """
    rewinds = read_rewinds(run_dir)
    branch = run_dir / "branches" / f"{len(rewinds) + 1:02}-before-{before}"
    branch.mkdir(parents=True, exist_ok=True)
    for name in _BRANCH_FILES:
        if (run_dir / name).exists():
            shutil.copy2(run_dir / name, branch)
    store = CheckpointStore(run_dir / "checkpoints", Retention())
    store.set_aside_after(before - 1)
    newest = store.newest()
    step = 0 if newest is None else newest.step
    rewind = {"before": before, "step": step, "samples": [*samples], "branch": str(branch.relative_to(run_dir))}
    # Write this last. If a kill comes before this line, the run simply reaches the step again.
    write_atomically(run_dir / REWINDS_FILE, "".join(f"{json.dumps(line)}\n" for line in [*rewinds, rewind]))
    return rewind
