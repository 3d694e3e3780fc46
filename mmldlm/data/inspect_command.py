"""`mmldlm data info|verify|sample STORE`: statistics of a store, its verification, and examples of its samples."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mmldlm.data import inspect as inspection
from mmldlm.data.store import Store
from mmldlm.errors import DataError, UsageError
from mmldlm.utils.printable import printable
from mmldlm.utils.progress import Progress

_MAX_PRINTED = 20  # problems


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("mmldlm data", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="counts, lengths, latents, tokenizer, encoder, sources, problems")
    info.add_argument("--json", action="store_true", help="print JSON")
    verify = commands.add_parser("verify", help="verify all hashes and samples, and the numbers of the manifest")
    verify.add_argument("--threads", type=int, help="files read at a time (default: number of CPU cores, at most 8)")
    sample = commands.add_parser("sample", help="print decoded examples with length and latent norm")
    sample.add_argument("-n", "--count", type=int, default=5, help="number of examples (default: %(default)s)")
    sample.add_argument("--split", default="train", help="train, validation or test (default: %(default)s)")
    sample.add_argument("--seed", type=int, default=0, help="seed of the draw (default: %(default)s)")
    sample.add_argument("--neighbours", type=int, default=0, metavar="K", help="also print the K nearest samples")
    for command in (info, verify, sample):
        command.add_argument("store", type=Path, help="folder of the store")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run `mmldlm data`; return 0 or raise `MmldlmError`."""
    options = _parser().parse_args(argv)
    for option in ("threads", "count", "neighbours", "seed"):
        value, minimum = getattr(options, option, None), 1 if option in ("threads", "count") else 0
        if value is not None and value < minimum:
            raise UsageError(f"--{option} {value}: expected at least {minimum}")
    if options.command == "info":
        info = inspection.info(Store.open(options.store))
        print(json.dumps(info, indent=1) if options.json else inspection.describe(info))
    elif options.command == "verify":
        with Progress() as progress:
            progress.phase("verifying", announce=False)
            problems = inspection.verify_store(options.store, options.threads, progress)
        for problem in problems[:_MAX_PRINTED]:
            print(printable(problem))
        if problems:
            raise DataError(f"{options.store}: {len(problems)} problems; the first: {problems[0]}")
        manifest = Store.open(options.store).manifest
        total = sum(split.samples for split in manifest.splits.values())
        print(f"{options.store}: intact: {total:,} samples, {len(list(manifest.all_files()))} files")
    else:
        for line in inspection.samples(
            Store.open(options.store), options.split, options.count, options.seed, options.neighbours
        ):
            print(printable(line))
    return 0
