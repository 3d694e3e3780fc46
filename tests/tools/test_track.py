"""`log.trackers` and `mmldlm track`: every record once, whatever is killed or out of reach."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from mmldlm import train
from mmldlm.errors import ConfigError, ExitCode
from mmldlm.telemetry import tracker_bridges
from mmldlm.tools import track
from mmldlm.tools.monitor.alerts import alerts
from mmldlm.tools.monitor.snapshot import Snapshot
from mmldlm.tools.runs import History
from tests.helpers.engine_runs import environment
from tests.helpers.paths import ROOT
from tests.helpers.tracker_stores import (
    TRACKERS,
    Rows,
    config_of_tracker,
    rows_of_file,
    rows_of_tracker,
    rows_of_wandb,
    variables,
)
from tests.helpers.waiting import wait_until
from tests.helpers.wandb_server import WandbServer

WRITER = ROOT / "tests/helpers/scripts/tracked_records.py"
WANDB, TRACKIO, MLFLOW = TRACKERS
ONLINE = pytest.param("wandb online", marks=WANDB.marks)


class Scene:
    """A run whose records are written at high speed, and a tracker; both may be killed or out of reach at any time."""

    def __init__(self, folder: Path, tracker: str):
        self.folder, self.run, self.tracker = folder, folder / "run", tracker
        self.variables = variables(folder)
        self.store, self.log = folder / tracker, (folder / "log").open("ab")
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, *command: object) -> subprocess.Popen[bytes]:
        words, env = [sys.executable, *map(str, command)], environment(PYTHONPATH=str(ROOT), **self.variables)
        process = subprocess.Popen(
            words, stdout=self.log, stderr=self.log, env=env, cwd=self.folder, start_new_session=True
        )
        self.processes.append(process)
        return process

    def write(self, steps: int, step_s: float, *trackers: str) -> subprocess.Popen[bytes]:
        """Start a process that writes records up to a step; it starts the bridges of `trackers`."""
        return self.start(WRITER, self.run, steps, step_s, *trackers)

    def follow(self, *options: str) -> subprocess.Popen[bytes]:
        """Start a bridge."""
        return self.start("-m", "mmldlm.tools.track", self.run, "--to", self.tracker, "--interval", "0.1", *options)

    def kill(self, process: subprocess.Popen[bytes], group: bool) -> None:
        """Kill a process, alone or with what it has started."""
        with suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(process.pid, signal.SIGKILL)
        process.wait()

    def set_reachable(self, reachable: bool) -> None:
        """Put a file in the place of the tracker's folder, or the folder back."""
        aside = self.folder / "aside"
        if not reachable and self.store.is_dir():
            self.store.rename(aside)
            self.store.touch()
        elif reachable and not self.store.is_dir():
            self.store.unlink(missing_ok=True)
            aside.rename(self.store) if aside.exists() else self.store.mkdir()

    def stored_bytes(self) -> int | None:
        """Return the size of what the tracker has; None if it is out of reach."""
        sizes = []
        for folder, _, names in os.walk(self.store):  # ignores folders that are just removed
            for name in names:
                with suppress(FileNotFoundError):
                    sizes.append(Path(folder, name).lstat().st_size)
        return sum(sizes) if self.store.is_dir() else None

    def rows(self) -> dict[str, Rows]:
        """Return the rows that the tracker has, by the name of its run."""
        return rows_of_tracker(self.tracker, self.folder)

    def has_ended(self) -> bool:
        """Return whether the bridge that the writer started has ended."""
        output = tracker_bridges.tracker_folder(self.run, self.tracker) / "output.log"
        return output.exists() and f"{self.tracker}: has " in output.read_text()


class OnlineScene(Scene):
    """The same with the client of W&B and a server."""

    def __init__(self, folder: Path):
        super().__init__(folder, "wandb")
        self.server = WandbServer()
        self.variables |= self.server.variables()

    def set_reachable(self, reachable: bool) -> None:
        (self.server.start if reachable else self.server.stop)()

    def stored_bytes(self) -> int | None:
        return sum(len(run["lines"]) for run in self.server.runs.values()) if self.server.is_running else None

    def rows(self) -> dict[str, Rows]:
        return {name: rows_of_wandb(history) for name, history in self.server.histories().items()}


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Callable[[str], Scene]]:
    scenes: list[Scene] = []

    def make(tracker: str) -> Scene:
        scenes.append(OnlineScene(tmp_path) if tracker == "wandb online" else Scene(tmp_path, tracker))
        scenes[-1].set_reachable(True)
        return scenes[-1]

    yield make
    for made in scenes:
        for process in made.processes:
            made.kill(process, group=True)
        if isinstance(made, OnlineScene):
            made.server.stop()


def kill_at_random(scene: Scene, kills: int, seed: int) -> None:
    """Kill writer and bridge at random times, with outages of the tracker; then let both finish.

    A kill follows at a random time after the tracker has got something.
    """
    rng = random.Random(seed)
    writer = scene.write(10**6, 5e-3)
    wait_until((scene.run / "metrics.jsonl").exists, "the first record")
    bridge = scene.follow()
    for _ in range(kills):
        scene.set_reachable(rng.random() < 0.8)
        size = scene.stored_bytes()
        if writer.poll() is not None:
            writer = scene.write(10**6, 5e-3)
        while size is not None and scene.stored_bytes() == size:
            if bridge.poll() is not None:  # it may have found the run ended
                bridge = scene.follow()
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 0.5))
        if rng.random() < 0.2:  # kill while it cannot write
            scene.set_reachable(False)
            time.sleep(rng.uniform(0, 1))
        scene.kill(writer if rng.random() < 0.4 else bridge, group=rng.random() < 0.5)
    scene.set_reachable(True)
    scene.kill(writer, group=True)
    saved = scene.run / "saved"
    last = 40 + (int(saved.read_text()) if saved.exists() else 0)
    assert scene.write(last, 1e-3).wait() == 0
    scene.kill(bridge, group=False)
    assert scene.follow().wait() == 0


@pytest.mark.parametrize(
    ("tracker", "kills"),
    [
        pytest.param("trackio", 10, marks=TRACKIO.marks),
        *(
            pytest.param(parameter.values[0], kills, marks=[*parameter.marks, pytest.mark.slow])
            # W&B's client waits long between attempts to reach its server.
            for parameter, kills in ((WANDB, 100), (TRACKIO, 100), (MLFLOW, 100), (ONLINE, 30))
        ),
    ],
)
def test_every_record_once_after_kills_and_outages(scene: Callable[[str], Scene], tracker: str, kills: int) -> None:
    made, seed = scene(tracker), kills
    kill_at_random(made, kills, seed)
    assert made.rows() == {"run": rows_of_file(made.run, made.tracker)}, f"seed {seed}"


@pytest.mark.parametrize("tracker", TRACKERS)
def test_the_bridge_outlives_the_training_and_holds_back_what_a_resume_repeats(
    scene: Callable[[str], Scene], tracker: str
) -> None:
    made = scene(tracker)
    writer = made.write(10**6, 5e-3, tracker)
    file = made.run / "metrics.jsonl"
    wait_until(lambda: file.exists() and '"kind": "checkpoint"' in file.read_text(), "a checkpoint")
    made.kill(writer, group=True)
    wait_until(made.has_ended, "the end of the bridge")
    records = [json.loads(line) for line in file.read_text().split("\n")[:-1]]
    last = max(record["step"] for record in records if record["kind"] == "checkpoint")
    expected = rows_of_file(made.run, tracker, last)
    assert made.rows() == {"run": expected} and expected
    # Without the option nothing changes; with it, everything is sent.
    assert made.follow().wait() == 0 and made.rows() == {"run": expected}
    assert made.follow("--all").wait() == 0
    assert made.rows() == {"run": rows_of_file(made.run, tracker)}


@pytest.mark.parametrize("tracker", [*TRACKERS, ONLINE])
def test_a_run_that_goes_back_behind_what_was_sent_gets_a_new_run(scene: Callable[[str], Scene], tracker: str) -> None:
    made = scene(tracker)
    assert made.write(100, 1e-4).wait() == 0 and made.follow().wait() == 0
    first = rows_of_file(made.run, made.tracker)
    assert made.rows() == {"run": first}
    (made.run / "saved").write_text("40")
    assert made.write(60, 1e-4).wait() == 0 and made.follow().wait() == 0
    second = rows_of_file(made.run, made.tracker)
    # A folder of W&B's offline mode is written anew.
    assert second != first and made.rows() == (
        {"run": second} if tracker == "wandb" else {"run": first, "run (2)": second}
    )
    # The new one goes on.
    assert made.write(80, 1e-4).wait() == 0 and made.follow().wait() == 0
    assert made.rows()["run" if tracker == "wandb" else "run (2)"] == rows_of_file(made.run, made.tracker)


@pytest.mark.parametrize("tracker", [TRACKIO])
def test_an_unreachable_tracker_raises_an_alert_until_it_is_back(scene: Callable[[str], Scene], tracker: str) -> None:
    made = scene(tracker)
    made.set_reachable(False)
    writer = made.write(10**6, 5e-3)
    wait_until((made.run / "saved").exists, "a checkpoint")
    bridge, error = made.follow(), tracker_bridges.tracker_folder(made.run, tracker) / "error.txt"
    wait_until(error.exists, "an error")
    (alert,) = (alert for alert in alerts(Snapshot(History(made.run), 10.0)) if alert.name == "tracker")
    assert alert.found.startswith("tracker trackio: FileExistsError") and "Traceback" in error.read_text()
    assert made.follow().wait() == ExitCode.RUN_IN_USE, "a second bridge"
    made.set_reachable(True)
    wait_until(lambda: not error.exists(), "the end of the error")
    assert "tracker" not in {alert.name for alert in alerts(Snapshot(History(made.run), 10.0))}
    made.kill(writer, group=True)
    assert bridge.wait() == 0 and made.rows()["run"]


@pytest.mark.parametrize("tracker", [TRACKIO])
def test_a_bridge_that_is_killed_is_not_a_success(scene: Callable[[str], Scene], tracker: str) -> None:
    made = scene(tracker)
    assert made.write(40, 1e-4).wait() == 0
    made.set_reachable(False)
    both = made.start("-m", "mmldlm.tools.track", made.run, "--to", tracker, tracker)
    error = tracker_bridges.tracker_folder(made.run, tracker) / "error.txt"
    wait_until(error.exists, "the bridge that waits for the tracker; the other has found it")
    for child in psutil.Process(both.pid).children():
        child.kill()
    assert both.wait() == 128 + signal.SIGKILL


@pytest.mark.setting("log.trackers")
@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_training_sends_its_records_and_config(
    scene: Callable[[str], Scene], tracker: str, tiny_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = scene(tracker)
    for name, value in made.variables.items():
        monkeypatch.setenv(name, value)
    assert train.main([str(tiny_config), f"log.trackers=[{tracker}]"]) == 0
    wait_until(made.has_ended, "the end of the bridge")
    expected = rows_of_file(made.run, tracker)
    assert made.rows() == {"run": expected} and "train.steps" in config_of_tracker(tracker, made.folder)
    assert {tag for row in expected for _, _, tag, _ in row} >= {"loss/total", "validation/total"}


@pytest.mark.parametrize("tracker", [TRACKIO])
def test_a_training_does_not_fail_by_an_unreachable_tracker(
    scene: Callable[[str], Scene], tracker: str, tiny_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = scene(tracker)
    made.set_reachable(False)
    for name, value in made.variables.items():
        monkeypatch.setenv(name, value)
    assert train.main([str(tiny_config), f"log.trackers=[{tracker}]"]) == 0
    # The bridge waits; what it sends when the tracker is back has been there since the end.
    made.set_reachable(True)
    wait_until(made.has_ended, "the end of the bridge")
    assert made.rows() == {"run": rows_of_file(made.run, tracker)}


@pytest.mark.slow
@pytest.mark.parametrize("tracker", TRACKERS)
def test_trainings_killed_at_random(scene: Callable[[str], Scene], tracker: str, tiny_config: Path) -> None:
    made, rng = scene(tracker), random.Random(tracker)
    training = ("-m", "mmldlm.train", tiny_config, "train.steps=120", "checkpoint.every_steps=6")
    training += (f"log.trackers=[{tracker}]",)
    for _ in range(10):
        process = made.start(*training)
        size = made.stored_bytes()
        wait_until(lambda size=size, process=process: made.stored_bytes() != size or process.poll() is not None, "rows")  # type: ignore[misc]
        time.sleep(rng.uniform(0, 2))
        made.kill(process, group=True)
    assert made.start(*training).wait() == 0
    wait_until(lambda: made.follow().wait() == 0, "the end of the bridge")  # RUN_IN_USE until then
    assert made.rows() == {"run": rows_of_file(made.run, tracker)}


@pytest.mark.quick
def test_a_missing_package_is_named_before_anything_is_created(
    tmp_path: Path, tiny_config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(tracker_bridges.PACKAGES, "wandb", ("no_such_package",))
    assert train.main([str(tiny_config), "log.trackers=[wandb]"]) == ExitCode.CONFIG
    assert capsys.readouterr().err == (
        "mmldlm: error: log.trackers: wandb needs no_such_package, which is missing; pip install 'mmldlm[wandb]'\n"
    )
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="--to: wandb needs no_such_package"):
        track.main([str(tmp_path), "--to", "wandb"])
