"""`checkpoint.mirror`: copies of checkpoints, and starts from them on an empty disk."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mmldlm import cli, train
from mmldlm.checkpoint.manifest import verify_checkpoint
from mmldlm.config import load_config
from mmldlm.tools.monitor.alerts import alerts
from tests.helpers.engine_runs import CURVE
from tests.helpers.forked_runs import ForkedRuns
from tests.helpers.metrics import read_metrics
from tests.helpers.monitor_runs import seen_at
from tests.helpers.object_store import BUCKET, FaultyProxy, ObjectStore
from tests.helpers.user_errors import assert_user_error
from tests.helpers.waiting import wait_until

SETTINGS = ("train.steps=16", "checkpoint.every_steps=4", "validation.every=0", "data.num_workers=0")
Single = Callable[..., Path]


@pytest.fixture
def reference(single: Single) -> list[list[float]]:
    """The curve of the run that nothing disturbs."""
    return curve(single(*SETTINGS))


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    with ObjectStore() as store:
        yield store


def curve(run: Path) -> list[list[float]]:
    return [
        [r["step"], *(r[key] for key in CURVE)] for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "train"
    ]


def records(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    return [record for record in read_metrics(path) if record["kind"] == "mirror"] if path.exists() else []


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:13]) for path in folder.glob("step-*"))


class Stopping(train.Trainer):
    """Receives SIGTERM in a step, so that it stops after the next one."""

    at = 0

    def update(self, step: int, *arguments: Any) -> Any:
        if step + 2 == self.at:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().update(step, *arguments)


def stopped_after(step: int) -> type[train.Trainer]:
    return type("Stopping", (Stopping,), {"at": step})


@pytest.mark.setting("checkpoint.mirror")
def test_a_stopped_run_goes_on_from_the_mirror_alone(
    parity_config: Path, tmp_path: Path, reference: list[list[float]]
) -> None:
    """Bit for bit; with the retention of the run, whatever disks it has seen."""
    run, mirror, kept = tmp_path / "run", tmp_path / "mirror/run", ["checkpoint.keep_last=1", "checkpoint.keep_every=8"]
    command = [str(parity_config), *SETTINGS, f"run.dir={run}", f"checkpoint.mirror={tmp_path / 'mirror'}", *kept]
    assert train.main(command, stopped_after(10)) == 75
    assert steps(run / "checkpoints") == steps(mirror) == [8, 10], "the stop waits for the copy"
    assert verify_checkpoint(mirror / "step-00000010/checkpoints/step-00000010").step == 10
    shutil.rmtree(run)
    assert train.main(command) == 0
    assert curve(run) == reference
    assert steps(run / "checkpoints") == [16] and steps(mirror) == [8, 16], "8 was on the other disk alone"
    kinds = [record["kind"] for record in read_metrics(run / "metrics.jsonl")]
    assert kinds.count("start") == kinds.count("resume") == 1
    assert {path.name for path in (mirror / "step-00000016").iterdir()} == {
        *("checkpoints", "config.yaml", "data", "metrics.jsonl", "skipped_steps.jsonl", "startup.json")
    }


def test_a_rewound_run_does_not_go_on_with_the_copies_of_the_branch_that_it_left(
    parity_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, mirror = tmp_path / "run", tmp_path / "mirror/run"
    command = [str(parity_config), *SETTINGS, f"run.dir={run}", f"checkpoint.mirror={tmp_path / 'mirror'}"]
    assert train.main(command) == 0
    sample = f"{Path(load_config(parity_config).data.path).name}:0"
    assert cli.main(["rewind", str(run), "--before", "9", "--skip", sample]) == 0
    capsys.readouterr()
    assert_user_error((train.main(command), capsys.readouterr().err), 64, str(mirror), "step 16", "none after 8")
    for step in (12, 16):
        shutil.rmtree(mirror / f"step-{step:08}")
    assert train.main(command) == 0 and steps(mirror)[-1] == 16
    # A copy knows what its run leaves out; the start that fetches it has been set up without that.
    shutil.rmtree(run)
    capsys.readouterr()
    assert_user_error((train.main(command), capsys.readouterr().err), 64, str(run), "run the command again")
    assert train.main(command) == 0 and load_config(run / "config.yaml", may_extend=False).data.skip_samples == [sample]


def test_two_ranks(forked: ForkedRuns, parity_config: Path, tmp_path: Path, reference: list[list[float]]) -> None:
    """Rank 0 copies for all; a single process goes on with what two have saved."""
    run, settings = tmp_path / "run", [parity_config, *SETTINGS, f"checkpoint.mirror={tmp_path / 'mirror'}"]
    forked.succeed("ddp", run, 2, *settings, "distributed.timeout_s=30")
    shared, copies = curve(run), steps(tmp_path / "mirror/run")
    assert copies == [8, 12, 16] and [row[0] for row in shared] == list(range(1, 17))
    for folder in (run, tmp_path / "mirror/run/step-00000016"):
        shutil.rmtree(folder)
    forked.succeed("single", run, 1, *settings)
    assert curve(run) == shared[:12] + curve(run)[12:]
    assert [row[:2] for row in curve(run)[12:]] == [pytest.approx(row[:2], rel=1e-4) for row in reference[12:]]


@pytest.mark.slow
def test_connections_that_are_cut(
    forked: ForkedRuns, parity_config: Path, tmp_path: Path, store: ObjectStore, reference: list[list[float]]
) -> None:
    """Uploads break half way: training goes on, an alert tells, and the copy is complete once the store is back."""
    run, log = tmp_path / "cut", tmp_path / "log"
    with FaultyProxy(store.address, "cut") as proxy:
        settings = [parity_config, *SETTINGS, f"checkpoint.mirror=s3://{BUCKET}/runs", f"run.dir={run}"]
        settings.append("data.num_workers=1")  # forked beside the threads of s3fs
        slow = {"STEP_S": "0.5", **store.environment(proxy.address)}
        pids = forked.start("single", settings, 1, log, "paused_steps.py", **slow)
        wait_until(lambda: bool(records(run)) or forked.wait(pids, 0) != {}, "a record of the fault")
        assert proxy.faults and "error" in records(run)[0], log.read_text()[-3000:]
        assert not store.complete("runs/cut"), "partial"
        proxy.fault = ""
        assert forked.wait(pids) == dict.fromkeys(pids, 0), log.read_text()[-3000:]
    assert curve(run) == reference
    assert "error" not in records(run)[-1] and store.complete("runs/cut") == [8, 12, 16]
    lines = [line for line in log.read_text().splitlines() if line.startswith("mirror at step 4: error")]
    assert len(lines) == 1 and f"s3://{BUCKET}/runs/cut" in lines[0] and "Traceback" not in log.read_text()
    result = {alert.name: alert for alert in alerts(seen_at(run, records(run)[0]["step"]))}
    assert "s3://" in result["mirror"].found and "mirror" not in {a.name for a in alerts(seen_at(run, 16))}


@pytest.mark.setting("checkpoint.mirror_wait_s")
def test_wrong_credentials(
    forked: ForkedRuns, parity_config: Path, tmp_path: Path, store: ObjectStore, reference: list[list[float]]
) -> None:
    """An empty disk is refused at the start; with checkpoints the run goes on, and a line says what is wrong."""
    run, log, wrong = tmp_path / "wrong", tmp_path / "log", store.environment(secret="wrong")
    settings = [parity_config, *SETTINGS, f"run.dir={run}"]
    mirrored = [*settings, f"checkpoint.mirror=s3://{BUCKET}/runs", "checkpoint.mirror_wait_s=100"]
    pids = forked.start("single", mirrored, 1, log, **wrong)
    assert forked.wait(pids) == dict.fromkeys(pids, 74)
    assert_user_error((74, log.read_text()), 74, "checkpoint.mirror", "Forbidden", alone=False)
    shutil.rmtree(run)
    assert train.main([*map(str, settings), "checkpoint.every_steps=100"], stopped_after(10)) == 75
    forked.succeed("single", run, 1, *mirrored, **wrong)
    assert curve(run) == reference and store.complete("runs/wrong") == []
    text = run.with_suffix(".log").read_text()
    assert "cannot look for newer checkpoints: s3://" in text and "Traceback" not in text
    assert {"Forbidden" in record["error"] for record in records(run)} == {True}
    assert records(run)[-1]["step"] == 16, "the end tries once more"
    # The same command does what is left; without waiting for it, it does not.
    forked.succeed("single", run, 1, *mirrored[:-1], "checkpoint.mirror_wait_s=0", **store.environment())
    # The copy may still be complete before the process ends.
    assert "checkpoint.mirror_wait_s" in records(run)[-1]["error"] and set(store.complete("runs/wrong")) <= {12, 16}
    forked.succeed("single", run, 1, *mirrored, **store.environment())
    assert store.complete("runs/wrong") == [10, 12, 16]


def test_killed_while_copying(
    forked: ForkedRuns, parity_config: Path, tmp_path: Path, store: ObjectStore, reference: list[list[float]]
) -> None:
    """Kill -9 with half of an upload done: an empty disk goes on from the copy before."""
    run, log = tmp_path / "killed", tmp_path / "log"
    settings = [parity_config, *SETTINGS, f"checkpoint.mirror=s3://{BUCKET}/runs", f"run.dir={run}"]
    with FaultyProxy(store.address) as proxy:
        slow = {"STEP_S": "0.3", **store.environment(proxy.address)}
        pids = forked.start("single", settings, 1, log, "paused_steps.py", **slow)
        wait_until(lambda: bool(store.complete("runs/killed")), "a first copy")
        first, proxy.fault = store.complete("runs/killed"), "slow"
        wait_until(lambda: proxy.faults > 0, "a copy that has begun")
        forked.kill(pids)
        assert forked.wait(pids) == dict.fromkeys(pids, -signal.SIGKILL)
        proxy.fault = ""
    assert store.complete("runs/killed") == first
    shutil.rmtree(run)
    forked.succeed("single", run, 1, *settings, **store.environment())
    assert curve(run) == reference and f"resuming from {run}/checkpoints/step-{first[-1]:08}" in (
        run.with_suffix(".log").read_text()
    )
    assert store.complete("runs/killed") == [8, 12, 16]
    assert {name.partition("/")[0] for name in store.names("runs/killed/")} == {
        "step-00000008", "step-00000012", "step-00000016"
    }, "no rest of the copy that was interrupted"  # fmt: skip


def test_a_mirror_that_is_full(parity_config: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=4m none {disk}"
    if subprocess.run(["unshare", "-Urm", "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("no small file system can be mounted here: unshare -Urm is refused")
    run = tmp_path / "run"
    settings = f"{parity_config} {' '.join(SETTINGS)} run.dir={run} checkpoint.mirror={disk}"
    lines = [mount, f"{sys.executable} -m mmldlm.train {settings}", f"ls {disk}/run/*/checkpoints/*/manifest.json"]
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", "\n".join(lines)], capture_output=True, text=True, check=False
    )
    assert [row[0] for row in curve(run)] == list(range(1, 17)), done.stderr[-3000:]
    assert "No space left on device" in records(run)[-1]["error"] and "Traceback" not in done.stderr
    assert len(done.stdout.split("manifest.json")) <= 2, "what is not whole is not complete"
