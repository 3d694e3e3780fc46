"""Run `mmldlm.train`, and write to TIMES.RANK.json when each step began and how long each event took.

Seconds are from `time.perf_counter`, which all processes of a machine share. An event's time excludes events inside it.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmldlm import train
from mmldlm.errors import exit_process
from mmldlm.telemetry.tracker import Tracker
from mmldlm.trainer import validation
from mmldlm.trainer.trainer import Trainer

STOP_AT = int(os.environ["STOP_AT"])  # 0: never
TURN = int(os.environ["TURN"])  # the process stops itself after this many steps
PATH = Path(os.environ["TIMES"] + "." + os.environ.get("RANK", "0") + ".json")
steps: list[tuple[int, float]] = []  # step, begin
events: list[tuple[str, int, float]] = []  # name, step, seconds
_nested: list[float] = []
_now = {"step": 0}


def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` so that its calls are recorded as events."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        _nested.append(0.0)
        try:
            return function(*args, **kwargs)
        finally:
            seconds, inner = time.perf_counter() - started, _nested.pop()
            if _nested:
                _nested[-1] += seconds
            events.append((name, _now["step"], seconds - inner))

    return call


class TimedTrainer(Trainer):
    paused = 0.0  # seconds

    def corrupt(self, step: int, *rest: Any) -> Any:
        self._begun = time.perf_counter()
        _now["step"] = step + 1
        return super().corrupt(step, *rest)

    def end_step(self, step: int, totals: Any, result: Any) -> None:
        try:
            super().end_step(step, totals, result)
        finally:
            steps.append((step + 1, self._begun))
            if PATH.name.endswith(".0.json"):
                if step + 1 == STOP_AT:
                    os.kill(os.getpid(), signal.SIGTERM)
                elif (step + 1) % TURN == 0:
                    stopped = time.perf_counter()
                    os.kill(os.getpid(), signal.SIGSTOP)
                    TimedTrainer.paused += time.perf_counter() - stopped

    save = timed("save", Trainer.save)


validation.validation_losses = timed("validation", validation.validation_losses)
validation.quality = timed("quality", validation.quality)
validation.text_samples = timed("text samples", validation.text_samples)
validation.collect_figure_data = timed("figures", validation.collect_figure_data)
Tracker.log_figures = timed("figures", Tracker.log_figures)  # type: ignore[method-assign]

code = train.main(trainer_cls=TimedTrainer)
times = {"ended": time.perf_counter(), "paused": TimedTrainer.paused, "steps": steps, "events": events}
PATH.write_text(json.dumps(times))
exit_process(code)
