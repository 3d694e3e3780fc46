"""`python -m benchmarks [NAME] [options]`: each benchmark is a function of `argv`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from mmldlm.errors import ExitCode, UsageError, run_command

BENCHMARKS = {  # module, function and description by name
    "step": ("step", "main", "speed, memory and counts of a step of the trainer against the reference (the default)"),
    "real_run": ("real_run", "main", "a run with all that happens in one: are steps slower for it, what events take"),
    "memory": ("memory", "main", "the dry run's estimate of memory against what a run takes"),
    "learning": ("learning", "main", "what the quickstart learns, over seeds, against bars that it must pass"),
    "meaning": ("meaning", "main", "which encoders know what sentences mean the same, beside TF-IDF"),
    "generation": ("generation", "main", "what texts gain by the search, and lose with rounded, cut or noised latents"),
    "decoder": ("decoder", "main", "an autoregressive decoder beside our network, and over reads of the corpus"),
    "yardstick": ("yardstick", "main", "texts from vectors of a public encoder, by several methods, on public texts"),
    "pages": ("pages", "main", "write the results into the tables of README.md and docs/; measures nothing"),
}
DEFAULT = "step"


def usage() -> str:
    names = "\n".join(f"  {name:<17} {what}" for name, (*_, what) in BENCHMARKS.items())
    return f"usage: python -m benchmarks [NAME] [--help] ...\n\n{names}"


def run(argv: Sequence[str]) -> int | None:
    """Run a benchmark. Return an exit code of `mmldlm`, or 1 if `--against` shows a regression."""
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
