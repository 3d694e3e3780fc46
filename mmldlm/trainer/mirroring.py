"""`Mirroring`: the run's side of `checkpoint.mirror`. What reads and writes the mirror are processes of their own."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mmldlm.checkpoint import mirror
from mmldlm.checkpoint.manifest import Checkpoint, verify_checkpoint
from mmldlm.checkpoint.store import CheckpointStore
from mmldlm.config import CONFIG_NAME, CheckpointConfig
from mmldlm.errors import ConfigError, ExitCode, StorageError, error_from_exit_code
from mmldlm.run.load import DESCRIPTION
from mmldlm.telemetry.tracker import Tracker
from mmldlm.trainer.branches import REWINDS_FILE
from mmldlm.trainer.step_guard import SKIPS_FILE

# Of the run folder; with a checkpoint all that resuming, sampling and the curves need.
FILES = (CONFIG_NAME, "startup.json", mirror.METRICS, SKIPS_FILE, REWINDS_FILE, DESCRIPTION, "tensorboard")
FIRST_DELAY_S, MAX_DELAY_S = 30.0, 1800.0  # from a failure to the next attempt, which doubles
_POLL_INTERVAL_S = 0.2

log = logging.getLogger(__name__)


class Mirroring:
    """The mirror of a run, on rank 0: all ranks share the run folder.

    One process at a time copies what is new, at a low priority; `poll` starts it and logs its outcome. A mirror that is
    the run folder is a `ConfigError`.
    """

    def __init__(self, settings: CheckpointConfig, run_dir: Path):
        self.run_dir, self.retention = run_dir.absolute(), settings.retention
        self.url = f"{settings.mirror.rstrip('/')}/{self.run_dir.name}"
        if Path(self.url).resolve() == self.run_dir.resolve():
            raise ConfigError(f"checkpoint.mirror: found {settings.mirror}, where run.dir is; expected another disk")
        self._process: subprocess.Popen[str] | None = None
        self._due_step: int | None = None  # of the newest checkpoint, while no process copies it
        self._step = self._failures = 0
        self._started = self._retry_at = 0.0

    def fetch_newer(self, local: Checkpoint | None, is_chosen: bool, store: CheckpointStore) -> Checkpoint | None:
        """Fetch the newest intact copy, with the records of its run, if it is newer than `local`, else return `local`.

        Raises:
            ConfigError: The mirror has another run, or is ahead of a start that `resume` demands (`is_chosen`).
            StorageError: The mirror cannot be read, and the run folder has no checkpoint.
        """
        step, started = -1 if local is None else local.step, time.monotonic()
        folder = self.run_dir / f".{mirror.CHECKPOINTS}.tmp"
        shutil.rmtree(folder, ignore_errors=True)
        self._start("fetch", {"step": step, "is_chosen": is_chosen, "folder": str(folder)})
        answer = self._answer()
        if "error" in answer:
            if answer["code"] != ExitCode.STORAGE:
                raise error_from_exit_code(answer["code"], f"checkpoint.mirror: {answer['error']}")
            if local is None and not is_chosen:
                raise StorageError(f"checkpoint.mirror: without it the run would start over: {answer['error']}")
            log.warning("checkpoint.mirror: cannot look for newer checkpoints: %s", answer["error"])
            return local
        for problem in answer["problems"]:
            log.warning("checkpoint.mirror: %s; trying an older copy", problem)
        if answer["step"] == step:
            return local
        (checkpoint,) = (folder / mirror.CHECKPOINTS).iterdir()
        # The checkpoint last: after a kill in between, the next start fetches all of it again.
        for path in (path for path in folder.iterdir() if path.name != mirror.CHECKPOINTS):
            target = self.run_dir / path.name
            if target.is_dir():
                shutil.rmtree(target)
            path.rename(target)
        path = store.publish(checkpoint, answer["step"])
        shutil.rmtree(folder)
        print(f"fetched {path.name} from {self.url} in {time.monotonic() - started:.1f} s", flush=True)
        return verify_checkpoint(path)

    def request(self, step: int) -> None:
        """Have the complete checkpoint of `step` copied soon."""
        self._due_step = step

    @property
    def busy(self) -> bool:
        """Return whether a checkpoint is being copied or will be."""
        return self._process is not None or self._due_step is not None

    def poll(self, tracker: Tracker) -> None:
        """Log the outcome of a process that has ended, and start one if it is due."""
        if self._process is not None and self._process.poll() is not None:
            answer, now = self._answer(), time.monotonic()
            if "error" in answer:
                delay_s = min(FIRST_DELAY_S * 2**self._failures, MAX_DELAY_S)
                self._failures, self._retry_at = self._failures + 1, now + delay_s
                self._due_step = self._due_step or self._step
                tracker.event("mirror", self._step, {"error": answer["error"]})
            else:
                self._failures = 0
                if self._due_step == answer["step"]:  # it was saved before the process looked
                    self._due_step = None
                values = {"path": self.url, "bytes": answer["bytes"], "seconds": now - self._started}
                tracker.event("mirror", answer["step"], values)
        if self._process is None and self._due_step is not None and time.monotonic() >= self._retry_at:
            self._step, self._due_step = self._due_step, None
            self._start("update", asdict(self.retention))

    def wait(self, deadline: float, tracker: Tracker) -> None:
        """Wait a moment for the last copy, until not `busy`: if an attempt fails, and at `deadline`, it is given up."""
        time.sleep(_POLL_INTERVAL_S)
        self._retry_at, step = 0.0, self._step
        self.poll(tracker)
        if self._due_step == step:  # failed
            self._due_step = None
        if self.busy and time.monotonic() >= deadline:
            self.close()
            tracker.event("mirror", self._step, {"error": f"{self.url}: not within checkpoint.mirror_wait_s"})

    def close(self) -> None:
        """End the process; what it has copied so far is no complete copy."""
        self._due_step = None
        if self._process is not None:
            self._process.kill()
            self._answer()

    def _start(self, method: str, arguments: dict[str, Any]) -> None:
        self._started = time.monotonic()
        request = json.dumps([[self.url, str(self.run_dir), FILES], arguments])
        command = [sys.executable, "-m", mirror.__name__, str(os.getpid()), method, request]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def _answer(self) -> dict[str, Any]:
        """Wait for the process to end, and return its answer."""
        assert self._process is not None
        process, self._process = self._process, None
        output = process.communicate()[0]
        if process.returncode:
            return {"error": f"{self.url}: the process ended with code {process.returncode}", "code": ExitCode.STORAGE}
        return dict(json.loads(output))
