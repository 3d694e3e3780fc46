"""Evaluate a run on held-out documents: `mmldlm evaluate RUN`, or `-m mmldlm.evaluate RUN` under any launcher."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):  # started by the path of the script, as the deepspeed launcher does it
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

if __name__ == "__main__":  # before the imports below import torch
    from mmldlm.utils.process import start_rank

    start_rank()

from mmldlm.diffusion.noise import MODES
from mmldlm.distributed.collectives import Collectives
from mmldlm.distributed.launch import read_launcher_env
from mmldlm.distributed.process_group import process_group
from mmldlm.errors import ExitCode, UsageError, exit_process, run_command
from mmldlm.evaluation import EvaluationConfig
from mmldlm.evaluation.suite import evaluate
from mmldlm.evaluation.table import samples_markdown, table
from mmldlm.loading.load import (
    BUNDLE_CONFIG,
    add_run_options,
    add_search,
    add_settings,
    given_settings,
    load_run_on_all_ranks,
    run_config,
)
from mmldlm.settings.successors import refuse_removed
from mmldlm.telemetry.notices import overfitting_notice
from mmldlm.trainer.consistency import versions
from mmldlm.utils.cpu import choose_threads, hardware
from mmldlm.utils.files import make_folder, write_atomically
from mmldlm.utils.nested import replace_nonfinite
from mmldlm.utils.printable import printable
from mmldlm.utils.process import stop_at_signals
from mmldlm.utils.progress import INTERVAL_S, Progress

if TYPE_CHECKING:
    import torch


def _parse_modes(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not set(names) <= set(MODES):
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(MODES)}, separated by commas, found {text}")
    return tuple(name for name in MODES if name in names)


def _parser() -> argparse.ArgumentParser:
    defaults = EvaluationConfig()
    parser = argparse.ArgumentParser(
        prog="mmldlm evaluate",
        description="Evaluate a run on held-out documents; docs/evaluation.md describes the metrics.",
    )
    add_run_options(parser)
    add_settings(parser)
    add_search(parser)
    parser.add_argument(
        "--modes", type=_parse_modes, help="comma-separated list of l2t, t2l and joint; default: the trained modes"
    )
    parser.add_argument("--split", default=defaults.split, help="default: %(default)s")
    for name, description in (
        ("samples", "documents for the likelihood bound, and candidates for retrieval"),
        ("texts", "texts to generate from latents of documents, and from noise"),
        ("times", "noise times per document"),
        ("seed", "seed of documents, noise and generation"),
        ("batch", "documents per micro-batch of each process"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=getattr(defaults, name), help=f"{description}; default: %(default)s"
        )
    parser.add_argument(
        "--sts",
        type=Path,
        metavar="FILE",
        help="t2l: sentence pairs with similarity scores, .tsv or .jsonl, to correlate with",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="where to write the results; default: the run folder"
    )
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)  # injected by the deepspeed launcher
    return parser


def run(argv: list[str] | None = None, interval: float = INTERVAL_S) -> int:
    """Evaluate as the command line says and return the exit code.

    If stderr is not a terminal, a progress line is printed every `interval` seconds.
    """
    parser = _parser()
    refuse_removed("evaluate", sys.argv[1:] if argv is None else argv)
    options = parser.parse_intermixed_args(argv)
    for name, minimum in (("samples", 2), ("texts", 1), ("times", 1), ("batch", 1), ("seed", 0)):
        if getattr(options, name) < minimum:
            parser.error(f"--{name}: expected at least {minimum}, found {getattr(options, name)}")
    config = EvaluationConfig(options.split, options.samples, options.texts, options.times, options.seed, options.batch)
    if options.out is None and (options.run / BUNDLE_CONFIG).is_file():
        parser.error("--out: expected a folder for the results, since a bundle must not change")
    with (
        stop_at_signals("nothing was written"),
        process_group(run_config(options.run).distributed, read_launcher_env(os.environ)) as processes,
        Progress(processes.is_main, interval) as progress,
    ):
        if processes.world_size == 1:
            choose_threads()
        _evaluate(options, config, processes, progress)
    return ExitCode.DONE


def _evaluate(
    options: argparse.Namespace, config: EvaluationConfig, processes: Collectives, progress: Progress
) -> None:
    """Load and evaluate the run, and write the results (collective)."""
    progress.phase("loading the run")
    loaded = load_run_on_all_ranks(options, processes)
    modes = options.modes or loaded.config.trained_modes
    for option, mode, value in (("--search", "l2t", options.search), ("--sts", "t2l", options.sts)):
        if value and mode not in modes:
            found = ",".join(modes)
            raise UsageError(f"{option}: belongs to mode {mode}, expected it among the measured modes, found {found}")
    measured = evaluate(loaded, config, modes, options.sts, processes, progress)
    settings = given_settings(options)
    overrides = {"sampling": " ".join(settings)} if settings else {}
    result = replace_nonfinite({**overrides, **measured, "measured_by": measured_by(loaded.device)})
    out: Path = options.out or options.run
    with processes.raise_on_all_ranks("writing of the results"):
        if processes.is_main:
            make_folder(out)
            write_atomically(out / "samples.md", samples_markdown(result))
            write_atomically(out / "evaluation.json", json.dumps(result, indent=1, allow_nan=False) + "\n")
            print("\n".join(map(printable, table(result).split("\n"))))
            if overfitting := loaded.info.get("overfitting"):
                print(printable(overfitting_notice(overfitting, options.run)))
            print(printable(f"written: {out / 'evaluation.json'}, {out / 'samples.md'}"), flush=True)


def measured_by(device: torch.device) -> dict[str, Any]:
    """Return the versions and the hardware that decide the last digits of an evaluation in this process."""
    return {"versions": versions("tokenizers", "sacrebleu"), **hardware(device)}


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code. A user's error is printed as one line."""
    return run_command(lambda: run(argv))


if __name__ == "__main__":
    exit_process(main())
