"""Problems of one node: devices, disk, data, limits, ports."""

from __future__ import annotations

import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from mmldlm.config import load_config
from mmldlm.data.store import Store
from mmldlm.errors import UsageError
from mmldlm.model.mmdit import count_parameters
from mmldlm.run.factory import build_model
from mmldlm.tools.doctor.checks import (
    check_attention,
    check_cores,
    check_disk,
    check_folder,
    check_open_files,
    check_shared_memory,
    exit_code,
    fail,
    format_report,
    ok,
    warn,
)
from mmldlm.tools.doctor.nodes import NodeEnv
from tests.helpers.doctor_runs import one
from tests.helpers.paths import ROOT
from tests.helpers.ports import free_port

Command = Callable[..., "subprocess.CompletedProcess[str]"]


@contextmanager
def small_disk(folder: Path, mib: int) -> Iterator[Path]:
    """A file system of its own, mounted at `folder`."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"mounting a small disk is not permitted: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_without_a_config_only_the_machine_is_checked(command: Command) -> None:
    result = command("mmldlm.cli", "doctor", "--device", "cpu")
    assert result.returncode == 0, result.stderr
    first, *lines, summary = result.stdout.splitlines()
    assert first == "mmldlm doctor: one node, 1 process" and summary.startswith("ready")
    assert [line.split()[1] for line in lines if "->" not in line] == ["cores", "backend", "shared", "open"]


def test_ready_run_passes(command: Command, tiny_config: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    result = command("mmldlm.cli", "doctor", tiny_config, "--device", "cpu", "train.steps=9")
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"^  ok    data store +\S+store, \d+ samples to train on$", result.stdout, re.MULTILINE)
    assert sorted(tmp_path.rglob("*")) == before


def test_variables_that_turn_timeouts_off_are_warned_of() -> None:
    report = one(TORCH_NCCL_ENABLE_MONITORING="false", TORCH_NCCL_RETHROW_CUDA_ERRORS="n")
    finding = report.findings["environment"]
    assert report.code == 0 and finding["status"] == "warn"
    assert "TORCH_NCCL_ENABLE_MONITORING=false: " in finding["found"]
    assert "TORCH_NCCL_RETHROW_CUDA_ERRORS=n: " in finding["found"]
    assert "environment" not in one(TORCH_NCCL_ENABLE_MONITORING="true").findings


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has GPUs")
def test_more_gpus_asked_for_than_there_are() -> None:
    report = one("--device", "cuda", "--processes", 8)
    assert report.code == 64 and report.failed["GPUs"].startswith("0 for 8 processes, driver ")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_as_many_gpus_as_there_are() -> None:
    count = torch.cuda.device_count()
    assert one("--processes", count).findings["GPUs"]["status"] == "ok"
    assert one("--processes", count + 1).failed["GPUs"].startswith(f"{count} for {count + 1} processes, driver ")


@pytest.mark.quick
def test_more_processes_than_cores_is_a_warning() -> None:
    cores = len(os.sched_getaffinity(0))
    assert check_cores(cores).status == "ok"
    assert check_cores(cores + 1).status == "warn"


@pytest.mark.quick
def test_attention_backend_is_named_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a stub of a GPU, which only says what it is."""
    assert check_attention(load_config(None, []), "cpu").found == "sdpa on cpu in fp32"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert check_attention(load_config(None, ["precision=fp16"]), "cuda").found == "efficient on cuda in fp16"
    refused = check_attention(load_config(None, ["precision=fp16", "attention.backend=varlen"]), "cuda")
    assert refused.status == "fail" and refused.exit_code == 64
    assert refused.found.startswith("attention.backend: varlen needs a GPU of compute capability 8.0 or newer, found")


def test_missing_store() -> None:
    config = ROOT / "configs" / "quickstart.yaml"
    report = one(config, "data.path=/nowhere", "run.dir=/tmp")
    assert report.code == 65
    assert report.failed["data store"].startswith("/nowhere: not a data store: no such folder")


def test_a_wrong_setting_is_a_finding() -> None:
    report = one(ROOT / "configs" / "quickstart.yaml", "optim.lrr=1")
    assert report.code == 64 and "did you mean 'optim.lr'?" in report.failed["config"]


def test_full_disk(tiny_config: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", mib=16) as disk:
        result = one(tiny_config, f"run.dir={disk / 'run'}", "--min-free-gib", 0.001)
        assert result.code == 0  # room for the checkpoints of a tiny network
        (disk / "ballast").write_bytes(bytes(15 << 20))
        result = one(tiny_config, f"run.dir={disk / 'run'}", "--min-free-gib", 0.001)
    assert result.code == 64 and list(result.failed) == ["disk"]
    assert result.failed["disk"].startswith(f"0.0 GiB free at {disk / 'run'}, ")


@pytest.mark.quick
def test_disk_space_of_checkpoints_follows_the_network(tiny_config: Path, tiny_store: Path, tmp_path: Path) -> None:
    config, store = load_config(tiny_config), Store.open(tiny_store)
    parameters = sum(count_parameters(build_model(config, store.manifest, "cpu")).values())
    assert check_disk(config, store, 0).status == "ok"
    many = load_config(tiny_config, ["checkpoint.keep_last=999999999"])
    result = check_disk(many, store, 0)
    assert result.status == "fail"
    assert f"{1e9 * parameters * 12 / 2**30:,.1f} needed for 1000000000 checkpoints" in result.found
    with_ema = load_config(tiny_config, ["checkpoint.keep_last=999999999", "ema.decay=0.9"])
    assert f"{1e9 * parameters * 16 / 2**30:,.1f} needed" in check_disk(with_ema, store, 0).found
    # What is there already needs no more room.
    saved = tmp_path / "run" / "checkpoints" / "step-00000004" / "model.safetensors"
    saved.parent.mkdir(parents=True)
    os.truncate(os.open(saved, os.O_WRONLY | os.O_CREAT), 2**40)
    assert f"{1e9 * parameters * 12 / 2**30 - 1024:,.1f} needed" in check_disk(many, store, 0).found


@pytest.mark.quick
def test_a_run_folder_that_cannot_be_written(tmp_path: Path) -> None:
    assert check_folder(tmp_path / "new" / "run").status == "ok" and not (tmp_path / "new").exists()
    (tmp_path / "file").touch()
    result = check_folder(tmp_path / "file" / "run")
    assert result.status == "fail" and result.found == f"cannot write {tmp_path / 'file' / 'run'}: Not a directory"


@pytest.mark.quick
def test_little_shared_memory_is_a_warning(tmp_path: Path) -> None:
    with small_disk(tmp_path / "shm", mib=64) as folder:
        result = check_shared_memory(2, folder)
    assert result.status == "warn" and result.found == f"64 MiB free in {folder}, 512 advised"
    assert check_shared_memory(1, tmp_path / "none").status == "warn"


def test_few_open_files_is_a_warning() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    code = (
        "import resource; from mmldlm.tools.doctor.checks import check_open_files as check\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard})); found = check(); print(found.status, found.remedy)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert result.startswith("warn ulimit -n ")
    advice = int(result.rsplit(maxsplit=1)[1])
    assert 256 < advice <= 4096 and check_open_files().name == "open files"


def test_port_taken_names_who_has_it() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        result = one(NNODES=2, NODE_RANK=0, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        assert result.code == 64 and result.failed["port"].startswith(f"{port}: in use by process {os.getpid()}: ")
        # accelerate launch takes another port by itself, on one node.
        alone = one("--processes", 2, MASTER_PORT=port)
    assert alone.code == 0 and alone.findings["port"]["status"] == "warn"


def test_node_0_does_not_answer() -> None:
    port = free_port()
    result = one("--timeout", 0.5, NNODES=2, NODE_RANK=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    assert result.code == 64 and result.failed == {"master": f"127.0.0.1:{port} refused"}
    assert "this node itself" in result.findings["master"]["remedy"]


def test_unresolved_host() -> None:
    result = one("--timeout", 0.5, NNODES=2, NODE_RANK=1, MASTER_ADDR="node0.invalid", MASTER_PORT=29500)
    assert result.code == 64 and result.failed["master"] == "node0.invalid:29500 name not resolved"
    assert result.failed["interface"] == "none leads to node0.invalid: name not resolved"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"NNODES": "two"}, "NNODES: expected a whole number from 1 to 1000000, found two"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR: expected the address of node 0"),
        ({"NNODES": "2", "MASTER_ADDR": "a"}, "NODE_RANK: expected a whole number from 0 to 1, found nothing"),
        ({"NNODES": "2", "MASTER_ADDR": "a", "NODE_RANK": "2"}, "NODE_RANK: expected a whole number from 0 to 1"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT: expected a whole number from 1 to 65535, found 70000"),
    ],
)
def test_invalid_node_variables(environment: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(message)}"):
        NodeEnv.from_environment(environment, None, 1)


@pytest.mark.quick
def test_node_environment_variables() -> None:
    environment = {"NNODES": "4", "NODE_RANK": "3", "NPROC_PER_NODE": "8", "MASTER_ADDR": "n0", "MASTER_PORT": "1234"}
    assert NodeEnv.from_environment(environment, None, 2) == NodeEnv(3, 4, 8, "n0", 1234)
    assert NodeEnv.from_environment(environment, 5, 2).processes == 5
    assert NodeEnv.from_environment({}, None, 2) == NodeEnv(0, 1, 2, "127.0.0.1", 29500)


@pytest.mark.quick
def test_invalid_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")  # the module sets it otherwise, for good
    from mmldlm.tools.doctor.command import main

    for arguments in (["--processes", "0"], ["--timeout", "-1"], ["--nope"]):
        with pytest.raises(SystemExit, match=r"^2$"):
            main(arguments)
    for arguments in (["a.yaml", "b.yaml"], ["optim.lr=1"]):
        with pytest.raises(UsageError, match="expected one config file"):
            main(arguments)


@pytest.mark.quick
def test_report_and_exit_code() -> None:
    good, doubtful, bad = ok("a", "1"), warn("long name", "2", "do this"), fail("c", "3", "do that", 65)
    assert format_report([good]).splitlines() == ["  ok    a  1", "ready"]
    assert format_report([good, doubtful, bad]).splitlines() == [
        "  ok    a          1",
        "  warn  long name  2",
        "                   -> do this",
        "  FAIL  c          3",
        "                   -> do that",
        "not ready: 1 failed, 1 warning",
    ]
    assert [exit_code(result) for result in ([good, doubtful], [bad], [bad, fail("d", "", "r")])] == [0, 65, 64]
