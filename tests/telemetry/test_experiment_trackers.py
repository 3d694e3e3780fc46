"""`log.trackers`: real trackers of Accelerate get the scalars of a run, and none of them ends it."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import accelerate.tracking
import pytest
from accelerate import PartialState
from accelerate.tracking import GeneralTracker
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mmldlm import train
from mmldlm.errors import ExitCode
from mmldlm.telemetry import experiment_trackers
from mmldlm.telemetry.experiment_trackers import ExperimentTracker
from mmldlm.tools.monitor.alerts import alerts
from tests.helpers.metrics import read_metrics
from tests.helpers.monitor_runs import seen_at

Command = Callable[..., "subprocess.CompletedProcess[str]"]


class Unreliable(GeneralTracker):
    """A tracker that fails, or waits for ever, at the method that a test names."""

    name, requires_logging_directory, tracker = "unreliable", False, None
    fails_at, hangs_at = "", ""

    def __init__(self, project: str) -> None:
        super().__init__()

    def _reach(self, method: str) -> None:
        if method == self.fails_at:
            raise ConnectionError(f"no route\nin {method}")
        if method == self.hangs_at:
            threading.Event().wait()

    def start(self) -> None:
        self._reach("start")

    def store_init_configuration(self, values: dict) -> None:  # type: ignore[type-arg]
        self._reach("store_init_configuration")

    def log(self, values: dict, step: int | None = None, **kwargs: Any) -> None:  # type: ignore[type-arg]
        self._reach("log")

    def finish(self) -> None:
        self._reach("finish")


@pytest.fixture
def unreliable(monkeypatch: pytest.MonkeyPatch) -> type[Unreliable]:
    monkeypatch.setitem(accelerate.tracking.LOGGER_TYPE_TO_CLASS, "unreliable", Unreliable)
    monkeypatch.setattr(accelerate.tracking, "_available_trackers", ["unreliable"])
    monkeypatch.setattr(experiment_trackers, "START_TIMEOUT_S", 0.2)
    monkeypatch.setattr(experiment_trackers, "CLOSE_TIMEOUT_S", 0.2)
    return Unreliable


def send(name: str, run_dir: Path, resumed: bool, rows: Mapping[int, Mapping[str, float]]) -> list[str]:
    """Send rows by step as a start of a run does; return the notices."""
    PartialState()
    notices: list[str] = []
    tracker = ExperimentTracker(name, run_dir, resumed, notices.append)
    tracker.start({"optim": {"lr": 0.1, "betas": [0.9, 0.99]}, "resume": None})
    for step, values in rows.items():
        tracker.log(step, values)
    tracker.close()
    return notices


@pytest.mark.setting("log.trackers")
def test_a_training_sends_its_scalars(tiny_config: Path, tmp_path: Path) -> None:
    assert train.main([str(tiny_config), "log.trackers=[tensorboard]", "train.steps=4", "validation.every=2"]) == 0
    run = tmp_path / "run"
    events = EventAccumulator(str(run / "trackers/tensorboard/run")).Reload()
    for kind, tag in (("train", "loss/total"), ("validation", "validation/total")):
        expected = [(r["step"], r[tag]) for r in read_metrics(run / "metrics.jsonl") if r["kind"] == kind]
        assert [(event.step, pytest.approx(event.value)) for event in events.Scalars(tag)] == expected and expected
    (settings,) = run.glob("trackers/tensorboard/run/*/hparams.yml")
    assert "train.steps: 4" in settings.read_text()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trackio") is None, reason="trackio is not installed")
def test_a_resumed_run_goes_on_under_its_name(
    tiny_config: Path, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # which the package reads when it is imported
    monkeypatch.setenv("TRACKIO_PROJECT", "mine")
    for steps in (2, 4):
        result = command(
            "mmldlm.train", tiny_config, "log.trackers=[trackio]", "schedule.lr=constant", f"train.steps={steps}"
        )
        assert result.returncode == 0 and "tracker trackio" not in result.stderr, result.stderr
    with closing(sqlite3.connect(tmp_path / "trackio/mine.db")) as store:
        rows = store.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
        (config,) = {config for (config,) in store.execute("SELECT config FROM configs")}
    losses = [(step, values["loss/total"]) for _, step, text in rows if "loss/total" in (values := json.loads(text))]
    records = [record for record in read_metrics(tmp_path / "run/metrics.jsonl") if record["kind"] == "train"]
    assert losses == [(record["step"], record["loss/total"]) for record in records] and len(losses) == 4
    assert {name for name, _, _ in rows} == {"run"} and json.loads(config)["schedule.lr"] == "constant"


@pytest.mark.quick
@pytest.mark.parametrize("method", ["start", "store_init_configuration", "log", "finish"])
def test_a_failure_is_one_notice_and_a_file(
    method: str, unreliable: type[Unreliable], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unreliable, "fails_at", method)
    error_file = tmp_path / "trackers/unreliable/error.txt"
    line = "tracker unreliable: ConnectionError: no route"
    rows = {step: {"loss/total": 1.0} for step in range(5)}
    notice = f"{line}; it gets nothing more until the next start, see {error_file}"
    assert send("unreliable", tmp_path, False, rows) == [notice]
    assert error_file.read_text().startswith(f"{line}\n\nTraceback")
    monkeypatch.setattr(unreliable, "fails_at", "")
    assert send("unreliable", tmp_path, True, {9: {"loss/total": 1.0}}) == [] and not error_file.exists()


@pytest.mark.quick
@pytest.mark.parametrize("method", ["start", "log", "finish"])
def test_a_tracker_that_does_not_answer_holds_up_nothing(
    method: str, unreliable: type[Unreliable], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unreliable, "hangs_at", method)
    monkeypatch.setattr(experiment_trackers, "MAX_WAITING_ROWS", 10)
    started = time.monotonic()
    assert send("unreliable", tmp_path, False, {step: {"loss/total": 1.0} for step in range(100)}) == []
    assert time.monotonic() - started < 5


def test_a_training_does_not_fail_by_its_tracker(
    unreliable: type[Unreliable],
    tiny_config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(unreliable, "fails_at", "log")
    assert train.main([str(tiny_config), "log.trackers=[unreliable]", "train.steps=3"]) == 0
    assert capsys.readouterr().err.count("tracker unreliable: ConnectionError") == 1
    (tmp_path / "run-3").mkdir()
    (tmp_path / "run/trackers").rename(tmp_path / "run-3/trackers")
    assert "tracker" in {alert.name for alert in alerts(seen_at(tmp_path / "run", 3))}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wandbb", "log.trackers: expected some of aim, comet_ml, mlflow, tensorboard, wandb, clearml, "),
        ("wandb", "log.trackers: wandb is not installed; pip install wandb\n"),
    ],
)
def test_a_wrong_or_missing_tracker_is_named_before_anything_is_created(
    name: str,
    message: str,
    tmp_path: Path,
    tiny_config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(accelerate.tracking, "_available_trackers", ["tensorboard"])
    assert train.main([str(tiny_config), f"log.trackers=[{name}]"]) == ExitCode.CONFIG
    (line,) = capsys.readouterr().err.splitlines(keepends=True)
    assert line.startswith(f"mmldlm: error: {message}") and not (tmp_path / "run").exists()
