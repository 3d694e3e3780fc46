"""What a ladder is shown as: a Markdown table, JSON, and a drawing of its bars."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import OTHER, PARTS, WAIT

PACKAGES = ("mmldlm", "torch", "numpy", "mmdit", "x-transformers", "hyper-connections", "accelerate", "tensorboard")
ROOT = Path(__file__).resolve().parent.parent


def say(what: str) -> None:
    """What is being done now."""
    print(f"==> {what}", file=sys.stderr, flush=True)


def circumstances(device: torch.device) -> dict[str, Any]:
    """Where, when and with what it was measured."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "cpu": _cpu(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "system": platform.system(),
            "cuda": torch.version.cuda,
        },
        "versions": versions,
        "git": git.stdout.strip(),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def write(result: dict[str, Any], folder: Path, name: str) -> None:
    """`folder`/`name`.json and .png."""
    write_json(result, folder, name)
    draw(result, folder / f"{name}.png")


def write_json(result: dict[str, Any], folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def table(result: dict[str, Any]) -> str:
    """Markdown: the ladder, then the parts of a step."""
    what, control, rows = result["what"], result["control"], result["variants"]
    task = what["task"]
    base = rows[result["base"]]
    unit = "GPU and host" if result["machine"]["device"] != "cpu" else "CPU" if what["threads"] == 1 else "wall"
    lines = [
        f"{task['width']} x {task['depth']} blocks, vocabulary {what['vocab_size']:,}, batch {task['batch']}, up to "
        f"{what['positions']} positions, {what['data']} ({what['tokens_per_step']:,.0f} real tokens a step), "
        f"{what['precision']}; {result['machine']['device']}, {what['threads']} thread(s), {unit} time.",
        f"{result['useful_flops_per_step'] / 1e9:,.1f} GFLOP of a step are of use. "
        f"{result['base']} against itself: {control['median']:.3f} [{control['low']:.3f}, {control['high']:.3f}].",
        *_steadiness(result.get("steadiness")),
        *([] if control["trusted"] else ["**No verdict: the machine was too busy; only what is counted holds.**"]),
        "",
        "| variant | | speed | 95 % | s a step | tokens/s | step memory, MiB | x | of the middle batch | x "
        "| parameters, M | operators | kernels "
        "| syncs | rows of logits | fill | GPU busy | MFU |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        if "error" in row:
            lines.append(f"| {name} | {row['about']} | {row['error']} |" + " |" * 15)
            continue
        counts, speed = row["counts"], row["speed"]
        cells = [
            *(name, row["about"], f"{speed['median']:.2f}", f"{speed['low']:.2f}-{speed['high']:.2f}"),
            *(f"{row['step_s']:.3g}", f"{row['tokens_per_s']:,.0f}"),
            *(cell for key in ("step_memory_mib", "middle_step_memory_mib") for cell in _memory(row, base, key)),
            f"{row['parameters'] / 1e6:.1f}",
            *(_count(counts.get(name)) for name in ("operators", "kernels", "host_syncs", "logit_rows")),
            f"{counts['fill']:.2f}",
            *(f"{row[name]:.1%}" if row.get(name) else "" for name in ("gpu_busy", "mfu")),
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    parts = (WAIT, *PARTS.values(), OTHER)
    lines += ["", f"| ms of a step | {' | '.join(parts)} |", "|---" * (len(parts) + 1) + "|"]
    for name, row in rows.items():
        if "parts" in row:
            milliseconds = (f"{1000 * row['parts'][part]:.1f}" for part in parts)
            lines.append(f"| {name} | {' | '.join(milliseconds)} |")
    return "\n".join(lines)


def _steadiness(found: dict[str, Any] | None) -> list[str]:
    """What the machine gave beside the steps; results of before have nothing of it."""
    if found is None:
        return []
    again = f"{found['repeated']} of {found['turns']} turns were taken again"
    return [f"{again}; {found['disturbed']} stayed disturbed, the machine at {found['slowest']:.2f} of its best."]


def _memory(row: dict[str, Any], base: dict[str, Any], key: str) -> tuple[str, str]:
    """MiB, and how many times the base's."""
    if key not in row:
        return "", ""
    return f"{row[key]:,.0f}", f"{row[key] / base[key]:.2f}"


def _count(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}".removesuffix(".0")


def draw(result: dict[str, Any], path: Path) -> None:
    """Bars of the speeds with their intervals; beside them the memory of a step, where it was measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = {name: row for name, row in result["variants"].items() if "speed" in row}
    memory = {name: row["step_memory_mib"] for name, row in rows.items() if "step_memory_mib" in row}
    figure, axes = pyplot.subplots(
        1, 2 if memory else 1, figsize=(13 if memory else 8, 1.5 + 0.34 * len(rows)), squeeze=False, sharey=True
    )
    names = [f"{row['about']}  ({name})" for name, row in rows.items()]
    speeds = [row["speed"] for row in rows.values()]
    axis = axes[0][0]
    errors = [[each["median"] - each["low"] for each in speeds], [each["high"] - each["median"] for each in speeds]]
    colors = ["tab:gray" if name.startswith("reference") else "tab:blue" for name in rows]
    axis.barh(names, [each["median"] for each in speeds], xerr=errors, color=colors, capsize=2)
    axis.invert_yaxis()
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_xlabel(f"speed, {result['base']} = 1, with 95 % intervals")
    if memory:
        axes[0][1].barh(names, [memory.get(name, 0) for name in rows], color=colors)
        axes[0][1].set_xlabel("memory of a step above weights and optimizer, MiB")
    what = result["what"]
    doubt = "" if result["control"]["trusted"] else "; NO VERDICT, the machine was busy"
    about = (what["shape"], what["data"], what["precision"], result["machine"]["device"], result["date"][:10])
    figure.suptitle(f"{', '.join(about)}{doubt}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
