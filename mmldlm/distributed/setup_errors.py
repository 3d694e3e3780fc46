"""Errors that accelerate and DeepSpeed raise while they set up an engine, as user errors."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from mmldlm.errors import ConfigError
from mmldlm.utils.short_repr import short_repr, truncate

LIBRARIES = ("accelerate", "deepspeed", "pydantic", "transformers")
MAX_MESSAGE_CHARS = 400


@contextlib.contextmanager
def library_errors_are_config_errors(source: str) -> Iterator[None]:
    """Raise what accelerate or DeepSpeed say of a value in the body as a `ConfigError` of one line.

    Errors of other kinds, or that our code or PyTorch raises, pass unchanged. `source` names the file that the
    libraries follow, or the engine.
    """
    try:
        yield
    except Exception as error:
        place = _raised_in(error)
        # DeepSpeed checks values by assertions as well; one without words is a bug.
        says = isinstance(error, ValueError) or (isinstance(error, AssertionError) and str(error))
        if place is None or not (says or type(error).__name__ == "DeepSpeedConfigError"):
            raise
        raise ConfigError(f"{source}: {_message(error)} ({type(error).__name__} in {place})") from error


def _raised_in(error: BaseException) -> str | None:
    """Return "FILE:LINE" in the library that raised the error; None if it was another package."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in LIBRARIES:
            path = Path(frame.f_code.co_filename)
            # From the last folder with the package's name on.
            first = max((i for i, part in enumerate(path.parts) if part == package), default=len(path.parts) - 1)
            return f"{Path(*path.parts[first:])}:{line}"
        if package not in sys.stdlib_module_names:  # it raised on behalf of the package that called it
            return None
    return None


def _message(error: Exception) -> str:
    if isinstance(error, ValidationError):
        problems = error.errors(include_url=False)
        text = "; ".join(
            f"{'.'.join(map(str, p['loc']))}: {p['msg']}, found {short_repr(p['input'])}" for p in problems
        )
    else:
        text = " ".join(str(error).split()) or "refused"
    return truncate(text, MAX_MESSAGE_CHARS)
