"""`metrics.prom`: valid OpenMetrics of the latest numbers, whole at every moment."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from mmldlm import train
from mmldlm.telemetry import open_metrics
from mmldlm.telemetry.open_metrics import OpenMetricsFile
from tests.helpers.metrics import read_metrics

parse = pytest.importorskip("prometheus_client.openmetrics.parser").text_string_to_metric_families
parse_old = pytest.importorskip("prometheus_client.parser").text_string_to_metric_families


def samples(text: str) -> dict[tuple[str, str], float]:
    """Values by name and mode, as a reader of OpenMetrics sees them."""
    return {(each.name, each.labels["mode"]): each.value for family in parse(text) for each in family.samples}


def test_a_run_writes_its_latest_numbers(tiny_config: Path, tmp_path: Path) -> None:
    assert train.main([str(tiny_config)]) == 0
    run = tmp_path / "run"
    text = (run / "metrics.prom").read_text()
    found, records = samples(text), read_metrics(run / "metrics.jsonl")
    last = next(record for record in reversed(records) if record["kind"] == "train")
    validation = next(record for record in reversed(records) if record["kind"] == "validation")
    assert (
        found["mmldlm_step", "all"] == found["mmldlm_planned_steps", "all"] == 8 and found["mmldlm_ended", "all"] == 1
    )
    assert (
        found["mmldlm_loss", "all"] == last["loss/total"] and found["mmldlm_loss_text", "l2t"] == last["loss/text_l2t"]
    )
    assert found["mmldlm_validation_text", "joint"] == validation["validation/text_joint"]
    assert found["mmldlm_speed_step_seconds", "all"] == last["speed/step_s"]
    assert found["mmldlm_speed_tokens_per_second", "all"] == last["speed/tokens_per_s"]
    assert found["mmldlm_memory_resident_bytes", "all"] == last["memory/resident_mib"] * 2**20
    age = records[-1]["time"] - found["mmldlm_last_record_timestamp_seconds", "all"]
    assert abs(age) < 5, "time of the last record"
    families = {family.name: family for family in parse(text)}
    assert {family.type for family in families.values()} == {"gauge"}
    assert families["mmldlm_speed_step_seconds"].unit == "seconds"
    run_id = json.loads((run / "startup.json").read_text())["run_id"]
    labels = {(each.labels["run"], each.labels["run_id"]) for family in families.values() for each in family.samples}
    assert labels == {("run", run_id)} and text.endswith("# EOF\n")
    # node_exporter reads Prometheus' older text format, without times of samples.
    old = {(each.name, each.labels["mode"]): each.value for family in parse_old(text) for each in family.samples}
    assert old == found and not [each for family in families.values() for each in family.samples if each.timestamp]


@pytest.mark.quick
def test_odd_names_and_numbers_are_valid(tmp_path: Path) -> None:
    folder = tmp_path / 'a "run"\\of\nmine'
    folder.mkdir()
    file = OpenMetricsFile(folder, 10)
    tags = {
        "loss/total": float("nan"),
        "own/Ä-b.c": float("inf"),
        "own/rows_total": -1e20,
        "loss/text_noise_0-0.2": 1.0,
    }
    file.update(3, {**tags, "validation/web/text": 1.0, "data/l2t": 2.0}, "id")
    (text,) = [path.read_text() for path in folder.iterdir()]
    found = samples(text)
    assert found["mmldlm_own___b_c", "all"] == float("inf") and found["mmldlm_own_rows", "all"] == -1e20
    assert found["mmldlm_data", "l2t"] == 2.0 and str(found["mmldlm_loss", "all"]) == "nan" and len(found) == 8
    assert {each.labels["run"] for family in parse(text) for each in family.samples} == {folder.name}


def test_a_reader_never_sees_a_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_metrics, "INTERVAL_S", 0.0)
    file, done = OpenMetricsFile(tmp_path, 10), threading.Event()
    file.update(0, {f"own/number_{index}": 1.0 for index in range(500)})

    def write() -> None:
        for step in range(300):
            file.update(step, {})
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    seen = set()
    while not done.is_set():
        text = (tmp_path / "metrics.prom").read_text()
        assert text.endswith("# EOF\n") and text.count("\n") == 2 + 2 * 504
        seen.add(text)
    thread.join()
    assert len(seen) > 3


@pytest.mark.quick
def test_short_steps_do_not_wait_for_the_disk(tmp_path: Path) -> None:
    file = OpenMetricsFile(tmp_path, 10)
    for step in range(5):
        file.update(step, {})
        inode = (tmp_path / "metrics.prom").stat().st_ino
        assert samples((tmp_path / "metrics.prom").read_text())["mmldlm_step", "all"] == 0
    file.update(5, {}, ended=True)
    assert (tmp_path / "metrics.prom").stat().st_ino != inode
    assert samples((tmp_path / "metrics.prom").read_text())["mmldlm_step", "all"] == 5
