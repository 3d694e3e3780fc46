"""Records show the peaks of the GPU's memory since the last record; a stub stands in for its allocator."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from mmldlm.config import load_config
from mmldlm.errors import ConfigError
from mmldlm.telemetry.profiler import ProfileConfig, StepProfiler
from mmldlm.telemetry.resources import memory_metrics
from mmldlm.train import train_step
from mmldlm.trainer.trainer import Trainer

MIB = 2**20


class Allocator:
    """What PyTorch's allocator on CUDA counts, in bytes."""

    def __init__(self) -> None:
        self.current = self.peak = 0
        self.counters = Counter(num_alloc_retries=0, num_ooms=0)

    def hold(self, size: int) -> None:
        self.current, self.peak = size, max(self.peak, size)

    def reset_peak(self) -> None:
        self.peak = self.current


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    stub = Allocator()
    for name, function in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "memory_allocated": lambda: stub.current,
        "memory_reserved": lambda: 2 * stub.current,
        "max_memory_allocated": lambda: stub.peak,
        "max_memory_reserved": lambda: 2 * stub.peak,
        "memory_stats": lambda: dict(stub.counters),
        "reset_peak_memory_stats": stub.reset_peak,
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    return stub


@pytest.mark.quick
def test_peaks_are_those_since_the_last_record(allocator: Allocator) -> None:
    shown = []
    for sizes in ((100, 900, 100), (100, 700, 200), (200,)):
        for size in sizes:
            allocator.hold(size * MIB)
        record = memory_metrics()
        shown.append([record[f"memory/cuda_{name}_mib"] for name in ("allocated", "peak_allocated", "peak_reserved")])
    assert shown == [[100, 900, 1800], [200, 700, 1400], [200, 200, 400]]


@pytest.mark.quick
def test_retries_and_failures_are_counted_from_the_start(allocator: Allocator) -> None:
    memory_metrics()
    allocator.counters.update(num_alloc_retries=3, num_ooms=1)
    for _ in range(2):
        record = memory_metrics()
        assert (record["health/cuda_alloc_retries"], record["health/cuda_ooms"]) == (3, 1)


@pytest.mark.quick
@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has GPUs")
def test_without_cuda_nothing_is_asked_of_it() -> None:
    assert not any("cuda" in key for key in memory_metrics())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_peak_of_freed_memory_on_cuda() -> None:
    torch.zeros(1, device="cuda")
    before = memory_metrics()["memory/cuda_allocated_mib"]
    block = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    del block
    peaks = [memory_metrics()["memory/cuda_peak_allocated_mib"] - before for _ in range(2)]
    assert peaks[0] >= 64 > peaks[1]


@pytest.mark.setting("profile.memory_history")
def test_memory_that_ran_out_is_explained(tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recorded and written by stubs of CUDA; the message, which does not hide the error if writing fails."""
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **given: calls.append(given))
    profiler = StepProfiler(ProfileConfig(memory_history=1000), tmp_path, 0, "cuda")
    profiler.close()
    assert calls == [{"max_entries": 1000, "stacks": "python"}, {"enabled": None}]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7 * MIB)
    for entries, snapshot, expected in (
        (0, Path.touch, r"\(CUDA out of memory\)$"),
        (9, Path.touch, r"; 7 MiB at the peak, [1-9]\d* by the estimate; .*memory.rank0.pickle has all allocations$"),
        (9, Path.rmdir, r"; profile.memory_history: .*No such file"),
    ):
        monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path, write=snapshot: write(Path(path)))
        config = load_config(tiny_config, [f"run.dir={tmp_path / 'run'}", f"profile.memory_history={entries}"])
        with pytest.raises(ConfigError, match=expected), Trainer(config) as run:
            run.engine.device = torch.device("cuda")
            raise torch.OutOfMemoryError("CUDA out of memory")
        written = tmp_path / "run" / "profile" / "memory.rank0.pickle"
        assert written.exists() == (snapshot is Path.touch and entries > 0)
        written.unlink(missing_ok=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_history_of_memory_that_ran_out(tiny_config: Path, tmp_path: Path) -> None:
    config = load_config(tiny_config, [f"run.dir={tmp_path / 'run'}", "profile.memory_history=10000"])
    expected = r"MiB at the peak, [\d,]+ by the estimate; .*memory.rank0.pickle"
    with pytest.raises(ConfigError, match=expected), Trainer(config) as run:
        for step, micro_batches in run.steps():
            train_step(run, step, micro_batches)
            torch.empty(2**42, dtype=torch.uint8, device="cuda")
    snapshot = pickle.loads((tmp_path / "run" / "profile" / "memory.rank0.pickle").read_bytes())
    events = [event for trace in snapshot["device_traces"] for event in trace]
    assert any(event["action"] == "oom" for event in events)
    assert any("mmdit.py" in frame["filename"] for event in events for frame in event.get("frames", ()))
