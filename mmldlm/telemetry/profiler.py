"""Traces of a few steps, with a table of the most expensive operators, and snapshots of GPU memory."""

from __future__ import annotations

import gzip
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from mmldlm.settings.declaration import setting
from mmldlm.utils.callback import Callback
from mmldlm.utils.files import naming

FOLDER = "profile"
_WARMUP_STEPS = 1  # traced and thrown away, because the first traced step includes the overhead of tracing


@dataclass(frozen=True)
class ProfileConfig:
    """Which steps to trace, on which ranks, and how many allocations to remember."""

    steps: list[int] = setting(
        factory=list,
        doc="first and last optimizer step to trace, as [first, last], counted from 1; empty: none. Traces go to "
        "run.dir/profile. Traced steps are slower, so trace only two or three",
    )
    ranks: list[int] = setting(factory=lambda: [0], doc="ranks that write a trace")
    memory_history: int = setting(
        0,
        "number of GPU allocations to remember, with the lines of code that made them; 0: none. If memory runs out, "
        "they are written to run.dir/profile, for https://pytorch.org/memory_viz",
        at_least=0,
        advice="Try 100000, a few steps of a large network, to see what fills a GPU",
    )

    def __post_init__(self) -> None:
        if self.steps and not (len(self.steps) == 2 and 1 <= self.steps[0] <= self.steps[1]):
            raise ValueError(f"steps: expected [first, last] with 1 <= first <= last, found {self.steps}")


class StepProfiler(Callback):
    """Traces the steps and ranks in `config`. On other ranks and at other steps it does nothing."""

    def __init__(self, config: ProfileConfig, run_dir: Path, rank: int, device_type: str):
        self.folder, self.rank, self.device_type = run_dir / FOLDER, rank, device_type
        # If this rank writes no trace, use a range that contains no step.
        self.first, self.last = config.steps if config.steps and rank in config.ranks else (0, -_WARMUP_STEPS - 1)
        self._profile: profile | None = None
        self._remembers = bool(config.memory_history) and device_type == "cuda"
        if self._remembers:
            torch.cuda.memory._record_memory_history(max_entries=config.memory_history, stacks="python")

    def before_step(self, step: int) -> None:
        """Start a trace if it is due. A run that resumes within the traced steps traces the rest of them."""
        if self._profile is not None or not self.first - _WARMUP_STEPS <= step <= self.last:
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Profiler won't be using warmup")  # if tracing starts at step 1
            active = self.last - max(step, self.first) + 1
            plan = schedule(wait=0, warmup=max(0, self.first - step), active=active, repeat=1)
        self._profile = profile(
            activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.device_type == "cuda"),
            schedule=plan,
            on_trace_ready=self._write,
            record_shapes=True,
            profile_memory=True,
        )
        self._profile.start()

    def after_step(self, step: int) -> None:
        """Mark the end of the step in the trace, and end the trace after its last step."""
        if self._profile is not None:
            self._profile.step()
            if step == self.last:
                self.close()

    def close(self) -> None:
        """Stop and write a running trace, and stop recording allocations."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None
        if self._remembers:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self, profiler: profile) -> None:
        table = profiler.key_averages().table(sort_by=f"self_{self.device_type}_time_total", row_limit=50)
        with naming(self.folder):
            self.folder.mkdir(exist_ok=True)
            trace = self.folder / f"trace.rank{self.rank}.json"
            profiler.export_chrome_trace(str(trace))  # with a name in .gz it would compress line by line
            with trace.open("rb") as plain, gzip.open(f"{trace}.gz", "wb", compresslevel=6) as compressed:
                shutil.copyfileobj(plain, compressed)
            trace.unlink()
            (self.folder / f"operations.rank{self.rank}.txt").write_text(table, encoding="utf-8")


def write_memory_history(run_dir: Path, rank: int) -> Path:
    """Write a snapshot of GPU memory with the remembered allocations, and return its path."""
    path = run_dir / FOLDER / f"memory.rank{rank}.pickle"
    path.parent.mkdir(exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(path))
    return path


def phase(name: str) -> torch.profiler.record_function:
    """Return a context manager or decorator that names a range of a trace. Without a trace it costs a microsecond."""
    return torch.profiler.record_function(f"mmldlm: {name}")
