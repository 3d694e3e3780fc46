"""Exit records are written atomically and keep the first cause; a reused process id is recognized."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from mmldlm.distributed import exit_files
from mmldlm.distributed.exit_files import ProcessInfo, clear_exit_files, dump_stacks, kill_processes, write_exit
from tests.helpers.waiting import TEST_TIMEOUT_S

pytestmark = pytest.mark.quick


def codes(folder: Path) -> dict[str, int]:
    return {path.name: json.loads(path.read_text())["code"] for path in folder.iterdir()}


def test_first_of_many_failures_is_recorded(tmp_path: Path) -> None:
    ranks, ended = 12, threading.Event()
    together = threading.Barrier(ranks)

    def fail(rank: int) -> None:
        together.wait()
        write_exit(tmp_path, rank, 7, 65, "x" * 100_000)

    def read() -> int:
        result = 0
        while not ended.is_set():
            for path in tmp_path.glob("exit*.json"):
                result += len(json.loads(path.read_text())["cause"]) == 100_000
        return result

    with ThreadPoolExecutor(ranks + 1) as pool:
        reader = pool.submit(read)
        list(pool.map(fail, range(ranks)))
        ended.set()
        assert reader.result() >= 0  # half a record would have raised
    first = json.loads((tmp_path / "exit.json").read_text())["rank"]
    assert {p.name for p in tmp_path.iterdir()} == {"exit.json"} | {
        f"exit.rank{rank}.json" for rank in range(ranks) if rank != first
    }


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([(1, 0), (0, 0)], {"exit.json": 0, "exit.rank1.json": 0}),
        ([(1, 0), (0, 74)], {"exit.json": 74, "exit.rank1.json": 0}),
        ([(0, 0), (1, 74), (2, 76)], {"exit.json": 74, "exit.rank0.json": 0, "exit.rank2.json": 76}),
        ([(1, 65), (0, 0)], {"exit.json": 65, "exit.rank0.json": 0}),
        ([(0, 75), (1, 75)], {"exit.json": 75, "exit.rank1.json": 75}),
        ([(1, 65), (1, 1), (0, 76)], {"exit.json": 65, "exit.rank0.json": 76}),
    ],
)
def test_failure_replaces_a_clean_exit(tmp_path: Path, ends: list[tuple[int, int]], expected: dict[str, int]) -> None:
    for rank, code in ends:
        write_exit(tmp_path, rank, 7, code, "cause")
    assert codes(tmp_path) == expected


def test_first_cause_is_kept_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", refuse)
    for rank, code in ((1, 65), (0, 76)):
        write_exit(tmp_path, rank, 7, code, "cause")
    assert codes(tmp_path) == {"exit.json": 65, "exit.rank0.json": 76}


def test_unwritable_folder_raises_no_second_error(tmp_path: Path) -> None:
    write_exit(tmp_path / "gone", 0, 7, 74, "the disk is full")
    dump_stacks(tmp_path / "gone", 0, "step 7")
    assert not (tmp_path / "gone").exists()


def test_new_run_clears_old_exit_files(tmp_path: Path) -> None:
    write_exit(tmp_path, 0, 7, 65, "cause")
    write_exit(tmp_path, 1, 7, 76, "cause")
    dump_stacks(tmp_path, 1, "step 7", ValueError("seven"))
    assert "ValueError: seven" in (tmp_path / "stacks.rank1.txt").read_text()
    (tmp_path / "metrics.jsonl").touch()
    clear_exit_files(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def test_only_the_identified_process_is_killed(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exit_files, "KILL_TIMEOUT_S", 0.2)
    stat = Path(f"/proc/{sleeper.pid}/stat").read_text()
    start_time = int(stat.rpartition(")")[2].split()[19])
    assert (
        abs(start_time / os.sysconf("SC_CLK_TCK") - (psutil.Process(sleeper.pid).create_time() - psutil.boot_time()))
        < 1
    )
    it = replace(ProcessInfo.current(), pid=sleeper.pid, start_time=start_time)
    assert it.state() == "running"
    for other in (replace(it, start_time=start_time - 1), replace(it, machine="another")):
        assert other.state() in ("gone", "")
        kill_processes([other])
        assert sleeper.poll() is None
    sleeper.send_signal(signal.SIGSTOP)
    while it.state() == "running":
        pass
    assert it.state() == "stopped"
    kill_processes([it])
    assert sleeper.wait(TEST_TIMEOUT_S) == -signal.SIGKILL and it.state() == "gone"
