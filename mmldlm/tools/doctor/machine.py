"""Checks of this machine alone: devices, driver, backend, shared memory, open files."""

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
SHARED_MIB_PER_PROCESS = 256  # batches of loader workers, NCCL's buffers between processes of one machine
OPEN_FILES = 4096


def device_type(choice: DeviceChoice) -> str:
    """`cuda` or `cpu`: what a run would use, where it was not chosen."""
    return choice if choice != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def check_machine(choice: DeviceChoice, processes: int) -> list[Finding]:
    """Findings for a run of `processes` on this machine."""
    device = device_type(choice)
    return [
        check_gpus(processes) if device == "cuda" else check_cores(processes),
        check_backend(device),
        check_shared_memory(processes),
        check_open_files(),
    ]


def check_gpus(processes: int) -> Finding:
    """One GPU a process, which torch can use."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
        count = torch.cuda.device_count() if usable else 0
    driver = driver_version()
    built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is built without CUDA"
    found = f"{count} for {processes} process{'es' * (processes > 1)}, driver {driver or 'none'}, {built}"
    if not usable:
        reason = str(caught[0].message).splitlines()[0] if caught else ""
        remedy = "install a torch that is built for CUDA" if not torch.version.cuda else "install the NVIDIA driver"
        return fail("GPUs", found, reason or (remedy if driver else f"no GPU driver answers; {remedy}"))
    if count < processes:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = f"; CUDA_VISIBLE_DEVICES is {visible!r}" if visible is not None else ""
        return fail("GPUs", found, f"start at most {count} processes on this node{hidden}")
    properties = torch.cuda.get_device_properties(0)
    return ok("GPUs", f"{found}, {properties.name}, {properties.total_memory / 2**30:.0f} GiB")


def driver_version() -> str | None:
    """Version of the NVIDIA driver; None where nvidia-smi finds none."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.partition("\n")[0].strip() or None if found.returncode == 0 else None


def check_cores(processes: int) -> Finding:
    """At least one core a process; and no GPU that torch overlooks."""
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
    backend = backend_of(device)
    version = backend_version(backend)
    if version is None:
        return fail(
            "backend", f"torch {torch.__version__} is built without {backend}", "install another build of torch"
        )
    return ok("backend", f"{backend} {version}" if backend == "nccl" else f"{backend} of torch {version}")


def check_shared_memory(processes: int, folder: Path = Path("/dev/shm")) -> Finding:
    name, least = "shared memory", processes * SHARED_MIB_PER_PROCESS
    try:
        free = shutil.disk_usage(folder).free // MIB
    except OSError as error:
        return warn(name, f"{folder}: {error.strerror}", "mount a tmpfs there: loader workers and NCCL need it")
    if free < least:
        return warn(name, f"{free:,} MiB free in {folder}, {least:,} advised", "in a container: --shm-size=8g")
    return ok(name, f"{free:,} MiB free in {folder}")


def check_open_files() -> Finding:
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,} allowed to a process"
    if limit != resource.RLIM_INFINITY and limit < OPEN_FILES:
        advice = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
        return warn("open files", f"{found}, {OPEN_FILES:,} advised", f"ulimit -n {advice}")
    return ok("open files", found)
