"""Measure a run on held-out documents: `mmldlm evaluate RUN`, or `-m mmldlm.evaluate RUN` under any launcher."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a script path, as the deepspeed launcher does
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

if __name__ == "__main__":  # before the imports below bring torch
    from mmldlm.utils.host_cpus import choose_spinning

    choose_spinning(os.environ)

from mmldlm.diffusion.noise import MODES
from mmldlm.distributed.launcher import read_launcher_env
from mmldlm.distributed.process_group import together
from mmldlm.errors import ExitCode, run_command
from mmldlm.evaluation import EvaluationConfig
from mmldlm.evaluation.suite import Extras, evaluate
from mmldlm.evaluation.table import samples_markdown, table
from mmldlm.optim.ema import add_weights_option
from mmldlm.run.load import load_run, newest_checkpoint, run_config
from mmldlm.utils.files import write_atomically
from mmldlm.utils.progress import INTERVAL_S, Progress


def finite(value: Any) -> Any:
    """The same, with None for numbers that are not finite: JSON has no word for them."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _modes(text: str) -> tuple[str, ...]:
    found = tuple(name.strip() for name in text.split(","))
    if not set(found) <= set(MODES):
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(MODES)}, with commas between, found {text}")
    return tuple(name for name in MODES if name in found)


def _parser() -> argparse.ArgumentParser:
    defaults = EvaluationConfig()
    parser = argparse.ArgumentParser(
        prog="mmldlm evaluate",
        description="Measure a run on held-out documents; docs/evaluation.md says what each metric is.",
    )
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--checkpoint", type=Path, help="a checkpoint's folder; default: the newest good one")
    parser.add_argument("--data", help="data store, where it is no longer at the config's data.path")
    add_weights_option(parser)
    parser.add_argument(
        "--modes", type=_modes, help="l2t, t2l and joint, with commas between; default: those that the run trained"
    )
    parser.add_argument("--split", default=defaults.split, help="default: %(default)s")
    for name, what in (
        ("samples", "documents of the bound, candidates of the retrieval"),
        ("texts", "documents to write from their latents, texts to make from noise"),
        ("times", "noise times a document"),
        ("seed", "of documents, noise and generation"),
        ("batch", "documents at a time, of each process"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=getattr(defaults, name), help=f"{what}; default: %(default)s"
        )
    parser.add_argument(
        "--sts",
        type=Path,
        metavar="FILE",
        help="t2l: pairs of sentences with a score, .tsv or .jsonl, to correlate with",
    )
    parser.add_argument(
        "--perplexity-model", type=Path, metavar="FOLDER", help="joint: a causal language model of transformers, local"
    )
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)  # injected by the deepspeed launcher
    return parser


def run(argv: list[str] | None = None, interval: float = INTERVAL_S) -> int:
    """`interval`: seconds between lines of progress, where stderr is no terminal."""
    parser = _parser()
    options = parser.parse_args(argv)
    for name, least in (("samples", 2), ("texts", 1), ("times", 1), ("batch", 1), ("seed", 0)):
        if getattr(options, name) < least:
            parser.error(f"--{name}: expected at least {least}, found {getattr(options, name)}")
    config = EvaluationConfig(options.split, options.samples, options.texts, options.times, options.seed, options.batch)
    extras = Extras(options.sts, options.perplexity_model)
    saved = run_config(options.run)
    with (
        together(saved.distributed, read_launcher_env(os.environ)) as processes,
        Progress(processes.is_main, interval) as progress,
    ):
        progress.phase("loading the run")
        checkpoint = options.checkpoint
        with processes.raise_on_all_ranks("loading of the run"):
            if checkpoint is None and processes.is_main:  # for all: a run that goes on may save another one meanwhile
                checkpoint = newest_checkpoint(options.run, saved).path
        checkpoint = processes.gather(str(checkpoint), "choice of the checkpoint")[0]
        with processes.raise_on_all_ranks("loading of the run"):
            loaded = load_run(options.run, checkpoint, options.data, options.weights)
        result = finite(evaluate(loaded, config, options.modes, extras, processes, progress))
        with processes.raise_on_all_ranks("writing of the results"):
            if processes.is_main:
                _write(options.run, result)
    return ExitCode.DONE


def _write(folder: Path, result: dict[str, Any]) -> None:
    write_atomically(folder / "samples.md", samples_markdown(result))
    write_atomically(folder / "evaluation.json", json.dumps(result, indent=1, allow_nan=False) + "\n")
    print(table(result))
    print(f"written: {folder / 'evaluation.json'}, {folder / 'samples.md'}", flush=True)


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: run(argv))


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # for the reason in train.py
