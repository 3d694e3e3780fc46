"""`mmldlm train --check`: problems of a machine and of the run on it, and the start of ranks, which leaves nothing."""

from __future__ import annotations

import os
import re
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from mmldlm import cli, train
from mmldlm.config import RunConfig, load_config, resolve_precision
from mmldlm.data.store import Store
from mmldlm.errors import ExitCode
from mmldlm.model.mmdit import count_parameters
from mmldlm.trainer.memory import estimate
from mmldlm.trainer.start_check import (
    Finding,
    check_attention,
    check_cores,
    check_disk,
    check_folder,
    check_gpu_health,
    check_gpus,
    check_open_files,
    check_shared_memory,
    exit_code,
    fail,
    format_report,
    ok,
    warn,
    wrong_numbers,
)
from tests.helpers.forked_runs import ForkedRuns
from tests.helpers.paths import ROOT
from tests.helpers.small_model import build_model


def check(forked: ForkedRuns, log: Path, config: Path, *per_rank: str) -> tuple[list[int], str]:
    """Check two ranks of DDP, of which the last one has the settings `per_rank`; return exit codes and output."""
    script = log.with_suffix(".py")
    script.write_text(
        "import os, sys\n"
        "from mmldlm import train\n"
        f"own = {list(per_rank)!r} if os.environ['RANK'] == '1' else []\n"
        "code = train.main([*sys.argv[1:], *own])\n"
        "sys.stdout.flush()\n"
        "os._exit(code)\n"
    )
    pids = forked.start("ddp", [config, "--check"], 2, log, str(script))
    codes = forked.wait(pids)
    return [codes[pid] for pid in pids], log.read_text()


def test_equal_ranks_are_ready(forked: ForkedRuns, tiny_config: Path, tmp_path: Path) -> None:
    codes, out = check(forked, tmp_path / "log", tiny_config)
    assert codes == [0, 0] and out.count("\nready\n") == 1, out
    assert "started ddp (ranks: 2, nodes: 1)" in out and "all-reduce, gloo: " in out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("setting", "code", "message"),
    [
        ("optim.lr=1e-3", ExitCode.CONFIG, "rank 1: config.optim.lr is 0.001, 0.003 on rank 0"),
        ("data.path=/nowhere", ExitCode.DATA, "/nowhere: not a data store"),
    ],
)
def test_ranks_that_differ_are_named(
    setting: str, code: int, message: str, forked: ForkedRuns, tiny_config: Path, tmp_path: Path
) -> None:
    codes, out = check(forked, tmp_path / "log", tiny_config, setting)
    assert codes == [code, code] and message in out and "\nready" not in out


def test_one_run_folder_for_all_ranks(forked: ForkedRuns, tiny_config: Path, tmp_path: Path) -> None:
    codes, out = check(forked, tmp_path / "log", tiny_config, f"run.dir={tmp_path / 'other'}")
    assert codes == [ExitCode.CONFIG] * 2 and "config.run.dir" in out


def test_one_process_without_a_launcher(tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert train.main([str(tiny_config), "--check", f"run.dir={tmp_path / 'new/run'}"]) == 0
    out = capsys.readouterr().out
    assert "  ok    data store" in out and "\nstarted single (ranks: 1, nodes: 1)\n" in out and out.endswith("ready\n")
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "file").touch()
    assert train.main([str(tiny_config), "--check", f"run.dir={tmp_path / 'file/run'}"]) == ExitCode.CONFIG
    out = capsys.readouterr().out
    assert f"run.dir: cannot write {tmp_path / 'file/run'}: Not a directory" in out and "started" not in out


# --- a node -----------------------------------------------------------------------------------------------------


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


def test_without_a_config_only_the_machine_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--check"]) == 0
    *lines, summary = capsys.readouterr().out.splitlines()
    assert summary.startswith("ready")
    first = "GPUs" if torch.cuda.is_available() else "cores"
    named = [line.split()[1] for line in lines if "->" not in line]
    assert [name for name in named if first != "GPUs" or name != "GPU"] == [first, "backend", "shared", "open"]


def test_a_node_that_is_ready(tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert cli.main(["train", str(tiny_config), "--check", "--processes", "1", "train.steps=9"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^  ok    data store +\S+store, \d+ samples to train on$", out, re.MULTILINE)
    assert "started" not in out and sorted(tmp_path.rglob("*")) == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_as_many_gpus_as_there_are() -> None:
    count = torch.cuda.device_count()
    assert check_gpus(count).status == "ok"
    assert check_gpus(count + 1).found.startswith(f"{count} for {count + 1} processes, driver ")


@pytest.mark.quick
def test_more_processes_than_cores_is_a_warning() -> None:
    cores = len(os.sched_getaffinity(0))
    assert check_cores(cores).status == "ok"
    assert check_cores(cores + 1).status == "warn"


@pytest.mark.quick
def test_attention_backend_is_named_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a stub of a GPU, which only says what it is."""
    assert check_attention(resolve_precision(load_config(None, [])), "cpu").found == "sdpa on cpu in fp32"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert check_attention(load_config(None, ["precision=fp16"]), "cuda").found == "efficient on cuda in fp16"
    refused = check_attention(load_config(None, ["precision=fp16", "attention.backend=varlen"]), "cuda")
    assert refused.status == "fail" and refused.exit_code == 64
    assert refused.found.startswith("attention.backend: varlen needs a GPU of compute capability 8.0 or newer, found")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("settings", "code", "shown"), [([], 0, "sdpa on cpu in bf16"), (["precision=fp32"], 64, "bf16")]
)
def test_the_check_has_the_launchers_precision(
    settings: list[str], code: int, shown: str, tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "accelerate_configs" / "ddp.yaml").read_text(encoding="utf-8")
    file = tmp_path / "ddp_bf16.yaml"
    file.write_text(re.sub("mixed_precision: .*", "mixed_precision: bf16", text), encoding="utf-8")
    options = ["--check", "--processes", "1", "--accelerate_config", str(file)]
    assert train.main([str(tiny_config), *options, *settings]) == code
    assert shown in capsys.readouterr().out


@pytest.mark.quick
def test_problems_of_a_config_are_findings(capsys: pytest.CaptureFixture[str]) -> None:
    quickstart = str(ROOT / "configs" / "quickstart.yaml")
    assert train.main([quickstart, "--check", "--processes", "1", "data.path=/nowhere", "run.dir=/tmp"]) == 65
    assert re.search(r"^  FAIL  data store +/nowhere: ", capsys.readouterr().out, re.MULTILINE)
    assert train.main([quickstart, "--check", "--processes", "1", "optim.lrr=1"]) == 64
    assert "did you mean 'optim.lr'?" in capsys.readouterr().out


def disk_of(config: RunConfig, store: Store) -> Finding:
    return check_disk(config, estimate(config, store, 1).checkpoint_mib)


def test_full_disk(tiny_config: Path, tiny_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmldlm.trainer.start_check._MIN_FREE_GIB", 0.001)
    with small_disk(tmp_path / "disk", mib=16) as disk:
        config, store = load_config(tiny_config, [f"run.dir={disk / 'run'}"]), Store.open(tiny_store)
        assert disk_of(config, store).status == "ok"  # room for the checkpoints of a tiny network
        (disk / "ballast").write_bytes(bytes(15 << 20))
        result = disk_of(config, store)
    assert (result.status, result.exit_code) == ("fail", 64)
    assert result.found.startswith(f"0.0 GiB free at {disk / 'run'}, ")


def test_disk_space_of_checkpoints_follows_the_network(tiny_config: Path, tiny_store: Path, tmp_path: Path) -> None:
    config, store = load_config(tiny_config), Store.open(tiny_store)
    parameters = sum(count_parameters(build_model(config, store.manifest)).values())
    assert disk_of(config, store).status == "ok"
    many = load_config(tiny_config, ["checkpoint.keep_last=999999999"])
    result = disk_of(many, store)
    assert result.status == "fail"
    assert f"{1e9 * parameters * 12 / 2**30:,.1f} needed for 1000000000 checkpoints" in result.found
    with_ema = load_config(tiny_config, ["checkpoint.keep_last=999999999", "ema.decay=0.9"])
    assert f"{1e9 * parameters * 16 / 2**30:,.1f} needed" in disk_of(with_ema, store).found
    # What is there already needs no more room.
    saved = tmp_path / "run" / "checkpoints" / "step-00000004" / "model.safetensors"
    saved.parent.mkdir(parents=True)
    os.truncate(os.open(saved, os.O_WRONLY | os.O_CREAT), 2**40)
    assert f"{1e9 * parameters * 12 / 2**30 - 1024:,.1f} needed" in disk_of(many, store).found


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
def test_a_slow_or_full_disk_is_named(tmp_path: Path) -> None:
    result = check_folder(tmp_path / "run", checkpoint_mib=1.0)
    assert result.status == "ok" and re.search(r" can be written, [\d,]+ MiB/s with fsync$", result.found)
    speed = float(re.findall(r"([\d,]+) MiB/s", result.found)[0].replace(",", ""))
    slow = check_folder(tmp_path / "run", checkpoint_mib=1e5 * speed)
    assert slow.status == "warn" and re.search(r": [\d,]{6,} s for a checkpoint$", slow.found), slow.found
    assert not [*tmp_path.iterdir()]
    with small_disk(tmp_path / "disk", mib=16) as disk:
        full = check_folder(disk / "run")
        assert (full.status, full.exit_code) == ("fail", 64) and "cannot write 64 MiB: No space left" in full.found
        assert not [*disk.iterdir()]


@pytest.mark.quick
def test_what_nvidia_smi_says_about_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a command of that name, as there is no GPU."""
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    program.touch(mode=0o755)

    def says(*lines: str, code: int = 0) -> list[tuple[str, str]]:
        program.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines) + f"exit {code}\n")
        return [(finding.status, finding.found) for finding in check_gpu_health() if finding.name == "GPU health"]

    good = "0, 0, No, Not Active, Not Active, Not Active, Not Active"
    assert says(good, "1, [N/A], [N/A], Not Active, N/A, [Not Supported], Not Active")[0][0] == "ok"
    hot = says(good, "1, 3, Yes, Not Active, Active, Not Active, Not Active")
    assert hot == [
        (
            "warn",
            "GPU 1: ecc.errors.uncorrected.volatile.total 3; GPU 1: retired_pages.pending Yes; "
            "GPU 1: hw_thermal_slowdown Active",
        )
    ]
    lost = "Unable to determine the device handle for GPU0: Unknown Error"
    assert says(good, lost)[0] == ("warn", f"GPU {lost}: does not answer")
    assert says("Field is not a valid field to query.", code=2) == []
    program.unlink()
    assert check_gpu_health()[0].name == "GPU product"


@pytest.mark.quick
def test_a_product_with_a_wrong_number_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wrong_numbers("cpu") == 0
    product, calls = torch.mm, []

    def faulty(*factors: torch.Tensor) -> torch.Tensor:
        result = product(*factors)
        calls.append(result)
        if len(calls) == 7:
            result[3, 5] += 1
        return result

    monkeypatch.setattr(torch, "mm", faulty)
    assert wrong_numbers("cpu") == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_healthy() -> None:
    assert {finding.status for finding in check_gpu_health()} == {"ok"}


@pytest.mark.quick
def test_little_shared_memory_is_a_warning(tmp_path: Path) -> None:
    with small_disk(tmp_path / "shm", mib=64) as folder:
        result = check_shared_memory(2, folder)
    assert result.status == "warn" and result.found == f"64 MiB free in {folder}, 512 advised"
    assert check_shared_memory(1, tmp_path / "none").status == "warn"


def test_few_open_files_is_a_warning() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        result = check_open_files()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert result.status == "warn" and result.remedy.startswith("ulimit -n ")
    assert 256 < int(result.remedy.rsplit(maxsplit=1)[1]) <= 4096 and result.name == "open files"


@pytest.mark.quick
def test_invalid_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--check", "--processes", "0"], ["--processes", "2", "a.yaml"], ["--check", "a.yaml", "b.yaml"]):
        assert train.main(arguments) == 2
    assert cli.main(["doctor"]) == 2 and "mmldlm train CONFIG --check" in capsys.readouterr().err


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
