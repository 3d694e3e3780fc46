"""Runs of experiment trackers that are written exactly once.

A tracker says how many rows it has and which was the last, and a row that is sent again, because a process was killed
between sending and hearing, changes nothing: trackio ignores a `log_id` that it has, MLflow's database has the whole
metric as its key, and W&B ignores or overwrites a `_step` that it has, which is the row's number here.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mmldlm.telemetry.tracker_bridges import TrackerName

DEFAULT_PROJECT = "mmldlm"


class Row(NamedTuple):
    """The scalars of one record, by tag; `time_ms` are Unix milliseconds."""

    step: int
    time_ms: int
    values: Mapping[str, float]


@dataclass(frozen=True)
class RunInfo:
    """What identifies and describes a tracker's run; `config` and `tags` are flat."""

    id: str
    name: str
    config: Mapping[str, Any]
    tags: Mapping[str, str]


class TrackerRun(Protocol):
    """A tracker's run, opened or created by its constructor.

    Attributes:
        sent: Number of rows that it has.
        last_ms: Time of the last one.
    """

    sent: int
    last_ms: int | None

    def __init__(self, info: RunInfo): ...

    def send(self, rows: Sequence[Row]) -> None:
        """Append rows."""
        ...

    def close(self, succeeded: bool) -> None:
        """Return once the tracker has everything, and tell it how the run ended."""
        ...


class WandbRun:
    """A run of Weights & Biases.

    Offline, nothing can be appended to a run once its process has ended: the folder is written anew, and those of
    earlier processes are removed when it is complete.
    """

    def __init__(self, info: RunInfo):
        import wandb

        wandb.teardown()  # a service that has died keeps its process from starting another
        offline = wandb.setup().settings.mode in ("offline", "dryrun")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", DEFAULT_PROJECT),
            id=info.id,
            name=info.name,
            config=dict(info.config),
            tags=[f"{key}: {value}"[:64] for key, value in info.tags.items()],
            resume=None if offline else "allow",
            allow_val_change=True,
            reinit="create_new",
            # Statistics would be those of this process, not of the training.
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )
        self._run.define_metric("*", step_metric="step")
        self.sent = self._run.starting_step  # 0 offline
        self.last_ms = _to_ms(self._run.summary["_timestamp"]) if self.sent else None

    def send(self, rows: Sequence[Row]) -> None:
        for number, row in enumerate(rows, self.sent):
            values = {**row.values, "step": row.step, "_timestamp": row.time_ms / 1000}
            self._run.log(values, step=number)
        self.sent, self.last_ms = self.sent + len(rows), rows[-1].time_ms

    def close(self, succeeded: bool) -> None:
        run, settings = self._run, self._run.settings
        run.finish(exit_code=0 if succeeded else 1)
        if run.offline:
            for folder in Path(settings.wandb_dir).glob(f"offline-run-*-{run.id}"):
                if folder != Path(settings.sync_dir):
                    shutil.rmtree(folder)


class TrackioRun:
    """A run of trackio's local store. `trackio.Run.log` would drop rows that it cannot write, with a warning."""

    def __init__(self, info: RunInfo):
        from trackio.sqlite_storage import SQLiteStorage

        self._storage, self._info = SQLiteStorage, info
        self._project = os.environ.get("TRACKIO_PROJECT", DEFAULT_PROJECT)
        SQLiteStorage.init_db(self._project)
        query = f"SELECT log_id FROM metrics WHERE run_id = '{info.id}' ORDER BY id DESC LIMIT 1"
        rows = SQLiteStorage.query_project(self._project, query)["rows"]
        # The identifiers of rows end in their number and time.
        number, time_ms = map(int, rows[0]["log_id"].split("-")[-2:]) if rows else (-1, 0)
        self.sent, self.last_ms = number + 1, time_ms if rows else None

    def send(self, rows: Sequence[Row]) -> None:
        info = self._info
        times = [datetime.fromtimestamp(row.time_ms / 1000, timezone.utc) for row in rows]
        self._storage.bulk_log(  # one transaction
            self._project,
            info.name,
            [dict(row.values) for row in rows],
            steps=[row.step for row in rows],
            timestamps=[time.isoformat() for time in times],
            log_ids=[f"{info.id}-{number}-{row.time_ms}" for number, row in enumerate(rows, self.sent)],
            config={**info.config, **info.tags, "_Created": times[0].isoformat()},
            run_id=info.id,
        )
        self.sent, self.last_ms = self.sent + len(rows), rows[-1].time_ms

    def close(self, succeeded: bool) -> None:
        pass


class MlflowRun:
    """A run of an MLflow server or database; a tag of it, written after the metrics, says what it has."""

    _ID, _SENT = "mmldlm.id", "mmldlm.rows"
    _MAX_METRICS, _MAX_PARAMS, _MAX_CHARACTERS = 1000, 100, 500  # of a request

    def __init__(self, info: RunInfo):
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient, get_tracking_uri

        _create_database(get_tracking_uri())
        self._metric, self._client = Metric, MlflowClient()
        project = os.environ.get("MLFLOW_EXPERIMENT_NAME", DEFAULT_PROJECT)
        experiment = self._client.get_experiment_by_name(project)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(project)
        runs = self._client.search_runs([experiment_id], f"tags.`{self._ID}` = '{info.id}'")
        tags = {self._ID: info.id, **info.tags}
        run = runs[0] if runs else self._client.create_run(experiment_id, tags=tags, run_name=info.name)
        self._id = run.info.run_id
        self._client.update_run(self._id, status="RUNNING")
        # Parameters cannot be changed: those of the first start stay.
        new = [(key, str(value)[: self._MAX_CHARACTERS]) for key, value in info.config.items()]
        params = [Param(key, value) for key, value in new if key not in run.data.params]
        for first in range(0, len(params), self._MAX_PARAMS):
            self._client.log_batch(self._id, params=params[first : first + self._MAX_PARAMS])
        sent, last_ms = map(int, run.data.tags.get(self._SENT, "0 0").split())
        self.sent, self.last_ms = sent, last_ms if sent else None

    def send(self, rows: Sequence[Row]) -> None:
        metrics = [
            self._metric(re.sub(r"[^\w. :/-]", "_", tag), value, row.time_ms, row.step)  # which it would refuse
            for row in rows
            for tag, value in row.values.items()
        ]
        for first in range(0, len(metrics), self._MAX_METRICS):
            self._client.log_batch(self._id, metrics=metrics[first : first + self._MAX_METRICS])
        self._client.set_tag(self._id, self._SENT, f"{self.sent + len(rows)} {rows[-1].time_ms}")
        self.sent, self.last_ms = self.sent + len(rows), rows[-1].time_ms

    def close(self, succeeded: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if succeeded else "FAILED")


def _create_database(uri: str) -> None:
    """Create MLflow's SQLite file under another name: it refuses one whose creation was killed half-way."""
    from mlflow.tracking import MlflowClient

    path = Path(uri.removeprefix("sqlite:///"))
    if uri.startswith("sqlite:///") and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        MlflowClient(f"sqlite:///{temporary}")
        with suppress(FileExistsError):  # another process was first
            os.link(temporary, path)
        temporary.unlink()


TRACKERS: Mapping[TrackerName, type[TrackerRun]] = {"wandb": WandbRun, "trackio": TrackioRun, "mlflow": MlflowRun}


def _to_ms(seconds: float) -> int:
    return round(seconds * 1000)
