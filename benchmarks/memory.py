"""The dry run's estimate of memory against the peak of a real run, and the memory of single steps.

    python -m benchmarks memory [--stores FOLDER] [--only WORD] [--out FOLDER]

Each setting trains for a few steps in its own process, with the real trainer. We measure the peak of resident memory
(on CUDA, of allocated memory) above the memory before the run. A short run with a small model comes first, so that
memory of libraries loaded at first use does not count. We use one thread, and an allocator that returns freed memory at
once. Exit code 1 if an estimate is off by more than `BOUND`.
"""

from __future__ import annotations

import ctypes
import gc
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

from benchmarks.common.measure import in_new_process
from benchmarks.common.report import circumstances, plain_parser, write_json
from benchmarks.common.task import TOKENIZER_VOCAB, Task, device, largest_batch, make_store, typical_batches
from benchmarks.common.variants import opened, variants
from mmldlm.config import RunConfig, load_config
from mmldlm.data.sampler import SampleOrder
from mmldlm.data.store import Store
from mmldlm.distributed.launch import SINGLE, read_launcher_env
from mmldlm.errors import UsageError
from mmldlm.train import train_step
from mmldlm.trainer.memory import MIB, Sharding, estimate, rank_memory
from mmldlm.trainer.trainer import Trainer

BOUND = 0.1
# glibc returns freed memory to the system at once. oneDNN caches no kernels, since kernels are not estimated.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "0",
    "OMP_NUM_THREADS": "1",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0",
}
STEPS = 2  # measured steps of each kind in `step_memory_mib`
COMMON = (
    "log={every: 100000, tensorboard: false}",
    "validation.every=0",
    "checkpoint.every_steps=0",
    "compile.scope=none",
)
FIRST = ("model={depth: 1, width: 64}", "train={steps: 2, global_batch_size: 32, micro_batch_size: 16}")
NARROW, DEEP, WIDE = (
    f"model={{depth: {depth}, width: {width}, num_heads: {width // 64}}}"
    for width, depth in ((256, 4), (256, 8), (512, 6))
)


def checkpointing(kind: str) -> str:
    return f"memory.activation_checkpointing={kind}"


def batch(samples: int, micro: int | None = None, steps: int = 2) -> str:
    return f"train={{steps: {steps}, global_batch_size: {samples}, micro_batch_size: {micro or 'null'}}}"


SETTINGS: dict[str, tuple[str, ...]] = {
    "256 x 4": (NARROW, batch(16)),
    "256 x 4, 4 micro-batches": (NARROW, batch(32, 8)),
    "256 x 4, logits of few tokens, not in chunks": (NARROW, batch(3)),
    "256 x 4, mode t2l": (NARROW, batch(16), "mode=t2l"),
    "256 x 4, backbone frozen": (NARROW, batch(16), "freeze=[backbone]"),
    "256 x 4, dropout, GELU": (NARROW, batch(16), "model.dropout=0.1", "model.mlp=gelu"),
    "256 x 4, Muon": (NARROW, batch(8), "optim.name=muon"),
    "256 x 8, full": (DEEP, batch(24), checkpointing("full")),
    "256 x 8, selective": (DEEP, batch(12), checkpointing("selective")),
    "256 x 8, every second": (DEEP, batch(12), checkpointing("every_k")),
    "256 x 8, bf16": (DEEP, batch(4), "precision=bf16"),
    "512 x 6": (WIDE, batch(8)),
    "512 x 6, few tokens, AdamW not fused": (WIDE, batch(1), "optim.fused=false"),
    "512 x 6, bf16, full": (WIDE, batch(3), "precision=bf16", checkpointing("full")),
    "512 x 6, checkpoints": (WIDE, batch(4, steps=3), "checkpoint.every_steps=1"),
}

LARGE, SMALL, HUGE = (
    f"model={{depth: {depth}, width: {width}, num_heads: {width // 64}}}"
    for width, depth in ((1024, 24), (768, 12), (2048, 24))
)
# For `scripts/gpu_check.sh state`: large networks, because errors are relative.
GPU_SETTINGS: dict[str, tuple[str, ...]] = {
    "24 x 1024": (LARGE, batch(32), "precision=bf16"),
    "24 x 1024, 4 micro-batches": (LARGE, batch(64, 16), "precision=bf16"),
    "24 x 1024, selective": (LARGE, batch(32), "precision=bf16", checkpointing("selective")),
    "24 x 1024, full": (LARGE, batch(64), "precision=bf16", checkpointing("full")),
    "24 x 2048": (HUGE, batch(16), "precision=bf16"),
    "12 x 768": (SMALL, batch(64), "precision=bf16"),
    "12 x 768, fp32": (SMALL, batch(16)),
    "24 x 1024, Muon": (LARGE, batch(16), "precision=bf16", "optim.name=muon"),
    "24 x 1024, EMA": (LARGE, batch(32), "precision=bf16", "ema.decay=0.999"),
}


# --- peaks ----------------------------------------------------------------------------------------


def peak_mib(work: Callable[[], None]) -> float:
    """Return the peak memory (MiB) of `work` above the memory held before. The process must have `ENVIRONMENT`."""
    gc.collect()
    with suppress(OSError, AttributeError):  # some C libraries lack malloc_trim
        ctypes.CDLL(None).malloc_trim(0)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with patch.object(torch.cuda, "reset_peak_memory_stats"):  # a run's records would reset the peak
            work()
        return (torch.cuda.max_memory_allocated() - before) / MIB
    before = _status_kib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    work()
    return (_status_kib("VmHWM") - before) / 1024


def _status_kib(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{key}:")).split()[1])


class OutOfMemory(Exception):
    """The variant does not fit."""


def step_memory_mib(name: str, task: Task) -> tuple[float, float]:
    """Measure the memory of a step above weights and optimizer state, in a separate process.

    Returns:
        MiB for an epoch's median micro-batch by tokens, and for the largest one, which decides what fits. All samples
        of the largest one have the maximum length, so padding costs nothing there.

    Raises:
        OutOfMemory: The variant does not fit.
    """
    try:
        return in_new_process(ENVIRONMENT, _step_memory_mib, name, task)
    except (torch.OutOfMemoryError, BrokenProcessPool):
        raise OutOfMemory(name) from None


def _step_memory_mib(name: str, task: Task) -> tuple[float, float]:
    torch.set_num_threads(1)
    split = Store.open(task.store).split("train")
    order = SampleOrder(split.lengths, seed=0)
    (median,), largest = typical_batches(order, split, task.batch, 1), largest_batch(order, split, task.batch)
    rows = [median[:1], median, largest]
    variant = variants(task.precision, device().type)[name]
    with tempfile.TemporaryDirectory() as folder, opened(variant, task, rows, Path(folder) / "run") as run:
        run.step(0)  # of one short sample: makes the optimizer's state

        def steps(kind: int) -> None:
            for step in range(kind, kind + STEPS * len(rows), len(rows)):
                run.step(step)

        return peak_mib(partial(steps, 1)), peak_mib(partial(steps, 2))


# --- runs -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """Memory of a run in MiB."""

    measured: float
    estimated: float

    @property
    def error(self) -> float:
        return self.estimated / self.measured - 1


def measure(store: Path, settings: Iterable[str]) -> Memory:
    """Train with one setting in a process of its own."""
    return in_new_process(ENVIRONMENT, _measure, store, tuple(settings))


def _measure(store: Path, settings: Sequence[str]) -> Memory:
    torch.set_num_threads(1)
    with_libraries = [setting for setting in settings if setting.startswith(("precision=", "optim.name="))]
    with tempfile.TemporaryDirectory() as folder:
        first, config = (
            load_config(None, [f"run.dir={folder}/{name}", f"data.path={store}", *COMMON, *given])
            for name, given in (("first", (*FIRST, *with_libraries)), ("run", settings))
        )
        with (Path(folder) / "output.txt").open("w") as output, redirect_stdout(output), redirect_stderr(output):
            train(first)
            measured = peak_mib(partial(train, config))
    estimated = estimate(config, Store.open(store), world_size=1)
    on_host = estimated.checkpoint_mib if config.checkpoint.every_steps and not torch.cuda.is_available() else 0.0
    return Memory(measured, rank_memory(estimated.step, Sharding(SINGLE, config.precision, 1)).peak + on_host)


def train(config: RunConfig) -> None:
    """Train as `mmldlm.train.train` does, but without the last checkpoint if checkpoints are off."""
    with Trainer(config, read_launcher_env({})) as run:
        for step, micro_batches in run.steps():
            train_step(run, step, micro_batches)
            if not config.checkpoint.every_steps:
                run.checkpointer.saved_at = run.state.step


def main(argv: Sequence[str] | None = None) -> int:
    parser = plain_parser("memory", __doc__)
    parser.add_argument("--stores", type=Path, help="folder of the store to measure on, kept (temporary)")
    parser.add_argument("--only", default="", metavar="WORD", help="only settings with this word in their name")
    parser.add_argument("--out", type=Path, help="folder of a JSON file with the result")
    options = parser.parse_args(argv)
    names = [name for name in SETTINGS if options.only in name]
    if not names:
        raise UsageError(
            f"--only: {options.only!r} is in no name of a setting, expected a part of {', '.join(SETTINGS)}"
        )
    rows: dict[str, Memory] = {}
    with tempfile.TemporaryDirectory() as temporary:
        store = make_store(options.stores or Path(temporary), "documents", TOKENIZER_VOCAB)
        print("| setting | measured, MiB | estimated, MiB | error |\n|---|---|---|---|", flush=True)
        for name in names:
            rows[name] = memory = measure(store, SETTINGS[name])
            print(f"| {name} | {memory.measured:,.0f} | {memory.estimated:,.0f} | {memory.error:+.1%} |", flush=True)
    if options.out:
        settings = {name: {"settings": SETTINGS[name], **asdict(memory)} for name, memory in rows.items()}
        result = {"benchmark": "memory", **circumstances(device()), "settings": settings}
        write_json(result, options.out, f"memory-{device().type}")
    return int(any(abs(memory.error) > BOUND for memory in rows.values()))
