"""Samples per second that one core reads, in order of length and collated, and how long the first batch takes.

    python -m benchmarks loader [--samples 10000 100000 1000000] [--micro-batches 8 64 256] [--quick]

Stores have random tokens, and one latent of 64 channels in float16 per sample. Throughput is measured with the loader
in this process on the largest store; its stages are timed separately, on the same samples. "other" is PyTorch's
DataLoader around them. Start-up is the time from the folder to the first micro-batch of 64, with data.verify: sizes, in
a process that has imported everything, with the files in the page cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common.measure import clock
from benchmarks.common.report import parse, parser, positive, print_status, report, work_dir
from benchmarks.common.task import lengths_of, random_store
from mmldlm.data.batch_schedule import BatchSize
from mmldlm.data.loader import DataConfig, Loader, collate
from mmldlm.data.micro_batches import deal
from mmldlm.data.store import Store

LENGTH = 100  # tokens of a sample
GOAL = 50_000  # samples per second of one core
FIRST = 64  # samples of the first micro-batch


def loader_of(store: Store, micro_batch: int) -> Loader:
    """Return a loader in this process, with one micro-batch a step."""
    size = BatchSize(micro_batch, micro_batch)
    return Loader(store, "train", DataConfig(verify="sizes", num_workers=0), 0, lambda step: size)


def seconds_of(work: Callable[[], object]) -> float:
    start = clock()
    work()
    return clock() - start


def throughput(store: Store, micro_batch: int, samples: int, rounds: int) -> dict[str, Any]:
    """Return medians over rounds, each of about `samples` samples after those of the previous round."""
    loader, split, size = loader_of(store, micro_batch), store.split("train"), BatchSize(micro_batch, micro_batch)
    count = max(1, samples // micro_batch)  # micro-batches of a round
    steps = loader.steps(0, count * (rounds + 1))
    seconds: dict[str, list[float]] = {name: [] for name in ("whole", "order", "gather", "collate")}
    for number in range(rounds + 1):
        starts = range(number * count * micro_batch, (number + 1) * count * micro_batch, micro_batch)
        rows: list[np.ndarray] = []

        def order(starts: range = starts, rows: list[np.ndarray] = rows) -> None:
            for start in starts:
                taken = loader.order.take(start, micro_batch)
                (slots,) = deal(split.lengths[taken], size, 1, split.manifest.latent.tokens)
                rows.append(taken[slots[:, 0]])

        def gather(rows: list[np.ndarray] = rows) -> None:
            for samples in rows:
                split.gather(samples)

        def collated(rows: list[np.ndarray] = rows) -> None:
            for samples in rows:
                collate(split, samples, samples)

        for name, work in {
            "whole": lambda: list(islice(steps, count)),
            "order": order,
            "gather": gather,
            "collate": collated,
        }.items():
            seconds[name].append(seconds_of(work))
    read = count * micro_batch
    whole, ordering, gathering, collating = (median(values[1:]) / read for values in seconds.values())
    return {
        "micro-batch": micro_batch,
        "samples/s": 1 / whole,
        f"at least {GOAL:,}/s": 1 / whole >= GOAL,
        "us a sample: order": 1e6 * ordering,
        "gather": 1e6 * gathering,
        "collate": 1e6 * (collating - gathering),
        "other": 1e6 * (whole - ordering - collating),
        "samples a round": read,
    }


def start_up(path: Path, rounds: int) -> dict[str, Any]:
    """Return milliseconds of the start, medians over `rounds` after a first one that does not count."""
    times = []
    for _ in range(rounds + 1):
        start = clock()
        store = Store.open(path)
        opened = clock()
        loader = loader_of(store, FIRST)
        created = clock()
        next(loader.steps(0, 1))
        times.append(1000 * np.diff([start, opened, created, clock()]))
    parts = np.median(times[1:], axis=0)
    split = store.split("train")
    return {
        "samples": len(split),
        "shards": len(split.shards),
        "first batch there after, ms": float(np.median(np.sum(times[1:], axis=1))),
        **dict(zip(("open", "order and lengths", "first batch"), map(float, parts), strict=True)),
    }


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    options = parser("loader", "Samples per second of the loader on one core, and its start-up.")
    options.add_argument("--samples", type=positive, nargs="+", default=[10_000, 100_000, 1_000_000], help="of stores")
    options.add_argument("--micro-batches", type=positive, nargs="+", default=[8, 64, 256])
    options.add_argument("--read", type=positive, default=20_000, help="samples of a round (%(default)s)")
    return parse(options, argv, samples=[1000, 4000], micro_batches=[8, 32], read=1000, rounds=2)


def main(argv: Sequence[str] | None = None) -> int:
    options = parsed(argv)
    tables: dict[str, list[dict[str, Any]]] = {}
    with work_dir(options) as folder:
        lengths = {
            f"{LENGTH} tokens": lambda count: np.full(count, LENGTH),
            "sentences": lambda count: lengths_of("sentences", count),
        }
        sizes = sorted(set(options.samples))
        for kind, drawn in lengths.items():
            stores = []
            for count in sizes:
                print_status(f"writing {count:,} samples, {kind}")
                stores.append(random_store(folder / f"{kind}-{count}", drawn(count)))
            print_status("reading")
            tables[f"Loader, {kind}, {sizes[-1]:,} samples"] = [
                throughput(Store.open(stores[-1]), each, options.read, options.rounds) for each in options.micro_batches
            ]
            tables[f"Start-up, {kind}"] = [start_up(store, options.rounds) for store in stores]
    report(options, "loader", tables)
    return 0
