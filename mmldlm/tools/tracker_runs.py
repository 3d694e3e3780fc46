"""Runs of experiment trackers, which get every row exactly once.

A tracker says how many rows it has and which was the last. A row that is sent again, because a process was killed
between sending and hearing, changes nothing: trackio ignores a `log_id` that it has, MLflow's database has the whole
metric as its key, and W&B keeps rows by their number.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from mmldlm.telemetry.tracker_bridges import TrackerName

DEFAULT_PROJECT = "mmldlm"


class Row(NamedTuple):
    """The scalars of one record, by tag; `time_ms` are Unix milliseconds."""

    step: int
    time_ms: int
    values: Mapping[str, float]


class RunInfo(NamedTuple):
    """What identifies and describes a tracker's run; `config` and `tags` are flat."""

    id: str
    name: str
    config: Mapping[str, Any]
    tags: Mapping[str, str]


class TrackerRun:
    """A tracker's run, opened or created by its constructor.

    It has `sent` rows, the last one of time `last_ms`.
    """

    def __init__(self, info: RunInfo):
        self.info, self.sent, self.last_ms = info, 0, 0

    def is_start_of(self, rows: Sequence[Row]) -> bool:
        """Return whether the rows that the tracker has are the first of `rows`."""
        return not self.sent or (self.sent <= len(rows) and rows[self.sent - 1].time_ms == self.last_ms)

    def send(self, rows: Sequence[Row]) -> None:
        """Append rows."""
        self._write(rows)
        self.sent, self.last_ms = self.sent + len(rows), rows[-1].time_ms

    def close(self, succeeded: bool) -> None:
        """Return once the tracker has everything, and tell it how the run ended."""

    def _write(self, rows: Sequence[Row]) -> None:
        raise NotImplementedError


class WandbRun(TrackerRun):
    """A run of Weights & Biases.

    Offline, nothing can be appended to a run once its process has ended: the folder is written again, and those of
    earlier processes are removed when it is complete.
    """

    def __init__(self, info: RunInfo):
        super().__init__(info)
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
            # Statistics would be those of this process, not of the training.
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )
        self._run.define_metric("*", step_metric="step")
        self.sent = self._run.starting_step
        if self.sent:
            self.last_ms = round(self._run.summary["_timestamp"] * 1000)

    def _write(self, rows: Sequence[Row]) -> None:
        for number, row in enumerate(rows, self.sent):
            self._run.log({**row.values, "step": row.step, "_timestamp": row.time_ms / 1000}, step=number)

    def close(self, succeeded: bool) -> None:
        self._run.finish(exit_code=0 if succeeded else 1)
        if self._run.offline:
            own = Path(self._run.settings.sync_dir)
            for folder in set(own.parent.glob(f"offline-run-*-{self.info.id}")) - {own}:
                shutil.rmtree(folder)


class TrackioRun(TrackerRun):
    """A run of trackio's local store. `trackio.Run.log` would drop rows that it cannot write, with a warning."""

    def __init__(self, info: RunInfo):
        super().__init__(info)
        from trackio.sqlite_storage import SQLiteStorage

        self._storage, self._project = SQLiteStorage, os.environ.get("TRACKIO_PROJECT", DEFAULT_PROJECT)
        SQLiteStorage.init_db(self._project)
        query = f"SELECT log_id FROM metrics WHERE run_id = '{info.id}' ORDER BY id DESC LIMIT 1"
        for row in SQLiteStorage.query_project(self._project, query)["rows"]:
            self.sent, self.last_ms = map(int, row["log_id"].split("-")[-2:])

    def _write(self, rows: Sequence[Row]) -> None:
        info, times = self.info, [datetime.fromtimestamp(row.time_ms / 1000, timezone.utc) for row in rows]
        self._storage.bulk_log(  # one transaction
            self._project,
            info.name,
            [dict(row.values) for row in rows],
            steps=[row.step for row in rows],
            timestamps=[time.isoformat() for time in times],
            log_ids=[f"{info.id}-{number}-{row.time_ms}" for number, row in enumerate(rows, self.sent + 1)],
            config={**info.config, **info.tags},
            run_id=info.id,
        )


class MlflowRun(TrackerRun):
    """A run of an MLflow server or database; a tag of it, written after the metrics, says what it has."""

    _ID, _SENT = "mmldlm.id", "mmldlm.rows"
    _MAX_METRICS, _MAX_PARAMS, _MAX_CHARACTERS = 1000, 100, 500  # of a request

    def __init__(self, info: RunInfo):
        super().__init__(info)
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
        new = {key: str(value)[: self._MAX_CHARACTERS] for key, value in info.config.items()}
        params = [Param(key, value) for key, value in new.items() if key not in run.data.params]
        for first in range(0, len(params), self._MAX_PARAMS):
            self._client.log_batch(self._id, params=params[first : first + self._MAX_PARAMS])
        self.sent, self.last_ms = map(int, run.data.tags.get(self._SENT, "0 0").split())

    def _write(self, rows: Sequence[Row]) -> None:
        metrics = [
            self._metric(re.sub(r"[^\w. :/-]", "_", tag), value, row.time_ms, row.step)  # which it would refuse
            for row in rows
            for tag, value in row.values.items()
        ]
        for first in range(0, len(metrics), self._MAX_METRICS):
            self._client.log_batch(self._id, metrics=metrics[first : first + self._MAX_METRICS])
        self._client.set_tag(self._id, self._SENT, f"{self.sent + len(rows)} {rows[-1].time_ms}")

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
