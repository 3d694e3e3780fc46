"""`python -m benchmarks [NAME] [options]`: each benchmark is a function of `argv`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from mmldlm.errors import ExitCode, UsageError, run_command

BENCHMARKS = {  # module, function and description by name
    "ladder": (
        "ladder",
        "main",
        "speed and memory of the trainer against the reference, one step at a time (the default)",
    ),
    "loader": ("loader", "main", "samples per second that one core reads, and how long the first batch takes"),
    "prepare": ("prepare", "main", "documents per second of `mmldlm prepare` by stage, and its memory"),
    "scaling": (
        "scaling",
        "main",
        "how time and memory of a step grow with tokens, length, depth, vocabulary and padding",
    ),
    "real_run": ("real_run", "main", "a run with all that happens in one: are steps slower for it, what events take"),
    "checkpoint_ranks": ("checkpoints", "main", "what a checkpoint costs each rank: exchanged, read, memory"),
    "sampling": ("sampling", "main", "tokens per second of generation"),
    "decoding": ("sampling", "decoding_main", "quality of generated texts by decoding, steps and temperature"),
    "optimizers": ("optimizers", "main", "cost of a step of each optimizer, and the loss after equal steps"),
    "engines": ("engines", "main", "traffic of each engine in a step, and bytes that it holds per parameter"),
    "scale": ("scale", "main", "one rank of up to 1,024: state and traffic, work on the host, heartbeats; simulated"),
    "memory": ("memory", "main", "the dry run's estimate of memory against what a run takes"),
    "gpu_memory": ("memory", "gpu_main", "the largest micro-batches that fit a GPU, by that estimate; needs no GPU"),
    "roofline": (
        "roofline",
        "main",
        "kernels and time of a step on one H200, predicted; needs no GPU",
    ),
    "learning": ("learning", "main", "what the quickstart learns, over seeds, against bars that it must pass"),
    "trials": ("trials", "main", "an arm of a paired trial: what a change does to what is learned, over seeds"),
    "warm_start": (
        "warm_start",
        "main",
        "steps to the bound on another corpus, by `init.from` and from random weights",
    ),
    "contextual": ("contextual", "main", "latents of as many vectors as tokens against text alone: bounds of the text"),
    "mdlm": ("mdlm", "main", "text alone compared with MDLM: bits per character at equal text and at equal CPU time"),
    "characters": ("learning", "characters_main", "a small character-level model against bigrams"),
    "paired": ("paired", "main", "`mmldlm compare`: what pairing saves, and how often a decision is wrong"),
    "pages": ("pages", "main", "write the results into the tables of README.md and docs/; measures nothing"),
}
DEFAULT = "ladder"


def usage() -> str:
    names = "\n".join(f"  {name:<17} {what}" for name, (*_, what) in BENCHMARKS.items())
    return f"usage: python -m benchmarks [NAME] [--help] ...\n\n{names}"


def run(argv: Sequence[str]) -> int | None:
    """Run a benchmark, and return an exit code of `mmldlm`, or 1 if `--against` shows a regression."""
    if list(argv) in (["-h"], ["--help"]):
        print(usage())
        return ExitCode.DONE
    if argv and argv[0] not in BENCHMARKS and not argv[0].startswith("-") and "=" not in argv[0]:
        raise UsageError(f"unknown benchmark {argv[0]!r}, expected one of {', '.join(BENCHMARKS)}, or key=value")
    name, rest = (argv[0], argv[1:]) if argv and argv[0] in BENCHMARKS else (DEFAULT, argv)
    module, function, _ = BENCHMARKS[name]
    return getattr(importlib.import_module(f"benchmarks.{module}"), function)(rest)


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(lambda: run(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
