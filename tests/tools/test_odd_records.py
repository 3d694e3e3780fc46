"""Records and files of a run that say odd things: neither monitor nor compare ends in a traceback, or obeys them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mmldlm import cli
from mmldlm.telemetry.metrics import MetricsFile
from mmldlm.tools.monitor.alerts import alerts
from mmldlm.tools.monitor.snapshot import Snapshot
from mmldlm.tools.monitor.view import to_json, view
from mmldlm.tools.runs import History

RETITLE = "\x1b]0;title\x07\x1b[2J"
START = {"kind": "start", "step": 0, "time": 1.0, "total_steps": 9}
# Lines that are left out and counted.
ODD: dict[str, dict[str, Any]] = {
    "nonfinite": {"kind": "train", "step": 3, "time": 3.0, "nonfinite": 5, "loss/total": 1.0},
    "nonfinite list": {"kind": "train", "step": 3, "time": 3.0, "nonfinite": [["loss/total"]]},
    "above floats": {"kind": "train", "step": 3, "time": 3.0, "loss/total": 10**400},
    "text as a loss": {"kind": "train", "step": 3, "time": 3.0, "loss/total": RETITLE},
    "list as a reason": {"kind": "skip", "step": 3, "time": 3.0, "reason": ["spike"]},
    "text as total": {**START, "total_steps": "many"},
    "list as stop": {"kind": "end", "step": 9, "time": 3.0, "stopped_by": ["me"]},
    "silent heartbeat": {"kind": "heartbeat", "step": 3, "time": 3.0},
    "endless time": {"kind": "train", "step": 3, "time": 1e999},
    "step before all": {"kind": "train", "step": -3, "time": 3.0},
    "endless step": {"kind": "train", "step": 10**30, "time": 3.0},
    "norm": {"kind": "train", "step": 3, "time": 3.0, "grad_norms": ["much"]},
    "hash": {"kind": "checkpoint", "step": 3, "time": 3.0, "sha256": 5},
    "world": {**START, "world_size": "two", "kind": "resume"},
    "list": ["train", 3],  # type: ignore[dict-item]
}


def run_with(folder: Path, *lines: object) -> Path:
    folder.mkdir(exist_ok=True)
    file = MetricsFile(folder / "metrics.jsonl", None)
    file.write("start", 0, {"total_steps": 9})
    file.write("train", 1, {"loss/total": 2.0, "speed/step_s": 0.5})
    file.close()
    with (folder / "metrics.jsonl").open("a") as added:
        added.writelines(json.dumps(line) + "\n" for line in lines)
    (folder / "config.yaml").write_text("optim: [1, 2]\ncheckpoint: {mirror: [x]}\nrun: 5\n")
    (folder / "startup.json").write_text(json.dumps({"ranks": [5], "data_manifest": ["x"]}))
    return folder


def look(history: History) -> str:
    """What the monitor prints of a run, alone and beside another, and as JSON."""
    snapshot = Snapshot(history, 10.0, now=1e9)
    looks = [(snapshot, alerts(snapshot))]
    console = Console(width=200, markup=False, highlight=False)
    with console.capture() as capture:
        console.print(view(looks), view(looks * 2))
    return capture.get() + json.dumps(to_json(looks))


@pytest.mark.quick
@pytest.mark.parametrize("name", ODD)
def test_the_monitor_leaves_them_out(name: str, tmp_path: Path) -> None:
    history = History(run_with(tmp_path / "run", ODD[name]))
    assert history.damaged == 1 and "1/9" in look(history)


def test_a_comparison_counts_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_with(tmp_path / "run", *ODD.values())
    assert cli.main(["compare", str(run)]) == 0
    assert f"{len(ODD)} damaged lines of metrics.jsonl are ignored" in capsys.readouterr().out


def test_no_text_of_a_run_reaches_the_terminal_as_an_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_with(tmp_path / f"run{RETITLE}", {"kind": "heartbeat", "step": 3, "time": 1.0, "what": RETITLE})
    lock = {"host": f"evil{RETITLE}", "pid": 1, "started": "2020-01-01T00:00:00"}
    (run / "run.lock").write_text(json.dumps(lock))
    printed = look(History(run))
    assert "evil" in printed and "title" in printed and "\x1b" not in printed and "\x07" not in printed
    (run / "config.yaml").write_text('data: {path: "x\\e]0;title\\a"}\n')
    other = run_with(tmp_path / "other")
    (other / "config.yaml").write_text("data: {path: y}\n")
    assert cli.main(["compare", str(run), str(other), f"--figures={tmp_path / 'out'}"]) == 0
    (run / "config.yaml").write_text("data: [}")
    assert cli.main(["compare", str(run), str(other)]) == 0
    printed = "".join(capsys.readouterr())
    assert "title" in printed and "\x1b" not in printed and "\x07" not in printed


def test_no_name_of_a_folder_or_tensor_reaches_the_terminal_as_an_order(
    tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, config = tmp_path / f"run{RETITLE}", tmp_path / f"config{RETITLE}.yaml"
    config.write_text(tiny_config.read_text())
    assert cli.main(["train", str(config), "checkpoint.every_steps=4"]) == 0
    (tmp_path / "run").rename(run)
    first, last = sorted((run / "checkpoints").glob("step-*"))
    capsys.readouterr()
    for command in (
        ["config", config],
        ["train", config, "--check"],
        ["checkpoints", "list", run],
        ["checkpoints", "diff", first, last],
        ["export", run, tmp_path / f"bundle{RETITLE}"],
        ["sample", run, "--mode", "joint", "--length", "3"],
        ["rewind", run, "--before", "6"],
    ):
        assert cli.main([*map(str, command)]) == 0
        printed = "".join(capsys.readouterr())
        assert printed and "\x1b" not in printed and "\x07" not in printed, command[0]


class Counted(dict[str, Any]):
    """A record that counts how often it is read."""

    reads = 0

    def __getitem__(self, key: str) -> Any:
        Counted.reads += 1
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        Counted.reads += 1
        return super().get(key, default)


@pytest.mark.quick
def test_a_look_reads_only_new_records(tmp_path: Path) -> None:
    """Its cost does not grow with the run."""

    def reads(records: int) -> int:
        folder = tmp_path / str(records)
        folder.mkdir()
        file = MetricsFile(folder / "metrics.jsonl", None)
        file.write("start", 0, {"total_steps": 10**6})
        for step in range(records):
            file.write("train", step, {"loss/total": 1.0 + 1 / (step + 1), "speed/step_s": 0.5, "optim/lr": 1.0})
            file.write("heartbeat", step, {"what": "validation"})
            file.write("validation", step, {"validation/total": 4.0})
        history = History(folder)
        looked = look(history)
        # The records are shared by all indexes, so each is replaced where it stands.
        for values in (history.records, *(history.by_kind(kind) for kind in ("train", "heartbeat", "validation"))):
            values[:] = map(Counted, values)
        Counted.reads = 0
        assert look(history).splitlines()[:9] == looked.splitlines()[:9]
        return Counted.reads

    assert reads(300) < 100 and reads(1200) < 100
