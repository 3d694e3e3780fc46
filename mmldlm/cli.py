"""`mmldlm COMMAND ...`: each command is a module's `main`, imported only when it is called."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from contextlib import suppress

from mmldlm import __version__
from mmldlm.errors import ExitCode, run_command
from mmldlm.utils.host_cpus import choose_spinning

COMMANDS = {
    "prepare": ("mmldlm.data.prepare.pipeline", "raw text to a data store"),
    "data": ("mmldlm.data.inspect_command", "look at a data store, or verify it"),
    "train": ("mmldlm.train", "train a run"),
    "sample": ("mmldlm.inference.command", "write texts from latents, find latents of texts"),
    "demo": ("mmldlm.tools.demo.command", "a web page on this machine, to sample from a run by hand"),
    "evaluate": ("mmldlm.evaluate", "measure a run on held-out documents"),
    "monitor": ("mmldlm.tools.monitor.command", "watch runs: curves, speed, and alerts with advice"),
    "report": ("mmldlm.tools.report.command", "show runs side by side in one HTML page"),
    "config": ("mmldlm.tools.config", "show a run config, and where each value comes from"),
    "bench": ("mmldlm.tools.bench", "measure the trainer against others' practice"),
    "doctor": ("mmldlm.tools.doctor.command", "check machine, run and nodes before training"),
}
COMPUTES = ("train", "sample", "demo", "evaluate")  # with as many threads as there are
PRINTS = ("config", "data", "monitor")  # the commands that only show something


def usage() -> str:
    commands = "\n".join(f"  {name:<10} {what}" for name, (_, what) in COMMANDS.items())
    return f"mmldlm {__version__}\n\nusage: mmldlm COMMAND [--help] ...\n\n{commands}"


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help", "--version"):
        print(usage())
        return ExitCode.DONE if arguments else ExitCode.USAGE
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        print(f"mmldlm: error: unknown command {name!r}, expected one of {', '.join(COMMANDS)}", file=sys.stderr)
        return ExitCode.USAGE
    if argv is None and name in PRINTS:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # whoever reads this, as `head` does, may stop before the end
    if argv is None and name in COMPUTES:
        choose_spinning(os.environ)  # before the module imports torch
    module = importlib.import_module(COMMANDS[name][0])
    status = run_command(lambda: module.main(rest))
    sys.stdout.flush()
    with suppress(OSError):  # nobody reads any more what was said on the way
        sys.stderr.flush()
    if argv is None and name in ("train", "doctor", "evaluate", "demo"):
        os._exit(status)  # for the reason in train.py; and a thread of the demo may be in the midst of a generation
    return status


if __name__ == "__main__":
    sys.exit(main())
