"""Training of two runs in turns, in this process: a run saves at the end of its turn, and resumes from there."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout, suppress
from functools import partial
from pathlib import Path

from mmldlm.config import RunConfig, require_paths
from mmldlm.distributed.launch import LauncherEnv, read_launcher_env
from mmldlm.errors import ConfigError, StoppedBySignal, UsageError
from mmldlm.tools.runs import History
from mmldlm.train import train
from mmldlm.trainer.step_log import StepResult, StepTotals
from mmldlm.trainer.trainer import Trainer


class TurnOver(StoppedBySignal):
    """The run was saved at the end of its turn."""


class TurnTrainer(Trainer):
    """A run that saves and ends after step `stop_at`, if that is not its last."""

    def __init__(self, config: RunConfig, launch: LauncherEnv | None = None, stop_at: float = math.inf):
        super().__init__(config, launch)
        self.stop_at = stop_at

    def end_step(self, step: int, totals: StepTotals, result: StepResult) -> None:
        """End the step, and the turn if it is over."""
        super().end_step(step, totals, result)
        if self.stop_at <= self.state.step < self.config.train.steps:
            self.save(wait=True)
            self.tracker.end(self.state.step, {"stopped_by": "mmldlm compare"})
            raise TurnOver(f"stopped by mmldlm compare after step {self.state.step}; saved, the same command resumes")


def train_in_turns(configs: Sequence[RunConfig], turn: int, max_step: float) -> Iterator[tuple[Path, Path]]:
    """Train two runs by `turn` steps each, up to `max_step` or their last; yield both folders after every round.

    If these runs cannot be trained in turns, that is a `UsageError` or `ConfigError`.
    """
    if read_launcher_env(os.environ).world_size > 1:
        raise UsageError("--until trains in one process: train both runs under the launcher, and compare their folders")
    for config in configs:
        require_paths(config, "data.path", "run.dir")
        if config.resume != "auto":
            raise ConfigError(f"resume: expected auto, by which each turn continues, found {config.resume}")
    a, b = (Path(config.run.dir) for config in configs)
    if a.resolve() == b.resolve():
        raise ConfigError(f"run.dir: expected a folder for each run, found {a} for both")
    done = False
    if all(map(_step, (a, b))):  # what an earlier start has trained may be enough
        yield a, b
    while not done:
        stop_at = min(min(map(_step, (a, b))) // turn * turn + turn, max_step)
        for config in configs:
            if _step(Path(config.run.dir)) < min(stop_at, config.train.steps):
                # Standard output is for what the command itself prints.
                with redirect_stdout(sys.stderr), suppress(TurnOver):
                    train(config, trainer_cls=partial(TurnTrainer, stop_at=stop_at))  # type: ignore[arg-type]
        done = stop_at >= min(max_step, *(config.train.steps for config in configs))
        yield a, b


def _step(run_dir: Path) -> int:
    return History(run_dir).step if (run_dir / "metrics.jsonl").exists() else 0
