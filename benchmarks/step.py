"""Compare steps of the trainer with steps of the reference.

    python -m benchmarks step [--shape proportional] [--data documents] [--precision fp32] [--variants NAME ...]

Prints a table, and writes OUT/step-SHAPE-DATA-PRECISION-DEVICE.json. All variants train in turns, on the same samples
with the same noise. Memory is measured in separate processes. benchmarks/README.md says how to read the result.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.common.counting import (
    OTHER,
    PARTS,
    WAIT,
    compiled_regions_of,
    counts_of,
    kernels_of,
    parts_of,
    useful_flops,
)
from benchmarks.common.measure import Comparison, LocalRun, ProcessRun, compare, open_runs, warm_up
from benchmarks.common.report import (
    ROOT,
    add_settings,
    circumstances,
    parser,
    positive,
    print_status,
    time_unit,
    write_json,
)
from benchmarks.common.task import KINDS, SHAPES, Task, device, typical_batches
from benchmarks.common.variants import Open, Variant, opened, variants
from benchmarks.memory import OutOfMemory, step_memory_mib
from mmldlm.data.sampler import SampleOrder
from mmldlm.data.store import Store
from mmldlm.errors import DataError, UsageError
from mmldlm.model.flops import peak_flops

QUICK = ("reference", "trainer")
MEMORY_KEYS = ("middle_step_memory_mib", "step_memory_mib")
WORSE = 0.10  # largest share of the speed that may be lost compared with an earlier result
MORE_IS_WORSE = {"operators": True, "kernels": True, "host_syncs": True, "logit_rows": True, "fill": False}
# Results are comparable if these are equal.
SAME = ("shape", "data", "precision", "batches", "task", "positions", "vocab_size")

Values = dict[str, Any]


# --- options --------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    options = parser("step", "Speed and memory of the trainer against the reference, one step at a time.")
    add = options.add_argument
    add_settings(options)
    add("--shape", choices=SHAPES, default="proportional")
    add("--data", choices=KINDS, default="documents", help="lengths of the samples (%(default)s)")
    add("--precision", choices=("fp32", "bf16"), default="fp32")
    add("--batch", type=positive, help="samples of a micro-batch, instead of the shape's")
    add("--positions", type=positive, help="maximum tokens of a sample, instead of the shape's")
    add("--variants", nargs="+", metavar="NAME", help="variants; all others are compared with the first")
    add("--batches", type=positive, default=8, help="micro-batches of a round (%(default)s)")
    add(
        "--patience",
        type=float,
        default=1.0,
        help="turns to repeat if the machine was slower than at its best, as a multiple of all (%(default)s)",
    )
    add("--no-memory", action="store_true", help="leave out the memory of a step, which takes a process per variant")
    add("--store", type=Path, help="a data store to measure on, instead of --data")
    add("--stores", type=Path, default=ROOT / "data" / "bench", help="folder that keeps its stores (%(default)s)")
    add("--against", type=Path, metavar="RESULT.json", help="compare with it; exit code 1 if something is worse")
    options.set_defaults(name=None)
    given = options.parse_intermixed_args(argv)
    if given.quick:
        given.rounds, given.batches, given.no_memory = 3, 2, True
        given.variants = given.variants or list(QUICK)
    if not 0 <= given.patience < math.inf:
        raise UsageError(f"--patience: expected 0 or more, found {given.patience:g}")
    given.name = given.name or f"step-{given.shape}-{given.data}-{given.precision}-{device().type}"
    return given


def selected_variants(options: argparse.Namespace) -> list[Variant]:
    """Return the variants that the options name.

    Raises:
        UsageError: A name is unknown, or the package of the reference is missing.
    """
    known = variants(options.precision, device().type)
    names = options.variants or list(known)
    for name in names:
        if name not in known:
            raise UsageError(f"--variants: expected some of {', '.join(known)}, found {name!r}")
    if any(known[name].is_reference for name in names) and importlib.util.find_spec("mmdit") is None:
        raise UsageError("the reference needs the package mmdit: run `bash scripts/setup.sh --dev`")
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


# --- measuring ------------------------------------------------------------------------------------


def measure(task: Task, selected: list[Variant], options: argparse.Namespace) -> Values:
    """Measure everything and return the result, which is written as JSON."""
    store = Store.open(task.store)
    manifest, split = store.manifest, store.split("train")
    rows = typical_batches(SampleOrder(split.lengths, seed=0), split, task.batch, options.batches)
    flops = useful_flops(task, rows)
    peak = peak_flops(torch.cuda.get_device_name() if torch.cuda.is_available() else "", task.precision)
    values: dict[str, Values] = {variant.name: {"about": variant.about} for variant in selected}
    if not options.no_memory:  # do this first, while this process holds no GPU memory
        measure_memory(task, values)
    fitting = [variant for variant in selected if "error" not in values[variant.name]]
    if not fitting:
        raise UsageError("no variant fits into the memory of this machine")
    torch.set_num_threads(options.threads)
    comparison = measure_steps(task, fitting, rows, manifest.vocab_size, options, values)
    tokens = sum(int(split.lengths[samples].sum()) for samples in rows) / len(rows)
    for name in (variant.name for variant in fitting):
        step = median(comparison.seconds[name]) / len(rows)
        values[name] |= {
            "seconds": comparison.seconds[name],
            "step_s": step,
            "speed": asdict(comparison.speed(name)),
            "tokens_per_s": tokens / step,
            "mfu": flops / step / peak if peak else None,
        }
        if "gpu_busy_s" in values[name]["counts"]:  # the profiler makes steps longer, but not kernels
            values[name]["gpu_busy"] = values[name]["counts"]["gpu_busy_s"] / step
    what = {name: getattr(options, name) for name in ("shape", "data", "precision", "threads", "rounds", "batches")}
    return {
        "benchmark": "step",
        "what": {
            **what,
            "task": task.to_json(),
            "positions": manifest.max_length,
            "vocab_size": manifest.vocab_size,
            "tokens_per_step": tokens,
        },
        **circumstances(device()),
        "base": comparison.base,
        "control": {**asdict(comparison.control), "trusted": comparison.trusted},
        "steadiness": asdict(comparison.steadiness),
        "useful_flops_per_step": flops,
        "peak_flops": peak,
        "variants": values,
    }


def measure_memory(task: Task, values: dict[str, Values]) -> None:
    for name, row in values.items():
        print_status(f"memory of a step: {name}")
        try:
            row |= zip(MEMORY_KEYS, step_memory_mib(name, task), strict=True)
        except OutOfMemory:
            row["error"] = "out of memory"


def measure_steps(
    task: Task,
    fitting: list[Variant],
    rows: list[np.ndarray],
    vocab_size: int,
    options: argparse.Namespace,
    values: dict[str, Values],
) -> Comparison:
    """Compare speeds. Add the parts of a step and the counts to `values`."""
    every = task.config().log.every
    with tempfile.TemporaryDirectory() as folder:
        openers = {each.name: partial(opened, each, task, rows, Path(folder) / each.name) for each in fitting}
        print_status(f"opening {', '.join(openers)}")
        with open_runs(openers) as runs:
            print_status("warming up")
            # Take every micro-batch twice, so that allocators know the sizes.
            next_step = math.ceil(2 * len(rows) / every) * every
            warm_up(runs, next_step)
            for name in (variant.name for variant in fitting if variant.is_compiled):
                if not runs[name].call(compiled_regions_of, next_step):
                    raise UsageError(f"{name}: torch.compile does not run here; a compiler is needed, or leave it out")
            print_status(f"{options.rounds} rounds of {len(rows)} steps")
            comparison = compare(runs, options.rounds, len(rows), next_step, patience=options.patience)
            next_step += options.rounds * len(rows)
            for name, run in runs.items():
                values[name]["parts"] = run.call(parts_of, range(next_step, next_step + len(rows)))
            next_step = math.ceil((next_step + len(rows)) / every) * every  # counting begins after a record
            print_status("counting")
            for variant in fitting:
                values[variant.name] |= count(runs[variant.name], variant, next_step, len(rows), vocab_size)
    return comparison


def _num_parameters(run: Open) -> int:
    return run.parameters


def count(run: LocalRun | ProcessRun, variant: Variant, first: int, steps: int, vocab_size: int) -> Values:
    """Count over `steps` steps from `first`. Call this last, since compiled code no longer runs afterwards."""
    kind, numbers = device().type, range(first, first + steps)
    of_gpu = {}
    if kind == "cuda":
        of_gpu["kernels"], of_gpu["gpu_busy_s"] = run.call(kernels_of, numbers)
    counts = asdict(run.call(counts_of, numbers, vocab_size, kind)) | of_gpu
    if variant.is_compiled:
        del counts["operators"]  # they would be the operators of the uncompiled step
    return {"parameters": run.call(_num_parameters), "counts": counts}


# --- against an earlier result --------------------------------------------------------------------


def read_result(path: Path) -> Values:
    """Read the result that `--against` names.

    Raises:
        DataError: The file cannot be read, or is no such result.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"--against: {path} cannot be read: {error}") from None
    if not isinstance(result, dict) or result.get("benchmark") != "step":
        raise DataError(f"--against: {path} is not a result of the benchmark step")
    return result


def regressions(earlier: Values, now: Values) -> list[str]:
    """Return a line for each count that is worse, and for each speed that fell by more than `WORSE` and both intervals.

    Speeds are only compared if both results can be trusted and have the same base.

    Raises:
        DataError: The results have different tasks.
    """
    before, after = earlier["what"], now["what"]
    for key in SAME:
        if before[key] != after[key]:
            raise DataError(f"--against: {key} was {before[key]}, now it is {after[key]}; expected the same")
    with_speed = all(result["control"]["trusted"] for result in (earlier, now)) and earlier["base"] == now["base"]
    lines: list[str] = []
    for name, row in now["variants"].items():
        old = earlier["variants"].get(name)
        if old is None or "error" in old:
            continue
        if "error" in row:
            lines.append(f"{name}: {row['error']}")
            continue
        lines += [f"{name}: {line}" for line in _worse(old, row, with_speed)]
    return lines


def _worse(old: Values, new: Values, with_speed: bool) -> Iterator[str]:
    before, after = old["speed"], new["speed"]
    if with_speed and after["median"] < (1 - WORSE) * before["median"] and after["high"] < before["low"]:
        yield (
            f"speed {after['median']:.2f} [{after['low']:.2f}, {after['high']:.2f}], "
            f"was {before['median']:.2f} [{before['low']:.2f}, {before['high']:.2f}]"
        )
    for name, more_is_worse in MORE_IS_WORSE.items():
        if name in old["counts"] and name in new["counts"]:
            was, is_now = old["counts"][name], new["counts"][name]
            if is_now > was if more_is_worse else is_now < was:
                yield f"{name} {is_now:.6g}, was {was:.6g}"


# --- display --------------------------------------------------------------------------------------


def table(result: Values) -> str:
    """Return Markdown: the variants, then the parts of a step."""
    what, control, rows = result["what"], result["control"], result["variants"]
    task, machine, base = what["task"], result["machine"]["device"], rows[result["base"]]
    lines = [
        f"{task['width']} x {task['depth']} blocks, vocabulary {what['vocab_size']:,}, batch {task['batch']}, up to "
        f"{what['positions']} positions, {what['data']} ({what['tokens_per_step']:,.0f} real tokens a step), "
        f"{what['precision']}; {machine}, {what['threads']} thread(s), {time_unit(machine, what['threads'])} time.",
        f"{result['useful_flops_per_step'] / 1e9:,.1f} useful GFLOP per step. "
        f"{result['base']} against itself: {control['median']:.3f} [{control['low']:.3f}, {control['high']:.3f}].",
    ]
    if steadiness := result.get("steadiness"):  # early results lack it
        lines.append(
            f"{steadiness['repeated']} of {steadiness['turns']} turns were repeated; {steadiness['disturbed']} stayed "
            f"disturbed, the machine at {steadiness['slowest']:.2f} of its best."
        )
    if not control["trusted"]:
        lines.append("**No conclusion on speed: the machine was too busy; only the counts hold.**")
    lines += [
        "",
        "| variant | | speed | 95 % | s a step | tokens/s | step memory, MiB | x | of the middle batch | x "
        "| parameters, M | operators | kernels | syncs | rows of logits | fill | GPU busy | MFU |",
        "|---" * 18 + "|",
    ]
    for name, row in rows.items():
        if "error" in row:
            lines.append(f"| {name} | {row['about']} | {row['error']} |" + " |" * 15)
            continue
        counts, speed = row["counts"], row["speed"]
        cells = [
            *(name, row["about"], f"{speed['median']:.2f}", f"{speed['low']:.2f}-{speed['high']:.2f}"),
            *(f"{row['step_s']:.3g}", f"{row['tokens_per_s']:,.0f}"),
            *(cell for key in reversed(MEMORY_KEYS) for cell in _memory_cells(row, base, key)),
            f"{row['parameters'] / 1e6:.1f}",
            *(_count_cell(counts.get(key)) for key in ("operators", "kernels", "host_syncs", "logit_rows")),
            f"{counts['fill']:.2f}",
            *(f"{row[key]:.1%}" if row.get(key) else "" for key in ("gpu_busy", "mfu")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    parts = (WAIT, *PARTS, OTHER)
    lines += ["", f"| ms of a step | {' | '.join(parts)} |", "|---" * (len(parts) + 1) + "|"]
    for name, row in rows.items():
        if "parts" in row:
            milliseconds = (f"{1000 * row['parts'][part]:.1f}" for part in parts)
            lines.append(f"| {name} | {' | '.join(milliseconds)} |")
    return "\n".join(lines)


def _memory_cells(row: Mapping[str, Any], base: Mapping[str, Any], key: str) -> tuple[str, str]:
    """Return the memory in MiB, and its ratio to the base's memory."""
    if key not in row:
        return "", ""
    return f"{row[key]:,.0f}", f"{row[key] / base[key]:.2f}"


def _count_cell(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}".removesuffix(".0")


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    selected = selected_variants(options)
    earlier = read_result(options.against) if options.against else None
    result = measure(task_of(options), selected, options)
    write_json(result, options.out, options.name)
    print(table(result))
    if earlier is None:
        return 0
    lines = regressions(earlier, result)
    print("\n".join(["", f"Against {options.against}:", *(lines or ["nothing is worse"])]))
    return 1 if lines else 0
