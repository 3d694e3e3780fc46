"""User-facing errors and their exit codes.

They derive from `MmldlmError`. The message is one line that names the key, file or sample, the value found and the
value expected. `run_command` prints it on stderr and returns the documented exit code. It treats an OSError the same
way, because the system may refuse anything. Any other exception is a bug and keeps its traceback.
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
    """Exit codes of all commands. Code 1 is a bug."""

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
    """Base class of all user-facing errors. A command that ends with one exits with its `exit_code`."""

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
    """The run was stopped because numbers became non-finite, or because ranks computed different updates."""

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
    """Return the error that ends a command with exit code `code` and message `text`."""
    return next((cls for cls in MmldlmError.__subclasses__() if cls.exit_code == code), UsageError)(text)


def exit_code_and_cause(error: BaseException | None) -> tuple[int, str]:
    """Return exit code and one-line cause of a command that ended with `error`, or cleanly (None).

    Code 1 means a bug: re-raise the error to keep its traceback.
    """
    if error is None:
        return int(ExitCode.DONE), "finished"
    if isinstance(error, MmldlmError):
        return int(error.exit_code), hide_passwords(str(error))
    if isinstance(error, KeyboardInterrupt):
        return int(ExitCode.INTERRUPTED), "interrupted"
    if isinstance(error, RuntimeError) and getattr(error.__context__, "errno", None) == errno.ELOOP:
        error = error.__context__  # a link to itself, which `Path.resolve` reports so before Python 3.13
    # Without a name, it is a standard stream that nobody reads any more.
    if isinstance(error, OSError) and not (isinstance(error, BrokenPipeError) and error.filename is None):
        name, reason = error.filename or "a file", error.strerror or " ".join(str(error).split())
        return int(ExitCode.STORAGE), hide_passwords(f"cannot read or write {name}: {reason or type(error).__name__}")
    return 1, hide_passwords(f"{type(error).__name__}: {error}")


def run_command(command: Callable[[], int | None]) -> int:
    """Run `command` and return its exit code. Errors that are not bugs become one line on stderr."""
    try:
        return int(command() or ExitCode.DONE)
    except (Exception, KeyboardInterrupt) as error:
        code, cause = exit_code_and_cause(error)
        if code == 1:
            raise
        sys.stderr.write(f"mmldlm: error: {printable(cause)}\n")  # one write, because several ranks may write at once
        return code


def exit_process(status: int) -> NoReturn:
    """Flush the output and end the process without running destructors.

    After a good run, PyTorch with gloo sometimes aborts in static destructors, and launchers report that as a failure.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
