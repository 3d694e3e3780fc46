"""`mmldlm data info|verify|sample STORE`: what is in a store, whether it is whole, and examples of it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from mmldlm.data import inspect as inspection
from mmldlm.data.store import Store
from mmldlm.errors import DataError, UsageError, run_command

_SHOWN = 20  # faults


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("mmldlm data", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="counts, lengths, latents, tokenizer, encoder, sources, problems")
    info.add_argument("--json", action="store_true", help="as JSON")
    verify = commands.add_parser("verify", help="read all of it: hashes, samples, and the manifest's numbers")
    verify.add_argument("--threads", type=int, help="files read at a time (as many as CPU cores, at most 8)")
    sample = commands.add_parser("sample", help="decoded examples with length and latent norm")
    sample.add_argument("-n", "--count", type=int, default=5, help="examples (%(default)s)")
    sample.add_argument("--split", default="train", help="train, validation or test (%(default)s)")
    sample.add_argument("--seed", type=int, default=0, help="of the draw (%(default)s)")
    sample.add_argument("--neighbours", type=int, default=0, metavar="K", help="and those of the K nearest latents")
    for command in (info, verify, sample):
        command.add_argument("store", type=Path, help="folder of the store")
    return parser


def main(argv: list[str] | None = None) -> int:
    """`mmldlm data`; returns 0, lets `MmldlmError` pass."""
    options = _parser().parse_args(argv)
    for option in ("threads", "count", "neighbours", "seed"):
        value, least = getattr(options, option, None), 1 if option in ("threads", "count") else 0
        if value is not None and value < least:
            raise UsageError(f"--{option} {value}: expected at least {least}")
    if options.command == "info":
        found = inspection.info(Store.open(options.store))
        print(json.dumps(found, indent=1, ensure_ascii=False) if options.json else inspection.describe(found))
    elif options.command == "verify":
        faults = inspection.faults(options.store, options.threads)
        for fault in faults[:_SHOWN]:
            print(fault)
        if faults:
            raise DataError(f"{options.store}: {len(faults)} faults; the first: {faults[0]}")
        manifest = Store.open(options.store).manifest
        total = sum(split.samples for split in manifest.splits.values())
        print(f"{options.store}: whole: {total:,} samples, {len(list(manifest.all_files()))} files")
    else:
        for line in inspection.samples(
            Store.open(options.store), options.split, options.count, options.seed, options.neighbours
        ):
            print(line)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
