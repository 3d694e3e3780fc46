"""Calls of Accelerate and DeepSpeed: the variables that they see, and the handling of their errors."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec

import torch
from pydantic import ValidationError

from mmldlm.errors import ConfigError
from mmldlm.utils.short_repr import short_repr, truncate
from mmldlm.utils.versions import check_versions, install_command

# Set before DeepSpeed is imported, which would otherwise warn on every machine without a GPU.
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")

PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_")  # prefixes of Accelerate's variables
LIBRARIES = ("accelerate", "deepspeed", "pydantic")
MAX_MESSAGE_CHARS = 400


@contextmanager
def library_call(source: str, variables: Mapping[str, str]) -> Iterator[None]:
    """Call Accelerate or DeepSpeed in the body, with only these of Accelerate's variables.

    If a library objects to a value, this is a one-line `ConfigError`. Other kinds of errors pass unchanged, and so do
    errors of our code or PyTorch. `source` names the file that the libraries follow, or the engine.
    """
    hidden = _pop_variables()
    os.environ.update(variables)
    try:
        yield
    except Exception as error:
        package = _raised_in(error)
        # DeepSpeed also checks values by assertions. An assertion without a message is a bug.
        says = isinstance(error, ValueError) or (isinstance(error, AssertionError) and str(error))
        if package not in LIBRARIES or not (says or type(error).__name__ == "DeepSpeedConfigError"):
            raise
        raise ConfigError(f"{source}: {_message(error)} ({type(error).__name__} in {package})") from error
    finally:
        _pop_variables()  # otherwise Accelerate would select this engine for later starts, too
        os.environ.update(hidden)


def _pop_variables() -> dict[str, str]:
    return {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(PREFIXES)}


def _raised_in(error: BaseException) -> str:
    """Return the package that raised the error, also if the standard library raised it for that package."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    packages = [str(frame.f_globals.get("__name__", "")).partition(".")[0] for frame in reversed(frames)]
    return next((package for package in packages if package not in sys.stdlib_module_names), "")


def _message(error: Exception) -> str:
    if isinstance(error, ValidationError):
        problems = error.errors(include_url=False)
        text = "; ".join(
            f"{'.'.join(map(str, p['loc']))}: {p['msg']}, found {short_repr(p['input'])}" for p in problems
        )
    else:
        text = " ".join(str(error).split()) or "refused"
    return truncate(text, MAX_MESSAGE_CHARS)


def require_deepspeed(source: str) -> None:
    """Raise `ConfigError` if DeepSpeed, which `source` needs, is not installed or too old."""
    if find_spec("deepspeed") is None:
        command = install_command("deepspeed")
        raise ConfigError(f"{source}: needs DeepSpeed, mmldlm's extra deepspeed, which is not installed: {command}")
    check_versions("deepspeed")
