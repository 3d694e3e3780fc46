"""What is in a store, for people: its numbers, its faults, and samples of it.

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

from mmldlm.data.encoders import load_encoder
from mmldlm.data.manifest import MANIFEST_NAME, SEAL_NAME, seal_of
from mmldlm.data.nearest import latent_blocks, neighbors_of
from mmldlm.data.shard_writer import spread
from mmldlm.data.store import Split, Store
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.data.verify import deal, read_items
from mmldlm.errors import DataError
from mmldlm.utils.files import sha256

_SAMPLED = 10_000  # latents whose norms are told
_TOLD = 100  # bad samples of a shard
_BINS = 12
_BAR = 40  # characters of the longest bar


# --- info -----------------------------------------------------------------------------------------


def info(store: Store) -> dict[str, Any]:
    """All that the manifest says but its hashes, and the lengths and latent norms of the splits; JSON values."""
    manifest = store.manifest
    found = asdict(manifest)
    for key in ("splits", "files", "latent"):
        del found[key]
    mean = np.asarray(manifest.latent.mean)
    return {
        "store": str(store.path),
        "identity": store.identity,
        "bytes": sum(file.bytes for _, file in manifest.all_files()),
        **found,
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
    below = np.cumsum(counts)
    quantiles = {f"{share:.0%}": int(np.searchsorted(below, share * below[-1])) for share in (0.05, 0.5, 0.95)}
    width = -(-split.manifest.max_length // _BINS)
    bins = [int(counts[low : low + width].sum()) for low in range(1, len(counts), width)]
    rows = np.unique(np.linspace(0, len(split) - 1, min(_SAMPLED, len(split))).astype(np.int64))
    norms = np.linalg.norm(split.gather(rows)[2], axis=-1)
    return {
        "samples": totals.samples,
        "tokens": totals.tokens,
        "characters": totals.characters,
        "shards": len(totals.shards),
        "lengths": {"shortest": int(np.flatnonzero(counts)[0]), "mean": totals.tokens / totals.samples, **quantiles,
                    "longest": int(np.flatnonzero(counts)[-1])},
        "length_histogram": {"width": width, "samples": bins},
        "latent_norms": {"of": len(rows), "least": float(norms.min()), "mean": float(norms.mean()),
                         "largest": float(norms.max())},
    }  # fmt: skip


def describe(found: dict[str, Any]) -> str:
    """`info` for people."""
    latent, encoder = found["latent"], found["encoder"]
    lines = [
        f"{found['store']}: {found['bytes']:,} bytes by {found['created_by']}, identity {found['identity'][:12]}",
        f"tokenizer  {found['vocab_size']} tokens, sha256 {found['tokenizer']['sha256'][:12]}; stored as "
        f"{found['token_dtype']}, longest sample {found['max_length']}",
        f"encoder    {', '.join(f'{key} {_short(value)}' for key, value in encoder.items())}",
        f"latents    {latent['tokens']} x {latent['channels']} {found['latent_dtype']}; centerd rms "
        f"{latent['rms']:.4g}, norm of the mean {latent['norm_of_mean']:.4g}, largest standardized norm "
        f"{latent['max_norm']:.4g} (sqrt(C) is {latent['channels'] ** 0.5:.4g})",
    ]
    for name, split in found["splits"].items():
        lengths, norms = split["lengths"], split["latent_norms"]
        lines += [
            "",
            f"{name}: {split['samples']:,} samples, {split['tokens']:,} tokens, {split['characters']:,} characters "
            f"({split['characters'] / split['tokens']:.2f} a token) in {split['shards']} shards",
            f"  latent norms {norms['least']:.4g} to {norms['largest']:.4g}, mean {norms['mean']:.4g} "
            f"(of {norms['of']:,})",
            f"  lengths {lengths['shortest']} to {lengths['longest']}, mean {lengths['mean']:.1f}; "
            f"5 %, half, 95 % of samples have at most {lengths['5%']}, {lengths['50%']}, {lengths['95%']}",
            *_bars(split["length_histogram"]),
        ]
    problems = ", ".join(f"{count:,} {kind}" for kind, count in found["problems"].items() if count) or "none"
    lines += ["", f"problems   {problems}", "sources"]
    shown = found["sources"][:10]
    lines += ["  " + ", ".join(f"{key} {_short(value)}" for key, value in source.items()) for source in shown]
    if len(found["sources"]) > len(shown):
        lines.append(f"  and {len(found['sources']) - len(shown)} more (--json has all)")
    return "\n".join(lines)


def _short(value: Any) -> str:
    """A value as it is, but hashes cut."""
    text = json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value
    return text[:12] if len(text) == 64 and set(text) <= set("0123456789abcdef") else text


def _bars(histogram: dict[str, Any]) -> Iterator[str]:
    width, counts = histogram["width"], histogram["samples"]
    for index, count in enumerate(counts):
        low = 1 + index * width
        bar = "#" * -(-count * _BAR // max(1, *counts))
        yield f"  {low:>6} to {low + width - 1:<6} {count:>12,}  {bar}".rstrip()


# --- verify ---------------------------------------------------------------------------------------


def faults(path: Path, threads: int | None = None) -> list[str]:
    """A line for every file that is damaged, sample that nobody can train on, and number that contradicts the data.

    DataError where the store cannot be opened at all.
    """
    if found := _seal(path):
        return found  # what the manifest says of the files cannot be trusted
    store = Store.open(path)
    splits = list(store.manifest.splits)
    (items,) = deal(store, 1, splits)

    def read(item: tuple[int, int, str]) -> list[str]:
        try:
            count, bad = read_items(store, [item], _TOLD)
        except DataError as error:
            return [str(error)]
        more = [f"{bad[-1].why} and {count - _TOLD} more in this shard"] if count > _TOLD else []
        return [sample.why for sample in bad[: _TOLD - len(more)]] + more

    # Hashing and numpy leave the interpreter to the other threads.
    with ThreadPoolExecutor(threads or min(8, os.cpu_count() or 1)) as pool:
        found = [line for lines in pool.map(read, items) for line in lines]
    if found:
        return found  # what follows would only say the same in other words
    try:
        return list(_contradictions(store))
    except (DataError, OSError, ValueError, KeyError) as error:
        return [f"{path}: {error}"]


def _seal(path: Path) -> list[str]:
    """Whether the manifest is what was written; stores of earlier versions have no seal."""
    seal = path / SEAL_NAME
    if not seal.is_file() or not (path / MANIFEST_NAME).is_file():
        return []
    expected, found = seal.read_text(encoding="utf-8", errors="replace"), sha256(path / MANIFEST_NAME)
    if expected == seal_of(found):
        return []
    return [
        f"{path / MANIFEST_NAME}: damaged, or its {SEAL_NAME}: SHA-256 is {found[:12]}..., expected {expected[:12]}..."
    ]


def _contradictions(store: Store) -> Iterator[str]:
    """Numbers of the manifest that are not those of the data."""
    manifest, where = store.manifest, store.path / MANIFEST_NAME
    tokenizer = Tokenizer.load(store.path / "tokenizer")
    counts, longest = np.zeros(manifest.vocab_size, np.int64), 0
    pairs: dict[str, tuple[Any, Any]] = {
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
        longest = max(longest, int(np.asarray(split.lengths).max(initial=0)))
        pairs[f"splits.{name}.samples"] = totals.samples, sum(shard.samples for shard in totals.shards)
        pairs[f"splits.{name}.tokens"] = totals.tokens, sum(shard.tokens for shard in totals.shards)
        pairs[f"splits.{name}.characters"] = totals.characters, int(split.characters.sum(dtype=np.int64))
        if name == "train":
            for shard in split.shards:
                counts += np.bincount(shard.tokens, minlength=len(counts))
    pairs["max_length"] = manifest.max_length, longest
    told = Counter(json.loads(line)["kind"] for line in _lines(store.path / "problems.jsonl"))
    pairs |= {f"problems.{kind}": (manifest.problems.get(kind, 0), count) for kind, count in told.items()}
    for key, (found, expected) in pairs.items():
        if found != expected:
            yield f"{where}: {key} is {found}, expected {expected} by the data"
    if not np.array_equal(counts, store.token_counts):
        yield f"{store.path / 'token_counts.npy'}: not the counts of the training split"
    mean, rms, largest = _latent_statistics(store)
    if not np.allclose(manifest.latent.mean, mean, rtol=1e-5, atol=1e-6 * rms):
        yield f"{where}: latent.mean is not that of the training split"
    for key, value, expected in (("rms", manifest.latent.rms, rms), ("max_norm", manifest.latent.max_norm, largest)):
        if not np.isclose(value, expected, rtol=1e-5):
            yield f"{where}: latent.{key} is {value}, expected {expected} by the data"


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


def _encoder_identity(folder: Path) -> dict[str, Any]:
    """Without loading a model of sentence-transformers, which may not be there."""
    description = json.loads((folder / "encoder.json").read_text(encoding="utf-8"))
    if description["kind"] == "stretches":
        return _encoder_identity(folder / "inner") | {"stretches": description["latent_tokens"]}
    if description["kind"] == "sentence-transformers":
        return {key: description[key] for key in ("name", "revision", "prompt", "normalisation", "dim")}
    return load_encoder(folder).identity


def _latent_statistics(store: Store) -> tuple[np.ndarray, float, float]:
    """Mean [C] and rms of the training split, and the largest standardized norm of all."""
    total, count = np.zeros(store.manifest.latent.channels), 0
    for latents in latent_blocks(store.split("train")):
        total, count = total + latents.sum((0, 1)), count + latents.shape[0] * latents.shape[1]
    mean = total / count
    shards = {name: [*split.shards] for name, split in store.manifest.splits.items()}
    squares, largest = spread(store.path, shards, mean)
    rms = float(np.sqrt(sum(squares) / total.size / count))
    return mean, rms, float(np.sqrt(largest)) / rms


# --- samples --------------------------------------------------------------------------------------


def samples(store: Store, split_name: str, count: int, seed: int, neighbors: int) -> Iterator[str]:
    """`count` samples drawn from a split: length, latent norm, text, and the samples whose latents are nearest."""
    split = store.split(split_name)
    tokenizer = Tokenizer.load(store.path / "tokenizer")
    rows = np.sort(np.random.default_rng(seed).permutation(len(split))[:count])
    near = nearest(store, split, rows, neighbors) if neighbors else [[] for _ in rows]

    def text(row: int) -> str:
        (found,) = tokenizer.decode_batch([split.tokens(row).tolist()], keep_special=True)
        return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in found)

    for row, length, others in zip(rows.tolist(), split.lengths[rows].tolist(), near, strict=True):
        characters = split.characters[row]
        norm = np.linalg.norm(split.latents(row), axis=-1).mean()
        yield f"{split_name} {row}: {length} tokens, {characters} characters, latent norm {norm:.4g}"
        yield f"  {text(row)}"
        for other, cosine in others:
            yield f"  near {cosine:+.3f}, {split_name} {other}: {text(other)}"


def nearest(store: Store, split: Split, rows: np.ndarray, count: int) -> list[list[tuple[int, float]]]:
    """For each of `rows`, the `count` other samples whose standardized latents have the largest cosine, and these."""
    return neighbors_of(store, split, split.gather(rows)[2], count, rows.tolist())
