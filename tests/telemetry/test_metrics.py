"""`metrics.jsonl` after kills, damage and non-finite values."""

import json
import math

import pytest
import torch

from mmldlm.telemetry.metrics import MetricsFile
from tests.helpers.metrics import read_metrics

pytestmark = pytest.mark.quick


def write_steps(path, first, last, resume_step=None):
    metrics = MetricsFile(path, resume_step)
    for step in range(first, last + 1):
        metrics.write("train", step, {"loss/total": 1.0 / step})
    metrics.close()


def test_resume_has_no_duplicate_and_no_gap(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 9)
    before = path.read_bytes().splitlines()
    for _ in range(2):  # resuming twice from the same step is no different
        write_steps(path, 7, 12, resume_step=6)
    assert [record["step"] for record in read_metrics(path)] == list(range(1, 13))
    assert path.read_bytes().splitlines()[:6] == before[:6], "what is kept stays as it was"
    assert not list(tmp_path.glob("*.tmp"))


def test_a_resume_keeps_what_is_not_later(tmp_path):
    """The record of a checkpoint of step 4 comes after those of the steps that were trained meanwhile."""
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 6)
    metrics = MetricsFile(path, 6)
    metrics.write("checkpoint", 4, {})
    metrics.close()
    write_steps(path, 5, 8, resume_step=4)
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3, 4, 4, 5, 6, 7, 8]


def test_incomplete_last_line_is_skipped_and_rewritten(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 5)
    whole = path.read_bytes()
    for cut in range(1, len(whole.splitlines()[-1]) + 1):
        path.write_bytes(whole[:-cut])
        # Without the newline alone, the record is whole and counts.
        assert [record["step"] for record in read_metrics(path)] == ([1, 2, 3, 4, 5] if cut == 1 else [1, 2, 3, 4])
        write_steps(path, 5, 6, resume_step=4)
        assert [record["step"] for record in read_metrics(path)] == [1, 2, 3, 4, 5, 6]


def test_whole_last_line_without_newline_does_not_glue(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 5)
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    write_steps(path, 6, 6, resume_step=5)
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3, 4, 5, 6]


def test_damage_inside_is_an_error_for_readers_only(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 5)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"\0\0\0\n", *lines[2:]]))
    write_steps(path, 6, 6, resume_step=5)
    assert "1 damaged lines" in caplog.text
    assert [record["step"] for record in read_metrics(path)] == [1, 3, 4, 5, 6]


def test_fresh_run_keeps_the_old_history_aside(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 3)
    write_steps(path, 1, 2)
    assert len(read_metrics(path)) == 2
    assert len(read_metrics(tmp_path / "metrics.jsonl.old")) == 3


def test_nonfinite_becomes_null_and_is_listed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, None)
    values = {
        "loss/total": math.nan,
        "loss/text": torch.tensor(-math.inf),
        "loss/latent": 0.5,
        "nested": {"a": [1, math.inf]},
        "path": tmp_path,
        "flag": True,
    }
    metrics.write("train", 3, values)
    line = path.read_text()  # flushed although not closed
    record = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert record["loss/total"] is None and record["loss/text"] is None and record["nested"] == {"a": [1, None]}
    assert record["nonfinite"] == ["loss/total", "loss/text", "nested.a.1"]
    assert record["loss/latent"] == 0.5 and record["flag"] is True and record["path"] == str(tmp_path)
    assert {"kind": "train", "step": 3}.items() <= record.items() and record["time"] > 1.7e9
    metrics.close()
