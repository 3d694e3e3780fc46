"""Evaluate a run on held-out documents: `mmldlm evaluate RUN`, or `-m mmldlm.evaluate RUN` under any launcher."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a script path, as the deepspeed launcher does
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

if __name__ == "__main__":  # before the imports below import torch
    from mmldlm.utils.process import start_rank

    start_rank()

from mmldlm.checkpoint.names import checkpoint_name
from mmldlm.checkpoint.retention import Retention
from mmldlm.checkpoint.store import CheckpointStore
from mmldlm.config import CONFIG_NAME
from mmldlm.diffusion.noise import MODES, Mode
from mmldlm.distributed.collectives import Collectives
from mmldlm.distributed.exit_files import failure_of
from mmldlm.distributed.launch import read_launcher_env
from mmldlm.distributed.process_group import process_group
from mmldlm.errors import DataError, ExitCode, UsageError, exit_process, run_command
from mmldlm.evaluation import EvaluationConfig
from mmldlm.evaluation.suite import evaluate, provenance
from mmldlm.evaluation.table import samples_markdown, table
from mmldlm.run.load import (
    BUNDLE_CONFIG,
    LoadedRun,
    add_run_options,
    add_search,
    add_settings,
    given_settings,
    load_run_on_all_ranks,
    run_config,
)
from mmldlm.settings.declaration import dump
from mmldlm.settings.successors import refuse_removed
from mmldlm.telemetry.experiment_trackers import ExperimentTracker
from mmldlm.telemetry.notices import overfitting_notice
from mmldlm.telemetry.tensorboard import TensorBoard
from mmldlm.utils.cpu import choose_threads
from mmldlm.utils.files import make_folder, write_atomically
from mmldlm.utils.nested import flatten, replace_nonfinite
from mmldlm.utils.printable import printable
from mmldlm.utils.process import stop_at_signals
from mmldlm.utils.progress import INTERVAL_S, Progress

FOLLOW_INTERVAL_S = 2.0  # between looks for a new checkpoint

# The run, config and modes, and the file of sentence pairs: the first arguments of `evaluate`.
Inputs = tuple[LoadedRun, EvaluationConfig, Sequence[Mode], Path | None]


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
    parser.add_argument(
        "--follow",
        action="store_true",
        help="evaluate each checkpoint, also while the run trains, to its last step; curves: RUN/evaluations",
    )
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)  # injected by the deepspeed launcher
    return parser


def run(argv: list[str] | None = None, interval: float = INTERVAL_S) -> int:
    """Evaluate as the command line says and return the exit code.

    `interval` is in seconds between progress lines if stderr is not a terminal.
    """
    parser = _parser()
    refuse_removed("evaluate", sys.argv[1:] if argv is None else argv)
    options = parser.parse_intermixed_args(argv)
    for name, minimum in (("samples", 2), ("texts", 1), ("times", 1), ("batch", 1), ("seed", 0)):
        if getattr(options, name) < minimum:
            parser.error(f"--{name}: expected at least {minimum}, found {getattr(options, name)}")
    config = EvaluationConfig(options.split, options.samples, options.texts, options.times, options.seed, options.batch)
    if options.out is None and (options.run / BUNDLE_CONFIG).is_file():
        parser.error("--out: expected a folder for the results, since those of a bundle are part of it")
    if options.follow and (options.checkpoint or (options.run / BUNDLE_CONFIG).is_file()):
        parser.error("--follow: evaluates each checkpoint of a run folder, expected no --checkpoint and no bundle")
    if options.follow and not (options.run / CONFIG_NAME).is_file():
        print(printable(f"waiting for {options.run / CONFIG_NAME}"), file=sys.stderr, flush=True)
        while not (options.run / CONFIG_NAME).is_file():
            time.sleep(FOLLOW_INTERVAL_S)
    with (
        stop_at_signals("nothing was written"),
        process_group(run_config(options.run).distributed, read_launcher_env(os.environ)) as processes,
        Progress(processes.is_main, interval) as progress,
    ):
        if processes.world_size == 1:
            choose_threads()
        if options.follow:
            _follow(options, config, processes, progress)
        else:
            _evaluate(options, _load(options, config, processes, progress), processes, progress)
    return ExitCode.DONE


def _load(options: argparse.Namespace, config: EvaluationConfig, processes: Collectives, progress: Progress) -> Inputs:
    """Load the run, and return the first arguments of `evaluate` (collective)."""
    progress.phase("loading the run")
    loaded = load_run_on_all_ranks(options, processes)
    modes = options.modes or loaded.config.trained_modes
    for option, mode, value in (("--search", "l2t", options.search), ("--sts", "t2l", options.sts)):
        if value and mode not in modes:
            found = ",".join(modes)
            raise UsageError(f"{option}: is of mode {mode}, expected it among those to measure, found {found}")
    return loaded, config, modes, options.sts


def _evaluate(
    options: argparse.Namespace, inputs: Inputs, processes: Collectives, progress: Progress
) -> dict[str, Any]:
    """Evaluate one checkpoint, write the results and return them (collective)."""
    measured = evaluate(*inputs, processes, progress)
    settings = given_settings(options)
    overrides = {"sampling": " ".join(settings)} if settings else {}
    result = replace_nonfinite({**overrides, **measured})
    out: Path = options.out or options.run
    with processes.raise_on_all_ranks("writing of the results"):
        if processes.is_main:
            make_folder(out)
            write_atomically(out / "samples.md", samples_markdown(result))
            _write_result(out / "evaluation.json", result)
            print("\n".join(map(printable, table(result).split("\n"))))
            if overfitting := inputs[0].info.get("overfitting"):
                print(printable(overfitting_notice(overfitting, options.run)))
            print(printable(f"written: {out / 'evaluation.json'}, {out / 'samples.md'}"), flush=True)
    return result


def _follow(options: argparse.Namespace, config: EvaluationConfig, processes: Collectives, progress: Progress) -> None:
    """Evaluate the checkpoints of a run in their order, also those to come, up to its last step (collective).

    Results in the folder of the same weights, data and options stay, so that another start goes on after the last one.
    If the run fails, it is a `DataError`, after its last checkpoint.
    """
    run: Path = options.run
    folder: Path = (options.out or run) / "evaluations"
    saved, settings = CheckpointStore(run / "checkpoints", Retention()), run_config(run)
    done, boards, trackers = 0, list[TensorBoard](), list[ExperimentTracker]()
    while done < settings.train.steps:
        progress.phase(f"waiting for a checkpoint after step {done:,} of {settings.train.steps:,}", announce=False)
        failure = failure_of(run)  # before the look for checkpoints: a run saves its last one before it fails
        paths = {step: str(path) for step, path in sorted(saved.by_step().items()) if step > done}
        found, failure = processes.gather((next(iter(paths.items()), None), failure), "choice of the checkpoint")[0]
        if found is None:
            if failure:
                raise DataError(f"{run}: has no checkpoint after step {done:,}, since the run has failed: {failure}")
            time.sleep(FOLLOW_INTERVAL_S)
            continue
        options.checkpoint, path = Path(found[1]), folder / f"{checkpoint_name(found[0])}.json"
        try:
            inputs = _load(options, config, processes, progress)
            expected, result = provenance(*inputs), dict[str, Any]()
            if processes.is_main:
                make_folder(folder)
                _set_others_aside(folder, expected)
                result = _read_result(path)
            result = processes.gather(result, "results of an earlier start")[0]
            is_kept = expected.items() <= result.items()
            result = result if is_kept else _evaluate(options, inputs, processes, progress)
        except DataError:
            if options.checkpoint.exists():
                raise
            continue  # removed by its run, which has saved newer ones since
        if processes.is_main and not is_kept:
            if not (boards or trackers):
                if settings.log.tensorboard:
                    boards = [TensorBoard(folder / "tensorboard", done + 1 if done else 0)]
                home = folder / f"{run.resolve().name}-evaluations"  # also the name that trackers show
                trackers = [ExperimentTracker(name, home, done > 0, print) for name in settings.log.trackers]
                for tracker in trackers:
                    tracker.start(dump(settings))
            _write_result(path, result)
        done = found[0]
        values = {
            f"evaluation/{key}": value for key, value in flatten(result).items() if isinstance(value, int | float)
        }
        for board in boards:
            board.scalars(done, values)
            board.flush()
        for tracker in trackers:
            tracker.log(done, values)
    for board in boards:
        board.close()
    for tracker in trackers:
        tracker.close()


def _set_others_aside(folder: Path, expected: Mapping[str, Any]) -> None:
    """Rename results of another run, of other data or of other options to `*.old`."""
    keys = ("weights", "run_id", "data_manifest", "options_sha256")
    for path in sorted(folder.glob("step-*.json")):
        result = _read_result(path)
        if others := [key for key in keys if result.get(key) != expected[key]]:
            path.rename(path.with_name(f"{path.name}.old"))
            print(printable(f"{path}: has another {', '.join(others)}; it is {path.name}.old now"), flush=True)


def _read_result(path: Path) -> dict[str, Any]:
    """Return results that `_write_result` wrote; empty if there are none."""
    try:
        result = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return result if isinstance(result, dict) else {}


def _write_result(path: Path, result: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(result, indent=1, allow_nan=False) + "\n")


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code; user errors are printed as one line."""
    return run_command(lambda: run(argv))


if __name__ == "__main__":
    exit_process(main())
