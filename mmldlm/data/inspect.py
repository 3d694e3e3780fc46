"""Inspection of a store for `mmldlm data`: its statistics, its verification, and examples of its samples.

Shape letters: n samples, M latent tokens of a sample, C latent channels.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.data.dataset import Split
from mmldlm.data.encoders import load_encoder
from mmldlm.data.manifest import CHECKSUM_NAME, MANIFEST_NAME, checksum_line, describe_losses
from mmldlm.data.nearest import latent_blocks, nearest_neighbors
from mmldlm.data.shard_writer import squared_deviations
from mmldlm.data.store import Store
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.data.verify import partition_items, verify_items
from mmldlm.errors import DataError
from mmldlm.utils.files import sha256
from mmldlm.utils.printable import printable
from mmldlm.utils.progress import Progress

_MAX_NORM_SAMPLES = 10_000  # samples per split whose latent norms are computed
_MAX_REPORTED = 100  # bad samples per shard
_LENGTH_BINS = 12
_BAR_WIDTH = 40  # characters of the longest bar


# --- info -----------------------------------------------------------------------------------------


def info(store: Store) -> dict[str, Any]:
    """Return the manifest without its hashes, and the lengths and latent norms of the splits, as JSON values."""
    manifest = store.manifest
    fields = asdict(manifest)
    for key in ("splits", "files", "latent"):
        del fields[key]
    mean = np.asarray(manifest.latent.mean)
    return {
        "store": str(store.path),
        "identity": store.identity,
        "bytes": sum(file.bytes for _, file in manifest.all_files()),
        **fields,
        "latent": {
            "tokens": manifest.latent.tokens,
            "channels": manifest.latent.channels,
            "rms": manifest.latent.rms,
            "max_norm": manifest.latent.max_norm,
            "norm_of_mean": float(np.linalg.norm(mean)),
        },
        "splits": {name: _split_info(store.split(name)) for name in manifest.splits},
    }


def _split_info(split: Split) -> dict[str, Any]:
    totals = split.manifest.splits[split.name]
    counts = np.bincount(split.lengths, minlength=split.manifest.max_length + 1)
    cumulative = np.cumsum(counts)
    quantiles = {f"{q:.0%}": int(np.searchsorted(cumulative, q * cumulative[-1])) for q in (0.05, 0.5, 0.95)}
    width = -(-split.manifest.max_length // _LENGTH_BINS)
    bins = [int(counts[low : low + width].sum()) for low in range(1, len(counts), width)]
    # Spaced evenly, not drawn: the same numbers for the same store.
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
        f"{info['token_dtype']}, longest sample {info['max_length']}",
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


# --- verify ---------------------------------------------------------------------------------------


def verify_store(path: Path, threads: int | None = None, progress: Progress | None = None) -> list[str]:
    """Verify all files and samples of a store, and the numbers of its manifest.

    Args:
        threads: Files that are read at a time; by default the number of CPU cores, at most 8.
        progress: Counts the shards and other files; None shows nothing.

    Returns:
        A line for every damaged file, bad sample, and number that contradicts the data; empty if the store is intact.

    Raises:
        DataError: The store cannot be opened at all.
    """
    if problems := _verify_checksum(path):
        return problems  # the manifest's hashes of the files cannot be trusted
    store = Store.open(path)
    splits = list(store.manifest.splits)
    (items,) = partition_items(store, 1, splits)

    def verify_item(item: tuple[int, int, str]) -> list[str]:
        try:
            count, bad = verify_items(store, [item], _MAX_REPORTED)
        except DataError as error:
            return [str(error)]
        more = [f"{bad[-1].reason} and {count - _MAX_REPORTED} more in this shard"] if count > _MAX_REPORTED else []
        return [sample.reason for sample in bad[: _MAX_REPORTED - len(more)]] + more

    # Threads suffice: hashing and NumPy release the GIL.
    with ThreadPoolExecutor(threads or min(8, os.cpu_count() or 1)) as pool:
        verified = pool.map(verify_item, items)
        verified = progress.track(verified, "shards and files", len(items)) if progress else verified
        problems = [line for lines in verified for line in lines]
    if problems:
        return problems  # contradictions would only repeat them in other words
    try:
        return list(_contradictions(store))
    except (DataError, OSError, ValueError, KeyError) as error:
        return [f"{path}: {error}"]


def _verify_checksum(path: Path) -> list[str]:
    """Return a line if the manifest does not match its checksum file, which stores of earlier versions lack."""
    checksum_path, manifest_path = path / CHECKSUM_NAME, path / MANIFEST_NAME
    if not checksum_path.is_file() or not manifest_path.is_file():
        return []
    expected, digest = checksum_path.read_text(encoding="utf-8", errors="replace"), sha256(manifest_path)
    if expected == checksum_line(digest):
        return []
    return [
        f"{manifest_path}: damaged, or its {CHECKSUM_NAME}: SHA-256 is {digest[:12]}..., expected {expected[:12]}..."
    ]


def _contradictions(store: Store) -> Iterator[str]:
    """Yield a line for every number of the manifest that contradicts the data."""
    manifest, manifest_path = store.manifest, store.path / MANIFEST_NAME
    tokenizer = Tokenizer.load(store.path / "tokenizer")
    counts, max_length = np.zeros(manifest.vocab_size, np.int64), 0
    pairs: dict[str, tuple[Any, Any]] = {  # of the manifest, of the data
        "tokenizer.sha256": (manifest.tokenizer["sha256"], tokenizer.identity),
        "vocab_size": (manifest.vocab_size, tokenizer.vocab_size),
        "mask_id": (manifest.mask_id, tokenizer.mask_id),
        "pad_id": (manifest.pad_id, tokenizer.pad_id),
    }
    encoder = _encoder_identity(store.path / "encoder")
    for key in sorted({*encoder, *manifest.encoder}):
        pairs[f"encoder.{key}"] = manifest.encoder.get(key), encoder.get(key)
    for name, totals in manifest.splits.items():
        split = store.split(name)
        max_length = max(max_length, int(np.asarray(split.lengths).max(initial=0)))
        pairs[f"splits.{name}.samples"] = totals.samples, sum(shard.samples for shard in totals.shards)
        pairs[f"splits.{name}.tokens"] = totals.tokens, sum(shard.tokens for shard in totals.shards)
        pairs[f"splits.{name}.characters"] = totals.characters, int(split.characters.sum(dtype=np.int64))
        if name == "train":
            for shard in split.shards:
                counts += np.bincount(shard.tokens, minlength=len(counts))
    pairs["max_length"] = manifest.max_length, max_length
    # Only kinds with a line are compared: `over_length` is counted, but not reported as a problem.
    reported = Counter(json.loads(line)["kind"] for line in _lines(store.path / "problems.jsonl"))
    pairs |= {f"problems.{kind}": (manifest.problems.get(kind, 0), count) for kind, count in reported.items()}
    for key, (value, expected) in pairs.items():
        if value != expected:
            yield f"{manifest_path}: {key} is {value}, expected {expected} from the data"
    if not np.array_equal(counts, store.token_counts):
        yield f"{store.path / 'token_counts.npy'}: differs from the counts in the training split"
    mean, rms, max_norm = _latent_statistics(store)
    # Sums of floats depend on their order, which differs here; atol is relative to the spread, as a mean may be 0.
    if not np.allclose(manifest.latent.mean, mean, rtol=1e-5, atol=1e-6 * rms):
        yield f"{manifest_path}: latent.mean differs from the mean of the training split"
    for key, value, expected in (("rms", manifest.latent.rms, rms), ("max_norm", manifest.latent.max_norm, max_norm)):
        if not np.isclose(value, expected, rtol=1e-5):
            yield f"{manifest_path}: latent.{key} is {value}, expected {expected} from the data"


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


def _encoder_identity(folder: Path) -> dict[str, Any]:
    """Return an encoder's identity without loading a sentence-transformers model, which may not be available."""
    description = json.loads((folder / "encoder.json").read_text(encoding="utf-8"))
    if description["kind"] == "stretches":
        return _encoder_identity(folder / "inner") | {"stretches": description["latent_tokens"]}
    if description["kind"] == "sentence-transformers":
        return {key: description[key] for key in ("name", "revision", "prompt", "normalisation", "dim")}
    return load_encoder(folder).identity


def _latent_statistics(store: Store) -> tuple[np.ndarray, float, float]:
    """Return the mean [C], the rms and the largest standardized norm of the training split."""
    total, count = np.zeros(store.manifest.latent.channels), 0
    for latents in latent_blocks(store.split("train")):
        total, count = total + latents.sum((0, 1)), count + latents.shape[0] * latents.shape[1]
    mean = total / count
    squares, largest = squared_deviations(store.path, store.manifest.splits["train"].shards, mean)
    rms = float(np.sqrt(sum(squares) / total.size / count))
    return mean, rms, float(np.sqrt(largest)) / rms


# --- samples --------------------------------------------------------------------------------------


def samples(store: Store, split_name: str, count: int, seed: int, neighbors: int) -> Iterator[str]:
    """Yield lines about `count` random samples: length, latent norm, text, and texts with the nearest latents."""
    split = store.split(split_name)
    tokenizer = Tokenizer.load(store.path / "tokenizer")
    indices = np.sort(np.random.default_rng(seed).permutation(len(split))[:count])
    # One pass over the latents for all samples.
    neighbors_of_samples: list[list[tuple[int, float]]] = [[] for _ in indices]
    if neighbors:
        latents = split.gather(indices)[2]
        neighbors_of_samples = nearest_neighbors(store, split, latents, neighbors, indices.tolist())

    def text_of(index: int) -> str:
        return tokenizer.decode_batch([split.tokens(index).tolist()], keep_special=True)[0]

    lengths = split.lengths[indices].tolist()
    for index, length, neighbors_of_sample in zip(indices.tolist(), lengths, neighbors_of_samples, strict=True):
        characters = split.characters[index]
        norm = np.linalg.norm(split.latents(index), axis=-1).mean()
        yield f"{split_name} {index}: {length} tokens, {characters} characters, latent norm {norm:.4g}"
        yield f"  {text_of(index)}"
        for neighbor, cosine in neighbors_of_sample:
            yield f"  near {cosine:+.3f}, {split_name} {neighbor}: {text_of(neighbor)}"
