"""Documents per second of `mmldlm prepare`, by stage, and its memory.

    python -m benchmarks prepare [--documents 100000] [--processes 1 2] [--part-bytes N] [--quick]

The corpus is synthetic: lines of 52 to 111 words, about 100 tokens each, with the default tokenizer and lsa. Each build
is a separate command, which prints the seconds of its stages. Seconds are wall time, so the machine should be quiet.
Memory is resident memory summed over the processes, with shared pages counted in each.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

from benchmarks.common.report import ROOT, parse, parser, positive, print_status, report, work_dir

STAGES = ("read", "fit", "tokenize", "encode", "measure", "merge")
_SAMPLE_S = 0.05


def build(corpus: Path, store: Path, processes: int, *options: object) -> tuple[float, int, dict[str, float]]:
    """Run the command; return its seconds, its peak of resident bytes, and the seconds of each stage that it ran."""
    began, log = time.perf_counter(), store.with_suffix(".log")
    process = started(corpus, store, processes, *options)
    peak = peak_until(process, lambda: False)
    seconds = time.perf_counter() - began
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, "mmldlm prepare", stderr=log.read_text())
    printed = dict(re.findall(r"(\w+) ([\d.]+) s\b", log.read_text()))
    spent = {stage: float(printed.get(stage, 0)) for stage in STAGES}
    return seconds, peak, spent | {"encode": spent["encode"] - spent["tokenize"]}


def started(corpus: Path, store: Path, processes: int, *options: object) -> psutil.Popen:
    """Start a preparation in a process group of its own, with its output in a file next to the store."""
    command = [
        sys.executable,
        "-m",
        "mmldlm.cli",
        "prepare",
        corpus,
        "--out",
        store,
        "--processes",
        processes,
        *options,
    ]
    with store.with_suffix(".log").open("w") as file:
        return psutil.Popen(
            [str(each) for each in command],
            cwd=ROOT,
            stderr=file,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )


def peak_until(process: psutil.Popen, enough: Callable[[], bool]) -> int:
    """Return the peak of resident bytes until the process ends, or until `enough` returns True."""
    peak = 0
    while process.poll() is None and not enough():
        peak = max(peak, resident(process))
        time.sleep(_SAMPLE_S)
    return peak


def resident(process: psutil.Process) -> int:
    """Return the resident bytes of a process and its descendants."""
    total = 0
    with suppress(psutil.NoSuchProcess):
        for each in [process, *process.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                total += each.memory_info().rss
    return total


def same_bytes(one: Path, other: Path) -> bool:
    names = [sorted(path.relative_to(store) for path in store.rglob("*")) for store in (one, other)]
    return names[0] == names[1] and all(
        filecmp.cmp(one / name, other / name, shallow=False) for name in names[0] if (one / name).is_file()
    )


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    options = parser("prepare", "Documents per second of a preparation, by stage, and its memory.")
    options.add_argument("--documents", type=positive, default=100_000, help="of the corpus (%(default)s)")
    options.add_argument("--processes", type=positive, nargs="+", default=[1, 2])
    options.add_argument("--part-bytes", type=positive, default=64 << 20, help="of input at a time (%(default)s)")
    options.set_defaults(rounds=1)
    return parse(options, argv, documents=2000, processes=[1], part_bytes=1 << 18)


def main(argv: Sequence[str] | None = None) -> int:
    options = parsed(argv)
    builds: list[dict[str, Any]] = []
    stages: list[dict[str, Any]] = []
    with work_dir(options) as folder:
        print_status(f"writing {options.documents:,} documents")
        corpus = write_synthetic_corpus(folder / "corpus.txt", options.documents)
        first = folder / "store-0"
        for processes in options.processes:
            print_status(f"preparing with {processes} process(es)")
            rounds, same = [], True
            for _ in range(options.rounds):
                store = first if not first.exists() else folder / "store"
                shutil.rmtree(store, ignore_errors=True)
                rounds.append(build(corpus, store, processes, "--part-bytes", options.part_bytes))
                same &= same_bytes(first, store)
            seconds = median(each[0] for each in rounds)
            builds.append(
                {
                    "processes": processes,
                    "documents": options.documents,
                    "MB of text": round(corpus.stat().st_size / 1e6),
                    "seconds": seconds,
                    "documents/s": options.documents / seconds,
                    "peak resident, MiB": max(each[1] for each in rounds) >> 20,
                    "bytes as the first": same,
                }
            )
            if processes == 1:
                times = {stage: median(each[2][stage] for each in rounds) for stage in STAGES}
                rates = {stage: options.documents / max(times[stage], 0.01) for stage in STAGES}
                stages = [
                    {"stage": each, "seconds by the clock": times[each], "documents/s": rates[each]} for each in STAGES
                ]
    report(
        options,
        "prepare",
        {"Preparation, by the clock": builds, **({"Stages, one process, by the clock": stages} if stages else {})},
    )
    return 0


# --- the corpus -----------------------------------------------------------------------------------

WORDS = 50_000
_CONSONANTS, _VOWELS = "bcdfghklmnprstvz", "aeiou"
_AT_ONCE = 10_000  # documents of one random state


def vocabulary(size: int = WORDS) -> np.ndarray:
    """Return `size` different words, the most frequent and shortest first."""
    syllables = [first + vowel for first in _CONSONANTS for vowel in _VOWELS]
    words = []
    for number in range(size):
        word, left = "", number
        while True:
            left, syllable = divmod(left, len(syllables))
            word += syllables[syllable]
            if not left:
                break
        words.append(word)
    return np.array(words, object)


def write_synthetic_corpus(path: Path, documents: int, words: tuple[int, int] = (52, 112), seed: int = 0) -> Path:
    """Write one document per line, of `range(*words)` words; a larger corpus begins with a smaller one."""
    spelled = vocabulary()
    share = np.cumsum(1 / np.arange(1, len(spelled) + 1))
    share /= share[-1]
    with path.open("w", encoding="ascii") as file:
        for start in range(0, documents, _AT_ONCE):
            draw = np.random.default_rng([seed, start])
            lengths = draw.integers(*words, _AT_ONCE)
            drawn = spelled[np.searchsorted(share, draw.random(int(lengths.sum())))].tolist()
            ends = np.cumsum(lengths).tolist()
            for begin, end in list(zip([0, *ends], ends, strict=False))[: documents - start]:
                file.write(" ".join(drawn[begin:end]) + "\n")
    return path
