"""Print how large the project is, and how far it is from the first line to the network.

    python scripts/size.py [--no-run]

Needs nothing but Python for what it counts. For the last rows it prepares a small corpus and trains two steps, with the
Python that runs it; `--no-run` leaves them out.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
CORE = ("trainer", "distributed", "checkpoint", "telemetry", "run", "settings", "utils", "config.py", "train.py")
CORE += ("evaluate.py", "errors.py", "cli.py")
METHOD = ("data", "model", "diffusion", "evaluation", "inference", "optim", "batch.py")

# Trains two steps; prints, of the second, the files of ours that are entered before the network, and modules imported.
TRACED = """
import json, sys
from mmldlm import train
from mmldlm.model.mmdit import MMDiT
files, seen, step = [], {}, train.train_step
def profile(frame, event, argument):
    name = frame.f_code.co_filename
    if event == "call" and "/mmldlm/" in name and "network" not in seen:
        if frame.f_code is MMDiT.forward.__code__:
            seen["network"] = len(set(files))
        files.append(name)
def traced(trainer, number, *rest):
    files.clear(), seen.clear()
    sys.setprofile(profile)
    try:
        return step(trainer, number, *rest)
    finally:
        sys.setprofile(None)
train.train_step = traced
assert train.main(sys.argv[1:]) == 0
modules = [name for name in sys.modules if name.split(".")[0] == "mmldlm"]
print(json.dumps({"files": seen["network"], "modules": len(modules)}))
"""


def sources(*names: str) -> list[Path]:
    """Return the Python files below folders or with names, relative to the root."""
    paths = [ROOT / name for name in names]
    return sorted(file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py")))


def lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def functions(paths: Iterable[Path]) -> Iterator[int]:
    """Yield the lines of each function, its docstring among them."""
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield (node.end_lineno or node.lineno) - node.lineno + 1


def docstring_lines(paths: Iterable[Path]) -> int:
    total = 0
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module) and node.body:
                first = node.body[0]
                if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and first.value.value:
                    total += (first.end_lineno or first.lineno) - first.lineno + 1
    return total


def comment_lines(paths: Iterable[Path]) -> int:
    """Return the lines that have a comment, alone or after code."""
    total = 0
    for path in paths:
        with path.open("rb") as file:
            total += sum(token.type == tokenize.COMMENT for token in tokenize.tokenize(file.readline))
    return total


def run() -> dict[str, int]:
    """Return what two steps of a small run enter and import."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, environment = Path(temporary), os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        corpus, store = folder / "corpus.txt", folder / "store"
        words = [f"word{number % 97} is a word{number % 89} of line{number}" for number in range(400)]
        corpus.write_text("\n\n".join(words), encoding="utf-8")
        prepare = [sys.executable, "-m", "mmldlm.cli", "prepare", corpus, "--tokenizer", "words", "--out", store]
        prepare += ["--channels", "16", "--on-problem", "skip"]
        subprocess.run(prepare, check=True, env=environment, cwd=folder, stderr=subprocess.DEVNULL)
        settings = ["train={steps: 2, global_batch_size: 4}", "model={depth: 1, width: 64, num_heads: 2}"]
        settings += [f"run.dir={folder / 'run'}", f"data.path={store}", "data.num_workers=0"]
        command = [sys.executable, "-c", TRACED, str(ROOT / "configs/quickstart.yaml"), *settings]
        done = subprocess.run(command, check=True, env=environment, cwd=folder, capture_output=True, text=True)
        return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-run", action="store_true")
    options = parser.parse_args()
    package = sources("mmldlm")
    grains, total = sorted(functions(package)), lines(package)
    results = (ROOT / "benchmarks/results").rglob("*.json")
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    rows = {
        "package: lines (files)": f"{total:,} ({len(package)})",
        "core rooms": f"{lines(sources(*(f'mmldlm/{name}' for name in CORE))):,}",
        "tools": f"{lines(sources('mmldlm/tools')):,}",
        "data and method rooms": f"{lines(sources(*(f'mmldlm/{name}' for name in METHOD))):,}",
        "functions; median lines": f"{len(grains):,}; {median(grains):g}",
        "comments; docstrings": f"{comment_lines(package) / total:.1%}; {docstring_lines(package) / total:.1%}",
        "benchmarks; JSON": f"{lines(sources('benchmarks')):,}; {lines(results):,}",
        "tests: lines (files)": f"{lines(sources('tests')):,} ({len(sources('tests'))})",
        "docs and README": f"{lines(pages):,}",
    }
    if not options.no_run:
        found = run()
        rows |= {"files from a step to the network": found["files"], "modules that `train` imports": found["modules"]}
    print("| | |\n|---|---|")
    print("\n".join(f"| {name} | {value} |" for name, value in rows.items()))


if __name__ == "__main__":
    main()
