"""`mmldlm rewind RUN --before STEP [--skip SAMPLE ...]`: go back to the newest checkpoint before a step.

The run's usual command then continues from there, without the named samples. The branch that it leaves stays.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mmldlm.data.mixture import open_data
from mmldlm.errors import ExitCode
from mmldlm.run.load import run_config
from mmldlm.trainer.branches import leave_branch
from mmldlm.utils.lock import RunLock
from mmldlm.utils.printable import printable


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return 0.

    A sample that is not one of the run's training samples is a `ConfigError`, a run that is training a `RunInUseError`.
    """
    parser = argparse.ArgumentParser("mmldlm rewind", description=__doc__)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--before", type=int, required=True, metavar="STEP", help="first step that is left")
    parser.add_argument(
        "--skip", nargs="+", default=[], metavar="SAMPLE", help="training samples to leave out, as STORE:INDEX"
    )
    options = parser.parse_args(argv)
    split = open_data(run_config(options.run).data.location).split("train")
    for name in options.skip:
        split.index_of(name)
    with RunLock(options.run):
        rewind = leave_branch(options.run, options.before, options.skip)
    without = f", without {', '.join(options.skip)}" if options.skip else ""
    left = f"the branch that it leaves is in {options.run / rewind['branch']}"
    print(printable(f"{options.run}: the next start continues from step {rewind['step']}{without}; {left}"))
    return ExitCode.DONE
