"""Traffic of each engine in a step, and bytes that it holds per parameter, measured on real steps.

    python -m benchmarks engines STORE [--processes 2] [--precision bf16] [--engines ddp zero2] [key.sub=value ...]

Each engine trains a few steps under torchrun with its shipped config file.

- Traffic: PyTorch's flight recorder keeps every collective with its sizes; what the last step added is that step's
  traffic. "payload" is what one rank hands to the collectives, "wire" what it sends with ring algorithms:
  2 (W - 1) / W of the payload for all-reduce, (W - 1) / W for reduce-scatter and all-gather.
- Memory: bytes of all tensors alive on rank 0 between the last backward and the optimizer's step, for each trained
  parameter. By then activations are freed, but not buckets, gradients, masters and moments.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from math import prod
from pathlib import Path

import torch

from benchmarks.common.report import ROOT, plain_parser
from mmldlm.distributed.launcher import ENGINES

BYTES = {"Float": 4, "Double": 8, "BFloat16": 2, "Half": 2, "Long": 8, "Int": 4, "Byte": 1, "Char": 1, "Bool": 1}
STEPS = 4
SMALL = 4096  # bytes: counts, norms and flags, not parameters


def entries() -> list[dict]:
    from torch._C._distributed_c10d import _dump_fr_trace_json

    return json.loads(_dump_fr_trace_json(True, False) or "{}").get("entries", [])


def size_of(entry: dict) -> int:
    """Return the bytes of a collective's whole tensor: input and output differ where it shards."""

    def total(sizes: list[list[int]], kinds: list[str]) -> int:
        return sum(prod(size) * BYTES.get(kind, 4) for size, kind in zip(sizes, kinds, strict=True))

    return max(
        total(entry.get("input_sizes", []), entry.get("input_dtypes", [])),
        total(entry.get("output_sizes", []), entry.get("output_dtypes", [])),
    )


def tensor_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of all tensors alive in this process, each memory once, after a garbage collection."""
    gc.collect()
    storages: dict[int, int] = {}
    tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    tensors += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        with contextlib.suppress(RuntimeError, NotImplementedError):  # fake and meta tensors have no memory
            storage = local.untyped_storage()
            if storage.device.type != "meta":
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def worker(arguments: list[str], out: Path) -> None:
    """Train as one rank, and write the traffic of the last step."""
    from mmldlm.config import load_config
    from mmldlm.distributed.launcher import read_launcher_env
    from mmldlm.train import parse, train_step
    from mmldlm.trainer.trainer import StepResult, Trainer
    from mmldlm.trainer.update_check import Gradients

    class Measured(Trainer):
        held = 0

        def update(self, step: int, reference: Gradients | None = None) -> StepResult:
            self.held = tensor_bytes(self.engine.unwrapped_model)
            return super().update(step, reference)

    options = parse(arguments)
    config = load_config(options.config, options.overrides)
    with Measured(config, read_launcher_env(os.environ, None, options.accelerate_config)) as run:
        for step, micro_batches in run.steps():
            before = len(entries())
            train_step(run, step, micro_batches)
            collectives = entries()[before:]
        assert not run.state.skipped_steps
        if run.engine.is_main:
            names, counts = Counter(), Counter()
            for entry in collectives:
                name, size = entry["profiling_name"].split(":", 1)[-1], size_of(entry)
                if size > SMALL:
                    names[name] += size
                    counts[name] += 1
            trained = run.components.trainable
            out.write_text(json.dumps({"bytes": names, "calls": counts, "held": run.held, "parameters": trained}))


def wire(name: str, size: float, world: int) -> float:
    """Return the bytes that a rank sends for a payload of `size` with a ring algorithm."""
    share = (world - 1) / world
    return size * share * (2 if "all_reduce" in name or name == "allreduce" else 1)


def main(argv: Sequence[str] | None = None) -> None:
    parser = plain_parser("engines", __doc__)
    parser.add_argument("store", type=Path)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--engines", nargs="*", default=ENGINES)
    parser.add_argument("settings", nargs="*")
    options = parser.parse_intermixed_args(argv)
    print("Bytes for each trained parameter.\n")
    print("| engine | micro-batches | held | payload | wire | collectives of a step |")
    print("|---|---|---|---|---|---|")
    for engine in options.engines:
        for accumulation in (1, 4):
            with tempfile.TemporaryDirectory() as folder:
                measure(engine, accumulation, options, Path(folder))


def measure(engine: str, accumulation: int, options: argparse.Namespace, folder: Path) -> None:
    config = folder / "config.yaml"
    config.write_text(
        f"run: {{dir: {folder / 'run'}}}\ndata: {{path: {options.store}, num_workers: 0}}\n"
        "model: {depth: 4, width: 256, num_heads: 4}\nlog: {every: 1000, tensorboard: false}\n"
        "validation: {every: 0}\ncheckpoint: {every_steps: 0}\n"
        f"train: {{steps: {STEPS}, global_batch_size: {2 * accumulation * options.processes}, micro_batch_size: 2}}\n"
        f"precision: {options.precision}\n",
        encoding="utf-8",
    )
    out = folder / "traffic.json"
    command = [str(Path(sys.executable).parent / "torchrun"), f"--nproc_per_node={options.processes}", "--standalone"]
    command += ["-m", "benchmarks.engines", "--worker", str(out), str(config), *options.settings]
    if engine != "ddp":
        command += ["--accelerate_config", f"accelerate_configs/{engine}.yaml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(f"{engine}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    result = json.loads(out.read_text())
    parameters, world = result["parameters"], options.processes
    payload = sum(result["bytes"].values()) / parameters
    sent = sum(wire(name, size, world) for name, size in result["bytes"].items()) / parameters
    shown = ", ".join(
        f"{result['calls'][name]} x {name} {size / parameters:.2f}" for name, size in sorted(result["bytes"].items())
    )
    print(
        f"| {engine} | {accumulation} | {result['held'] / parameters:.1f} | {payload:.2f} | {sent:.2f} | {shown} |",
        flush=True,
    )


if __name__ == "__main__":
    if "--worker" in sys.argv:
        index = sys.argv.index("--worker")
        target = Path(sys.argv[index + 1])
        worker(sys.argv[1:index] + sys.argv[index + 2 :], target)
        sys.stdout.flush()
        os._exit(0)
    main()
