"""Entry point of `mmldlm COMMAND ...`. A command's module is imported only when the command is called."""

from __future__ import annotations

import importlib
import os
import signal
import sys

from mmldlm import __version__
from mmldlm.errors import ExitCode, exit_process, run_command
from mmldlm.settings.successors import refuse_removed
from mmldlm.utils.malloc import configure_cuda_allocator
from mmldlm.utils.process import start_process
from mmldlm.utils.versions import check_versions

GROUPS = {  # commands by group: the module, with the function unless it is `main`, and a description
    "Data": {
        "prepare": ("mmldlm.prepare.pipeline", "raw text to a data store"),
        "data": ("mmldlm.data.inspect", "inspect or verify a data store"),
        "convert": ("mmldlm.contrib.lgdlm.command", "data of the LGDLM trainer"),
    },
    "Train": {
        "new": ("mmldlm.tools.new", "a project folder with presets, launcher files and the quickstart"),
        "config": ("mmldlm.tools.config", "show a run config, and where each value comes from"),
        "train": ("mmldlm.train", "train a run; --check: would it start?"),
    },
    "Use": {
        "sample": ("mmldlm.inference.command", "generate texts from latents, or latents from texts"),
        "score": ("mmldlm.inference.score", "the likelihood bound of each text of a file"),
        "evaluate": ("mmldlm.evaluate", "evaluate a run on held-out documents"),
        "export": ("mmldlm.tools.export", "a run as a self-contained bundle: load it, sample from it, publish it"),
    },
    "Compare": {
        "monitor": ("mmldlm.tools.monitor.command", "watch runs: curves, speed, and alerts with advice"),
        "compare": ("mmldlm.tools.compare.command", "summarize runs, and compare them by paired tests"),
        "race": ("mmldlm.contrib.race.command", "train changes of a run until each is decided: better, or luck"),
    },
    "Repair": {
        "checkpoints": ("mmldlm.tools.checkpoints", "list the checkpoints of a run, compare two, or average several"),
        "verify": ("mmldlm.tools.verify", "check a run or a checkpoint by its hashes, and compute steps again"),
        "explain": ("mmldlm.tools.spikes:explain_main", "find the samples that caused a step's gradient norm"),
        "rewind": ("mmldlm.tools.spikes:rewind_main", "go back before a step, and leave samples out"),
    },
}
COMMANDS = {name: entry for group in GROUPS.values() for name, entry in group.items()}
# Commands that compute on torch's devices.
COMPUTE_COMMANDS = ("train", "sample", "score", "evaluate", "verify", "explain")
# Commands that continue if the terminal is closed, as their result is a file. Others do so with --out or --figures.
MAKERS = ("prepare", "convert", "train", "evaluate", "export", "race")


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code.

    Without `argv`, take the arguments of the process. The command may then end the process by a signal or `os._exit`.
    """
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help", "--version"):
        print(f"mmldlm {__version__}\n\nusage: mmldlm COMMAND [--help] ...\n")
        for title, group in GROUPS.items():
            print(f"{title}:")
            print("\n".join(f"  {name:<11} {description}" for name, (_, description) in group.items()))
        return ExitCode.DONE if arguments else ExitCode.USAGE
    name, rest = arguments[0], arguments[1:]
    outlives_terminal = name in MAKERS or any(argument.startswith(("--out", "--figures")) for argument in rest)
    if argv is None:
        start_process(outlives_terminal)
    if status := run_command(lambda: refuse_removed(name, rest)):
        return status
    if name not in COMMANDS:
        print(f"mmldlm: error: unknown command {name!r}, expected one of {', '.join(COMMANDS)}", file=sys.stderr)
        return ExitCode.USAGE
    if argv is None and name in COMPUTE_COMMANDS:
        configure_cuda_allocator(os.environ)  # before the module imports torch
    if status := run_command(check_versions):
        return status
    module, _, function = COMMANDS[name][0].partition(":")
    command = getattr(importlib.import_module(module), function or "main")
    try:
        status = run_command(lambda: command(rest))
        sys.stdout.flush()
    except BrokenPipeError:
        if argv is not None or outlives_terminal:
            raise
        # A reader, e.g. `head`, has closed the pipe. End by SIGPIPE, as other programs do.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGPIPE)
    if argv is None and name in ("train", "evaluate", "sample", "score"):
        exit_process(status)
    return status


if __name__ == "__main__":
    sys.exit(main())
