"""What a checkpoint costs each rank: bytes exchanged and stall of a save, bytes read at a resume; memory at the start.

    python -m benchmarks checkpoint_ranks STORE [--processes 4] [--engines fsdp2 zero3 ddp] [key.sub=value ...]

A run trains a model of about 100 million parameters for one step and saves; a second one resumes from it. Exchanged are
the sizes of all collectives from the beginning of the save to its commit; the stall is that of the first save, which
allocates its buffers. Read is what the rank copies from the files.
Memory is that of the process without mapped files: the most during the start of the first run, and what is left of it
before the first step. All are of rank 0.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.report import ROOT, plain_parser
from benchmarks.engines import size_of
from mmldlm.distributed.flight_recorder import collectives

SETTINGS = (
    "model={depth: 12, width: 768, num_heads: 12}",
    "log={every: 1000, tensorboard: false}",
    "data.num_workers=0",
    "validation.every=0",
    "checkpoint={every_steps: 0, keep_last: 1}",
)


def worker(arguments: list[str], out: Path) -> None:
    """Run as one rank, and write what it exchanged, waited, read and holds."""
    from mmldlm.checkpoint.tensors import TensorFiles
    from mmldlm.config import load_config
    from mmldlm.distributed.launcher import read_launcher_env
    from mmldlm.train import parse, train_step
    from mmldlm.trainer.trainer import Trainer

    result: dict[str, Any] = {}
    read: dict[tuple[str, int], int] = {}
    method = TensorFiles.read

    def counted(self: TensorFiles, name: str, start: int, stop: int) -> Any:
        part = method(self, name, start, stop)
        read[name, start] = part.nbytes
        return part

    TensorFiles.read = counted  # type: ignore[method-assign]

    class Measured(Trainer):
        def save(self, *arguments: Any, **options: Any) -> None:
            started_ns = time.time_ns()
            super().save(*arguments, **options)
            result["exchanged"] = max(sum(map(size_of, collectives(started_ns))), result.get("exchanged", 0))

    options = parse(arguments)
    config = load_config(options.config, options.overrides)
    started, samples = threading.Event(), [own_memory()]

    def sample() -> None:
        while not started.wait(0.002):
            samples.append(own_memory())

    threading.Thread(target=sample, daemon=True).start()
    with Measured(config, read_launcher_env(os.environ, None, options.accelerate_config)) as run:
        started.set()
        result |= {"read": sum(read.values()), "peak": max(samples), "memory": own_memory()}
        save = run.checkpointer.save

        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return save(*arguments)  # writing goes on in a thread
            finally:
                result["stall_s"] = time.perf_counter() - start

        run.checkpointer.save = timed  # type: ignore[method-assign]
        for step, micro_batches in run.steps():
            train_step(run, step, micro_batches)
        result["parameters"] = run.components.trainable
    if run.engine.is_main:
        out.write_text(json.dumps(result))


def own_memory() -> int:
    """Return the bytes of this process in memory, without mapped files."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(status["RssAnon"].split()[0])


def main(argv: Sequence[str] | None = None) -> None:
    parser = plain_parser("checkpoint_ranks", __doc__)
    parser.add_argument("store", type=Path)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--engines", nargs="*", default=["fsdp2", "zero3", "ddp"])
    parser.add_argument("settings", nargs="*")
    options = parser.parse_intermixed_args(argv)
    print("| engine | exchanged in a save (MB) | stall (s) | read at a resume (MB) | memory: most, after start (MB) |")
    print("|---|---|---|---|---|")
    for engine in options.engines:
        with tempfile.TemporaryDirectory() as folder:
            saved, resumed = (measure(engine, steps, options, Path(folder)) for steps in (1, 2))
        sizes = (saved["exchanged"], resumed["read"], saved["peak"], saved["memory"])
        exchanged, read, peak, memory = (f"{size / 1e6:,.1f}" for size in sizes)
        print(f"| {engine} | {exchanged} | {saved['stall_s']:.2f} | {read} | {peak}, {memory} |", flush=True)


def measure(engine: str, steps: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train or resume to `steps` and return what rank 0 wrote."""
    config, out = folder / "config.yaml", folder / "measured.json"
    config.write_text(f"data: {{path: {options.store}}}\n", encoding="utf-8")
    command = [str(Path(sys.executable).parent / "torchrun"), f"--nproc_per_node={options.processes}", "--standalone"]
    command += ["-m", "benchmarks.checkpoints", "--worker", str(out), str(config), *SETTINGS]
    command += [f"run.dir={folder / 'run'}", f"train={{steps: {steps}, global_batch_size: {options.processes}}}"]
    command += options.settings
    if engine != "ddp":
        command += ["--accelerate_config", f"accelerate_configs/{engine}.yaml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(f"{engine}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return json.loads(out.read_text())


if __name__ == "__main__":
    if "--worker" in sys.argv:
        index = sys.argv.index("--worker")
        target = Path(sys.argv[index + 1])
        worker(sys.argv[1:index] + sys.argv[index + 2 :], target)
        sys.stdout.flush()
        os._exit(0)
    main()
