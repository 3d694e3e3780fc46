"""Records, TensorBoard events and lines of one run agree, also after a kill."""

import os
import signal

import pytest
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

from mmldlm.telemetry.tracker import Tracker
from tests.helpers.metrics import read_metrics


def values(step):
    return {"loss/total": 1 / step, "loss/text": 2.0, "optim/lr": 1e-3, "memory/resident_mib": 100.0}


def run(folder, first, last, resumed):
    tracker = Tracker(folder, 20, first - 1, resumed, enabled=True)
    tracker.start({"world_size": 1, "versions": {"torch": "x"}}, config={"optim": {"lr": 1e-3}, "list": [1, None]})
    for step in range(first, last + 1):
        tracker.train(step, values(step))
        if step % 5 == 0:
            tracker.validation(step, {"validation/total": 1.5})
            tracker.samples(step, [{"reference": "a", "generated": "b"}], "samples/l2t")
            tracker.heartbeat(step, "saving")
            tracker.event("checkpoint", step, {"path": f"step-{step}"})
    return tracker


def test_resume_after_kill(tmp_path, capfd):
    child = os.fork()
    if not child:
        run(tmp_path, 1, 13, resumed=False)
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["step"] == 13
    with run(tmp_path, 11, 20, resumed=True) as tracker:
        tracker.end(20, {"reason": "done", "exit_code": 0})
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in records if r["kind"] == "train"] == list(range(1, 21))
    assert [r["step"] for r in records if r["kind"] == "validation"] == [5, 10, 15, 20]
    assert [r["step"] for r in records if r["kind"] == "checkpoint"] == [5, 10, 15, 20]
    assert [r["kind"] for r in records if r["kind"] in ("start", "resume", "end")] == ["start", "resume", "end"]
    assert records[0]["total_steps"] == 20 and records[0]["versions"] == {"torch": "x"}
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    assert [event.step for event in events.Tensors("loss/total")] == list(range(1, 21))
    assert [event.step for event in events.Tensors("validation/total")] == [5, 10, 15, 20]
    assert "custom_scalars__config__" in events.Tags()["tensors"]
    printed = capfd.readouterr().err.splitlines()
    assert sum(line.startswith("step ") for line in printed) == 23
    assert "validation at step 20: total 1.5000" in printed


@pytest.mark.quick
def test_disabled_does_nothing(tmp_path, capfd):
    with Tracker(tmp_path, 10, 0, False, enabled=False) as tracker:
        tracker.start({"a": 1}, config={})
        tracker.train(1, values(1))
        tracker.validation(1, {})
        tracker.samples(1, [{"a": "b"}], "x")
        tracker.event("skip", 1, {})
        tracker.heartbeat(1, "saving")
        tracker.end(1, {})
        tracker.flush()
    assert not list(tmp_path.iterdir()) and capfd.readouterr() == ("", "")


def test_without_tensorboard_and_with_nan(tmp_path):
    with Tracker(tmp_path, 10, 0, False, enabled=True, tensorboard=False) as tracker:
        tracker.train(1, {"loss/total": float("nan")})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "metrics.prom"]
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["nonfinite"] == ["loss/total"]
