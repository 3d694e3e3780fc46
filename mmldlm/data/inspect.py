"""`mmldlm data info|verify|sample STORE`: statistics of a store, its verification, and examples of its samples.

Shape letters: n samples, M latent tokens of a sample, C latent channels.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.data.manifest import describe_losses
from mmldlm.data.nearest import nearest_neighbors
from mmldlm.data.store import Split, Store
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.data.verify import partition_items, verify_item
from mmldlm.errors import DataError, UsageError
from mmldlm.utils.printable import printable
from mmldlm.utils.progress import Progress

_MAX_NORM_SAMPLES = 10_000  # samples per split whose latent norms are computed
_LENGTH_BINS = 12
_BAR_WIDTH = 40  # characters of the longest bar
_MAX_PRINTED = 20  # problems


def info(store: Store) -> dict[str, Any]:
    """Return the manifest without its hashes, and the lengths and latent norms of the splits, as JSON values."""
    manifest = store.manifest
    fields = asdict(manifest)
    del fields["files"]
    mean = fields["latent"].pop("mean")
    return {
        "store": str(store.path),
        "identity": store.identity,
        "bytes": sum(file.bytes for _, file in manifest.all_files()),
        **fields,
        "latent": {**fields["latent"], "norm_of_mean": float(np.linalg.norm(mean))},
        "splits": {name: _split_info(store.split(name)) for name in manifest.splits},
    }


def _split_info(split: Split) -> dict[str, Any]:
    totals = split.manifest.splits[split.name]
    counts = np.bincount(split.lengths, minlength=split.manifest.max_length + 1)
    cumulative = np.cumsum(counts)
    quantiles = {f"{q:.0%}": int(np.searchsorted(cumulative, q * cumulative[-1])) for q in (0.05, 0.5, 0.95)}
    width = -(-split.manifest.max_length // _LENGTH_BINS)
    bins = [int(counts[low : low + width].sum()) for low in range(1, len(counts), width)]
    # Spaced evenly rather than drawn, so that a store always gets the same numbers.
    indices = np.unique(np.linspace(0, len(split) - 1, min(_MAX_NORM_SAMPLES, len(split))).astype(np.int64))
    norms = np.linalg.norm(split.gather(indices)[2], axis=-1)
    return {
        "samples": totals.samples,
        "tokens": totals.tokens,
        "characters": totals.characters,
        "shards": len(totals.shards),
        "lengths": {"shortest": int(np.flatnonzero(counts)[0]), "mean": totals.tokens / totals.samples, **quantiles,
                    "longest": int(np.flatnonzero(counts)[-1])},
        "length_histogram": {"width": width, "samples": bins},
        "latent_norms": {"of": len(indices), "least": float(norms.min()), "mean": float(norms.mean()),
                         "largest": float(norms.max())},
    }  # fmt: skip


def describe(info: dict[str, Any]) -> str:
    """Format the result of `info` as text."""
    latent, encoder = info["latent"], info["encoder"]
    lines = [
        f"{info['store']}: {info['bytes']:,} bytes by {info['created_by']}, identity {info['identity'][:12]}",
        f"tokenizer  {info['vocab_size']} tokens, sha256 {info['tokenizer']['sha256'][:12]}; stored as "
        f"{info['token_dtype']}, longest sample {info['max_length']}"
        + (", prefixes included" if "prefixes" in info["tokenizer"] else ""),
        f"           {describe_losses(info['tokenizer'])}",
        f"encoder    {', '.join(f'{key} {_short(value)}' for key, value in encoder.items())}",
        f"latents    {latent['tokens']} x {latent['channels']} {info['latent_dtype']}; centered rms "
        f"{latent['rms']:.4g}, norm of the mean {latent['norm_of_mean']:.4g}, largest standardized norm "
        f"{latent['max_norm']:.4g} (sqrt(C) is {latent['channels'] ** 0.5:.4g})",
    ]
    for name, split in info["splits"].items():
        lengths, norms = split["lengths"], split["latent_norms"]
        lines += [
            "",
            f"{name}: {split['samples']:,} samples, {split['tokens']:,} tokens, {split['characters']:,} characters "
            f"({split['characters'] / split['tokens']:.2f} per token) in {split['shards']} shards",
            f"  latent norms {norms['least']:.4g} to {norms['largest']:.4g}, mean {norms['mean']:.4g} "
            f"(of {norms['of']:,})",
            f"  lengths {lengths['shortest']} to {lengths['longest']}, mean {lengths['mean']:.1f}; "
            f"percentiles 5, 50, 95: {lengths['5%']}, {lengths['50%']}, {lengths['95%']}",
            *_bars(split["length_histogram"]),
        ]
    problems = ", ".join(f"{count:,} {kind}" for kind, count in info["problems"].items() if count) or "none"
    lines += ["", f"problems   {problems}", "sources"]
    sources = info["sources"][:10]
    lines += ["  " + ", ".join(f"{key} {_short(value)}" for key, value in source.items()) for source in sources]
    if len(info["sources"]) > len(sources):
        lines.append(f"  and {len(info['sources']) - len(sources)} more (--json has all)")
    return "\n".join(map(printable, lines))


def _short(value: Any) -> str:
    """Format a value, hashes shortened."""
    text = json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value
    return text[:12] if len(text) == 64 and set(text) <= set("0123456789abcdef") else text


def _bars(histogram: dict[str, Any]) -> Iterator[str]:
    width, counts = histogram["width"], histogram["samples"]
    for index, count in enumerate(counts):
        low = 1 + index * width
        bar = "#" * -(-count * _BAR_WIDTH // max(1, *counts))
        yield f"  {low:>6} to {low + width - 1:<6} {count:>12,}  {bar}".rstrip()


def verify_store(path: Path, threads: int | None = None, progress: Progress | None = None) -> list[str]:
    """Return a line for every damaged file and every bad sample of a store, reading `threads` files at a time.

    It is a `DataError` if the store cannot be opened at all.
    """
    store = Store.open(path)
    (items,) = partition_items(store, 1, list(store.manifest.splits))

    def verify(item: tuple[int, int, str]) -> list[str]:
        try:
            return [sample.reason for sample in verify_item(store, item)]
        except DataError as error:
            return [str(error)]

    # Threads suffice: hashing and NumPy release the GIL.
    with ThreadPoolExecutor(threads or min(8, os.cpu_count() or 1)) as pool:
        verified = (progress or Progress(False)).track(pool.map(verify, items), "shards and files", len(items))
        return [line for lines in verified for line in lines]


def samples(store: Store, split_name: str, count: int, seed: int, neighbors: int) -> Iterator[str]:
    """Yield lines about `count` random samples: length, latent norm, text, and texts with the nearest latents."""
    split = store.split(split_name)
    tokenizer = Tokenizer.load(store.path / "tokenizer")
    indices = np.sort(np.random.default_rng(seed).permutation(len(split))[:count])
    _, lengths, latents = split.gather(indices)
    norms = np.linalg.norm(latents, axis=-1).mean(axis=1)
    # One pass over the latents of the split for all samples.
    near = nearest_neighbors(store, split, latents, neighbors, indices.tolist()) if neighbors else [[] for _ in indices]

    def text_of(index: int) -> str:
        return tokenizer.decode_batch([split.tokens(index).tolist()], keep_special=True)[0]

    for index, length, norm, neighbors_of_sample in zip(indices.tolist(), lengths, norms, near, strict=True):
        characters = split.characters[index]
        yield f"{split_name} {index}: {length} tokens, {characters} characters, latent norm {norm:.4g}"
        yield f"  {text_of(index)}"
        for neighbor, cosine in neighbors_of_sample:
            yield f"  near {cosine:+.3f}, {split_name} {neighbor}: {text_of(neighbor)}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "mmldlm data", description="Statistics, verification and examples of a data store."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="counts, lengths, latents, tokenizer, encoder, sources, problems")
    info.add_argument("--json", action="store_true", help="print JSON")
    verify = commands.add_parser("verify", help="verify all hashes and samples, also of the manifest")
    verify.add_argument("--threads", type=int, help="files read at a time (default: number of CPU cores, at most 8)")
    sample = commands.add_parser("sample", help="print decoded examples with length and latent norm")
    sample.add_argument("-n", "--count", type=int, default=5, help="number of examples (default: %(default)s)")
    sample.add_argument("--split", default="train", help="train, validation or test (default: %(default)s)")
    sample.add_argument("--seed", type=int, default=0, help="seed of the draw (default: %(default)s)")
    sample.add_argument("--neighbors", type=int, default=0, metavar="K", help="also print the K nearest samples")
    for command in (info, verify, sample):
        command.add_argument("store", type=Path, help="folder of the store")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run `mmldlm data` and return 0, or raise `MmldlmError`."""
    options = _parser().parse_args(argv)
    for option in ("threads", "count", "neighbors", "seed"):
        value, minimum = getattr(options, option, None), 1 if option in ("threads", "count") else 0
        if value is not None and value < minimum:
            raise UsageError(f"--{option} {value}: expected at least {minimum}")
    if options.command == "info":
        facts = info(Store.open(options.store))
        print(json.dumps(facts, indent=1) if options.json else describe(facts))
    elif options.command == "verify":
        with Progress() as progress:
            progress.phase("verifying", announce=False)
            problems = verify_store(options.store, options.threads, progress)
        for problem in problems[:_MAX_PRINTED]:
            print(printable(problem))
        if problems:
            raise DataError(f"{options.store}: {len(problems)} problems; the first: {problems[0]}")
        manifest = Store.open(options.store).manifest
        total = sum(split.samples for split in manifest.splits.values())
        print(f"{options.store}: intact: {total:,} samples, {len(list(manifest.all_files()))} files")
    else:
        for line in samples(Store.open(options.store), options.split, options.count, options.seed, options.neighbors):
            print(printable(line))
    return 0
