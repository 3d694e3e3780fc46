"""Train a run, under any launcher: `python -m mmldlm.train CONFIG.yaml key.sub=value ...`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):  # started as a script path, as the deepspeed launcher does
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

if __name__ == "__main__":  # do this before the imports below import torch
    from mmldlm.utils.process import start_rank

    start_rank()

from mmldlm.batch import Batch
from mmldlm.config import RunConfig, load_config, require_paths, split_arguments
from mmldlm.data.manifest import CHECKSUM_NAME, MANIFEST_NAME
from mmldlm.diffusion.objective import NoisedBatch
from mmldlm.distributed.launch import LauncherEnv, read_launcher_env
from mmldlm.errors import ConfigError, ExitCode, UsageError, exit_process, run_command
from mmldlm.settings.successors import refuse_removed
from mmldlm.trainer.trainer import Trainer
from mmldlm.utils.files import folder_around


def train(
    config: RunConfig,
    launch: LauncherEnv | None = None,
    trainer_cls: type[Trainer] = Trainer,
    stop_at: int | None = None,
) -> None:
    """Train a run to its end.

    Args:
        launch: Environment of this rank, by default read from environment variables.
        trainer_cls: `Trainer`, or a subclass that overrides some of its methods.
        stop_at: Step after which to save and stop, unless it is the last one.

    Raises:
        StoppedBySignal: A signal or `stop_at` ended the run early. A checkpoint has been saved.
    """
    with trainer_cls(config, launch, stop_at) as trainer:
        for steps_done, micro_batches in trainer.steps():
            train_step(trainer, steps_done, micro_batches)


def train_step(trainer: Trainer, steps_done: int, micro_batches: Sequence[Batch | NoisedBatch]) -> None:
    """Run the optimizer step that follows `steps_done` steps, on this rank's micro-batches (collective)."""
    noised = trainer.corrupt(steps_done, micro_batches)  # q(z_t | x): masked tokens and noised latents
    totals = trainer.sync(steps_done, noised)  # starts an all-reduce: divisors of the losses, requests to stop or save
    for batch in trainer.accumulate(noised):
        trainer.forward_backward(batch, totals)
    result = trainer.update(steps_done)  # skipped if a loss or the gradient norm is non-finite or a spike
    trainer.end_step(steps_done, totals, result)  # log, validate, save; end at a signal


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line into a config file, overrides and flags."""
    parser = argparse.ArgumentParser(
        prog="mmldlm train",
        usage="%(prog)s [--check [--processes N] | --dry-run [--gpus N] | --stop-at STEP] CONFIG.yaml "
        "[key.sub=value ...]",
        description="Train a run; docs/settings.md lists the keys, docs/launchers.md the launchers.",
    )
    parser.add_argument("arguments", nargs="*", metavar="CONFIG.yaml | key.sub=value")
    parser.add_argument("--config", help="config file, if it is not the first argument")
    parser.add_argument("--dry-run", action="store_true", help="print the config and its estimated costs and exit")
    parser.add_argument(
        "--stop-at", type=int, metavar="STEP", help="save and stop after this step; schedules still span train.steps"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="check machine, data and disk, start and compare the ranks, time an all-reduce, and exit; without "
        "CONFIG.yaml check the machine. Exit code 0: ready; 64: something failed; 65: the data",
    )
    parser.add_argument("--processes", type=int, help="with --check: check this node for N processes and start none")
    parser.add_argument("--gpus", type=int, metavar="N", help="with --dry-run: print each engine's memory on N GPUs")
    parser.add_argument("--deepspeed_config", metavar="FILE", help="DeepSpeed config, with the deepspeed launcher")
    parser.add_argument(
        "--accelerate_config", metavar="FILE", help="accelerate config that selects the engine, with torchrun"
    )
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)  # the deepspeed launcher adds it
    parser.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)  # its examples pass it
    refuse_removed("train", sys.argv[1:] if argv is None else argv)
    options = parser.parse_intermixed_args(argv)
    files, options.overrides = split_arguments(options.arguments)
    files += [options.config] if options.config else []
    if options.processes is not None and not (options.check and options.processes > 0):
        raise UsageError(f"--processes: expected at least 1, together with --check, found {options.processes}")
    if options.check and not files and not options.overrides:
        return options
    if not files:
        raise UsageError("expected a config file, found none")
    if len(files) > 1:
        raise UsageError(f"{files[1]}: expected key.sub=value, since {files[0]} is the config file")
    options.config = files[0]
    if options.gpus is not None and not (options.dry_run and options.gpus > 0):
        raise UsageError(f"--gpus: expected at least 1, together with --dry-run, found {options.gpus}")
    if options.stop_at is not None and options.stop_at < 1:
        raise UsageError(f"--stop-at: expected a step from 1 on, found {options.stop_at}")
    return options


def run(argv: list[str] | None = None, trainer_cls: type[Trainer] = Trainer) -> int:
    """Run the command; return its exit code."""
    options = parse(argv)
    if options.check and (options.processes is not None or options.config is None):
        from mmldlm.trainer.start_check import check_node

        return check_node(options.config, options.overrides, options.processes, options.accelerate_config)
    try:
        config = load_config(options.config, options.overrides)
        require_paths(config, "data.path", "run.dir")
        run_dir = Path(config.run.dir)
        if (run_dir / MANIFEST_NAME).is_file() or folder_around(run_dir, CHECKSUM_NAME):
            raise ConfigError(
                f"run.dir: {run_dir} is inside a data store, bundle or checkpoint, or is one; expected another folder"
            )
        files = options.deepspeed_config, options.accelerate_config
        launch = None if options.dry_run else read_launcher_env(os.environ, *files)
    except ConfigError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            raise
        return error.exit_code  # the first process of the node prints it
    if options.dry_run:
        from mmldlm.trainer.dry_run import print_estimate

        print_estimate(config, options.accelerate_config, options.gpus)
        return ExitCode.DONE
    assert launch is not None
    if options.check:
        from mmldlm.trainer.start_check import check_node, check_start

        node = options.config, options.overrides, 1, options.accelerate_config
        if launch.world_size == 1 and (code := check_node(*node)):
            return code
        check_start(config, launch)
    else:
        train(config, launch, trainer_cls, options.stop_at)
    return ExitCode.DONE


def main(argv: list[str] | None = None, trainer_cls: type[Trainer] = Trainer) -> int:
    """Run the command, report user errors in one line, and return the exit code."""
    return run_command(lambda: run(argv, trainer_cls))


if __name__ == "__main__":
    exit_process(main())
