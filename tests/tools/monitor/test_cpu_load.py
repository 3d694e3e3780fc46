"""A speed that fell is put down to other processes only where more of them came."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmldlm.telemetry.metrics import MetricsFile
from mmldlm.tools.monitor.alerts import alerts
from mmldlm.tools.monitor.snapshot import Snapshot, Thresholds
from mmldlm.tools.run_history import History

pytestmark = pytest.mark.quick
Phase = tuple[int, float, float | None]  # records, tokens a second, cores of others

QUIET, LOADED, SLOW = (40, 5000.0, 0.1), (10, 500.0, 2.0), (10, 500.0, 0.2)


def alerts_of(folder: Path, *phases: Phase, **thresholds: float) -> dict[str, str]:
    """Alerts at the end of a session of `phases`, a record each tenth step."""
    file = MetricsFile(folder / "metrics.jsonl", None)
    file.write("start", 0, {"total_steps": 10_000})
    values = [(speed, cores) for count, speed, cores in phases for _ in range(count)]
    for number, (speed, cores) in enumerate(values, 1):
        load = {} if cores is None else {"speed/cores_of_others": cores}
        record = {"loss/total": 5 - number / 100, "speed/tokens_per_s": speed, "speed/step_s": 600 / speed, **load}
        file.write("train", 10 * number, record)
    snapshot = Snapshot(History(folder), 10.0, Thresholds(**thresholds))  # type: ignore[arg-type]
    return {alert.name: f"{alert.found}; {alert.advice}" for alert in alerts(snapshot)}


def test_new_load_explains_lower_speed(tmp_path: Path) -> None:
    (words,) = alerts_of(tmp_path, QUIET, LOADED).values()
    assert "500 tokens/s (median of 10 records), before 5000; other processes keep 2.0 cores" in words
    assert "before 0.1" in words and "OMP_NUM_THREADS" in words and "start it again" in words


@pytest.mark.parametrize(
    ("phases", "names"),
    [
        ([QUIET, LOADED], {"busy cores"}),
        ([QUIET, SLOW], {"low speed"}),
        ([(40, 5000.0, None), (10, 500.0, None)], {"low speed"}),  # a system that does not tell
        ([(40, 5000.0, 2.0), LOADED], {"low speed"}),  # they were there before
        ([(60, 500.0, 2.0)], set()),  # started at the same time
        ([(40, 500.0, 2.0), (10, 5000.0, 0.0)], set()),  # they went
        ([QUIET, (60, 500.0, 2.0)], set()),  # what has lasted for most of the session is usual
        ([QUIET, (10, 4500.0, 2.0)], set()),  # there is room for all
        ([(15, 5000.0, 0.1), LOADED], set()),  # too early to know what is usual
    ],
)
def test_cause_of_lower_speed(tmp_path: Path, phases: list[Phase], names: set[str]) -> None:
    assert set(alerts_of(tmp_path, *phases)) == names


def test_its_threshold(tmp_path: Path) -> None:
    assert set(alerts_of(tmp_path, QUIET, LOADED, cores_of_others=1.8)) == {"busy cores"}
    assert set(alerts_of(tmp_path / "more", QUIET, LOADED, cores_of_others=2.0)) == {"low speed"}
