"""The ladder: the reference, our trainer with old practice, and what each step from there to its defaults brings.

    python -m benchmarks ladder [--shape proportional] [--data documents] [--precision fp32] [--variants NAME ...]

Prints a table, and writes OUT/ladder-SHAPE-DATA-PRECISION-DEVICE.json and .png. All variants train on the same samples
with the same noise, in turns; memory is measured in processes of their own. README.md beside this
file says how to read it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import against, results
from benchmarks.apart import Turn, freeze, in_turns, parameters_of, steps_of
from benchmarks.counting import compiled_regions_of, counts_of, kernels_of, useful_flops
from benchmarks.measure import CONTROL, Ratio, parts_of, run_rounds, trusted
from benchmarks.step_memory import ROOT, OutOfMemory, step_memory_mib
from benchmarks.task import SHAPES, Task, device
from benchmarks.variants import Variant, variants
from benchmarks.workload import KINDS, typical_batches
from mmldlm.data.sampler import SampleOrder
from mmldlm.data.store import Store
from mmldlm.errors import UsageError
from mmldlm.model.flops import peak_flops

QUICK = ("reference", "old", "trainer")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mmldlm bench ladder",
        description="Speed and memory of the trainer against the reference, one step at a time.",
    )
    add = parser.add_argument
    add("settings", nargs="*", metavar="key.sub=value", help="settings of the run config, for all variants of ours")
    add("--shape", choices=SHAPES, default="proportional")
    add("--data", choices=KINDS, default="documents", help="lengths of the samples (%(default)s)")
    add("--precision", choices=("fp32", "bf16"), default="fp32")
    add("--batch", type=int, help="samples of a micro-batch, instead of the shape's")
    add("--positions", type=int, help="most tokens of a sample, instead of the shape's")
    add("--variants", nargs="+", metavar="NAME", help="only these; all others are compared with the first")
    add("--rounds", type=int, default=9, help="(%(default)s)")
    add("--batches", type=int, default=8, help="micro-batches of a round (%(default)s)")
    add(
        "--patience",
        type=float,
        default=1.0,
        help="turns taken again where the machine gave less than at its best, as a multiple of all (%(default)s)",
    )
    add("--threads", type=int, default=1, help="of PyTorch; with more than one, seconds are by the clock (%(default)s)")
    add("--no-memory", action="store_true", help="leave out the memory of a step, which takes a process a variant")
    add("--memory-of", type=Path, metavar="RESULT.json", help="memory of a step as it was found there")
    add("--quick", action="store_true", help=f"{', '.join(QUICK)} in 3 rounds of 2 micro-batches, without memory")
    add("--store", type=Path, help="a data store to measure on, instead of --data")
    add("--stores", type=Path, default=ROOT / "data" / "bench", help="where stores are made and kept (%(default)s)")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of JSON and PNG (%(default)s)")
    add("--name", help="of the files in it, instead of ladder-SHAPE-DATA-PRECISION-DEVICE")
    add("--against", type=Path, metavar="RESULT.json", help="compare with it; exit code 1 where something is worse")
    options = parser.parse_intermixed_args(argv)
    if options.quick:
        options.rounds, options.batches, options.no_memory = 3, 2, True
        options.variants = options.variants or list(QUICK)
    if not 0 <= options.patience < math.inf:
        raise UsageError(f"--patience: expected 0 or more, found {options.patience:g}")
    for name in ("rounds", "batches", "threads", "batch", "positions"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name}: expected at least 1, found {value}")
    return options


def chosen(options: argparse.Namespace) -> list[Variant]:
    """UsageError for a name that is none, or where a package is missing that one needs."""
    known = variants(options.precision, device().type)
    names = options.variants or list(known)
    for name in names:
        if name not in known:
            raise UsageError(f"--variants: {name!r} is none here, expected some of {', '.join(known)}")
    needed = ["matplotlib"] + ["mmdit"] * any(known[name].is_reference for name in names)
    missing = [package for package in needed if importlib.util.find_spec(package) is None]
    if missing:
        raise UsageError(
            f"this benchmark needs the packages {' and '.join(missing)}: "
            "run `bash scripts/setup.sh --dev`, or pip install -e '.[bench]'"
        )
    return [known[name] for name in dict.fromkeys(names)]


def task_of(options: argparse.Namespace) -> Task:
    shape = SHAPES[options.shape]
    shape = replace(shape, batch=options.batch or shape.batch, positions=options.positions or shape.positions)
    store = options.store or shape.store(options.stores, options.data)
    return Task(
        store=str(Path(store).resolve()),
        width=shape.width,
        depth=shape.depth,
        heads=shape.heads,
        batch=shape.batch,
        precision=options.precision,
        settings=tuple(options.settings),
    )


def measure(task: Task, selected: list[Variant], options: argparse.Namespace) -> dict[str, Any]:
    """The result as JSON has it."""
    manifest, split = Store.open(task.store).manifest, Store.open(task.store).split("train")
    rows = typical_batches(SampleOrder(split.lengths, seed=0), split, task.batch, options.batches)
    device_name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    flops, peak = useful_flops(task, rows), peak_flops(device_name, task.precision)
    found: dict[str, dict[str, Any]] = {each.name: {"about": each.about} for each in selected}
    if options.memory_of:
        take_memory(options.memory_of, task, found)
    elif not options.no_memory:  # first, while this process holds nothing of the GPU's memory
        for name, values in found.items():
            results.say(f"memory of a step: {name}")
            try:
                values["middle_step_memory_mib"], values["step_memory_mib"] = step_memory_mib(name, task)
            except OutOfMemory:
                values["error"] = "out of memory"
    torch.set_num_threads(options.threads)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        fitting = [variant for variant in selected if "error" not in found[variant.name]]
        if not fitting:
            raise UsageError("no variant fits into the memory of this machine")
        results.say(f"opening {', '.join(variant.name for variant in fitting)}")
        runs = stack.enter_context(in_turns(fitting, task, rows, folder))
        results.say("warming up")
        # Every micro-batch twice: allocators know their sizes then.
        every = task.config("never-opened").log.every
        next_step = math.ceil(2 * len(rows) / every) * every
        for run in runs.values():
            for number in range(next_step):
                run.step(number)
            run.call(freeze)
        for name in (variant.name for variant in fitting if variant.is_compiled):
            if not runs[name].call(compiled_regions_of, next_step):
                raise UsageError(f"{name}: torch.compile does not run here; a compiler is needed, or leave it out")
        results.say(f"{options.rounds} rounds of {len(rows)} steps")
        measured = run_rounds(runs, options.rounds, len(rows), next_step, patience=options.patience)
        seconds = measured.seconds
        next_step += options.rounds * len(rows)
        for name, run in runs.items():
            found[name]["parts"] = run.call(parts_of, range(next_step, next_step + len(rows)))
        next_step += len(rows)
        results.say("counting")
        for variant in fitting:
            run = runs[variant.name]
            for _ in range(-run.call(steps_of) % every):  # what is counted begins behind a record
                run.step(next_step)
            found[variant.name] |= counted(run, variant, next_step, len(rows), manifest.vocab_size)
    tokens = sum(int(split.lengths[samples].sum()) for samples in rows)
    base = next(iter(runs))
    for name in runs:
        step = median(seconds[name]) / len(rows)
        found[name] |= {
            "seconds": seconds[name],
            "step_s": step,
            "speed": asdict(Ratio.of(seconds[base], seconds[name])),
            "tokens_per_s": tokens / len(rows) / step,
            "mfu": flops / step / peak if peak else None,
        }
        if "gpu_busy_s" in found[name]["counts"]:  # the profiler, which counts it, makes steps longer, but not kernels
            found[name]["gpu_busy"] = found[name]["counts"]["gpu_busy_s"] / step
    control = Ratio.of(seconds[base], seconds[CONTROL])
    return {
        "benchmark": "ladder",
        "what": {
            **{name: getattr(options, name) for name in ("shape", "data", "precision", "threads", "rounds", "batches")},
            "task": asdict(task) | {"store": Path(task.store).name},
            "positions": manifest.max_length,
            "vocab_size": manifest.vocab_size,
            "tokens_per_step": tokens / len(rows),
        },
        **results.circumstances(device()),
        "base": base,
        "control": {**asdict(control), "trusted": trusted(control)},
        "steadiness": asdict(measured.steadiness),
        "useful_flops_per_step": flops,
        "peak_flops": peak,
        "variants": found,
    }


def counted(run: Turn, variant: Variant, first: int, steps: int, vocab_size: int) -> dict[str, Any]:
    """Of `steps` steps from `first` on. Comes last: it ends what is compiled, see `compiled_regions_of`."""
    kind, numbers = device().type, range(first, first + steps)
    of_gpu = {}
    if kind == "cuda":
        of_gpu["kernels"], of_gpu["gpu_busy_s"] = run.call(kernels_of, numbers)
    counts = asdict(run.call(counts_of, numbers, vocab_size, kind)) | of_gpu
    if variant.is_compiled:
        del counts["operators"]  # they were those of the same steps uncompiled
    return {"parameters": run.call(parameters_of), "counts": counts}


def take_memory(path: Path, task: Task, found: dict[str, dict[str, Any]]) -> None:
    """That of the variants of an earlier result. UsageError where it is of another task."""
    earlier = against.read(path, "--memory-of")
    same = json.loads(json.dumps(asdict(task) | {"store": Path(task.store).name}))
    if earlier["what"]["task"] != same:
        raise UsageError(f"--memory-of: {path} is of another task, expected {same}, found {earlier['what']['task']}")
    for name, values in found.items():
        of = earlier["variants"].get(name, {})
        values |= {key: of[key] for key in ("middle_step_memory_mib", "step_memory_mib", "error") if key in of}


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    selected = chosen(options)
    earlier = against.read(options.against, "--against") if options.against else None
    task = task_of(options)
    result = measure(task, selected, options)
    name = options.name or f"ladder-{options.shape}-{options.data}-{options.precision}-{device().type}"
    results.write(result, options.out, name)
    print(results.table(result))
    if earlier is None:
        return 0
    regressions = against.regressions(earlier, result)
    print("\n".join(["", f"Against {options.against}:", *(regressions or ["nothing is worse"])]))
    return 1 if regressions else 0
