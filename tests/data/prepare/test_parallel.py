"""Preparations of several processes that are killed, fail or meet others: the store always has the same bytes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from mmldlm.data.prepare.coordinator import INTERVAL_S
from mmldlm.data.prepare.pipeline import main
from mmldlm.data.store import Store
from mmldlm.data.verify import verify_part
from mmldlm.errors import DataError, run_command
from tests.helpers.paths import BIN, ROOT
from tests.helpers.ports import free_port
from tests.helpers.prepare_runs import Preparation, differing, pieces
from tests.helpers.sample_corpus import write_corpus
from tests.helpers.waiting import PATIENCE_S, wait_until


class Job:
    """A corpus with problems and long documents, in several files and formats, and the store that one process made."""

    def __init__(self, folder: Path):
        lines = write_corpus(folder / "corpus.txt", 400).read_bytes().splitlines()
        lines[10], lines[200], lines[205] = b"not \xff utf-8", b"", "。。。".encode()
        (folder / "corpus.txt").write_bytes(b"\r\n".join(lines))
        texts = write_corpus(folder / "more.txt", 200, seed=1).read_text().splitlines()
        (folder / "more.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in [*texts, " "]))
        for number in range(5):
            write_corpus(folder / f"small-{number}.txt", 7, seed=number)
        self.inputs = [folder / "corpus.txt", folder / "more.jsonl", *sorted(folder.glob("small-*.txt"))]
        self.reference = folder / "reference"
        assert main(self.arguments(self.reference)) == 0
        self.chunks = len(Store.open(self.reference).manifest.splits["train"].shards)

    def arguments(self, out: Path, **changes: object) -> list[str]:
        options = {
            "part_bytes": 4000,
            "vocab_size": 280,
            "channels": 8,
            "max_length": 30,
            "fit_documents": 300,
            "validation_fraction": 0.1,
            "test_fraction": 0.1,
            "on_problem": "skip",
            "peer_timeout": 20,
            **changes,
        }
        given = [part for key, value in options.items() for part in (f"--{key.replace('_', '-')}", value)]
        return [*map(str, self.inputs), "--out", str(out), *map(str, given)]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("job"))


def test_the_reference_has_all_there_is(job: Job) -> None:
    store = Store.open(job.reference)
    verify_part(store)
    manifest = store.manifest
    assert job.chunks > 8 and len(manifest.splits["test"].shards) > 4
    assert manifest.problems["unreadable"] == manifest.problems["no_latent"] == 1 and manifest.problems["empty"] == 2
    assert manifest.problems["over_length"] > 10 and manifest.max_length == 30
    told = [json.loads(line) for line in (job.reference / "problems.jsonl").read_text().splitlines()]
    assert [(Path(row["source"]).name, row["line"], row["kind"]) for row in told] == [
        ("corpus.txt", 11, "unreadable"), ("corpus.txt", 201, "empty"), ("more.jsonl", 201, "empty"),
        ("corpus.txt", 206, "no_latent"),
    ]  # fmt: skip
    assert manifest.grouping["documents"] == 400 - 2 + 200 + 35
    assert not list(job.reference.parent.glob("reference.*"))


@pytest.mark.parametrize("processes", [2, 3])
def test_any_number_of_processes_makes_the_same_bytes(job: Job, tmp_path: Path, processes: int) -> None:
    with Preparation(job.arguments(tmp_path / "store"), processes, tmp_path / "log") as preparation:
        assert preparation.wait() == [0] * processes, preparation.said()
    assert differing(job.reference, tmp_path / "store") == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "store"]
    assert all(f"rank {rank}: " in preparation.said() for rank in range(processes)), "one did all the work"


def killed_and_resumed(job: Job, folder: Path, seed: int, kills: int) -> None:
    """Kill all processes, or the leading one alone, once so much is done; then go on with another number of them."""
    draw, store = random.Random(seed), folder / "store"
    moments = sorted(draw.sample(range(1, 3 * job.chunks + 3), kills))
    for moment in moments:
        processes = draw.choice([1, 2, 3])
        with Preparation(job.arguments(store), processes, folder / "log") as preparation:
            wait_until(lambda: pieces(store) >= moment or not preparation.at_work, "progress")  # noqa: B023
            time.sleep(draw.random() * 0.02)
            if draw.random() < 0.3:
                preparation.ranks[0].kill()
                assert all(code in (0, 76, -9) for code in preparation.wait()), preparation.said()
    before = pieces(store)
    with Preparation(job.arguments(store), draw.choice([1, 2]), folder / "log") as preparation:
        assert set(preparation.wait()) == {0}, preparation.said()
    assert before or store.exists()
    assert differing(job.reference, store) == [], f"seed {seed}, {moments}"
    assert not list(folder.glob("store.*"))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_preparation_goes_on_to_the_same_bytes(job: Job, tmp_path: Path, seed: int) -> None:
    killed_and_resumed(job, tmp_path, seed, kills=4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 27))
def test_many_killed_preparations_go_on_to_the_same_bytes(job: Job, tmp_path: Path, seed: int) -> None:
    killed_and_resumed(job, tmp_path, seed, kills=8)


def left_half_done(job: Job, store: Path, log: Path, at_least: int = 5) -> None:
    with Preparation(job.arguments(store), 1, log) as preparation:
        wait_until(lambda: pieces(store) >= at_least or not preparation.at_work, "progress")
        os.kill(preparation.ranks[0].pid or 0, signal.SIGSTOP)
    assert pieces(store) >= at_least and not store.exists(), preparation.said()


def test_what_is_done_is_not_done_again(job: Job, tmp_path: Path) -> None:
    store = tmp_path / "store"
    left_half_done(job, store, tmp_path / "log", job.chunks + 5)
    (work,) = store.with_name("store.incomplete").glob("work-*")
    done = {path.name: path.stat().st_mtime_ns for path in work.iterdir() if not path.name.startswith(".")}
    assert "fit" in done and "read-00000" in done
    with Preparation(job.arguments(store), 1, tmp_path / "log") as preparation:
        wait_until(lambda: pieces(store) > len(done) + 2, "more pieces")
        os.kill(preparation.ranks[0].pid or 0, signal.SIGSTOP)
    assert {name: (work / name).stat().st_mtime_ns for name in done} == done
    assert main(job.arguments(store)) == 0 and differing(job.reference, store) == []


def test_work_of_other_options_or_inputs_is_refused_or_overwritten(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    left_half_done(job, store, tmp_path / "log")
    before = pieces(store)

    def refused(arguments: list[str]) -> str:
        assert run_command(lambda: main(arguments)) == 65
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mmldlm: error:")]
        assert len(lines) == 1 and pieces(store) == before
        return lines[0]

    other = job.arguments(store, seed=1, channels=4)
    assert "store.incomplete: left unfinished with other channels, seed; expected" in refused(other)
    write_corpus(tmp_path / "corpus.txt", 100)
    changed = [str(tmp_path / "corpus.txt"), *job.arguments(store)[1:]]
    assert "left unfinished with other sources" in refused(changed)
    assert main([*other, "--overwrite"]) == 0
    assert Store.open(store).manifest.latent.channels == 4
    assert main([*job.arguments(store), "--overwrite"]) == 0 and differing(job.reference, store) == []


def test_a_store_is_prepared_by_one_command_at_a_time(job: Job, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with Preparation(job.arguments(store), 1, tmp_path / "log") as preparation:
        wait_until(lambda: pieces(store) >= 3, "progress")
        os.kill(preparation.ranks[0].pid or 0, signal.SIGSTOP)
        with Preparation(job.arguments(store), 1, tmp_path / "other") as second:
            assert second.wait() == [73]
        assert f"store.incomplete is in use by process {preparation.ranks[0].pid}" in second.said()
        os.kill(preparation.ranks[0].pid or 0, signal.SIGCONT)
        assert preparation.wait() == [0]
    assert differing(job.reference, store) == []


def send(processes: Iterable[BaseProcess], number: signal.Signals) -> None:
    for process in processes:
        os.kill(process.pid or 0, number)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_dies_ends_the_others(job: Job, tmp_path: Path, rank: int) -> None:
    store = tmp_path / "store"
    with Preparation(job.arguments(store), 3, tmp_path / "log") as preparation:
        wait_until(lambda: pieces(store) >= 3, "progress")
        # The others are held until they are due to look, or a quick machine has done their work before.
        dying, others = preparation.ranks[rank], preparation.ranks[:rank] + preparation.ranks[rank + 1 :]
        send(others, signal.SIGSTOP)
        dying.kill()
        dying.join()
        time.sleep(INTERVAL_S)
        send(others, signal.SIGCONT)
        codes = preparation.wait()
    assert codes.pop(rank) == -9 and codes == [76, 76], preparation.said()
    assert f"rank {rank} (process {preparation.ranks[rank].pid} on " in preparation.said()
    assert "is gone; start the same command again to go on" in preparation.said()
    assert main(job.arguments(store)) == 0 and differing(job.reference, store) == []


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_process_that_hangs_ends_the_others_in_time(job: Job, tmp_path: Path, rank: int) -> None:
    store = tmp_path / "store"
    with Preparation(job.arguments(store, peer_timeout=3), 2, tmp_path / "log") as preparation:
        wait_until(lambda: pieces(store) >= 3, "progress")
        send(preparation.ranks, signal.SIGSTOP)
        (session,) = store.with_name("store.incomplete").glob("session-*")
        # As though it hung in the midst of this piece: without any, it would not be missed.
        (session / f"encode-{job.chunks - 1:05d}").touch(exist_ok=False)
        other = preparation.ranks[1 - rank]
        send([other], signal.SIGCONT)
        wait_until(lambda: other.exitcode is not None, "the end")
        assert other.exitcode == 76, preparation.said()
    assert "gave no sign of life for 3 s" in preparation.said()


def test_an_error_of_one_process_is_that_of_all(job: Job, tmp_path: Path) -> None:
    store = tmp_path / "store"
    arguments = job.arguments(store, on_problem="error")
    with Preparation(arguments, 2, tmp_path / "log") as preparation:
        assert preparation.wait() == [65, 65], preparation.said()
    assert preparation.said().count("corpus.txt:11: byte 5 (0xff) is not UTF-8; fix the input") == 2
    assert "mmldlm: error: rank 0 failed: " in preparation.said()
    assert [path.name for path in tmp_path.iterdir()] == ["log"], "what cannot go on is left behind"


def test_processes_of_unlike_options_are_refused(job: Job, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with Preparation(job.arguments(store), 2, tmp_path / "log", job.arguments(store, seed=1, peer_timeout=3)) as both:
        assert both.wait() == [2, 76], both.said()
    assert "was started with other options than rank 0" in both.said()


def test_a_process_that_does_not_come_is_waited_for_in_vain(job: Job, tmp_path: Path) -> None:
    arguments = job.arguments(tmp_path / "store", peer_timeout=2)
    with Preparation(arguments, 3, tmp_path / "log", [*arguments, "--out", str(tmp_path / "elsewhere")]) as lonely:
        assert lonely.wait() == [76] * 3
    assert "rank 1, 2 did not come within 2 s" in lonely.said()
    assert "rank 0 opened no session within 2 s" in lonely.said()


def run(*command: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE_S, env=environment
    )


def test_processes_of_one_command(job: Job, tmp_path: Path) -> None:
    arguments = job.arguments(tmp_path / "store")
    done = run(sys.executable, "-m", "mmldlm.cli", "prepare", *arguments, "--processes", 2)
    assert done.returncode == 0 and "rank 1: " in done.stderr, done.stderr
    assert differing(job.reference, tmp_path / "store") == []


@pytest.mark.parametrize("launcher", ["accelerate", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_launchers(job: Job, tmp_path: Path, launcher: str) -> None:
    how = ["--config_file", "accelerate_configs/ddp.yaml", "--num_processes", 2, "--main_process_port", free_port()]
    command = [launcher, *(["launch", *how] if launcher == "accelerate" else ["--standalone", "--nproc_per_node", 2])]
    done = run(BIN / command[0], *command[1:], "-m", "mmldlm.prepare", *job.arguments(tmp_path / "store"))
    assert done.returncode == 0 and "rank 1: " in done.stderr, done.stderr
    assert differing(job.reference, tmp_path / "store") == []


def test_near_duplicates_of_several_processes(job: Job, tmp_path: Path) -> None:
    stores = [tmp_path / "one", tmp_path / "two"]
    for number, store in enumerate(stores, 1):
        arguments = [*job.arguments(store), "--near-duplicates"]
        with Preparation(arguments, number, tmp_path / "log") as preparation:
            assert set(preparation.wait()) == {0}, preparation.said()
    assert differing(*stores) == []
    assert Store.open(stores[0]).manifest.grouping["method"] == "one-hole"


def test_a_launcher_that_makes_no_sense(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run_command(lambda: main(job.arguments(tmp_path / "store"))) == 2
    with pytest.raises(DataError, match="no such folder"):
        Store.open(tmp_path / "store")
