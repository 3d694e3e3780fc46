"""Alerts of `mmldlm monitor`: a table of records, and two real runs with real processes."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mmldlm.tools.monitor.alerts import RULES, alert_table, alerts
from mmldlm.tools.monitor.snapshot import Snapshot, Thresholds
from mmldlm.tools.runs import History
from tests.helpers.forked_runs import ForkedRuns
from tests.helpers.paths import ROOT
from tests.helpers.run_records import STEP_S, T0, Values, record, train, write_run
from tests.helpers.waiting import TEST_TIMEOUT_S, wait_until

START = record("start", 0, total_steps=1000)
noise = random.Random(0).gauss
HOST = socket.gethostname()
GONE = {"host": HOST, "pid": 2**22 + 1, "started": "2020-01-01T00:00:00"}  # above the largest pid
HERE = {"host": HOST, "pid": os.getpid(), "started": "2200-01-01T00:00:00"}


def exited(rank: int, code: int, cause: str = "so it went") -> Values:
    return {"rank": rank, "code": code, "step": 20, "cause": cause, "time": T0}


def losses(*values: float, spread: float = 0.0) -> list[Values]:
    """Ten training records at each of these losses."""
    every = [value + noise(0, spread) for value in values for _ in range(10)]
    return train(1, len(every), loss__total=lambda step: every[step - 1])


def validations(*values: float | None, tag: str = "validation/total") -> list[Values]:
    return [
        record("validation", 10 * i, **{tag: value, **({"nonfinite": [tag]} if value is None else {})})
        for i, value in enumerate(values, 1)
    ]


def skips(reason: str, *steps: int) -> list[Values]:
    return [record("skip", step, reason=reason) for step in steps]


def norms(*values: float) -> list[Values]:
    return train(1, len(values), optim__grad_norm=lambda step: values[step - 1])


def speeds(*phases: tuple[int, float, float | None]) -> list[Values]:
    """Records of phases: their number, tokens per second, cores of others."""
    rows = [(speed, cores) for count, speed, cores in phases for _ in range(count)]
    return train(
        1, len(rows), speed__tokens_per_s=lambda i: rows[i - 1][0], speed__cores_of_others=lambda i: rows[i - 1][1]
    )


def slow(*ranks: int, by: float = 0.2) -> list[Values]:
    """Records in which these ranks are the slowest, one after the other."""
    slowest = {"speed__slowest_rank": lambda step: ranks[step - 1], "speed__compute_s_slowest": 1 + by}
    return train(1, len(ranks), speed__compute_s=1.0, **slowest)


def mirrored(*steps: int) -> list[Values]:
    return [record("mirror", step) for step in steps]


def saved(*steps: int) -> list[Values]:
    return [record("checkpoint", step) for step in steps]


RUNNING = train(1, 300)
RESUME = record("resume", 40, total_steps=1000)
MIRROR = {"config": {"checkpoint": {"mirror": "s3://b"}}}
MEMORY = {"startup": {"ranks": [{"host": "a", "pid": 1, "device": "cuda:0", "device_memory_mib": 1000.0}]}}
HOST_MEMORY = {"startup": {"ranks": [{"host": "a", "pid": 1, "host_memory_mib": 1000.0}]}}
NODES = {"startup": {"ranks": [{"host": host, "pid": 1} for host in "aabb"]}}
QUIET, LOADED, SLOW = (40, 5000.0, 0.1), (10, 500.0, 2.0), (10, 500.0, 0.2)

# What is in the folder of a run, and what its only alert says: name and words; nothing if there is none.
CASES: dict[str, tuple[list[Values], dict[str, Any], str, str]] = {
    "healthy": (losses(4, 3, 2.5, 2.2, 2.1, spread=0.1) + validations(3, 2.5, 2.3), {}, "", ""),
    "finished": (losses(4, 3, 2, 9), {"exit": exited(0, 0)}, "", ""),
    "stopped": (losses(4, 3, 2, 9), {"exit": exited(0, 75)}, "", ""),
    "overfitted": (
        validations(4, 3, 3.2, tag="validation/text"),
        {"exit": exited(0, 0)},
        "overfitting",
        "validation/text is 3.2 at the end and was 3 at step 20; sample",
    ),
    "ended near its best": (validations(4, 3, 3.05, tag="validation/text"), {"exit": exited(0, 0)}, "", ""),
    "texts rise, the sum does not": (
        validations(4, 3, 2, 1) + validations(4, 3, 3.1, 3.2, 3.3, tag="validation/text"),
        {},
        "rising loss",
        "validation/text rose three times in a row, to 3.3",
    ),
    "killed": (RUNNING, {"run": GONE}, "killed", "process 4194305 is gone and left no exit.json"),
    "killed on another host": (RUNNING, {"run": {**GONE, "host": "elsewhere"}}, "", ""),
    "failed": (RUNNING, {"exit": exited(0, 74, "disk full")}, "failed", "exit code 74: disk full; fix what is named"),
    "a wrong setting of both ranks": (RUNNING, {"exit": exited(0, 64), "exit.rank1": exited(1, 64)}, "failed", "64"),
    "rank lost": (
        RUNNING,
        {"exit": exited(0, 76), "exit.rank2": exited(2, 1, "oops")},
        "failed, rank lost",
        "rank 2 ended at step 20 with exit code 1: oops",
    ),
    "rank gone": (
        RUNNING,
        {"run": HERE, "startup": {"ranks": [HERE, {**GONE, "pid": 2**22 + 2}]}},
        "rank lost",
        f"gone from {HOST}: rank 1 (process 4194306)",
    ),
    "ranks of an earlier start": (RUNNING, {"run": HERE, "startup": {"ranks": [GONE, GONE]}}, "", ""),
    "loss is NaN": (
        [*RUNNING, record("train", 301, loss__text=None, nonfinite=["loss/text"])],
        {},
        "not finite",
        "loss/text at step 301; go back to a checkpoint",
    ),
    "gradient norm is NaN": ([record("train", 1, optim__grad_norm=None, nonfinite=["optim/grad_norm"])], {}, "", ""),
    "loss was NaN": ([record("train", 1, loss__text=None, nonfinite=["loss/text"]), *train(2, 9)], {}, "", ""),
    "validation is NaN": (validations(3, None), {}, "not finite", "validation/total at step 20"),
    "skips": (
        [*train(1, 150), *skips("loss", 140), *skips("spike", 141, 150)],
        {},
        "skipped steps",
        "3 of the last 100 steps: the gradient norm was a spike (2), the loss was not finite (1); the latest: 140, 141",
    ),
    "skip long ago": ([*skips("norm", 50), *train(1, 150)], {}, "", ""),
    "overflows": ([*skips("overflow", *range(190, 201))], {}, "skipped steps", "overflowed in 11 of the last 200"),
    "few overflows": ([*skips("overflow", *range(191, 201))], {}, "", ""),
    "overflows long ago": ([*skips("overflow", *range(90, 101)), *train(1, 300)], {}, "", ""),
    "overflows at the start": ([*skips("overflow", *range(1, 20))], {}, "", ""),
    "loss rises": (losses(4, 3, 2, 2.3), {}, "rising loss", "loss/total is 2.3 (median of 10 records) and was 2; go"),
    "loss rises from the start": (losses(3, 5, 8), {}, "rising loss", "is 8"),
    "loss rises a little": (losses(4, 3, 2, 2.09), {}, "", ""),
    "loss rises by chance": (losses(4, 3, 2, 2.15, spread=0.3), {}, "", ""),
    "loss rises early": (losses(2, 9), {}, "", ""),
    "loss is below 0": (losses(0, -1, -2, -2.3), {}, "", ""),
    "validation rises": (
        validations(4, 3, 3.1, 3.2, 3.3),
        {},
        "rising loss",
        "to 3.3; its lowest was 3; if loss",
    ),
    "validation rises twice": (validations(4, 3, 3.1, 3.2), {}, "", ""),
    "validation rises a little": (validations(4, 3, 3.01, 3.02, 3.04), {}, "", ""),
    "validation falls again": (validations(4, 3, 3.1, 3.3, 3.2), {}, "", ""),
    "norm jumps": (norms(*[1.0] * 25, *[5.1] * 3, 1, 9), {}, "gradient norm", "5.1 (median of 5 records), before 1"),
    "norm jumps less": (norms(*[1.0] * 25, *[4.9] * 5), {}, "", ""),
    "norm jumps for two steps": (norms(*[1.0] * 25, 9, 9, 1, 1, 1), {}, "", ""),
    "norm was low long ago": (norms(*[0.1] * 200, *[1.0] * 110), {}, "", ""),
    "norm jumps early": (norms(*[1.0] * 19, *[9.0] * 5), {}, "", ""),
    "device is full": (
        train(1, 2, memory__cuda_peak_reserved_mib=960.0, memory__cuda_reserved_mib=10.0),
        MEMORY,
        "memory",
        "0.9 of 1.0 GiB of the device cuda:0 are used",
    ),
    "device has been full": (
        [*train(1, 1, memory__cuda_peak_reserved_mib=960.0), *train(2, 2, memory__cuda_peak_reserved_mib=940.0)],
        MEMORY,
        "",
        "",
    ),
    "host is full": (train(1, 2, memory__host_free_mib=40.0), HOST_MEMORY, "memory", "of the host are used"),
    "host has room": (train(1, 2, memory__host_free_mib=60.0), HOST_MEMORY, "", ""),
    "mirror failed": (
        [*mirrored(40), record("mirror", 80, error="no space")],
        MIRROR,
        "mirror",
        "not copied at step 80: no space; repair",
    ),
    "mirror failed and recovered": ([record("mirror", 40, error="no space"), *mirrored(80)], MIRROR, "", ""),
    "mirror failed and was switched off": ([record("mirror", 40, error="no space")], {}, "", ""),
    "mirror is late": (
        [*saved(10, 20, 30, 40, 50), *mirrored(10)],
        MIRROR,
        "mirror",
        "4 checkpoints are newer than the newest copy, of step 10",
    ),
    "mirror is a little late": ([*saved(10, 20, 30, 40), *mirrored(10)], MIRROR, "", ""),
    "slow rank": (slow(1, *[3] * 5, by=0.5), NODES, "slow rank", "rank 3 on b is 50% slower"),
    "slow host": (slow(1, *[2, 3, 3, 2, 3]), NODES, "slow rank", "rank 2 and 3 on b is 20% slower"),
    "slow ranks of two hosts": (slow(1, *[1, 3, 3, 2, 3]), NODES, "", ""),
    "slow ranks of the only host": (slow(1, *[1, 0, 1, 1, 1]), {"startup": {"ranks": [{"host": "a"}] * 2}}, "", ""),
    "slow rank recovered": (slow(*[1] * 9) + slow(*[1] * 10, by=0.05)[9:], NODES, "", ""),
    "slow rank of an earlier session": ([*slow(*[1] * 40), RESUME], {}, "", ""),
    "slow rank of a failed run": (slow(*[1] * 9), {"exit": exited(0, 1)}, "failed", ""),
    "data-bound": (train(1, 11, speed__data_wait_s=0.5), {}, "data-bound", "25% of a step is waiting for data; raise"),
    "data-bound a little": (train(1, 11, speed__data_wait_s=0.3), {}, "", ""),
    "data-bound at first": (train(1, 10, speed__data_wait_s=0.5), {}, "", ""),
    "data-bound before": ([*train(1, 30, speed__data_wait_s=0.5), RESUME, *train(41, 50)], {}, "", ""),
    "busy cores": (
        speeds(QUIET, LOADED),
        {},
        "low speed",
        "(median of 10 records), before 5000; other processes keep 2.0 cores of this host busy, before 0.1",
    ),
    "low speed": (speeds(QUIET, SLOW), {}, "low speed", "before 5000; look for another job"),
    "low speed without cores": (speeds((40, 5e3, None), (10, 5e2, None)), {}, "low speed", "before 5000; look"),
    "low speed, busy before": (speeds((40, 5e3, 2.0), LOADED), {}, "low speed", "before 5000; look"),
    "busy from the start": (speeds((60, 500.0, 2.0)), {}, "", ""),
    "speed rises": (speeds((40, 500.0, 2.0), (10, 5000.0, 0.0)), {}, "", ""),
    "low speed for long": (speeds(QUIET, (60, 500.0, 2.0)), {}, "", ""),
    "busy, but fast": (speeds(QUIET, (10, 4500.0, 2.0)), {}, "", ""),
    "low speed early": (speeds((15, 5000.0, 0.1), LOADED), {}, "", ""),
    "low speed after a resume": (
        [*train(1, 40, speed__tokens_per_s=5e3), RESUME, *train(41, 60, speed__tokens_per_s=1e2)],
        {},
        "",
        "",
    ),
}


def look(folder: Path, after_s: float = 1.0, interval_s: float = 10.0, **thresholds: float) -> Snapshot:
    """Return the snapshot some seconds after the latest record."""
    history = History(folder)
    latest = history.last()
    now = (latest["time"] if latest else T0) + after_s
    return Snapshot(history, interval_s, Thresholds(**thresholds), now)


def raised(snapshot: Snapshot) -> dict[str, str]:
    return {alert.name: f"{alert.found}; {alert.advice}" for alert in alerts(snapshot)}


@pytest.mark.quick
@pytest.mark.parametrize("name", CASES)
def test_alerts_of_records(name: str, tmp_path: Path) -> None:
    records, files, names, words = CASES[name]
    result = raised(look(write_run(tmp_path / "run", [START, *records], **files)))
    assert ", ".join(result) == names and words in "; ".join(result.values())


@pytest.mark.quick
def test_every_rule_has_a_case() -> None:
    """Those of disk, tracker and silence have tests of their own."""
    names = {name for _, _, names, _ in CASES.values() for name in names.split(", ") if name}
    assert names | {"disk", "tracker", "no news"} == {rule.name for rule in RULES}


@pytest.mark.quick
def test_thresholds_that_can_be_set(tmp_path: Path) -> None:
    run = write_run(tmp_path, [START, *train(1, 11, speed__data_wait_s=0.5, memory__host_free_mib=60.0)], **HOST_MEMORY)
    assert set(raised(look(run, data_wait=0.26))) == set() and set(raised(look(run, data_wait=0.24))) == {"data-bound"}
    assert "memory" in raised(look(run, memory=0.93)) and "memory" not in raised(look(run, memory=0.95))
    assert "disk" in raised(look(run, disk_gib=1e9)) and "disk" not in raised(look(run, disk_gib=0))
    started = write_run(tmp_path / "started", [START])
    assert not raised(look(started, 900)) and set(raised(look(started, 911))) == {"no news"}
    assert set(raised(look(started, 61, silent_s=50))) == {"no news"}


@pytest.mark.quick
def test_a_disk_without_room_for_checkpoints(tmp_path: Path) -> None:
    newest = write_run(tmp_path, [START]) / "checkpoints" / "step-00000002"
    newest.mkdir(parents=True)
    snapshot = look(tmp_path)
    with (newest / "model.safetensors").open("wb") as file:
        file.truncate(snapshot.disk_free_bytes // 3 - 2**28)
    assert not raised(look(tmp_path, disk_gib=0))
    os.truncate(newest / "model.safetensors", snapshot.disk_free_bytes // 3 + 2**28)
    assert set(raised(look(tmp_path, disk_gib=0))) == {"disk"}


@pytest.mark.quick
def test_a_tracker_that_cannot_be_reached(tmp_path: Path) -> None:
    error = write_run(tmp_path, [START]) / "trackers/wandb/error.txt"
    error.parent.mkdir(parents=True)
    error.write_text("tracker wandb: no route\n\nTraceback\n")
    assert raised(look(tmp_path))["tracker"].startswith("tracker wandb: no route; trackers/NAME/error.txt")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("records", "silent_after_s", "words"),
    [
        ([START], 910, "since step 0;"),
        ([*RUNNING, record("resume", 300)], 910, "since step 300; a step usually takes 2s"),
        (RUNNING, 10 + 10 * STEP_S, "since step 300; a step usually takes 2s; `kill -CONT PID`"),
        (train(8, 80, 8), 10 + 2 * 8 * STEP_S, "since step 80"),
        # What a heartbeat announces may take as long as a start, if it is new, or ten times as long as it usually does.
        ([*RUNNING, record("heartbeat", 300, what="saving")], 910, "since step 300 while saving"),
        (
            [
                *train(1, 100),
                *(record("heartbeat", 100, what="saving"), record("checkpoint", 100, after_s=40)),
                *train(121, 200),
                record("heartbeat", 200, what="saving"),
            ],
            410,
            "while saving",
        ),
        ([*train(1, 100), record("heartbeat", 100, what="x"), record("train", 101), record("heartbeat", 101, what="x")],
         10 + 10 * STEP_S, "while x"),
    ],
)  # fmt: skip
def test_silence(records: list[Values], silent_after_s: float, words: str, tmp_path: Path) -> None:
    run = write_run(tmp_path, [START, *records])
    before, after = (look(run, silent_after_s + seconds) for seconds in (-0.5, 0.5))
    assert (before.state.name, after.state.name) == ("running", "silent") and not raised(before)
    assert words in raised(after)["no news"]


@pytest.mark.quick
def test_the_page_has_the_table_of_alerts() -> None:
    assert alert_table() in (ROOT / "docs" / "review.md").read_text(encoding="utf-8")


def read_until(monitor: subprocess.Popen[str], state: str, alert: str) -> dict[str, str]:
    """Return the alerts of the first snapshot that finds the run in `state` with that alert."""
    assert monitor.stdout is not None
    deadline = time.monotonic() + TEST_TIMEOUT_S
    for line in monitor.stdout:
        (result,) = json.loads(line)
        found = {one["name"]: f"{one['found']}; {one['advice']}" for one in result["alerts"]}
        if result["state"] == state and alert in found:
            return found
        assert time.monotonic() < deadline, f"the run is {result['state']}, with {found}, not {state} with {alert}"
    raise AssertionError(f"the monitor ended, and no snapshot was {state} with {alert}")


def test_a_run_that_waits_for_data_hangs_and_is_killed(forked: ForkedRuns, tiny_config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    endless = ("train.steps=100000", "data.num_workers=0", "validation.every=0", "checkpoint.every_steps=0")
    arguments = [tiny_config, *endless, f"run.dir={run}"]
    (pid,) = forked.start("single", arguments, 1, tmp_path / "log", "slow_data.py", SLOW_STEP="60")
    wait_until(lambda: (run / "metrics.jsonl").exists() and History(run).step > 1, "steps")
    command = [sys.executable, "-m", "mmldlm.cli", "monitor", str(run), "--interval", "1", "--json"]
    monitor = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert "% of a step is waiting for data" in read_until(monitor, "running", "data-bound")["data-bound"]
        os.kill(pid, signal.SIGSTOP)
        assert f"stopped by a signal: process {pid}" in read_until(monitor, "silent", "no news")["no news"]
        os.kill(pid, signal.SIGCONT)
        read_until(monitor, "running", "data-bound")
        os.kill(pid, signal.SIGKILL)
        read_until(monitor, "killed", "killed")
        assert monitor.wait(TEST_TIMEOUT_S) == 69, "it ends with the run"
    finally:
        monitor.kill()
        forked.kill([pid])


def test_a_rank_that_hangs_and_is_lost(forked: ForkedRuns, tiny_config: Path, tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    endless = ("train.steps=100000", "distributed.timeout_s=60", "validation.every=0", "checkpoint.every_steps=0")
    pids = forked.start("ddp", [tiny_config, *endless, "data.num_workers=0", f"run.dir={run}"], 2, log)

    def result() -> dict[str, str]:
        return raised(Snapshot(History(run), 1.0, now=time.time()))

    try:
        wait_until(lambda: (run / "metrics.jsonl").exists() and History(run).step > 5, "steps")
        os.kill(pids[1], signal.SIGSTOP)
        wait_until(lambda: "no news" in result(), "news of the hang")
        assert f"stopped by a signal: process {pids[1]}" in result()["no news"]
        os.kill(pids[0], signal.SIGSTOP)  # so that it cannot tell of the loss
        os.kill(pids[1], signal.SIGKILL)
        wait_until(lambda: "rank lost" in result(), "news of the loss")
        assert f"rank 1 (process {pids[1]})" in result()["rank lost"]
        os.kill(pids[0], signal.SIGCONT)
        assert forked.wait(pids[:1]) == {pids[0]: 76}, log.read_text()[-3000:]
        assert "exit code 76" in result()["failed"] and "rank 1" in result()["rank lost"]
    finally:
        forked.kill(pids)
