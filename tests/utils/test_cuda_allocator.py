"""The allocator on GPUs has its options under every command that computes, unless the user has set options of it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mmldlm.utils.malloc import CUDA_ALLOCATOR_ENV, CUDA_ALLOCATOR_OPTIONS, configure_cuda_allocator
from tests.helpers.paths import ROOT

# What PyTorch has taken from the environment, after a command has printed its help.
PROGRAM = """
import runpy, sys
module, *sys.argv[1:] = sys.argv[1:]
try:
    runpy.run_module(module, run_name="__main__")
except SystemExit:
    import torch
    print("read back:", torch._C._accelerator_getAllocatorSettings())
"""


def options(module: str, *arguments: str, **variables: str) -> str:
    """Return the options of PyTorch's allocator in a process that was started as `python -m MODULE ARGUMENTS`."""
    environment = {name: value for name, value in os.environ.items() if name not in CUDA_ALLOCATOR_ENV}
    command = [sys.executable, "-c", PROGRAM, module, *arguments]
    done = subprocess.run(command, env={**environment, **variables}, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.rpartition("read back: ")[2].strip()


@pytest.mark.parametrize("command", ["mmldlm.train", "mmldlm.evaluate", "mmldlm.cli sample"])
def test_options_are_set(command: str) -> None:
    assert options(*command.split(), "--help") == ",".join(CUDA_ALLOCATOR_OPTIONS)


def test_options_of_the_user_are_kept() -> None:
    older = {CUDA_ALLOCATOR_ENV[-1]: "max_split_size_mb:128"}
    assert options("mmldlm.cli", "sample", "--help", **older) == "max_split_size_mb:128"


@pytest.mark.quick
@pytest.mark.parametrize("name", CUDA_ALLOCATOR_ENV)
def test_environment_is_changed_only_without_options(name: str) -> None:
    environment: dict[str, str] = {}
    configure_cuda_allocator(environment)
    assert environment == {"PYTORCH_ALLOC_CONF": ",".join(CUDA_ALLOCATOR_OPTIONS)}
    given = {name: ""}
    configure_cuda_allocator(given)
    assert given == {name: ""}
