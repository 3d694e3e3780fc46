"""Options of the benchmarks, circumstances of a measurement, tables, and JSON files."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common.task import device
from mmldlm.errors import UsageError
from mmldlm.utils.cpu import processor_name
from mmldlm.utils.files import write_atomically

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("mmldlm", "torch", "numpy", "mmdit", "x-transformers", "hyper-connections", "accelerate", "tensorboard")

Row = Mapping[str, Any]  # lists and mappings are written to JSON only


def print_status(status: str) -> None:
    print(f"==> {status}", file=sys.stderr, flush=True)


# --- options --------------------------------------------------------------------------------------


def plain_parser(name: str, description: str) -> argparse.ArgumentParser:
    """Return a parser without options, for the benchmark `name`."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def parser(name: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that most benchmarks have."""
    options = plain_parser(name, description)
    add = options.add_argument
    add("--rounds", type=positive, default=9, help="measurements, of which the medians are reported (%(default)s)")
    add("--threads", type=positive, default=1, help="threads of PyTorch; with one, seconds are its CPU time")
    add("--out", type=Path, default=RESULTS, help="folder of the results (%(default)s)")
    add("--name", default=f"{name}-{device().type}", help="name of the files in it (%(default)s)")
    add("--quick", action="store_true", help="small and short, to see that it works")
    return options


def add_settings(options: argparse.ArgumentParser) -> None:
    options.add_argument("settings", nargs="*", metavar="key.sub=value", help="settings of the run config")


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, found {value}")
    return value


def select_names(option: str, given: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """Return the given names, or all `known` names if none was given.

    Raises:
        UsageError: A given name is not known.
    """
    for name in given or ():
        if name not in known:
            raise UsageError(f"{option}: expected some of {', '.join(known)}, found {name!r}")
    return [name for name in known if given is None or name in given]


# --- results --------------------------------------------------------------------------------------


def circumstances(on: torch.device) -> dict[str, Any]:
    """Return date, machine, versions and commit of a measurement."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    commit = ""
    if shutil.which("git"):
        describe = ["git", "describe", "--always", "--dirty"]
        commit = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {
            "device": torch.cuda.get_device_name(on) if on.type == "cuda" else "cpu",
            "cpu": f"{processor_name()}, {torch.backends.cpu.get_cpu_capability()}",
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "system": platform.system(),
            "cuda": torch.version.cuda,
        },
        "versions": versions,
        "git": commit,
    }


def kept(path: Path, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a result that an earlier call has left. If it is not there, measure it."""
    if not path.is_file():
        print_status(f"{path.parent.name}: {path.stem}")
        write_atomically(path, json.dumps(measure()))
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


def write_json(result: Mapping[str, Any], folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def read_result(name: str) -> dict[str, Any]:
    """Return a committed result."""
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return result


def time_unit(device_name: str, threads: int) -> str:
    return "GPU and host" if device_name != "cpu" else "CPU" if threads == 1 else "wall"


def markdown(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table."""
    keys = [key for key, value in rows[0].items() if not isinstance(value, list | dict)]
    lines = [f"| {' | '.join(keys)} |", "|---" * len(keys) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(_cell(row[key]) for key in keys)} |" for row in rows)])


def median_with_range(values: Sequence[float | None], digits: str = ".3g") -> str:
    """Return the median of the known values as Markdown, with their range if there are several."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    spread = f" ({min(known):{digits}} to {max(known):{digits}})" if len(known) > 1 else ""
    return f"{median(known):{digits}}{spread}"


def value_with_spread(runs: Sequence[Mapping[str, Any]], metric: str, digits: str) -> str:
    """Return the median and range of runs as Markdown, or of one run the value with its 95 % interval."""
    interval = runs[0].get(f"{metric}_ci95")
    if len(runs) == 1 and interval and runs[0].get(metric) is not None:
        return f"{runs[0][metric]:{digits}} ({interval[0]:{digits}} to {interval[1]:{digits}})"
    return median_with_range([run.get(metric) for run in runs], digits)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
