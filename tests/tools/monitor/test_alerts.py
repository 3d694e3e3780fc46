"""Each alert of `mmldlm monitor` comes on a short real run with that fault, and none on a run without."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mmldlm.data.prepare.pipeline import prepare
from mmldlm.tools.monitor.alerts import Alert, alerts
from mmldlm.tools.monitor.command import _pause_s
from mmldlm.tools.monitor.snapshot import Snapshot
from mmldlm.tools.run_history import History
from tests.helpers.forked_runs import ForkedRuns
from tests.helpers.monitor_runs import alerts_at, seen_at
from tests.helpers.paths import ROOT
from tests.helpers.sample_corpus import small_config, write_corpus
from tests.helpers.waiting import TEST_TIMEOUT_S, wait_until

BARE = ("data.num_workers=0", "validation.every=0", "checkpoint.every_steps=0")
HEALTHY = ("train.steps=100", "schedule.lr=constant", "log.every=2", "checkpoint.every_steps=40", "data.num_workers=0")
OFTEN = "validation={every: 10, samples: 32, text_samples: 0}"  # which shows whether it learns
# Other tests run at the same time.
BUSY_MACHINE = {"speed_spread": 10.0, "speed_drop": 0.01, "silent_steps": 100.0, "data_wait": 0.99}


def steps(run: Path) -> list[int]:
    return sorted({record["step"] for record in History(run).by_kind("train")})


def advice(result: list[Alert], name: str) -> str:
    return next(f"{alert.found}; {alert.advice}" for alert in result if alert.name == name)


def test_healthy_run_has_no_alert(forked: ForkedRuns, tiny_config: Path, tmp_path: Path) -> None:
    run = tmp_path / "healthy"
    forked.succeed("single", run, 1, tiny_config, *HEALTHY, OFTEN)
    assert {step: result for step in steps(run) if (result := alerts_at(run, step, **BUSY_MACHINE))} == {}
    snapshot = seen_at(run, 90)
    assert snapshot.state.name == "running" and snapshot.eta_s and len(snapshot.memory) == 1
    assert snapshot.data_wait_share is not None
    finished = Snapshot(History(run), 10.0)
    assert finished.state.name == "finished" and finished.state.code == 0 and alerts(finished) == []

    # What takes a small machine or disk to happen: the same run, with other thresholds.
    assert alerts_at(run, 90, **BUSY_MACHINE, memory=1e-6) == {"memory"}
    assert alerts_at(run, 90, **BUSY_MACHINE, disk_gib=1e9) == {"disk"}
    shutil.copytree(run / "checkpoints", run.with_name("healthy-90") / "checkpoints")
    assert alerts_at(run, 90, **BUSY_MACHINE, disk_checkpoints=1e9) == {"disk"}

    # Resumed with a learning rate that is far too high, the loss rises from where it was.
    forked.succeed("single", run, 1, tiny_config, *HEALTHY, "train.steps=124", "validation.every=0", "optim.lr=0.3")
    assert alerts_at(run, 100, **BUSY_MACHINE) == set()
    assert "rising loss" in alerts_at(run, 122, **BUSY_MACHINE, diverged=1e12), "above where it was"


def test_mirror_without_the_newest_checkpoints(forked: ForkedRuns, tiny_config: Path, tmp_path: Path) -> None:
    run, file, saves = tmp_path / "run", tmp_path / "file", ("validation.every=0", "checkpoint.every_steps=4")
    file.touch()
    forked.succeed("single", run, 1, tiny_config, *saves, f"checkpoint.mirror={file}/no/folder")
    result = alerts(seen_at(run, 8))
    assert [alert.name for alert in result] == ["mirror"] and "Not a directory" in result[0].found
    assert "tries again by itself" in result[0].advice

    # Copies that are slow: two checkpoints came before the first copy.
    shutil.rmtree(run)
    forked.succeed("single", run, 1, tiny_config, *saves, f"checkpoint.mirror={tmp_path / 'disk'}")
    assert alerts_at(run, 8, mirror_checkpoints=0) == set()
    lines = [line for line in (run / "metrics.jsonl").read_text().splitlines() if '"kind": "mirror"' not in line]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert alerts_at(run, 8, mirror_checkpoints=1) == {"mirror"} and alerts_at(run, 8, mirror_checkpoints=2) == set()


def test_a_run_that_diverges(forked: ForkedRuns, tiny_config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    forked.succeed("single", run, 1, tiny_config, *BARE, "train.steps=26", "optim.lr=0.1")
    result = alerts(seen_at(run, 14))
    assert "more than at the start" in advice(result, "rising loss") and "optim.lr" in advice(result, "rising loss")
    assert "times optim.clip_norm" in advice(alerts(seen_at(run, 25)), "gradient norm")


def test_a_gradient_norm_that_jumps(forked: ForkedRuns, tiny_config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    faults = [{"step": step, "kind": "huge", "rank": 0, "micro_batch": 0} for step in range(27, 32)]
    variables = {"FAULTS": json.dumps(faults), "FACTS": str(tmp_path)}
    forked.succeed("single", run, 1, tiny_config, *BARE, "train.steps=33", script="faulty_steps.py", **variables)
    assert "gradient norm" not in alerts_at(run, 27, norm_clipped=1e3)
    assert "gradient norm" in alerts_at(run, 32, norm_clipped=1e3)
    assert ", before " in advice(alerts(seen_at(run, 32)), "gradient norm")


def test_a_run_that_learns_nothing(forked: ForkedRuns, tiny_config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    flat = ("train.steps=24", "optim.lr=1e-9", "schedule.lr=constant", "validation={every: 2, text_samples: 0}")
    forked.succeed("single", run, 1, tiny_config, *BARE, *flat)
    assert "plateau" not in alerts_at(run, 10) and "plateau" in alerts_at(run, 20)


def test_nonfinite_samples(forked: ForkedRuns, tiny_config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    faults = [{"step": step, "kind": "nan", "rank": 0, "micro_batch": 0} for step in [5, *range(10, 30)]]
    variables = {"FAULTS": json.dumps(faults), "FACTS": str(tmp_path)}
    arguments = [tiny_config, *BARE, "train.steps=40", "log.every=2", f"run.dir={run}"]
    pids = forked.start("single", arguments, 1, tmp_path / "log", "faulty_steps.py", **variables)
    assert forked.wait(pids) == {pids[0]: 70}
    assert "optim/grad_norm" in History(run).by_kind("train")[2]["nonfinite"], "of the step that was left out"
    assert alerts_at(run, 5, **BUSY_MACHINE) == set() and alerts_at(run, 6, **BUSY_MACHINE) == {"skipped steps"}
    assert alerts_at(run, 8, **BUSY_MACHINE, skip_steps=2) == set(), "it is long ago"
    ended = Snapshot(History(run), 10.0)
    assert ended.state.name == "failed" and ended.state.code == 70
    result = alerts(ended)
    assert [alert.name for alert in result] == ["failed", "skipped steps"]
    assert "the loss was not finite (11)" in advice(result, "skipped steps") and "exit code 70" in result[0].found


def test_overfitting_run(forked: ForkedRuns, tiny_config: Path, tmp_path: Path) -> None:
    """With 17 documents the model soon knows from a latent which text to generate."""
    run, few = tmp_path / "run", write_corpus(tmp_path / "few.txt", 60)
    options = {"max_length": 32, "channels": 4, "validation_fraction": 0.6, "test_fraction": 0.2}
    prepare(small_config(tmp_path / "few", few, **options), progress=False)
    learns = ("mode=l2t", "model.width=64", "train={steps: 110, global_batch_size: 16}", "schedule.lr=constant")
    often = ("loss.text=masked_mean", "validation={every: 20, samples: 64, text_samples: 0}", "log.every=2")
    forked.succeed("single", run, 1, tiny_config, *BARE, *learns, *often, f"data.path={tmp_path / 'few'}")
    assert alerts_at(run, 60, **BUSY_MACHINE) == set() and alerts_at(run, 100, **BUSY_MACHINE) == {"rising loss"}
    result = advice(alerts(seen_at(run, 100)), "rising loss")
    assert "validation/total rose three times in a row" in result and "checkpoint.keep_best" in result


def test_an_fp16_run_that_overflows_again_and_again(forked: ForkedRuns, tiny_config: Path, tmp_path: Path) -> None:
    """The overflows by which the scale comes down at the start are none of it."""
    run, small = tmp_path / "run", ("model.depth=1", "train={steps: 240, global_batch_size: 2}", "log.every=5")
    settings = (*BARE, *small, "precision=fp16")
    forked.succeed("single", run, 1, tiny_config, *settings, script="growing_loss_scale.py", GROWS_FROM="205")
    skips = History(run).by_kind("skip")
    assert {record["reason"] for record in skips} == {"overflow"} and skips[0]["step"] == 1
    assert "overflow" not in alerts_at(run, 205) and "overflow" in alerts_at(run, 240)
    assert "of the last 200 steps; use precision=bf16" in advice(alerts(seen_at(run, 240)), "overflow")
    assert "skipped steps" not in alerts_at(run, 240), "no data and no learning rate is at fault"


def test_nan_weight(forked: ForkedRuns, tiny_config: Path, tmp_path: Path) -> None:
    run, often = tmp_path / "run", "validation={every: 3, samples: 8, text_samples: 0}"
    arguments = [tiny_config, *BARE, "train.steps=40", often, f"run.dir={run}"]
    pids = forked.start("single", arguments, 1, tmp_path / "log", "ruined_weight.py", RUINED_AFTER="6")
    assert forked.wait(pids) == {pids[0]: 70}
    assert alerts_at(run, 5, **BUSY_MACHINE) == set() and alerts_at(run, 6, **BUSY_MACHINE) == {"not finite"}
    assert "validation/total, " in advice(alerts(seen_at(run, 6)), "not finite")
    ended = alerts(Snapshot(History(run), 10.0))
    assert [alert.name for alert in ended] == ["failed", "not finite", "skipped steps"]


def test_slow_disk(forked: ForkedRuns, tiny_config: Path, tmp_path: Path) -> None:
    run, small = tmp_path / "run", ("model.depth=1", "train.global_batch_size=4", "train.steps=106", "log.every=2")
    forked.succeed("single", run, 1, tiny_config, *BARE, *small, script="slow_data.py", SLOW_STEP="60")
    assert "data-bound" not in alerts_at(run, 60)
    idle = {"cores_of_others": 1e9}  # whatever else this machine does
    assert alerts_at(run, 104, **idle) == {"data-bound", "low speed", "unstable speed"}


def read_until(monitor: subprocess.Popen[str], state: str) -> dict[str, object]:
    """Return the first snapshot that finds the run in `state`."""
    assert monitor.stdout is not None
    for line in monitor.stdout:
        (result,) = json.loads(line)
        if result["state"] == state:
            return result
    raise AssertionError(f"the monitor ended, and no snapshot was {state}")


def test_a_run_that_hangs_and_is_killed(forked: ForkedRuns, tiny_config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    endless = [tiny_config, *BARE, "train.steps=100000", "log.every=40", f"run.dir={run}"]
    (pid,) = forked.start("single", endless, 1, tmp_path / "log")
    wait_until(lambda: (run / "metrics.jsonl").exists() and len(steps(run)) > 1, "steps")
    command = [sys.executable, "-m", "mmldlm.cli", "monitor", str(run), "--interval", "2", "--json"]
    monitor = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        read_until(monitor, "running")
        os.kill(pid, signal.SIGSTOP)
        snapshot = read_until(monitor, "silent")
        # It is said 10 steps and an interval after the latest record, for which the monitor wakes up.
        history = History(run)
        age = history.news_age_s(now := time.time())
        assert history.step_s is not None and age is not None
        news, limit = now - age, 2 + 10 * history.step_s
        before, after = (Snapshot(history, 2.0, now=news + limit + seconds) for seconds in (-0.5, 0.01))
        assert (before.state.name, after.state.name) == ("running", "silent")
        assert _pause_s([before], 2.0) == pytest.approx(0.5, abs=0.1) and _pause_s([after], 2.0) == 2.0
        (alert,) = (alert for alert in snapshot["alerts"] if alert["name"] == "no news")  # type: ignore[attr-defined]
        assert f"kill -CONT {pid}" in alert["advice"] and "stopped by a signal" in alert["found"]
        os.kill(pid, signal.SIGCONT)
        read_until(monitor, "running")
        os.kill(pid, signal.SIGKILL)
        snapshot = read_until(monitor, "killed")
        assert "killed" in {alert["name"] for alert in snapshot["alerts"]}  # type: ignore[attr-defined]
        assert monitor.wait(TEST_TIMEOUT_S) == 69, "it ends with the run"
    finally:
        monitor.kill()
        forked.kill([pid])


def test_a_rank_that_hangs_and_is_lost(forked: ForkedRuns, tiny_config: Path, tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    endless = ("train.steps=100000", "distributed.timeout_s=60", f"run.dir={run}")
    pids = forked.start("ddp", [tiny_config, *BARE, *endless], 2, log)

    def result() -> dict[str, str]:
        snapshot = Snapshot(History(run), 1.0)
        return {alert.name: alert.found for alert in alerts(snapshot)}

    try:
        wait_until(lambda: (run / "metrics.jsonl").exists() and len(steps(run)) > 5, "steps")
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


@pytest.mark.quick
def test_first_record_with_an_alert(tmp_path: Path) -> None:
    """Where exactly they begin, from records as a run writes them."""
    from mmldlm.telemetry.metrics import MetricsFile

    file = MetricsFile(tmp_path / "metrics.jsonl", None)
    file.write("start", 0, {"total_steps": 1000})

    def names() -> set[str]:
        return {alert.name for alert in alerts(Snapshot(History(tmp_path), 10.0))}

    for step, loss in ((50, 4.0), (100, 3.0), (150, 3.1), (200, 3.2)):
        file.write("validation", step, {"validation/total": loss})
    assert names() == set()
    file.write("validation", 250, {"validation/total": 3.3})
    assert names() == {"rising loss"}
    for step in range(251, 261):
        file.write("skip", step, {"reason": "overflow"})
    assert names() == {"rising loss"}, "ten overflows in 200 steps are how a loss scale comes down"
    file.write("skip", 262, {"reason": "overflow"})
    assert names() == {"rising loss", "overflow"}
    file.write("validation", 300, {"validation/total": float("nan")})
    assert "not finite" in names()
