"""Environment variables that PyTorch and NCCL read when the process group starts."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from mmldlm.distributed.config import DistributedConfig

FLIGHT_RECORDER_ENTRIES = 2000
# PyTorch's default, "SkipCleanUp": end the process without `ncclCommAbort`, which may hang itself.
ASYNC_ERROR_HANDLING = "3"
_BY_TORCHRUN = "TORCH_NCCL_ASYNC_ERROR_HANDLING"  # which torchrun sets to 1 where its user has set nothing
_FALSE = ("0", "n", "no", "f", "false")  # in any case, as PyTorch reads them
_GUARDS = {  # variables that turn off what PyTorch does about a hang, where they are false
    "TORCH_NCCL_ENABLE_MONITORING": "distributed.heartbeat_timeout_s has no effect",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "NCCL's timeouts and errors do not end the process",
}
_exported: dict[str, str] = {}  # by this process, which may train several runs in turn; others are the user's


def settings_to_export(config: DistributedConfig) -> dict[str, str]:
    """Return variables and their values; `distributed.nccl` names none of the others."""
    recorder = str(FLIGHT_RECORDER_ENTRIES if config.flight_recorder else 0)
    return {
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(config.heartbeat_timeout_s),
        "TORCH_NCCL_BLOCKING_WAIT": str(int(config.blocking_wait)),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": ASYNC_ERROR_HANDLING if config.async_error_handling else "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": str(int(config.flight_recorder)),
        "TORCH_FR_BUFFER_SIZE": recorder,
        **{name: str(value) for name, value in config.nccl.items()},
    }


def export_settings(config: DistributedConfig) -> None:
    """Set the variables of `settings_to_export` that the user has not set, before the process group starts."""
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get(_BY_TORCHRUN) == "1":
        _exported.setdefault(_BY_TORCHRUN, "1")
    for name, value in settings_to_export(config).items():
        if os.environ.get(name) in (None, _exported.get(name)):
            os.environ[name] = _exported[name] = value


def kept_variables(config: DistributedConfig) -> list[str]:
    """Return a line about each variable that has the user's value instead of that of the settings."""
    return [
        f"{name}: {os.environ[name]} of the environment is kept, {value} of the settings (distributed) has no effect"
        for name, value in settings_to_export(config).items()
        if os.environ.get(name, value) != value
    ]


def disabled_guards(environment: Mapping[str, str]) -> list[str]:
    """Return the variables in `environment` that turn off what PyTorch does about a hang, each with its effect."""
    values = {name: environment.get(name, "1") for name in _GUARDS}
    return [f"{name}={value}: {_GUARDS[name]}" for name, value in values.items() if value.lower() in _FALSE]


def unread_variables(names: Iterable[str]) -> list[str]:
    """Return the variables that the installed PyTorch and NCCL do not read, so that setting them has no effect.

    Empty without CUDA: there is no NCCL to search, and none of them is in use.
    """
    if not torch.cuda.is_available():
        return []
    return variables_not_in([*Path(torch.__file__).parent.glob("lib/libtorch*.so"), *_nccl_libraries()], names)


def variables_not_in(libraries: Iterable[Path], names: Iterable[str]) -> list[str]:
    """Return the names of environment variables that occur in none of the compiled `libraries`, sorted."""
    missing = set(names)
    for library in libraries:
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            # NCCL stores its names without the prefix.
            missing = {
                name
                for name in missing
                if content.find(name.encode()) < 0 and content.find(_without_prefix(name).encode()) < 0
            }
        if not missing:
            break
    return sorted(missing)


def _without_prefix(name: str) -> str:
    # With the end of a C string: "DEBUG" must not be found in the name of another variable, such as DEBUG_FILE.
    return name.removeprefix("NCCL_") + "\0" if name.startswith("NCCL_") else name


def _nccl_libraries() -> list[Path]:
    try:
        import nvidia.nccl
    except ImportError:
        return []
    return [library for folder in nvidia.nccl.__path__ for library in Path(folder).glob("lib/libnccl.so*")]
