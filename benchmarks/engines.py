"""Traffic of each engine in a step, and bytes that it holds per parameter, measured on real steps.

    python -m benchmarks engines STORE [--processes 2] [--per-node 2] [--precision bf16] [--engines ddp zero2]
        [--out FOLDER --name NAME] [key.sub=value ...]

Each engine trains a few steps under torchrun with its shipped config file.

- Traffic: PyTorch's flight recorders keep the latest collectives of gloo and NCCL with their sizes; what the last step
  added is that step's traffic. "payload" is what one rank hands to the collectives, "within" and "between" its parts
  in groups of processes of one node (`--per-node`, all by default) and of several. "wire" is what a rank sends with
  ring algorithms in groups of W processes: 2 (W - 1) / W of the payload for all-reduce, (W - 1) / W for reduce-scatter
  and all-gather.
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
import time
from collections import Counter
from collections.abc import Sequence
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.report import RESULTS, ROOT, circumstances, plain_parser, write_json
from benchmarks.common.task import device
from mmldlm.distributed.launcher import ENGINES

BYTES = {"Float": 4, "Double": 8, "BFloat16": 2, "Half": 2, "Long": 8, "Int": 4, "Byte": 1, "Char": 1, "Bool": 1}
STEPS = 4
SMALL = 4096  # bytes: counts, norms and flags, not parameters


def size_of(entry: dict) -> int:
    """Return the bytes of a collective's whole tensor: input and output differ where it shards."""

    def total(sizes: list[list[int]], kinds: list[str]) -> int:
        return sum(prod(size) * BYTES.get(kind, 4) for size, kind in zip(sizes, kinds, strict=True))

    return max(
        total(entry.get("input_sizes", []), entry.get("input_dtypes", [])),
        total(entry.get("output_sizes", []), entry.get("output_dtypes", [])),
    )


def group_sizes() -> dict[str, tuple[int, bool]]:
    """Return the number of ranks of each group of this rank, and whether they are of several nodes, by its name."""
    import torch.distributed as dist

    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    ranks = {group.group_name: dist.get_process_group_ranks(group) for group in dist.distributed_c10d._world.pg_map}
    return {name: (len(group), len({rank // per_node for rank in group}) > 1) for name, group in ranks.items()}


def tensor_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of all tensors alive in this process, each memory once, after a garbage collection."""
    gc.unfreeze()  # what `ScheduledCollection` has frozen is not listed
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
    from mmldlm.distributed.flight_recorder import collectives
    from mmldlm.distributed.launcher import read_launcher_env
    from mmldlm.train import parse, train_step
    from mmldlm.trainer.step import StepResult
    from mmldlm.trainer.trainer import Trainer
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
            started_ns = time.time_ns()
            train_step(run, step, micro_batches)
            of_step = collectives(started_ns)
        assert not run.state.skipped_steps
        if run.engine.is_main:
            groups, payload, calls = group_sizes(), Counter(), Counter()
            for entry in of_step:
                name, size = entry["profiling_name"].split(":", 1)[-1], size_of(entry)
                if size > SMALL:
                    key = (name, *groups[entry["process_group"][0]])
                    payload[key] += size
                    calls[key] += 1
            exchanges = [
                {"collective": name, "ranks": ranks, "between_nodes": between, "calls": calls[key], "bytes": size}
                for key, size in sorted(payload.items())
                for name, ranks, between in [key]
            ]
            trained = run.components.trainable
            out.write_text(json.dumps({"exchanges": exchanges, "held": run.held, "parameters": trained}))


def wire(exchange: dict) -> float:
    """Return the bytes that a rank sends for a payload with a ring algorithm."""
    share, name = (exchange["ranks"] - 1) / exchange["ranks"], exchange["collective"]
    return exchange["bytes"] * share * (2 if "all_reduce" in name or name == "allreduce" else 1)


def main(argv: Sequence[str] | None = None) -> None:
    parser = plain_parser("engines", __doc__)
    parser.add_argument("store", type=Path)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--per-node", type=int, help="processes that count as those of a node")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument(
        "--engines", nargs="*", default=ENGINES, help="names of accelerate_configs/; also fsdp2_hsdp and zero3_hpz"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results (%(default)s)")
    parser.add_argument("--name", default=f"engines-{device().type}", help="name of the file in it (%(default)s)")
    parser.add_argument("settings", nargs="*")
    options = parser.parse_intermixed_args(argv)
    print("Bytes for each trained parameter.\n")
    print("| engine | micro-batches | held | payload | within | between | wire | collectives of a step |")
    print("|---|---|---|---|---|---|---|---|")
    results = []
    for engine in options.engines:
        for accumulation in (1, 4):
            with tempfile.TemporaryDirectory() as folder:
                results.append(measure(engine, accumulation, options, Path(folder)))
    sizes = {"processes": options.processes, "per_node": options.per_node or options.processes}
    result = {**sizes, "precision": options.precision, "engines": results}
    write_json({**circumstances(device()), **result}, options.out, options.name)


def measure(engine: str, accumulation: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Print the row of an engine, and return what was measured."""
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
    if options.per_node:
        command += ["--per-node", str(options.per_node)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(f"{engine}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    result = json.loads(out.read_text())
    parameters, exchanges = result["parameters"], result["exchanges"]
    within, between = (
        sum(exchange["bytes"] for exchange in exchanges if exchange["between_nodes"] == kind) / parameters
        for kind in (False, True)
    )
    numbers = [result["held"], *(sum(map(size, exchanges)) for size in (itemgetter("bytes"), wire))]
    held, payload, sent = (number / parameters for number in numbers)
    shown = ", ".join(
        f"{exchange['calls']} x {exchange['collective']} of {exchange['ranks']} {exchange['bytes'] / parameters:.2f}"
        for exchange in exchanges
    )
    print(
        f"| {engine} | {accumulation} | {held:.1f} | {payload:.2f} | {within:.2f} | {between:.2f} | {sent:.2f} "
        f"| {shown} |",
        flush=True,
    )
    return {"engine": engine, "accumulation": accumulation, **result}


if __name__ == "__main__":
    if "--worker" in sys.argv:
        index = sys.argv.index("--worker")
        target = Path(sys.argv[index + 1])
        arguments = sys.argv[1:index] + sys.argv[index + 2 :]
        if "--per-node" in arguments:  # the launcher of a single node would have another number
            index = arguments.index("--per-node")
            os.environ["LOCAL_WORLD_SIZE"] = arguments[index + 1]
            del arguments[index : index + 2]
        worker(arguments, target)
        sys.stdout.flush()
        os._exit(0)
    main()
