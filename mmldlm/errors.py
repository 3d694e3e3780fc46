"""User-facing errors and their exit codes.

User-facing errors derive from `MmldlmError`. Their message is one line that names the key, file or sample, the value
found and the value expected. `run_command` prints that line on stderr and returns the documented exit code, as it does
for an OSError, whatever the system refuses. Any other exception is a bug and keeps its traceback.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from enum import IntEnum
from typing import NoReturn

from mmldlm.utils.printable import hide_passwords, printable


class ExitCode(IntEnum):
    """Exit codes of all commands; 1 is a bug."""

    DONE = 0
    USAGE = 2
    CONFIG = 64
    DATA = 65
    ALERT = 69
    NUMERICAL = 70
    RUN_IN_USE = 73
    STORAGE = 74
    STOPPED = 75
    PEER_LOST = 76
    INTERRUPTED = 130


class MmldlmError(Exception):
    """Base class of all user-facing errors; `exit_code` is that of the process."""

    exit_code = ExitCode.USAGE


class UsageError(MmldlmError):
    """Invalid command line."""


class ConfigError(MmldlmError):
    """Invalid key or value in the run config, or an environment that contradicts it."""

    exit_code = ExitCode.CONFIG


class DataError(MmldlmError):
    """Input text, data store or checkpoint that is missing, damaged or incompatible."""

    exit_code = ExitCode.DATA


class NumericalError(MmldlmError):
    """The run was stopped because of non-finite numbers, or of ranks whose updates disagree."""

    exit_code = ExitCode.NUMERICAL


class RunInUseError(MmldlmError):
    """Another process is using the run folder."""

    exit_code = ExitCode.RUN_IN_USE


class StorageError(MmldlmError):
    """A file or folder cannot be read or written, or the disk is full."""

    exit_code = ExitCode.STORAGE


class StoppedBySignal(MmldlmError):
    """The run was stopped by a signal, after saving its state."""

    exit_code = ExitCode.STOPPED


class PeerLostError(MmldlmError):
    """Another process of the run died or hung."""

    exit_code = ExitCode.PEER_LOST


def error_from_exit_code(code: int, text: str) -> MmldlmError:
    """Return an error with message `text` that ends a command with exit code `code`."""
    return next((cls for cls in MmldlmError.__subclasses__() if cls.exit_code == code), UsageError)(text)


def exit_code_and_cause(error: BaseException | None) -> tuple[int, str]:
    """Return exit code and one-line cause of a command that ended with `error`, or cleanly with None.

    Code 1 is a bug: the caller should re-raise to keep the traceback.
    """
    if error is None:
        return int(ExitCode.DONE), "finished"
    if isinstance(error, MmldlmError):
        return int(error.exit_code), hide_passwords(str(error))
    if isinstance(error, KeyboardInterrupt):
        return int(ExitCode.INTERRUPTED), "interrupted"
    if isinstance(error, RuntimeError) and getattr(error.__context__, "errno", None) == errno.ELOOP:
        error = error.__context__  # of a link to itself, from `Path.resolve` before Python 3.13
    # A standard stream that nobody reads any more has no name.
    if isinstance(error, OSError) and not (isinstance(error, BrokenPipeError) and error.filename is None):
        name, reason = error.filename or "a file", error.strerror or " ".join(str(error).split())
        return int(ExitCode.STORAGE), hide_passwords(f"cannot read or write {name}: {reason or type(error).__name__}")
    return 1, hide_passwords(f"{type(error).__name__}: {error}")


def run_command(command: Callable[[], int | None]) -> int:
    """Run `command` and return its exit code; errors that are no bugs are printed as one line on stderr."""
    try:
        return int(command() or ExitCode.DONE)
    except (Exception, KeyboardInterrupt) as error:
        code, cause = exit_code_and_cause(error)
        if code == 1:
            raise
        sys.stderr.write(f"mmldlm: error: {printable(cause)}\n")  # a single write, as several ranks may write at once
        return code


def exit_process(status: int) -> NoReturn:
    """Flush the output and end the process without destructors.

    PyTorch with gloo now and then aborts in static destructors after a good run, which launchers report as a failure.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
