"""Reading a run folder without torch, while it is written and afterwards."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mmldlm.errors import DataError
from mmldlm.telemetry.metrics import MetricsFile
from mmldlm.tools.runs import History
from tests.helpers.paths import ROOT
from tests.helpers.waiting import wait_until

pytestmark = pytest.mark.quick


def written(folder: Path, resume_step: int | None = None) -> MetricsFile:
    folder.mkdir(exist_ok=True)
    return MetricsFile(folder / "metrics.jsonl", resume_step)


def test_records_by_kind_and_series(tmp_path: Path) -> None:
    file = written(tmp_path / "run")
    file.write("start", 0, {"total_steps": 30})
    for step, loss in ((10, 3.0), (20, math.nan), (30, 1.0)):
        file.write("train", step, {"loss/total": loss, "speed/step_s": 0.5})
        file.write("heartbeat", step, {"what": "validation"})
        file.write("validation", step, {"validation/total": 4.0, "weights": "trained"})
    file.write("skip", 30, {"reason": "norm", "optim/grad_norm": None})
    history = History(tmp_path / "run")
    steps, values = history.series("loss/total")
    assert steps == [10, 20, 30] and values[::2] == [3.0, 1.0] and math.isnan(values[1])
    assert history.series("validation/total").values == [4.0] * 3 and history.series("nothing").steps == []
    assert history.tags() == ["loss/total", "speed/step_s", "validation/total"]
    assert [record["step"] for record in history.by_kind("heartbeat")] == [10, 20, 30]
    assert history.series("optim/grad_norm", "skip").values == [], "null without `nonfinite` is no value"
    assert (history.total_steps, history.step, history.step_s, history.steps_per_record) == (30, 30, 0.5, 10)


def test_only_what_was_added_is_read_and_a_torn_line_waits(tmp_path: Path) -> None:
    file = written(tmp_path / "run")
    file.write("start", 0, {"total_steps": 9})
    history = History(tmp_path / "run")
    assert not history.refresh()
    first = history.records[0]
    path = tmp_path / "run" / "metrics.jsonl"
    line = json.dumps({"kind": "train", "step": 1, "time": 5.0, "loss/total": 2.0}).encode() + b"\n"
    with path.open("ab") as torn:
        torn.write(line[:30])
    assert not history.refresh() and len(history.records) == 1 and history.damaged == 0
    with path.open("ab") as rest:
        rest.write(line[30:] + b"no record\n" + line)
    assert history.refresh() and history.series("loss/total").values == [2.0, 2.0]
    assert history.damaged == 1 and history.records[0] is first, "the old records were read again"


def test_what_a_resume_superseded_is_dropped(tmp_path: Path) -> None:
    file = written(tmp_path / "run")
    for step in range(1, 6):
        file.write("train", step, {"loss/total": float(step)})
    history = History(tmp_path / "run")
    again = written(tmp_path / "run", resume_step=2)  # replaces the file
    again.write("resume", 2, {"total_steps": 9})
    again.write("train", 3, {"loss/total": -3.0})
    assert history.refresh() and history.series("loss/total").values == [1.0, 2.0, -3.0]
    third = written(tmp_path / "run", resume_step=2)  # and it is longer than before at the next look
    third.write("resume", 2, {"total_steps": 9})
    for step in range(3, 9):
        third.write("train", step, {"loss/total": -2.0 * step})
    assert history.refresh() and history.series("loss/total").values[2:] == [-6.0, -8.0, -10.0, -12.0, -14.0, -16.0]
    third.write("resume", 1, {"total_steps": 9})  # of a folder that was put together by hand
    assert history.refresh() and history.series("loss/total").values == [1.0] and len(history.by_kind("resume")) == 1


def test_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"metrics\.jsonl"):
        History(tmp_path)


def test_history_imports_no_torch() -> None:
    seen = "import mmldlm.tools.runs, sys; print(sorted({'torch', 'mmldlm.config'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", seen], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


HOLD = """
import sys, time
from mmldlm.utils.lock import RunLock
with RunLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_states_of_processes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    written(run).write("start", 0, {"total_steps": 9})
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        history = History(run)
        assert history.state().name == "running" and [p.pid for p in history.processes] == [process.pid]
        assert history.state(stall_timeout_s=0.0).name == "silent"
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: history.processes[0].state() == "stopped", "SIGSTOP")
    finally:
        process.kill()
    wait_until(lambda: (history.refresh(), history.state().name)[1] == "killed", "news of the kill")
    process.wait()
    history.refresh()
    assert history.state().name == "killed" and f"process {process.pid} is gone" in history.state().cause


@pytest.mark.parametrize(
    ("code", "name"), [(0, "finished"), (75, "stopped"), (70, "failed"), (1, "failed"), (76, "failed")]
)
def test_the_exit_record_decides(tmp_path: Path, code: int, name: str) -> None:
    written(tmp_path).write("start", 0, {"total_steps": 9})
    record = {"code": code, "rank": 1, "step": 4, "cause": "so it went", "time": 1.0}
    (tmp_path / "exit.json").write_text(json.dumps(record))
    state = History(tmp_path).state()
    assert (state.name, state.code, state.cause, state.is_active) == (name, code, "so it went", False)
