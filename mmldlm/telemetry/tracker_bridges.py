"""Experiment trackers of a run: their names, the packages they need, and the processes that feed them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from mmldlm.errors import ConfigError

TrackerName = Literal["wandb", "trackio", "mlflow"]
PACKAGES: dict[TrackerName, tuple[str, ...]] = {
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),  # the last two are what its local store needs
}


def check_packages(trackers: Sequence[TrackerName], origin: str) -> None:
    """Raise ConfigError if a tracker's packages are not installed; `origin` is the setting or option that names it."""
    for name in trackers:
        missing = [package for package in PACKAGES[name] if find_spec(package) is None]
        if missing:
            raise ConfigError(f"{origin}: {name} needs {missing[0]}, which is missing; pip install 'mmldlm[{name}]'")


def tracker_folder(run_dir: Path, name: str) -> Path:
    """Return the folder of a bridge's lock, output and error."""
    return run_dir / "trackers" / name


def start_bridges(run_dir: Path, trackers: Sequence[TrackerName]) -> list[str]:
    """Start a process for each tracker that sends it the records of the run; return notes for the user.

    The processes have a low priority and a session of their own, and are no children of this one, so that they outlive
    it whatever ends it. One that finds the bridge of an earlier start at work leaves the run to that one.
    """
    notes = []
    for name in trackers:
        log = tracker_folder(run_dir, name) / "output.log"
        bridge = [sys.executable, "-m", "mmldlm.tools.track", str(run_dir), "--to", name]
        command = ["nice", "-n", "10", "setsid", "--fork", *bridge]
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as output:
                subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=True)
            notes.append(f"tracker {name}: gets the records from a process of its own, whose output is in {log}")
        except (OSError, subprocess.SubprocessError) as error:  # a run does not fail by its trackers
            notes.append(f"tracker {name}: not started: {error}; mmldlm track {run_dir} --to {name} sends the records")
    return notes
