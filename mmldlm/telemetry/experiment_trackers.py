"""Experiment trackers of a run (`log.trackers`), such as W&B or MLflow, through Accelerate's classes."""

from __future__ import annotations

import os
import re
import secrets
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Full, Queue
from threading import Event, Thread
from typing import Any

from mmldlm.errors import ConfigError
from mmldlm.utils.files import write_atomically
from mmldlm.utils.nested import flatten
from mmldlm.utils.printable import hide_passwords, printable

# Environment variables that name the project, for trackers whose class in Accelerate ignores the project.
PROJECT_VARIABLES = {"wandb": "WANDB_PROJECT", "trackio": "TRACKIO_PROJECT", "comet_ml": "COMET_PROJECT_NAME"}
START_TIMEOUT_S = 60.0  # training waits this long for a tracker to start
CLOSE_TIMEOUT_S = 60.0
MAX_WAITING_ROWS = 10_000  # kept for a tracker that does not answer, and later rows are lost


def check_trackers(names: Sequence[str]) -> None:
    """Raise `ConfigError` if Accelerate does not know a tracker or its package is not installed."""
    if not names:
        return
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    installed = [str(name) for name in get_available_trackers()]
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            raise ConfigError(f"log.trackers: expected some of {', '.join(LOGGER_TYPE_TO_CLASS)}, found {name}")
        if name not in installed:
            raise ConfigError(f"log.trackers: {name} is not installed; pip install {name}")


class ExperimentTracker:
    """Sends the scalars of a run to one tracker. It uses a thread, because the tracker may wait for a network.

    A tracker that fails gets nothing more until the next start. Then `notify` prints one line, and the details are in
    `trackers/NAME/error.txt` in the run folder.
    """

    def __init__(self, name: str, run_dir: Path, resumed: bool, notify: Callable[[str], None]):
        self.name, self._run_dir, self._resumed, self._notify = name, run_dir, resumed, notify
        self._folder = run_dir / "trackers" / name
        self._rows: Queue[tuple[int, dict[str, float]] | None] = Queue(MAX_WAITING_ROWS)
        self._started = Event()
        self._thread: Thread | None = None

    def start(self, config: Mapping[str, Any]) -> None:
        """Open the tracker's run, and wait up to a minute for it.

        We wait because loader workers must not be forked while the tracker's package is being imported. Config values
        that trackers do not accept are passed as text.
        """
        flat = {key: v if isinstance(v, str | int | float) else str(v) for key, v in flatten(config).items()}
        self._thread = Thread(target=self._follow, args=(flat,), name=f"tracker {self.name}", daemon=True)
        self._thread.start()
        self._started.wait(START_TIMEOUT_S)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Queue scalars by tag for sending and return at once."""
        row = {
            re.sub(r"[^\w. :/-]", "_", tag): value for tag, value in values.items()
        }  # MLflow refuses other characters
        with suppress(Full):
            self._rows.put_nowait((step, row))

    def close(self) -> None:
        """Send the remaining rows and end the tracker's run. Wait at most a minute for it."""
        if self._thread is not None and self._thread.is_alive():
            with suppress(Full):
                self._rows.put(None, timeout=CLOSE_TIMEOUT_S)
            self._thread.join(CLOSE_TIMEOUT_S)

    def _follow(self, config: dict[str, Any]) -> None:
        """Open the tracker, send rows until there are no more, and close it. The thread runs this function."""
        error_file = self._folder / "error.txt"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            error_file.unlink(missing_ok=True)
            tracker = self._open()
            tracker.store_init_configuration(config)
            self._started.set()
            while (row := self._rows.get()) is not None:
                tracker.log(row[1], step=row[0])
            tracker.finish()
        except Exception as error:  # the tracker's package may raise any type
            line = printable(f"tracker {self.name}: {type(error).__name__}: {error}".splitlines()[0])
            with suppress(OSError):
                error_file.write_text(f"{line}\n\n{hide_passwords(traceback.format_exc())}", encoding="utf-8")
            self._notify(f"{line}; it gets nothing more until the next start, see {error_file}")
        finally:
            self._started.set()

    def _open(self) -> Any:
        """Start Accelerate's tracker and return it. It continues the run of an earlier start if it can."""
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        run_name, id_file = self._run_dir.resolve().name, self._folder / "id"
        if not (self._resumed and id_file.exists()):
            write_atomically(id_file, secrets.token_hex(16))
        run_id = id_file.read_text(encoding="utf-8")
        options: dict[str, dict[str, Any]] = {
            "wandb": {"id": run_id, "name": run_name, "resume": "allow"},
            "trackio": {"name": run_name, "resume": "allow" if self._resumed else "never"},
            "comet_ml": {"experiment_key": run_id},
            "mlflow": {"run_name": run_name},
            "clearml": {"task_name": run_name},
            "swanlab": {"experiment_name": run_name},
            "dvclive": {"dir": str(self._folder), "resume": self._resumed},
        }
        tracker_class = LOGGER_TYPE_TO_CLASS[self.name]
        if tracker_class.requires_logging_directory:  # keep its files in the run folder
            place = [run_name, str(self._folder)]
        else:
            place = [os.environ.get(PROJECT_VARIABLES.get(self.name, ""), "mmldlm")]
        tracker = tracker_class(*place, **options.get(self.name, {}))
        tracker.start()
        return tracker
