"""The dry run's estimate of a run's memory against what the run takes at its peak.

    python -m benchmarks memory [--stores FOLDER] [--only WORD] [--out FOLDER]

Each setting trains for a few steps in a process of its own, with the trainer as users call it. Measured is the most
that is resident above what was there before the run; on CUDA, the most that is allocated. A short run with a small
model comes first, so that what libraries load and keep at first use is there before. One thread, and an allocator that
gives freed memory back. The exit code is 1 where an estimate is off by more than `BOUND`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.results import circumstances, write_json
from benchmarks.step_memory import ENVIRONMENT, ROOT, peak_mib
from benchmarks.task import TOKENIZER_VOCAB, device
from benchmarks.workload import make_store
from mmldlm.config import RunConfig, load_config
from mmldlm.data.store import Store
from mmldlm.distributed.launcher import read_launcher_env
from mmldlm.errors import UsageError
from mmldlm.train import train_step
from mmldlm.trainer.dry_run import estimate
from mmldlm.trainer.trainer import Trainer

BOUND = 0.1
COMMON = ("log={every: 100000, tensorboard: false}", "validation.every=0", "checkpoint.every_steps=0")
FIRST = ("model={depth: 1, width: 64}", "train={steps: 2, global_batch_size: 32, micro_batch_size: 16}")
NARROW, DEEP, WIDE = (
    f"model={{depth: {depth}, width: {width}, num_heads: {width // 64}}}"
    for width, depth in ((256, 4), (256, 8), (512, 6))
)


def recomputing(kind: str) -> str:
    return f"memory.activation_checkpointing={kind}"


def batch(samples: int, micro: int | None = None, steps: int = 2) -> str:
    return f"train={{steps: {steps}, global_batch_size: {samples}, micro_batch_size: {micro or 'null'}}}"


SETTINGS: dict[str, tuple[str, ...]] = {
    "256 x 4": (NARROW, batch(16)),
    "256 x 4, one step": (NARROW, batch(16, steps=1)),
    "256 x 4, 4 micro-batches": (NARROW, batch(32, 8)),
    "256 x 4, logits of few tokens, not in chunks": (NARROW, batch(3)),
    "256 x 4, mode t2l": (NARROW, batch(16), "mode=t2l"),
    "256 x 4, backbone frozen": (NARROW, batch(16), "freeze=[backbone]"),
    "256 x 4, dropout, GELU": (NARROW, batch(16), "model.dropout=0.1", "model.mlp=gelu"),
    "256 x 4, Muon": (NARROW, batch(8), "optim.name=muon"),
    "256 x 8, full": (DEEP, batch(24), recomputing("full")),
    "256 x 8, selective": (DEEP, batch(12), recomputing("selective")),
    "256 x 8, every second": (DEEP, batch(12), recomputing("every_k")),
    "256 x 8, bf16": (DEEP, batch(4), "precision=bf16"),
    "256 x 4, bf16, 30 steps": (NARROW, batch(8, 4, steps=30), "precision=bf16"),
    "512 x 6": (WIDE, batch(8)),
    "512 x 6, few tokens, AdamW not fused": (WIDE, batch(1), "optim.fused=false"),
    "512 x 6, bf16, full": (WIDE, batch(3), "precision=bf16", recomputing("full")),
    "512 x 6, checkpoints": (WIDE, batch(4, steps=3), "checkpoint.every_steps=1"),
}


@dataclass(frozen=True)
class Found:
    """MiB."""

    measured: float
    estimated: float

    @property
    def error(self) -> float:
        return self.estimated / self.measured - 1


def train(config: RunConfig) -> None:
    """As `mmldlm.train.train` does, but without the checkpoint at the end where checkpoints are off."""
    with Trainer(config, read_launcher_env({})) as run:
        for step, micro_batches in run.steps():
            train_step(run, step, micro_batches)
            if not config.checkpoint.every_steps:
                run.saved_at = run.state.step


def worker(store: Path, settings: Sequence[str]) -> Found:
    """One setting, in this process."""
    torch.set_num_threads(1)
    with_libraries = [each for each in settings if each.startswith(("precision=", "optim.name="))]
    with tempfile.TemporaryDirectory() as folder:
        first, config = (
            load_config(None, [f"run.dir={folder}/{name}", f"data.path={store}", *COMMON, *chosen])
            for name, chosen in (("first", (*FIRST, *with_libraries)), ("run", settings))
        )
        train(first)
        measured = peak_mib(partial(train, config))
    found = estimate(config, Store.open(store), world_size=1)
    on_host = found.checkpoint_mib if config.checkpoint.every_steps and not torch.cuda.is_available() else 0.0
    return Found(measured, found.total_mib + found.kernels_mib + on_host)


def measure(store: Path, settings: Iterable[str]) -> Found:
    """One setting, in a process of its own; RuntimeError where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", str(store), *settings],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, **ENVIRONMENT},
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(settings)}: {done.stderr[-2000:]}")
    return Found(**json.loads(done.stdout.splitlines()[-1]))


def table(store: Path, names: Iterable[str]) -> dict[str, Found]:
    """Printed row by row, since each takes its time."""
    print("| setting | measured, MiB | estimated, MiB | error |\n|---|---|---|---|", flush=True)
    rows = {}
    for name in names:
        rows[name] = found = measure(store, SETTINGS[name])
        print(f"| {name} | {found.measured:,.0f} | {found.estimated:,.0f} | {found.error:+.1%} |", flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="mmldlm bench memory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stores", type=Path, help="folder of the store to measure on, kept; else it is temporary")
    parser.add_argument("--only", default="", metavar="WORD", help="settings with this word in their name")
    parser.add_argument("--out", type=Path, help="folder of the result as JSON; else it is only printed")
    options = parser.parse_args(argv)
    names = [name for name in SETTINGS if options.only in name]
    if not names:
        raise UsageError(
            f"--only: {options.only!r} is in no name of a setting, expected a part of {', '.join(SETTINGS)}"
        )
    with tempfile.TemporaryDirectory() as temporary:
        rows = table(make_store(options.stores or Path(temporary), "documents", TOKENIZER_VOCAB), names)
    if options.out:
        shown = {name: {"settings": SETTINGS[name], **asdict(found)} for name, found in rows.items()}
        result = {"benchmark": "memory", **circumstances(device()), "settings": shown}
        write_json(result, options.out, f"memory-{device().type}")
    return int(any(abs(found.error) > BOUND for found in rows.values()))


if __name__ == "__main__":  # a process of its own
    print(json.dumps(asdict(worker(Path(sys.argv[1]), sys.argv[2:]))), flush=True)
    os._exit(0)  # for the reason in mmldlm/train.py
