"""`python -m benchmarks [NAME] [options]`, also `mmldlm bench`: each benchmark is a module's `main(argv)`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from mmldlm.errors import ExitCode, run_command

BENCHMARKS = {
    "ladder": "speed and memory of the trainer against the reference, one step at a time (the default)",
    "loader": "samples per second that one core reads, and how long the first batch takes",
    "prepare": "documents per second of `mmldlm prepare` by stage, and its memory",
    "scaling": "how time and memory of a step grow with tokens, length, depth, vocabulary and padding",
    "log_overhead": "what logging takes of a step, and the wait for data",
    "sampling": "tokens per second of generation",
    "busy": "tokens per second of training next to busy loops, by how OpenMP's threads wait",
    "checkpoint_stall": "how long training pauses for a checkpoint",
    "optimizers": "cost of a step of each optimizer, and the loss after equal steps",
    "engines": "traffic of each engine in a step, and bytes that it holds per parameter",
    "memory": "the dry run's estimate of memory against what a run takes",
    "gpu_memory": "the largest micro-batches that fit a GPU, by that estimate; needs no GPU",
    "learning": "what the quickstart learns, over seeds, against bars that it must pass",
    "decoding": "quality of generated texts by decoding, steps and temperature",
    "pages": "write the results into the tables of README.md and docs/; measures nothing",
    "characters": "a small character-level model against bigrams",
}
DEFAULT = "ladder"


def usage() -> str:
    names = "\n".join(f"  {name:<17} {what}" for name, what in BENCHMARKS.items())
    return f"usage: mmldlm bench [NAME] [--help] ...\n\n{names}"


def run(argv: Sequence[str]) -> int | None:
    """Run a benchmark, and return an exit code of `mmldlm`, or 1 if `--against` shows a regression."""
    if list(argv) in (["-h"], ["--help"]):
        print(usage())
        return ExitCode.DONE
    name, rest = (argv[0], argv[1:]) if argv and argv[0] in BENCHMARKS else (DEFAULT, argv)
    return importlib.import_module(f"benchmarks.{name}").main(rest)


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(lambda: run(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
