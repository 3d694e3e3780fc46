"""How long training pauses for a checkpoint: asynchronous and synchronous, against a step and `torch.save`.

    python -m benchmarks.checkpoint_stall STORE [--saves 5] [key.sub=value ...]

One process trains a model of about 100 million parameters and saves after every ninth step, in turns: while training
continues, waiting, and with `torch.save` (which neither syncs nor hashes, and is not safe in a crash). For each kind
the table has the median stall, the median time until the checkpoint is complete, and how much longer than usual the
steps took that ran during the writing.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

from mmldlm.config import load_config
from mmldlm.distributed.launcher import read_launcher_env
from mmldlm.train import train_step
from mmldlm.trainer.checkpointer import SavedCheckpoint
from mmldlm.trainer.trainer import Trainer

INTERVAL = 9  # steps from one save to the next: it is complete by then
KINDS = ("asynchronous", "synchronous", "torch.save")
SETTINGS = (
    "model={depth: 12, width: 768, num_heads: 12}",
    "train.global_batch_size=4",
    "log={every: 100000, tensorboard: false}",
    "validation.every=0",
    "checkpoint={every_steps: 0, keep_last: 1}",
)


def plain_save(run: Trainer, folder: Path) -> float:
    start = time.perf_counter()
    model, optimizer = run.engine.unwrapped_model, run.engine.unwrapped_optimizer
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "plain.pt")
    return time.perf_counter() - start


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("--saves", type=int, default=5, help="of each kind")
    parser.add_argument("settings", nargs="*")
    options = parser.parse_intermixed_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        measure(options, Path(folder))


def measure(options: argparse.Namespace, folder: Path) -> None:
    total = INTERVAL * (len(KINDS) * options.saves + 2)
    given = [f"run.dir={folder / 'run'}", f"data.path={options.store}", f"train.steps={total}"]
    config = load_config(None, [*SETTINGS, *given, *options.settings])
    steps: dict[str, list[float]] = defaultdict(list)
    stalls: dict[str, list[float]] = defaultdict(list)
    complete: dict[str, list[float]] = defaultdict(list)
    kind, saved = "", 0
    with Trainer(config, read_launcher_env(os.environ)) as run:
        log_checkpoint = run.log_checkpoint

        def record(checkpoints: list[SavedCheckpoint]) -> None:
            for checkpoint in checkpoints:
                stalls[kind].append(checkpoint.stall_s)
                complete[kind].append(checkpoint.seconds)
            log_checkpoint(checkpoints)

        run.log_checkpoint = record  # type: ignore[method-assign]
        for number, micro_batches in run.steps():
            start = time.perf_counter()
            train_step(run, number, micro_batches)
            steps[kind].append(time.perf_counter() - start)
            if run.state.step % INTERVAL or run.state.step == total:
                continue
            run.log_checkpoint(run.checkpointer.finish())  # none is unfinished when the next begins
            kind = KINDS[saved % len(KINDS)]
            saved += 1
            if kind == "torch.save":
                stalls[kind].append(plain_save(run, folder))
                complete[kind].append(stalls[kind][-1])
            else:
                run.checkpointer.asynchronous = kind == KINDS[0]
                run.save()
        kind = "end"
        size = run.components.trainable
    usual = median(steps["torch.save"] + steps["synchronous"])
    print(f"{size / 1e6:.0f} million parameters, {torch.get_num_threads()} threads; a step takes {usual:.2f} s.\n")
    print("| checkpoint | stall (s) | in steps | until complete (s) | steps meanwhile |")
    print("|---|---|---|---|---|")
    for kind in KINDS:
        stall, until = median(stalls[kind][1:]), median(complete[kind][1:])  # the first allocates
        meanwhile = median(steps[kind]) / usual
        print(f"| {kind} | {stall:.2f} | {stall / usual:.2f} | {until:.2f} | {meanwhile:.2f} x |")


if __name__ == "__main__":
    main()
