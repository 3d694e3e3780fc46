"""`mmldlm doctor [CONFIG.yaml] [key.sub=value ...]`: check this machine, and the run on it, before it starts."""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from mmldlm.config import RunConfig, load_config, require_paths, resolve_precision, split_arguments
from mmldlm.data.mixture import open_data
from mmldlm.data.store import Store
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.distributed.comm_benchmark import backend_of, backend_version
from mmldlm.errors import ConfigError, DataError, ExitCode, MmldlmError, StorageError, UsageError
from mmldlm.model.attention import AttentionConfig
from mmldlm.run.factory import attention_backend, build_meta_model, describe_attention
from mmldlm.run.warm_start import find_source, warm_start
from mmldlm.trainer.consistency import writable_run_folder
from mmldlm.trainer.memory import estimate
from mmldlm.utils.printable import printable

_MIB, _GIB = 2**20, 2**30
_SHARED_MEMORY_MIB_PER_PROCESS = 256  # batches of loader workers, and NCCL's buffers within a machine
_MIN_OPEN_FILES = 4096


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        remedy: What to do about it; "" if the status is "ok".
        exit_code: Exit code of the command if this is its only failure.
    """

    status: Literal["ok", "warn", "fail"]
    name: str
    found: str
    remedy: str = ""
    exit_code: int = ExitCode.DONE


ok, warn = partial(Finding, "ok"), partial(Finding, "warn")
fail = partial(Finding, "fail", exit_code=ExitCode.CONFIG)


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 0 if nothing failed, 65 if only the data failed, otherwise 64."""
    codes = {finding.exit_code for finding in findings if finding.status == "fail"}
    return max(codes) if len(codes) == 1 else int(ExitCode.CONFIG if codes else ExitCode.DONE)


def format_report(findings: Sequence[Finding]) -> str:
    """Return one line per finding, each followed by its remedy, and a summary line."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"  {finding.status.replace('fail', 'FAIL'):<4}  {finding.name:<{width}}  {finding.found}")
        if finding.remedy:
            lines.append(f"{'':8}{'':<{width}}  -> {finding.remedy}")
    num_failed, num_warned = (sum(finding.status == status for finding in findings) for status in ("fail", "warn"))
    warnings = f"{num_warned} warning{'s' * (num_warned != 1)}"
    if num_failed:
        lines.append(f"not ready: {num_failed} failed, {warnings}")
    else:
        lines.append(f"ready, {warnings}" if num_warned else "ready")
    return "\n".join(lines)


# --- this machine -----------------------------------------------------------------------------------------------


def check_gpus(processes: int) -> Finding:
    """Check that there is one GPU per process and that torch can use it."""
    # torch says in a warning why CUDA cannot be used; the finding repeats it.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
        count = torch.cuda.device_count() if usable else 0
    driver = driver_version()
    torch_build = (
        f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is built without CUDA"
    )
    result = f"{count} for {processes} process{'es' * (processes > 1)}, driver {driver or 'none'}, {torch_build}"
    if not usable:
        reason = str(caught[0].message).splitlines()[0] if caught else ""
        remedy = "install a torch that is built for CUDA" if not torch.version.cuda else "install the NVIDIA driver"
        return fail("GPUs", result, reason or (remedy if driver else f"no GPU driver found; {remedy}"))
    if count < processes:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = f"; CUDA_VISIBLE_DEVICES is {visible!r}" if visible is not None else ""
        return fail("GPUs", result, f"start at most {count} processes on this node{hidden}")
    properties = torch.cuda.get_device_properties(0)
    return ok("GPUs", f"{result}, {properties.name}, {properties.total_memory / 2**30:.0f} GiB")


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
    result = f"{cores} for {processes} process{'es' * (processes > 1)}, no GPU"
    if not torch.cuda.is_available() and (driver := driver_version()):
        return warn(
            "cores",
            f"{result} that torch can use, but the machine has NVIDIA driver {driver}",
            "install a torch that is built for CUDA" if not torch.version.cuda else "try `mmldlm doctor --device cuda`",
        )
    if processes > cores:
        return warn("cores", result, f"start {cores} or fewer: processes that share a core wait for each other")
    return ok("cores", result)


def check_backend(device: str) -> Finding:
    """Check that torch has the communication backend of the device."""
    backend = backend_of(device)
    version = backend_version(backend)
    if version is None:
        return fail(
            "backend", f"torch {torch.__version__} is built without {backend}", "install another build of torch"
        )
    return ok("backend", f"{backend} {version}" if backend == "nccl" else f"{backend} of torch {version}")


def check_shared_memory(processes: int, folder: Path = Path("/dev/shm")) -> Finding:  # noqa: S108 - of the loaders
    """Check the free space of the tmpfs in `folder`."""
    name, needed = "shared memory", processes * _SHARED_MEMORY_MIB_PER_PROCESS
    try:
        free = shutil.disk_usage(folder).free // _MIB
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
    """Check that the configured attention runs on this machine; the finding says which kernel is taken."""
    config = resolve_precision(config)
    try:
        backend = attention_backend(config, device)
    except ConfigError as error:
        return fail("attention", str(error), "set attention.backend: auto")
    return ok("attention", f"{describe_attention(backend)} on {device} in {config.precision}")


def check_store(config: RunConfig) -> tuple[Store | None, Finding]:
    """Open the data store and its tokenizer; return the store, or None, and the finding."""
    try:
        store = open_data(config.data.location)
        Tokenizer.load(store.path / "tokenizer")
    except (DataError, OSError) as error:
        remedy = "copy the store to every node, or set data.path to where this node has it"
        return None, fail("data store", str(error), remedy, exit_code=ExitCode.DATA)
    paths = ", ".join(str(source.path) for source in store.sources)
    return store, ok("data store", f"{paths}, {len(store.split('train')):,} samples to train on")


def check_init(config: RunConfig, store: Store) -> list[Finding]:
    """Check that weights of `init` can be taken; nothing if it names none, or if the run has checkpoints to resume."""
    resumes = config.resume != "never" and any((Path(config.run.dir) / "checkpoints").glob("step-*"))
    try:
        source = {} if resumes else find_source(config.init)
        if not source:
            return []
        # The configured attention may be refused on the CPU, and has no influence on the parameters.
        model = build_meta_model(replace(config, attention=AttentionConfig("sdpa")), store.manifest, "cpu")
        start = warm_start(source, config, store, model.initial_weights(config.run.weights_seed))
    except MmldlmError as error:
        return [fail("init", str(error), "docs/checkpoints.md, Start from a trained model", exit_code=error.exit_code)]
    return [ok("init", "; ".join(line.strip() for line in start.notes))]


def check_disk(config: RunConfig, store: Store | None, min_free_gib: float) -> Finding:
    """Check the free space at run.dir: for the most checkpoints that the run keeps at once, and `min_free_gib`."""
    folder = Path(config.run.dir)
    existing = next(path for path in [folder, *folder.resolve().parents] if path.exists())
    free = shutil.disk_usage(existing).free
    needed, reason = min_free_gib * _GIB, "--min-free-gib"
    if store is not None:
        # One more than are kept, since a new one is complete before an old one is removed.
        count = config.checkpoint.retention.max_checkpoints(config.train.steps) + 1
        checkpoints = count * estimate(config, store, 1).checkpoint_mib * _MIB
        with suppress(OSError):  # a running run may remove some in the meantime
            # Checkpoints of an earlier start are among those that the run keeps, and take their space already.
            checkpoints -= sum(file.stat().st_size for file in (folder / "checkpoints").glob("step-*/*"))
        if checkpoints > needed:
            needed, reason = checkpoints, f"{count} checkpoints"
    result = f"{free / _GIB:,.1f} GiB free at {folder}, {needed / _GIB:,.1f} needed for {reason}"
    if free < needed:
        return fail("disk", result, "free some, set run.dir to another disk, or lower checkpoint.keep_last")
    return ok("disk", result)


def check_folder(run_dir: Path) -> Finding:
    """Check that a file can be written into run.dir; nothing is left behind."""
    try:
        with writable_run_folder(run_dir):
            return ok("run.dir", f"{run_dir.resolve()} can be written")
    except StorageError as error:
        return fail("run.dir", str(error), "set run.dir to another folder")


# --- the command ------------------------------------------------------------------------------------------------


def run_checks(options: argparse.Namespace) -> list[Finding]:
    """Check the machine and, if a config is given, the run; return the findings."""
    files, overrides = split_arguments(options.arguments)
    if len(files) > 1 or (overrides and not files):
        raise UsageError(f"expected one config file, found {len(files)}: {' '.join(files) or 'none'}")
    findings = [
        check_gpus(options.processes) if options.device == "cuda" else check_cores(options.processes),
        check_backend(options.device),
        check_shared_memory(options.processes),
        check_open_files(),
    ]
    if not files:
        return findings
    try:
        config = load_config(files[0], overrides)
        require_paths(config, "data.path", "run.dir")
    except ConfigError as error:
        return [*findings, fail("config", str(error), "docs/settings.md lists the keys")]
    store, finding = check_store(config)
    findings += [ok("config", files[0]), check_attention(config, options.device), finding]
    if store is not None:
        findings += check_init(config, store)
    return [*findings, check_disk(config, store, options.min_free_gib), check_folder(Path(config.run.dir))]


def main(argv: list[str] | None = None) -> int:
    """Run `mmldlm doctor`; an `MmldlmError` propagates."""
    parser = argparse.ArgumentParser(
        prog="mmldlm doctor",
        usage="%(prog)s [CONFIG.yaml] [key.sub=value ...] [options]",
        description="Check what would stop or slow a run: this machine, and with CONFIG.yaml the run on it; "
        "scripts/launch_node.sh ... --check checks all nodes. Exit code 0: ready; 64: something failed; 65: data.",
    )
    parser.add_argument("arguments", nargs="*", metavar="CONFIG.yaml | key.sub=value")
    parser.add_argument("--json", action="store_true", help="one JSON object {ok, findings} on stdout")
    parser.add_argument("--processes", type=int, help="processes on this node; default: the number of GPUs, or 1")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")
    parser.add_argument(
        "--min-free-gib", type=float, default=1.0, help="free space at run.dir, in GiB; default: %(default)s"
    )
    options = parser.parse_intermixed_args(argv)
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.processes is None:
        options.processes = max(1, torch.cuda.device_count() if options.device == "cuda" else 1)
    if options.processes < 1:
        parser.error(f"--processes: expected at least 1, found {options.processes}")
    findings = run_checks(options)
    code = exit_code(findings)
    if options.json:
        print(json.dumps({"ok": code == 0, "findings": [asdict(finding) for finding in findings]}))
    else:
        print(f"mmldlm doctor: {options.processes} process{'es' * (options.processes > 1)}")
        print(*map(printable, format_report(findings).split("\n")), sep="\n")
    return code
