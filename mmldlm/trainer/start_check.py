"""`mmldlm train [CONFIG] --check`: find problems of this machine, of a run on it, and between its ranks.

It trains nothing and leaves nothing behind.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from mmldlm.config import RunConfig, load_config, require_paths, resolve_precision
from mmldlm.data.mixture import open_data
from mmldlm.data.store import Store
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.distributed.comm_benchmark import all_reduce_speed, backend_of, backend_version
from mmldlm.distributed.init import start_engine
from mmldlm.distributed.launch import LauncherEnv, read_launcher_sizes
from mmldlm.distributed.process_group import published_failures
from mmldlm.errors import ConfigError, DataError, ExitCode, MmldlmError, StorageError
from mmldlm.loading.factory import attention_backend, build_meta_model, describe_attention
from mmldlm.loading.warm_start import find_source, warm_start
from mmldlm.model.attention import AttentionConfig
from mmldlm.telemetry.resources import MIB
from mmldlm.trainer.consistency import check_run_folder, compare_ranks, writable_run_folder
from mmldlm.trainer.memory import estimate
from mmldlm.trainer.setup import build_components, check_settings, step_plan
from mmldlm.utils.files import fsync, temporary_name
from mmldlm.utils.printable import printable

_GIB = 2**30
_SHARED_MEMORY_MIB_PER_PROCESS = 256  # for batches of loader workers, and NCCL's buffers within a machine
_MIN_OPEN_FILES = 4096
_MIN_FREE_GIB = 1
_PROBE_MIB = 64  # written to measure the disk of the run folder
_MAX_CHECKPOINT_S = 30.0
# What nvidia-smi calls the state of a GPU, as far as it can be bad, and how it says that it is good or not known.
_HEALTH = (
    "ecc.errors.uncorrected.volatile.total",
    "retired_pages.pending",
    "clocks_throttle_reasons.hw_slowdown",
    "clocks_throttle_reasons.hw_thermal_slowdown",
    "clocks_throttle_reasons.hw_power_brake_slowdown",
    "clocks_throttle_reasons.sw_thermal_slowdown",
)
_HEALTHY = ("0", "No", "Not Active", "N/A", "[N/A]", "[Not Supported]")


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    status: Literal["ok", "warn", "fail"]
    name: str
    found: str
    remedy: str = ""  # how to mend it, empty if the status is "ok"
    exit_code: int = ExitCode.DONE  # of the command if nothing else fails


ok, warn = partial(Finding, "ok"), partial(Finding, "warn")
fail = partial(Finding, "fail", exit_code=ExitCode.CONFIG)


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 0 if nothing failed, 65 if only the data failed, otherwise 64."""
    codes = {finding.exit_code for finding in findings if finding.status == "fail"}
    return max(codes) if len(codes) == 1 else int(ExitCode.CONFIG if codes else ExitCode.DONE)


def format_report(findings: Sequence[Finding]) -> str:
    """Return a line for each finding, its remedy below it, and a summary."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"  {finding.status.replace('fail', 'FAIL'):<4}  {finding.name:<{width}}  {finding.found}")
        if finding.remedy:
            lines.append(f"{'':8}{'':<{width}}  -> {finding.remedy}")
    num_failed, num_warned = (sum(finding.status == status for finding in findings) for status in ("fail", "warn"))
    warnings = f", {num_warned} warning{'s' * (num_warned != 1)}" * bool(num_warned)
    return "\n".join([*lines, f"not ready: {num_failed} failed{warnings}" if num_failed else f"ready{warnings}"])


# --- this machine -----------------------------------------------------------------------------------------------


def check_gpus(processes: int) -> Finding:
    """Check that there is a GPU for each process."""
    count, properties = torch.cuda.device_count(), torch.cuda.get_device_properties(0)
    result = f"{count} for {processes} process{'es' * (processes > 1)}, driver {driver_version() or 'unknown'}"
    if count < processes:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = f"; CUDA_VISIBLE_DEVICES is {visible!r}" if visible is not None else ""
        return fail("GPUs", result, f"start at most {count} processes on this node{hidden}")
    return ok("GPUs", f"{result}, {properties.name}, {properties.total_memory / 2**30:.0f} GiB")


def driver_version() -> str | None:
    """Return the version of the NVIDIA driver, or None if nvidia-smi finds none."""
    return next((row[0] for row in _query_gpus("driver_version")), None) or None


def _query_gpus(*fields: str) -> list[list[str]]:
    """Return the values of some fields of nvidia-smi for each GPU, or nothing if it is absent or does not know one."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = result.stdout.splitlines() if result.returncode == 0 else []
    return [[value.strip() for value in line.split(",")] for line in lines]


def check_gpu_health() -> list[Finding]:
    """Check for memory errors and throttling by nvidia-smi, if it tells, and a matrix product on each GPU."""
    rows = _query_gpus("index", *_HEALTH)
    faults = [
        f"GPU {index}: {field.rpartition('reasons.')[2]} {value}"
        for index, *values in rows  # or a message about a GPU that does not answer
        for field, value in (zip(_HEALTH, values, strict=False) if values else [("does not", "answer")])
        if value not in _HEALTHY
    ]
    name, remedy = "GPU health", "reset or replace the GPU after memory errors; cool it or raise its power limit"
    findings = [warn(name, "; ".join(faults), remedy) if faults else ok(name, "no errors, not throttled")] * bool(rows)
    wrong = {index: wrong_numbers(f"cuda:{index}") for index in range(torch.cuda.device_count())}
    if bad := [f"GPU {index}: {count:,} wrong numbers" for index, count in wrong.items() if count]:
        return [*findings, fail("GPU product", "; ".join(bad), "do not train on it: replace the GPU")]
    return [*findings, ok("GPU product", f"exact on {len(wrong)}")]


def wrong_numbers(device: str) -> int:
    """Return how many numbers are wrong in products of integer matrices, which float32 represents exactly."""
    draw = torch.Generator().manual_seed(0)
    left, right = (torch.randint(-8, 9, (1024, 1024), generator=draw).float() for _ in range(2))
    expected, factors = left @ right, (left.to(device), right.to(device))
    return sum(int((torch.mm(*factors).cpu() != expected).sum()) for _ in range(10))


def check_cores(processes: int) -> Finding:
    """Check that there is a core for each process, and no GPU that torch cannot use."""
    cores = len(os.sched_getaffinity(0))
    result = f"{cores} for {processes} process{'es' * (processes > 1)}, no GPU"
    if driver := driver_version():
        # torch gives the reason in a warning.
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.is_available()
        reason = str(caught[0].message).splitlines()[0] if caught else f"torch is built for CUDA {torch.version.cuda}"
        remedy = reason if torch.version.cuda else "install a torch that is built for CUDA"
        return warn("cores", f"{result} that torch can use, but the machine has NVIDIA driver {driver}", remedy)
    if processes > cores:
        return warn("cores", result, f"start {cores} or fewer: processes that share a core wait for each other")
    return ok("cores", result)


def check_backend(device: str) -> Finding:
    """Check that torch was built with the communication backend for this device."""
    name, backend = "backend", backend_of(device)
    if (version := backend_version(backend)) is None:
        return fail(name, f"torch {torch.__version__} is built without {backend}", "install another build of torch")
    return ok(name, f"{backend} {version}" if backend == "nccl" else f"{backend} of torch {version}")


def check_shared_memory(processes: int, folder: Path = Path("/dev/shm")) -> Finding:  # noqa: S108 - for the loaders
    """Check the free space of `folder`, a tmpfs."""
    name, needed = "shared memory", processes * _SHARED_MEMORY_MIB_PER_PROCESS
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
    result = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,} allowed per process"
    if limit != resource.RLIM_INFINITY and limit < _MIN_OPEN_FILES:
        advice = _MIN_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MIN_OPEN_FILES)
        return warn("open files", f"{result}, {_MIN_OPEN_FILES:,} advised", f"ulimit -n {advice}")
    return ok("open files", result)


# --- the run ----------------------------------------------------------------------------------------------------


def check_attention(config: RunConfig, device: str) -> Finding:
    """Check that the attention of a config with its resolved precision runs here. The finding names the kernel."""
    try:
        backend = attention_backend(config, device)
    except ConfigError as error:
        return fail("attention", str(error), "set attention.backend: auto")
    return ok("attention", f"{describe_attention(backend)} on {device} in {config.precision}")


def check_store(config: RunConfig) -> tuple[Store | None, Finding]:
    """Open the data store and its tokenizer. Return the store (None if that fails) and the finding."""
    try:
        store = open_data(config.data.location)
        Tokenizer.load(store.path / "tokenizer")
    except (DataError, OSError) as error:
        remedy = "copy the store to every node, or set data.path to where this node has it"
        return None, fail("data store", str(error), remedy, exit_code=ExitCode.DATA)
    paths = ", ".join(str(source.path) for source in store.sources)
    return store, ok("data store", f"{paths}, {len(store.split('train')):,} samples to train on")


def check_init(config: RunConfig, store: Store) -> list[Finding]:
    """Check that the weights of `init` fit. No finding if `init` names none, or if the run would resume instead."""
    resumes = config.resume != "never" and any((Path(config.run.dir) / "checkpoints").glob("step-*"))
    try:
        source = {} if resumes else find_source(config.init)
        if not source:
            return []
        # The configured attention may not run on a CPU. It does not change the parameters.
        model = build_meta_model(replace(config, attention=AttentionConfig("sdpa")), store.manifest, "cpu")
        start = warm_start(source, config, store, model.initial_weights(config.run.weights_seed))
    except MmldlmError as error:
        remedy = "see docs/checkpoints.md, Start from a trained model"
        return [fail("init", str(error), remedy, exit_code=error.exit_code)]
    return [ok("init", "; ".join(line.strip() for line in start.notes))]


def check_disk(config: RunConfig, checkpoint_mib: float) -> Finding:
    """Check the disk at run.dir: it needs room for as many checkpoints as the run keeps at once, and at least 1 GiB.

    A checkpoint has `checkpoint_mib`, or 0 if its size is unknown.
    """
    folder = Path(config.run.dir)
    existing = next(path for path in [folder, *folder.resolve().parents] if path.exists())
    free = shutil.disk_usage(existing).free
    needed, reason = float(_MIN_FREE_GIB * _GIB), "records and logs"
    # One more than the run keeps: it removes an old checkpoint only after a new one is complete.
    count = config.checkpoint.retention.max_checkpoints(config.train.steps) + 1
    checkpoints = count * checkpoint_mib * MIB
    with suppress(OSError):  # a run that is training may remove some meanwhile
        # Checkpoints of an earlier start count among the kept ones, and already take their space.
        checkpoints -= sum(file.stat().st_size for file in (folder / "checkpoints").glob("step-*/*"))
    if checkpoints > needed:
        needed, reason = checkpoints, f"{count} checkpoints"
    result = f"{free / _GIB:,.1f} GiB free at {folder}, {needed / _GIB:,.1f} needed for {reason}"
    if free < needed:
        return fail("disk", result, "free some, set run.dir to another disk, or lower checkpoint.keep_last")
    return ok("disk", result)


def check_folder(run_dir: Path, checkpoint_mib: float = 0.0) -> Finding:
    """Check that files can be written to run.dir, and fast enough for a checkpoint, without leaving one behind."""
    name, path, content = "run.dir", temporary_name(run_dir / "speed"), os.urandom(MIB) * _PROBE_MIB
    try:
        with writable_run_folder(run_dir):
            started = time.perf_counter()
            try:
                path.write_bytes(content)
                fsync(path)
            finally:
                path.unlink(missing_ok=True)
            speed = _PROBE_MIB / (time.perf_counter() - started)
    except StorageError as error:
        return fail(name, str(error), "set run.dir to another folder")
    except OSError as error:
        return fail(name, f"{run_dir}: cannot write {_PROBE_MIB} MiB: {error.strerror}", "free some space")
    found = f"{run_dir.resolve()} can be written, {speed:,.0f} MiB/s with fsync"
    if (seconds := checkpoint_mib / speed) <= _MAX_CHECKPOINT_S:
        return ok(name, found)
    found += f": {seconds:,.0f} s for a checkpoint"
    return warn(name, found, "use a faster disk, or raise checkpoint.every_steps")


# --- the command ------------------------------------------------------------------------------------------------


def check_node(
    config_file: str | None, overrides: Sequence[str], processes: int | None, accelerate_file: str | None = None
) -> int:
    """Check this machine for `processes` processes (default: one per GPU) and, given a config, the run on it.

    Print the findings and return the exit code. `accelerate_file`, the launcher's file, may set the precision.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    processes = processes or max(1, torch.cuda.device_count())
    findings = [
        check_gpus(processes) if device == "cuda" else check_cores(processes),
        check_backend(device),
        check_shared_memory(processes),
        check_open_files(),
        *(check_gpu_health() if device == "cuda" else ()),
    ]
    if config_file is not None:
        findings += check_run(config_file, overrides, device, accelerate_file)
    print(*map(printable, format_report(findings).split("\n")), sep="\n", flush=True)
    return exit_code(findings)


def check_run(
    config_file: str, overrides: Sequence[str], device: str, accelerate_file: str | None = None
) -> list[Finding]:
    """Check a config: its data, its attention on this device, and the disk of its run folder."""
    try:
        _, _, mixed_precision = read_launcher_sizes(os.environ, accelerate_file)
        config = resolve_precision(load_config(config_file, overrides), mixed_precision)
        require_paths(config, "data.path", "run.dir")
    except ConfigError as error:
        return [fail("config", str(error), "see docs/settings.md, which lists the keys")]
    store, finding = check_store(config)
    findings = [ok("config", config_file), check_attention(config, device), finding]
    if store is not None:
        findings += check_init(config, store)
    checkpoint_mib = 0.0 if store is None else estimate(config, store, 1).checkpoint_mib
    return [*findings, check_disk(config, checkpoint_mib), check_folder(Path(config.run.dir), checkpoint_mib)]


def check_start(config: RunConfig, launch: LauncherEnv) -> None:
    """Start the engine, compare config, data, versions and run folder of all ranks, and print the result.

    Nothing is left behind. An error that would end the start of a run is raised here as well.
    """
    config, run_dir = resolve_precision(config, launch.mixed_precision), Path(config.run.dir)
    check_settings(config, launch, "cuda" if torch.cuda.is_available() else "cpu")
    engine = start_engine(config.distributed, launch, step_plan(config, launch.world_size))
    try:
        with published_failures(engine):
            device = engine.device
            facts = {
                "host": socket.gethostname(),
                "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
                "interface": os.environ.get("GLOO_SOCKET_IFNAME", "default"),
                "clock": time.time(),  # comparable, because all ranks have just started the engine together
            }
            ranks = engine.gather(facts)
            with engine.raise_on_all_ranks("opening of the data"):
                store = build_components(config, engine).store
            compare_ranks(engine, config, store)
            with ExitStack() as stack:
                with engine.raise_on_all_ranks("opening of the run folder"):
                    if engine.is_main:
                        stack.enter_context(writable_run_folder(run_dir))
                check_run_folder(engine, run_dir)
            lines = [f"started {engine.name} (ranks: {launch.world_size}, nodes: {launch.nodes})"]
            for rank in range(0, launch.world_size, launch.local_world_size):
                lines.append("  rank {}: {host}, {device}, network interface {interface}".format(rank, **ranks[rank]))
            clocks = [rank["clock"] for rank in ranks]
            lines.append(f"  clocks at most {max(clocks) - min(clocks):.1f} s apart")
            lines.append(f"  equal on all ranks: config, data, versions; one run folder: {run_dir.resolve()}")
            if launch.world_size > 1:
                latency_us, speed = all_reduce_speed(engine, device)
                backend = backend_of(device.type)
                lines.append(f"  all-reduce, {backend}: {latency_us:,.0f} us for 4 bytes, {speed:.2f} GB/s")
            if engine.is_main:
                print(*map(printable, lines), "ready", sep="\n", flush=True)
    finally:
        engine.close()
