"""Preparations by several processes that are killed, stopped or fail: the store always has the same bytes."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from mmldlm.data.store import Store
from mmldlm.data.verify import verify_part
from mmldlm.errors import run_command
from mmldlm.prepare import pipeline
from mmldlm.prepare.job import Job
from mmldlm.prepare.pipeline import main
from mmldlm.prepare.workers import RunTasks, worker_pool
from tests.helpers.paths import ROOT
from tests.helpers.prepare_job import PrepareJob
from tests.helpers.prepare_runs import Preparation, differing, finished_tasks
from tests.helpers.sample_corpus import write_corpus
from tests.helpers.waiting import TEST_TIMEOUT_S, wait_until


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> PrepareJob:
    return PrepareJob(tmp_path_factory.mktemp("job"))


def test_reference_is_complete(job: PrepareJob) -> None:
    store = Store.open(job.reference)
    verify_part(store)
    manifest = store.manifest
    assert job.chunks > 8 and len(manifest.splits["test"].shards) > 4
    assert manifest.problems["unreadable"] == manifest.problems["no_latent"] == 1 and manifest.problems["empty"] == 2
    assert manifest.problems["over_length"] > 10 and manifest.max_length == 30
    problems = [json.loads(line) for line in (job.reference / "problems.jsonl").read_text().splitlines()]
    assert [(Path(row["source"]).name, row["line"], row["kind"]) for row in problems] == [
        ("corpus.txt", 11, "unreadable"), ("corpus.txt", 201, "empty"), ("more.jsonl", 201, "empty"),
        ("corpus.txt", 206, "no_latent"),
    ]  # fmt: skip
    assert manifest.grouping["documents"] == 400 - 2 + 200 + 35
    assert not list(job.reference.parent.glob("reference.*"))


@pytest.mark.parametrize("processes", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_same_bytes_by_any_number_of_processes(job: PrepareJob, tmp_path: Path, processes: int) -> None:
    assert main(job.arguments(tmp_path / "store", processes=processes)) == 0
    assert differing(job.reference, tmp_path / "store") == []
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_near_duplicates_by_several_processes(job: PrepareJob, tmp_path: Path) -> None:
    for processes in (1, 2):
        assert main([*job.arguments(tmp_path / str(processes), processes=processes), "--near-duplicates"]) == 0
    assert differing(tmp_path / "1", tmp_path / "2") == []
    assert Store.open(tmp_path / "2").manifest.grouping["method"] == "one-deletion"


class Thread(threading.Thread):
    """`mmldlm prepare` in a thread of this process, whose workers can be found and killed."""

    def __init__(self, arguments: list[str]):
        super().__init__(daemon=True)
        self.arguments, self.code = arguments, -1
        self.start()

    def run(self) -> None:
        self.code = run_command(lambda: main(self.arguments))

    def wait(self) -> int:
        self.join(TEST_TIMEOUT_S)
        assert not self.is_alive(), "hangs"
        return self.code


@pytest.mark.parametrize("rounds", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_workers(job: PrepareJob, tmp_path: Path, rounds: int, capfd: pytest.CaptureFixture[str]) -> None:
    """A worker killed at a random moment ends the command with code 76; the next one continues to the same bytes."""
    began = time.monotonic()
    assert Thread(job.arguments(tmp_path / "first", processes=3)).wait() == 0
    duration, draw = time.monotonic() - began, random.Random(rounds)
    codes: list[int] = []
    slowest_end = 0.0
    while codes.count(76) < rounds:
        store = tmp_path / f"store-{len(codes)}"
        thread = Thread(job.arguments(store, processes=3))
        wait_until(lambda: bool(multiprocessing.active_children()) or not thread.is_alive(), "workers")  # noqa: B023
        time.sleep(draw.random() * duration * 0.8)
        if workers := multiprocessing.active_children():
            draw.choice(workers).kill()
        killed = time.monotonic()
        codes.append(thread.wait())
        slowest_end = max(slowest_end, time.monotonic() - killed)
        output = capfd.readouterr().err
        if codes[-1]:
            errors = [line for line in output.splitlines() if line.startswith("mmldlm: error:")]
            assert len(errors) == 1 and "a worker process was killed" in errors[0] and "Traceback" not in output, output
            assert not store.exists() and Thread(job.arguments(store, processes=draw.choice([1, 2, 3]))).wait() == 0
        assert differing(job.reference, store) == []
        assert not list(tmp_path.glob("*.incomplete"))
    assert set(codes) <= {0, 76}
    with capfd.disabled():
        print(f"\n{codes.count(76)} killed, {codes.count(0)} finished before; {slowest_end:.1f} s at most to the end")


@pytest.mark.parametrize("attempt", range(3))
def test_workers_that_are_killed_after_their_tasks(
    attempt: int, job: PrepareJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of six waits for tasks with the lock that the others wait for: it is hardly three times the survivor."""

    @contextmanager
    def killing(job: Job) -> Iterator[RunTasks]:
        with worker_pool(job) as run:
            yield run
            time.sleep(0.2)
            for worker in multiprocessing.active_children()[1:]:
                worker.kill()

    monkeypatch.setattr(pipeline, "worker_pool", killing)
    assert Thread(job.arguments(tmp_path / "store", processes=6)).wait() == 0
    assert differing(job.reference, tmp_path / "store") == []


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 26))])
def test_killed_commands(job: PrepareJob, tmp_path: Path, seed: int) -> None:
    """A command that is killed at random moments continues to the same bytes, with any number of processes."""
    draw, store = random.Random(seed), tmp_path / "store"
    moments = sorted(draw.sample(range(1, 3 * job.chunks + 3), 2))
    for moment in moments:
        arguments = job.arguments(store, processes=draw.choice([1, 2]))
        with Preparation(arguments, tmp_path / "log") as preparation:
            wait_until(lambda: len(finished_tasks(store)) >= moment or not preparation.process.is_alive(), "progress")  # noqa: B023
            time.sleep(draw.random() * 0.02)
    before = finished_tasks(store)
    assert before or store.exists()
    assert main(job.arguments(store, processes=draw.choice([1, 2]))) == 0
    assert differing(job.reference, store) == [], f"seed {seed}, {moments}"
    assert not list(tmp_path.glob("store.*"))


def leave_unfinished(job: PrepareJob, store: Path, log: Path, tasks: int = 5) -> None:
    with Preparation(job.arguments(store), log) as preparation:
        wait_until(lambda: len(finished_tasks(store)) >= tasks or not preparation.process.is_alive(), "progress")
        os.kill(preparation.pid, signal.SIGSTOP)
    assert len(finished_tasks(store)) >= tasks and not store.exists(), preparation.output()


def test_finished_tasks_are_not_repeated(job: PrepareJob, tmp_path: Path) -> None:
    store = tmp_path / "store"
    staging = store.with_name("store.incomplete")
    leave_unfinished(job, store, tmp_path / "log", job.chunks + 5)
    done = {name: (staging / name).stat().st_mtime_ns for name in finished_tasks(store)}
    assert "fit-00000" in done and "read-00000" in done
    with Preparation(job.arguments(store), tmp_path / "log") as preparation:
        wait_until(lambda: len(finished_tasks(store)) > len(done) + 2, "more tasks")
        os.kill(preparation.pid, signal.SIGSTOP)
    assert {name: (staging / name).stat().st_mtime_ns for name in done} == done
    assert main(job.arguments(store)) == 0 and differing(job.reference, store) == []


def test_work_of_other_options_or_inputs_is_refused_or_replaced(
    job: PrepareJob, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    leave_unfinished(job, store, tmp_path / "log")
    before = finished_tasks(store)

    def error(arguments: list[str]) -> str:
        assert run_command(lambda: main(arguments)) == 65
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mmldlm: error:")]
        assert len(lines) == 1 and finished_tasks(store) == before
        return lines[0]

    other = job.arguments(store, seed=1, channels=4)
    assert "store.incomplete: left unfinished with other channels, seed; expected" in error(other)
    write_corpus(tmp_path / "corpus.txt", 100)
    changed = [str(tmp_path / "corpus.txt"), *job.arguments(store)[1:]]
    assert "left unfinished with other sources" in error(changed)
    assert main([*other, "--overwrite"]) == 0
    assert Store.open(store).manifest.latent.channels == 4
    assert main([*job.arguments(store), "--overwrite"]) == 0 and differing(job.reference, store) == []


def test_one_command_at_a_time(job: PrepareJob, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with Preparation(job.arguments(store), tmp_path / "log") as preparation:
        wait_until(lambda: len(finished_tasks(store)) >= 3, "progress")
        os.kill(preparation.pid, signal.SIGSTOP)
        with Preparation(job.arguments(store), tmp_path / "other") as second:
            assert second.wait() == 73
        assert f"store.incomplete is in use by process {preparation.pid}" in second.output()
        os.kill(preparation.pid, signal.SIGCONT)
        assert preparation.wait() == 0
    assert differing(job.reference, store) == []


def test_error_of_a_worker(job: PrepareJob, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for changes in ({"on_problem": "error"}, {"max_problems": 0}):  # found when all chunks are read; in a worker
        arguments = job.arguments(tmp_path / "store", processes=2, **changes)
        assert run_command(lambda: main(arguments)) == 65  # noqa: B023
        lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("mmldlm: error:")]
        assert len(lines) == 1 and "corpus.txt:11: byte 5 (0xff) is not UTF-8" in lines[0]
        assert list(tmp_path.iterdir()) == [], "work that cannot be continued is removed"


@pytest.mark.parametrize(
    ("number", "to_group", "code", "processes"),
    [
        (signal.SIGINT, True, 130, 2),
        pytest.param(signal.SIGTERM, False, 75, 2, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, True, 75, 2, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, True, 75, 2, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, False, 130, 1, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, False, 75, 1, marks=pytest.mark.slow),
        (signal.SIGKILL, False, -9, 2),
    ],
)
def test_signals(
    job: PrepareJob, tmp_path: Path, number: signal.Signals, to_group: bool, code: int, processes: int
) -> None:
    """A signal, to the command or to all processes of a terminal, ends all processes; the same command continues."""
    store = tmp_path / "store"
    command = [sys.executable, "-m", "mmldlm.cli", "prepare", *job.arguments(store, processes=processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment, start_new_session=True
    )
    wait_until(lambda: len(finished_tasks(store)) >= 3, "progress")
    children = psutil.Process(process.pid).children(recursive=True)
    (os.killpg if to_group else os.kill)(process.pid, number)
    error = process.communicate(timeout=TEST_TIMEOUT_S)[1]
    assert process.returncode == code, error
    if code > 0:
        last = error.splitlines()[-1]
        assert error.count("mmldlm: error:") == 1 and last.startswith("mmldlm: error: "), error
        assert "Traceback" not in error
    assert psutil.wait_procs(children, timeout=TEST_TIMEOUT_S)[1] == []
    assert not store.exists() and len(finished_tasks(store)) >= 3
    assert main(job.arguments(store)) == 0 and differing(job.reference, store) == []
