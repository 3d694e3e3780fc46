"""Problems of a machine and of the run on it: devices, disk, data, limits."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from mmldlm import cli
from mmldlm.config import load_config
from mmldlm.data.store import Store
from mmldlm.errors import UsageError
from mmldlm.model.mmdit import count_parameters
from mmldlm.tools.doctor import (
    check_attention,
    check_cores,
    check_disk,
    check_folder,
    check_open_files,
    check_shared_memory,
    exit_code,
    fail,
    format_report,
    main,
    ok,
    warn,
)
from tests.helpers.paths import ROOT
from tests.helpers.small_model import build_model

Command = Callable[..., "subprocess.CompletedProcess[str]"]
Findings = dict[str, dict[str, str]]
Doctor = Callable[..., tuple[int, Findings]]


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Run `mmldlm doctor --json`; return its exit code and its findings by name."""

    def run(*arguments: object) -> tuple[int, Findings]:
        code = cli.main(["doctor", "--json", *map(str, arguments)])
        report = json.loads(capsys.readouterr().out)
        findings = {finding["name"]: finding for finding in report["findings"]}
        assert report["ok"] == (code == 0)
        assert all(bool(finding["remedy"]) == (finding["status"] != "ok") for finding in findings.values())
        return code, findings

    return run


def failures(findings: Findings) -> dict[str, str]:
    return {name: finding["found"] for name, finding in findings.items() if finding["status"] == "fail"}


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
    assert first == "mmldlm doctor: 1 process" and summary.startswith("ready")
    assert [line.split()[1] for line in lines if "->" not in line] == ["cores", "backend", "shared", "open"]


def test_ready_run_passes(command: Command, tiny_config: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    result = command("mmldlm.cli", "doctor", tiny_config, "--device", "cpu", "train.steps=9")
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"^  ok    data store +\S+store, \d+ samples to train on$", result.stdout, re.MULTILINE)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.quick
@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has GPUs")
def test_more_gpus_asked_for_than_there_are(doctor: Doctor) -> None:
    code, findings = doctor("--device", "cuda", "--processes", 8)
    assert code == 64 and failures(findings)["GPUs"].startswith("0 for 8 processes, driver ")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_as_many_gpus_as_there_are(doctor: Doctor) -> None:
    count = torch.cuda.device_count()
    assert doctor("--processes", count)[1]["GPUs"]["status"] == "ok"
    found = failures(doctor("--processes", count + 1)[1])["GPUs"]
    assert found.startswith(f"{count} for {count + 1} processes, driver ")


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


@pytest.mark.quick
def test_missing_store(doctor: Doctor) -> None:
    code, findings = doctor(ROOT / "configs" / "quickstart.yaml", "data.path=/nowhere", "run.dir=/tmp")
    assert code == 65 and failures(findings)["data store"].startswith("/nowhere: not a data store: no such folder")


@pytest.mark.quick
def test_a_wrong_setting_is_a_finding(doctor: Doctor) -> None:
    code, findings = doctor(ROOT / "configs" / "quickstart.yaml", "optim.lrr=1")
    assert code == 64 and "did you mean 'optim.lr'?" in failures(findings)["config"]


def test_full_disk(doctor: Doctor, tiny_config: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", mib=16) as disk:
        arguments = tiny_config, f"run.dir={disk / 'run'}", "--min-free-gib", 0.001
        assert doctor(*arguments)[0] == 0  # room for the checkpoints of a tiny network
        (disk / "ballast").write_bytes(bytes(15 << 20))
        code, findings = doctor(*arguments)
    assert code == 64 and list(failures(findings)) == ["disk"]
    assert failures(findings)["disk"].startswith(f"0.0 GiB free at {disk / 'run'}, ")


def test_disk_space_of_checkpoints_follows_the_network(tiny_config: Path, tiny_store: Path, tmp_path: Path) -> None:
    config, store = load_config(tiny_config), Store.open(tiny_store)
    parameters = sum(count_parameters(build_model(config, store.manifest)).values())
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
    assert (
        result.status == "fail"
        and result.found == f"run.dir: cannot write {tmp_path / 'file' / 'run'}: Not a directory"
    )


@pytest.mark.quick
def test_little_shared_memory_is_a_warning(tmp_path: Path) -> None:
    with small_disk(tmp_path / "shm", mib=64) as folder:
        result = check_shared_memory(2, folder)
    assert result.status == "warn" and result.found == f"64 MiB free in {folder}, 512 advised"
    assert check_shared_memory(1, tmp_path / "none").status == "warn"


def test_few_open_files_is_a_warning() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    code = (
        "import resource; from mmldlm.tools.doctor import check_open_files as check\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard})); found = check(); print(found.status, found.remedy)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert result.startswith("warn ulimit -n ")
    advice = int(result.rsplit(maxsplit=1)[1])
    assert 256 < advice <= 4096 and check_open_files().name == "open files"


@pytest.mark.quick
def test_invalid_command_line() -> None:
    for arguments in (["--processes", "0"], ["--nope"]):
        with pytest.raises(SystemExit, match=r"^2$"):
            main(arguments)
    for arguments in (["a.yaml", "b.yaml"], ["optim.lr=1"]):
        with pytest.raises(UsageError, match="expected one config file"):
            main(arguments)


@pytest.mark.quick
def test_report_and_exit_code() -> None:
    good, doubtful, bad = ok("a", "1"), warn("long name", "2", "do this"), fail("c", "3", "do that", exit_code=65)
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
