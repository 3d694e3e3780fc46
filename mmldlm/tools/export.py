"""`mmldlm export RUN OUT`: write a run as a folder that needs neither the data store nor the trainer's dependencies."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from mmldlm.errors import DataError, UsageError
from mmldlm.inference.bundle import EVALUATION_NAME, matching_evaluation, write_bundle
from mmldlm.loading.load import LoadedRun, add_run_options, load_run
from mmldlm.utils.files import fsync, make_folder, naming, temporary_name
from mmldlm.utils.printable import printable


def check_new(out: Path) -> None:
    """Raise `UsageError` if `out` exists."""
    if out.exists():
        raise UsageError(f"{out}: exists already, expected a new folder")


def save_bundle(run: LoadedRun, out: Path, description: str = "") -> None:
    """Write a bundle to a new folder, complete or not at all: write a temporary folder beside it, then rename."""
    temporary = temporary_name(out.absolute())
    try:
        make_folder(temporary)
        with naming(out):
            write_bundle(run, temporary, description)
        try:
            temporary.rename(out)
        except OSError:
            check_new(out)  # another process may have created it in the meantime
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    fsync(out.absolute().parent)


def main(argv: list[str] | None = None) -> int:
    """Run `mmldlm export` and return the exit code."""
    parser = argparse.ArgumentParser("mmldlm export", description=__doc__)
    add_run_options(parser)
    parser.add_argument("out", type=Path, help="new folder for the bundle")
    parser.add_argument("--card", type=Path, metavar="FILE", help="Markdown to include in the model card")
    options = parser.parse_args(argv)
    out: Path = options.out
    check_new(out)
    try:
        description = options.card.read_text(encoding="utf-8") if options.card else ""
    except (OSError, ValueError) as error:
        raise DataError(f"--card: {options.card} cannot be read: {error}") from None
    run = load_run(options.run, options.checkpoint, options.data, options.weights, device="cpu")
    save_bundle(run, out, description)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    if (run.folder / EVALUATION_NAME).is_file() and matching_evaluation(run) is None:
        print(printable(f"{run.folder / EVALUATION_NAME}: belongs to other weights, so the model card has no figures"))
    next_step = f"mmldlm sample {out} --text ..., or mmldlm.load({str(out)!r})"
    print(printable(f"{out}: {run}, {size / 2**20:.1f} MiB; {next_step}"))
    return 0
