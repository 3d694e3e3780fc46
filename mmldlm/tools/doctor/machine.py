"""Checks of this machine: devices, driver, backend, shared memory, open files."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import warnings
from pathlib import Path
from typing import Literal

import torch

from mmldlm.distributed.comm_benchmark import backend_of, backend_version
from mmldlm.tools.doctor.findings import Finding, fail, ok, warn

DeviceChoice = Literal["auto", "cpu", "cuda"]

MIB = 2**20
SHARED_MEMORY_MIB_PER_PROCESS = 256  # batches of loader workers, and NCCL's buffers within a machine
MIN_OPEN_FILES = 4096


def device_type(choice: DeviceChoice) -> str:
    """Return `choice`, or for "auto" the device that a run would use: `cuda` or `cpu`."""
    return choice if choice != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def check_machine(choice: DeviceChoice, processes: int) -> list[Finding]:
    """Check this machine for a run with `processes` processes."""
    device = device_type(choice)
    return [
        check_gpus(processes) if device == "cuda" else check_cores(processes),
        check_backend(device),
        check_shared_memory(processes),
        check_open_files(),
    ]


def check_gpus(processes: int) -> Finding:
    """Check that there is one GPU per process and that torch can use it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
        count = torch.cuda.device_count() if usable else 0
    driver = driver_version()
    torch_build = (
        f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is built without CUDA"
    )
    found = f"{count} for {processes} process{'es' * (processes > 1)}, driver {driver or 'none'}, {torch_build}"
    if not usable:
        reason = str(caught[0].message).splitlines()[0] if caught else ""
        remedy = "install a torch that is built for CUDA" if not torch.version.cuda else "install the NVIDIA driver"
        return fail("GPUs", found, reason or (remedy if driver else f"no GPU driver found; {remedy}"))
    if count < processes:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = f"; CUDA_VISIBLE_DEVICES is {visible!r}" if visible is not None else ""
        return fail("GPUs", found, f"start at most {count} processes on this node{hidden}")
    properties = torch.cuda.get_device_properties(0)
    return ok("GPUs", f"{found}, {properties.name}, {properties.total_memory / 2**30:.0f} GiB")


def driver_version() -> str | None:
    """Return the version of the NVIDIA driver; None if nvidia-smi finds none."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.partition("\n")[0].strip() or None if result.returncode == 0 else None


def check_cores(processes: int) -> Finding:
    """Check that there is one core per process, and no GPU that torch cannot use."""
    cores = len(os.sched_getaffinity(0))
    found = f"{cores} for {processes} process{'es' * (processes > 1)}, no GPU"
    if not torch.cuda.is_available() and (driver := driver_version()):
        return warn(
            "cores",
            f"{found} that torch can use, but the machine has NVIDIA driver {driver}",
            "install a torch that is built for CUDA" if not torch.version.cuda else "try `mmldlm doctor --device cuda`",
        )
    if processes > cores:
        return warn("cores", found, f"start {cores} or fewer: processes that share a core wait for each other")
    return ok("cores", found)


def check_backend(device: str) -> Finding:
    """Check that torch has the communication backend of the device."""
    backend = backend_of(device)
    version = backend_version(backend)
    if version is None:
        return fail(
            "backend", f"torch {torch.__version__} is built without {backend}", "install another build of torch"
        )
    return ok("backend", f"{backend} {version}" if backend == "nccl" else f"{backend} of torch {version}")


def check_shared_memory(processes: int, folder: Path = Path("/dev/shm")) -> Finding:
    """Check the free space of the tmpfs in `folder`."""
    name, needed = "shared memory", processes * SHARED_MEMORY_MIB_PER_PROCESS
    try:
        free = shutil.disk_usage(folder).free // MIB
    except OSError as error:
        return warn(name, f"{folder}: {error.strerror}", "mount a tmpfs there: loader workers and NCCL need it")
    if free < needed:
        return warn(name, f"{free:,} MiB free in {folder}, {needed:,} advised", "in a container: --shm-size=8g")
    return ok(name, f"{free:,} MiB free in {folder}")


def check_open_files() -> Finding:
    """Check the limit of open files per process."""
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,} allowed per process"
    if limit != resource.RLIM_INFINITY and limit < MIN_OPEN_FILES:
        advice = MIN_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MIN_OPEN_FILES)
        return warn("open files", f"{found}, {MIN_OPEN_FILES:,} advised", f"ulimit -n {advice}")
    return ok("open files", found)
