"""A rank that stops, hangs, dies or raises ends all ranks in time, and is named: real processes, real signals."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.helpers.forked_runs import ForkedRuns
from tests.helpers.waiting import TEST_TIMEOUT_S
from tests.helpers.watched_runs import LaunchedRun, WatchedRun

LONG_S = 2 * TEST_TIMEOUT_S  # a timeout that these runs need not wait for

STOPPED = r"is not responding \(its process is stopped\), last seen at step [1-9]\d*, (in all-reduce|outside).*"
SILENT = r"is not responding \(no heartbeat for at least \d+\.\d s\), last seen at step \d+, .*"
DIED = r"exited without reporting an error, last seen at step \d+, .*"
WAITED = (
    r"; rank (\d) waited (\d+\.\d) s in all-reduce of the loss counts "
    r"\(gloo:all_reduce number \d+, sizes \[\[7\]\]\) at step (\d+)"
)


def check_lost(run: WatchedRun, lost: int, text: str, survivors: list[int]) -> None:
    """Each survivor says the same, once, and leaves its stacks; the first leaves exit.json."""
    first = run.record()
    name = rf"rank {lost} \(host \S+, pid {run.pids[lost]}\) "
    result = re.fullmatch(name + text + WAITED, first["cause"])
    assert result, first["cause"]
    assert first["code"] == 76 and first["rank"] in survivors and first["step"] >= 7
    assert int(result[result.lastindex or 0]) >= 7
    for rank in survivors:
        if rank != first["rank"]:
            assert run.record(f"exit.rank{rank}.json")["cause"] == first["cause"]
        assert "in sum_of_ones" in run.stacks(rank) and "in loop" in run.stacks(rank)
        assert f"flight_recorder.rank{rank}.json" in run.files()
        if not isinstance(run, LaunchedRun):
            assert run.complaints(rank) == [first["cause"]]


def test_the_store_of_many_ranks_is_not_limited_to_the_usual_number_of_files(
    forked: ForkedRuns, tmp_path: Path
) -> None:
    """Rank 0 has a limit of 50 more open files, which it may raise, and 40 connections with both ends in it."""
    forked.succeed("ddp", tmp_path / "run", 2, script="many_connections.py")


def test_a_stopped_rank_ends_the_run(forked: ForkedRuns, tmp_path: Path) -> None:
    with WatchedRun(forked, tmp_path, 3, 3, "none") as run:
        run.harm(1, signal.SIGSTOP)
        assert run.codes() == [76, -signal.SIGKILL, 76]
        assert run.seconds >= 3
        check_lost(run, 1, STOPPED, [0, 2])


def test_a_stopped_rank_with_the_store_ends_the_run(forked: ForkedRuns, tmp_path: Path) -> None:
    with WatchedRun(forked, tmp_path, 2, 2, "none") as run:
        run.harm(0, signal.SIGSTOP)
        assert run.codes() == [-signal.SIGKILL, 76]
        check_lost(run, 0, STOPPED, [1])


@pytest.mark.parametrize("number", [pytest.param(signal.SIGSTOP, marks=pytest.mark.slow), signal.SIGKILL])
def test_a_lost_rank_ends_torchrun(forked: ForkedRuns, tmp_path: Path, number: signal.Signals) -> None:
    with LaunchedRun(forked, tmp_path, 2, 2, "none") as run:
        run.harm(0, number)
        assert run.codes() == [1]
        check_lost(run, 0, STOPPED if number == signal.SIGSTOP else DIED, [1])
        assert re.search(r"rank +: 1 .*\n +exitcode +: 76 ", run.output())


@pytest.mark.parametrize(("world_size", "lost"), [(3, 1), (2, 0)])
def test_a_killed_rank_ends_the_run(forked: ForkedRuns, tmp_path: Path, world_size: int, lost: int) -> None:
    with WatchedRun(forked, tmp_path, world_size, LONG_S, "none") as run:
        run.harm(lost, signal.SIGKILL)
        codes = run.codes()
        assert codes.pop(lost) == -signal.SIGKILL and set(codes) == {76}
        check_lost(run, lost, DIED, [rank for rank in range(world_size) if rank != lost])


def test_an_error_of_one_rank_ends_the_run(forked: ForkedRuns, tmp_path: Path) -> None:
    with WatchedRun(forked, tmp_path, 3, LONG_S, "raise", 1) as run:
        assert run.codes() == [76, 65, 76]
        assert {k: run.record()[k] for k in ("code", "rank", "step")} == {"code": 65, "rank": 1, "step": 7}
        assert run.record()["cause"] == "sample 3: nothing in it"
        for rank in (0, 2):
            cause = "rank 1 ended with exit code 65 at step 7: sample 3: nothing in it"
            assert run.record(f"exit.rank{rank}.json")["cause"] == cause
            assert run.complaints(rank) == [cause]
        assert "stacks.rank1.txt" not in run.files()


def test_a_broken_connection_is_told_in_the_words_of_gloo(forked: ForkedRuns, tmp_path: Path) -> None:
    with WatchedRun(forked, tmp_path, 2, LONG_S, "disconnect", 1) as run:
        assert run.codes() == [76, 76]
        words = (
            r"the connection broke \(.*Connection (closed|reset) by peer.*\), or the ranks called different collectives"
        )
        assert re.match(words, run.record()["cause"]), run.record()


def test_an_endless_loop_outside_of_collectives_ends_the_run(forked: ForkedRuns, tmp_path: Path) -> None:
    with WatchedRun(forked, tmp_path, 2, 2, "spin", 1) as run:
        assert run.codes() == [76, 76]
        check_lost(run, 1, r"has been stuck outside of any collective for \d+\.\d s \(step 7\)", [0])
        assert run.record("exit.rank1.json")["code"] == 76
        assert re.search(r'watchdog_rank.py", line \d+ in spin\n', run.stacks(1))


def test_code_that_holds_the_gil_ends_the_run(forked: ForkedRuns, tmp_path: Path) -> None:
    """Its own watchdog cannot run, so the watchdogs of other ranks on its machine kill it."""
    with WatchedRun(forked, tmp_path, 2, 2, "hold", 1) as run:
        assert run.codes() == [76, -signal.SIGKILL]
        check_lost(run, 1, SILENT, [0])


def test_stuck_main_thread_is_killed(forked: ForkedRuns, tmp_path: Path) -> None:
    """The main thread hangs as in a collective on a device; the watchdog thread names `sum_of_ones`."""
    with WatchedRun(forked, tmp_path, 2, 2, "hang") as run:
        run.harm(1, signal.SIGSTOP)
        assert run.codes() == [76, -signal.SIGKILL]
        check_lost(run, 1, STOPPED, [0])


def test_hang_of_nccl_ends_the_run(forked: ForkedRuns, tmp_path: Path) -> None:
    """The main threads are outside of any phase, as when they launch kernels after a collective that never ends."""
    with WatchedRun(forked, tmp_path, 2, 2, "nccl-hang") as run:
        assert run.codes() == [76, 76]
        cause = run.record()["cause"]
        waited = r"rank \d waited (\d+\.\d) s in nccl:all_reduce number 42, sizes \[\[1024\]\] at step 7"
        hangs = "a GPU or the network between GPUs hangs: all 2 ranks respond, and wait in one collective"
        result = re.fullmatch(rf"{hangs}; {waited}", cause)
        assert result and float(result[1]) >= 2, cause
        for rank in (0, 1):
            assert run.complaints(rank) == [cause]
            assert "in work_alone" in run.stacks(rank)
            record = json.loads((tmp_path / f"flight_recorder.rank{rank}.json").read_text())
            assert record["pending"] == ["nccl:all_reduce number 42, sizes [[1024]]"]
            assert list(record) == ["pending", "nccl", "gloo"]


def test_rank_that_nccl_waits_for_is_named(forked: ForkedRuns, tmp_path: Path) -> None:
    with WatchedRun(forked, tmp_path, 2, 2, "nccl-waits-for-rank-1") as run:
        assert run.codes() == [76, 76]
        stuck = rf"rank 1 \(host \S+, pid {run.pids[1]}\) has been stuck outside of any collective for \d+\.\d s"
        waited = r"rank 0 waited \d+\.\d s in nccl:all_reduce number 42, sizes \[\[1024\]\] at step 7"
        assert re.fullmatch(rf"{stuck} \(step 7\); {waited}", run.record()["cause"]), run.record()


def test_progress_of_nccl_is_no_hang(forked: ForkedRuns, tmp_path: Path) -> None:
    """Some collective is pending at all times, and entries of coalesced ones never complete."""
    with WatchedRun(forked, tmp_path, 2, 1, "nccl-progress") as run:
        assert run.codes() == [0, 0]
        assert run.seconds > 4
        assert run.output(0) == run.output(1) == ""


def test_remote_rank_is_judged_by_its_heartbeat(forked: ForkedRuns, tmp_path: Path) -> None:
    """It cannot be killed from another machine; it exits when it continues."""
    with WatchedRun(forked, tmp_path, 2, 2, "none", FAR="1") as run:
        run.harm(1, signal.SIGSTOP)
        assert run.code(0) == 76
        check_lost(run, 1, SILENT, [0])
        assert run.code(1, 0) is None
        os.kill(run.pids[1], signal.SIGCONT)
        assert run.code(1) == 76
        assert "exit.rank1.json" in run.files()


def test_unreachable_store_ends_the_run(forked: ForkedRuns, tmp_path: Path) -> None:
    with WatchedRun(forked, tmp_path, 2, 2, "none", FAR="1") as run:
        run.harm(0, signal.SIGSTOP)
        assert run.code(1) == 76
        cause = run.record()["cause"]
        host = rf"rank 0 \(host \S+, pid {run.pids[0]}\), last seen at step \d+, .*, or the launcher hosts it"
        # Torch's record of collectives, from which the numbers come, is not always there at this moment.
        waited = r"; rank 1 waited \d+\.\d s in all-reduce of the loss counts( \(.*\))? at step \d+"
        assert re.fullmatch(rf"the store at 127.0.0.1:\d+ does not respond; {host}{waited}", cause), cause


def test_lost_store_ends_independent_ranks(forked: ForkedRuns, tmp_path: Path) -> None:
    with WatchedRun(forked, tmp_path, 2, 2, "work-alone") as run:
        run.harm(0, signal.SIGSTOP)
        assert run.codes() == [-signal.SIGKILL, 76]
        assert re.fullmatch(rf"rank 0 .*{STOPPED}; detected by rank 1 at step 7", run.record()["cause"])
        assert "in work_alone" in run.stacks(1)


def test_ranks_in_different_collectives_are_named(forked: ForkedRuns, tmp_path: Path) -> None:
    with WatchedRun(forked, tmp_path, 2, 2, "other-collective", 1) as run:
        assert run.codes() == [76, 76]
        cause = run.record()["cause"]
        assert "all-reduce of the loss counts" in cause and "barrier before saving" in cause and "step 7" in cause


def test_bug_on_all_ranks_is_reported_as_such(forked: ForkedRuns, tmp_path: Path) -> None:
    with WatchedRun(forked, tmp_path, 2, LONG_S, "bug") as run:
        assert run.codes() == [1, 1]
        assert run.files() == {"exit.json", f"exit.rank{1 - run.record()['rank']}.json"}
        for rank in (0, 1):
            assert run.output(rank).rstrip().splitlines()[-1].startswith("RuntimeError: inconsistent tensor size")
            assert run.complaints(rank) == []


def test_clean_exit_blames_no_rank(forked: ForkedRuns, tmp_path: Path) -> None:
    with WatchedRun(forked, tmp_path, 2, LONG_S, "end") as run:
        assert run.codes() == [0, 0]
        assert run.files() == {"exit.json", "exit.rank1.json"}
        assert run.record()["code"] == run.record("exit.rank1.json")["code"] == 0


def test_rank_may_finish_early(forked: ForkedRuns, tmp_path: Path) -> None:
    """The others work longer than the timeout, although the store ends with rank 0."""
    with WatchedRun(forked, tmp_path, 2, 1, "early-end", 0) as run:
        assert run.codes() == [0, 0]
        assert run.seconds > 4
        assert run.files() == {"exit.json", "exit.rank1.json"}
        assert run.output(0) == run.output(1) == ""
