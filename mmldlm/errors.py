"""Every way a command may end, and the errors that carry its exit code.

User-facing errors derive from `MmldlmError`; their text is one line that names the key, file or
sample, the value found and the value expected. `run_command` turns them into that line on stderr
and the documented exit code. Everything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from enum import IntEnum


class ExitCode(IntEnum):
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
    """Base of all errors that are the user's to read; `exit_code` is the process's."""

    exit_code = ExitCode.USAGE


class UsageError(MmldlmError):
    """A command line that makes no sense."""

    exit_code = ExitCode.USAGE


class ConfigError(MmldlmError):
    """A key or value of the run config, or a set-up that contradicts it."""

    exit_code = ExitCode.CONFIG


class DataError(MmldlmError):
    """Input text, a data store or a checkpoint that is missing, damaged or does not fit."""

    exit_code = ExitCode.DATA


class NumericalError(MmldlmError):
    """The run was stopped because its numbers are not finite."""

    exit_code = ExitCode.NUMERICAL


class RunInUseError(MmldlmError):
    """Another process holds the run folder."""

    exit_code = ExitCode.RUN_IN_USE


class StorageError(MmldlmError):
    """The disk is full or refuses to be written."""

    exit_code = ExitCode.STORAGE


class StoppedBySignal(MmldlmError):
    """A signal asked the run to end; its state was saved first."""

    exit_code = ExitCode.STOPPED


class PeerLostError(MmldlmError):
    """Another process of the run died or hung."""

    exit_code = ExitCode.PEER_LOST


def error_of(code: int, text: str) -> MmldlmError:
    """The error that ends a command with exit code `code`."""
    kinds = [ConfigError, DataError, NumericalError, RunInUseError, StorageError, StoppedBySignal, PeerLostError]
    return next((kind for kind in kinds if kind.exit_code == code), UsageError)(text)


_DISK_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}


def outcome(error: BaseException | None) -> tuple[int, str]:
    """Exit code and one-line cause of a command that ended with `error`, or in good order with None.

    Code 1 is a bug: whoever meets it keeps the traceback.
    """
    if error is None:
        return int(ExitCode.DONE), "finished"
    if isinstance(error, MmldlmError):
        return int(error.exit_code), str(error)
    if isinstance(error, KeyboardInterrupt):
        return int(ExitCode.INTERRUPTED), "interrupted"
    if isinstance(error, OSError) and error.errno in _DISK_ERRNOS:
        return int(ExitCode.STORAGE), f"cannot write {error.filename or ''}: {error.strerror}"
    return 1, f"{type(error).__name__}: {error}"


def run_command(command: Callable[[], int | None]) -> int:
    """Run `command` and return its exit code; what is not a bug becomes one line on stderr."""
    try:
        return int(command() or ExitCode.DONE)
    except (MmldlmError, OSError, KeyboardInterrupt) as error:
        code, cause = outcome(error)
        if code == 1:
            raise
        sys.stderr.write(f"mmldlm: error: {cause}\n")  # in one piece, where several ranks write at once
        return code
