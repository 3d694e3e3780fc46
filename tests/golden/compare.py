"""Compare what two commits compute and write: a refactoring has to leave all of it alone.

    python tests/golden/compare.py BASE [HEAD] [--only PART ...] [--keep FOLDER]

Records BASE and HEAD (this working tree if left out), each in a worktree of its own, on this machine, and prints every
difference. Runs and stores of BASE are opened with HEAD as well. Exits with 1 if anything differs. It takes about ten
minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from record import PARTS, Recorder, record

ROOT = Path(__file__).resolve().parent.parent.parent


@contextmanager
def worktree(commit: str, folder: Path) -> Iterator[Path]:
    """Check `commit` out into `folder`."""
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--detach", "--quiet", str(folder), commit], check=True)
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def differences(base: Any, head: Any, name: str = "") -> Iterator[str]:
    """Yield one line for each value of `base` and `head` that is not the same in both."""
    if isinstance(base, dict) and isinstance(head, dict):
        for key in sorted(base.keys() | head.keys()):
            if key not in head:
                yield f"{name}/{key}: only in the base"
            elif key not in base:
                yield f"{name}/{key}: only in the head"
            else:
                yield from differences(base[key], head[key], f"{name}/{key}")
    elif isinstance(base, list) and isinstance(head, list) and len(base) == len(head):
        for index, pair in enumerate(zip(base, head, strict=True)):
            yield from differences(*pair, f"{name}/{index}")
    elif base != head:
        yield f"{name}: {str(base)[:200]} -> {str(head)[:200]}"


def old_files(base: Path, head: Path, folder: Path) -> dict[str, Any]:
    """A store and a run of `base`, opened and continued by `head`: what `head` makes of them."""
    old = Recorder(base, folder)
    old.prepare(old.store, old.text)
    whole = old.curve("whole", ["ema.decay=0.9"])
    half = old.curve("half", ["ema.decay=0.9", "train.steps=20"])
    assert half == whole, "the base is not deterministic"
    for checkpoint in (folder / "runs/half/checkpoints").glob("*20*"):
        subprocess.run(["rm", "-r", str(checkpoint)], check=True)
    new = Recorder(head, folder)
    try:
        resumed = new.curve("half", ["ema.decay=0.9"]) == whole
    except RuntimeError as error:  # a format of before, or settings that are gone
        return {"resumed curve is equal": str(error).splitlines()[-1][-400:]}
    return {
        "resumed curve is equal": resumed,
        "store is valid": new.mmldlm("data", "verify", new.store).returncode,
        "samples are equal": _written(new, "whole") == _written(old, "whole"),
    }


def _written(recorder: Recorder, run: str) -> str:
    arguments = ["sample", recorder.folder / "runs" / run, "--mode", "joint", "--count", 3, "--seed", 1]
    return recorder.succeed(recorder.mmldlm(*arguments)).partition("\n")[2]  # without the line that names the run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="the commit to compare with")
    parser.add_argument("head", nargs="?", help="the commit to compare (default: the working tree)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--keep", type=Path, help="write base.json and head.json into this folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, worktree(options.base, Path(scratch) / "base") as base:
        folders = [Path(scratch) / name for name in ("scratch-base", "scratch-head", "scratch-old")]
        for folder in folders:
            folder.mkdir()
        with ThreadPoolExecutor(2) as pool:
            if options.head:
                verify = ["git", "-C", str(ROOT), "rev-parse", "--verify", "--quiet", options.head]
                subprocess.run(verify, check=True, stdout=subprocess.DEVNULL)
            head = Path(scratch) / "head"
            with worktree(options.head, head) if options.head else _here() as head:
                result = list(pool.map(record, (base, head), folders, [tuple(options.only)] * 2))
                opened = old_files(base, head, folders[2])
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
        for name, values in zip(("base", "head"), result, strict=True):
            (options.keep / f"{name}.json").write_text(json.dumps(values, indent=1, sort_keys=True) + "\n")
    expected = {"resumed curve is equal": True, "store is valid": 0, "samples are equal": True}
    lines = [*differences(*result), *differences(expected, opened, "old files")]
    print("\n".join(lines) or "no difference")
    return 1 if lines else 0


@contextmanager
def _here() -> Iterator[Path]:
    yield ROOT


if __name__ == "__main__":
    sys.exit(main())
