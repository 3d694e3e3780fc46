"""Train: `python -m mmldlm.train CONFIG.yaml key.sub=value ...`, under any launcher."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

if __package__ in (None, ""):  # started as a script path, as the deepspeed launcher does
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from mmldlm.config import RunConfig, load_config, require
from mmldlm.errors import ExitCode, UsageError, run_command
from mmldlm.optim import lr_at
from mmldlm.training import Training


def train(config: RunConfig) -> None:
    """Run the training that `config` describes, to its end or to a signal."""
    with Training(config) as run:
        for step, micro_batches in run.steps():
            noised, totals = run.corrupt(step, micro_batches)
            for batch in run.runtime.accumulate(noised):
                loss, sums = run.objective(run.runtime.model, batch, totals)
                run.runtime.backward(loss)
                run.meter.add(sums, batch.counts)
            lr = lr_at(step, config.train.steps, config.optim, config.schedule)
            update = run.runtime.update(lr, config.optim.clip_norm)
            run.finish_step(lr, update)


def parse(argv: list[str] | None) -> tuple[RunConfig, bool]:
    parser = argparse.ArgumentParser(
        prog="mmldlm train",
        usage="%(prog)s [--dry-run] CONFIG.yaml [key.sub=value ...]",
        description="Train a run; docs/settings.md lists the keys.",
    )
    parser.add_argument("arguments", nargs="*", metavar="CONFIG.yaml | key.sub=value")
    parser.add_argument("--config", help="the config file, where it is not the first argument")
    parser.add_argument("--dry-run", action="store_true", help="print what would be trained, create nothing")
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)  # injected by the deepspeed launcher
    options = parser.parse_intermixed_args(argv)
    overrides = [argument for argument in options.arguments if "=" in argument]
    files = [argument for argument in options.arguments if "=" not in argument]
    files += [options.config] if options.config else []
    if len(files) != 1:
        raise UsageError(f"expected one config file, found {len(files)}: {' '.join(files) or 'none'}")
    return load_config(files[0], overrides), options.dry_run


def run(argv: list[str] | None = None) -> int:
    config, dry_run = parse(argv)
    require(config, "data.path", "run.dir")
    if dry_run:
        from mmldlm.estimate import print_estimate

        print_estimate(config)
        return ExitCode.DONE
    train(config)
    return ExitCode.DONE


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: run(argv))


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # torch with gloo now and then aborts in static destructors after a good run, which launchers report as failure.
    os._exit(status)
