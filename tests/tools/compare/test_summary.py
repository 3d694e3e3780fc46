"""`mmldlm compare` of any number of runs: its numbers, figures and lines, at any moment of a run's life."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmldlm import cli
from mmldlm.telemetry.metrics import MetricsFile
from mmldlm.tools.compare import figures
from mmldlm.tools.compare.run_summary import Curve
from tests.helpers.forked_runs import ForkedRuns
from tests.helpers.metrics import read_metrics
from tests.helpers.paths import ROOT
from tests.helpers.waiting import wait_until
from tests.helpers.written_runs import write_run

SEEDS = (1, 2, 3)
KEYS = ("loss/total", "validation/total", "validation/total/best", "speed/tokens_per_s", "memory/resident_mib")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs: three seeds of a base, three of a larger learning rate."""
    folder = tmp_path_factory.mktemp("reported")
    for seed in SEEDS:
        write_run(folder / f"base-{seed}", seed)
        write_run(folder / f"slow-{seed}", seed, shift=0.5, lr=3e-4)
    return folder


def names(kind: str) -> list[str]:
    return [f"{kind}-{seed}" for seed in SEEDS]


def compared(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """The object of `mmldlm compare --json`."""
    capsys.readouterr()
    assert cli.main(["compare", *map(str, arguments), "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def by_kind(runs: Path) -> list[Path]:
    return [runs / name for name in names("base") + names("slow")]


def test_numbers_and_figures_of_groups(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Values from the records by the rule of their group; seeds are one group, and what was changed differs."""
    result = compared(capsys, *by_kind(runs), "--figures", tmp_path)
    assert {path.name for path in tmp_path.glob("*")} == {"curves.png", "paired.png"}
    (name, comparison), *others = result["comparison"].items()
    assert name == "slow-1" and not others and comparison["decision"] == "higher"
    entries = {entry["metric"]: entry for entry in comparison["over_seeds"]}
    for key in KEYS:
        entry, values = entries[key], [result["runs"][name]["metrics"][key] for name in names("base")]
        assert (entry["of"], entry["n"]) == ("pairs", 3) and entry["baseline"] == pytest.approx(np.mean(values)), key
    assert entries["loss/total"]["verdict"] == "worse" and entries["speed/tokens_per_s"]["verdict"] == ""
    assert [pair["pairing"][:7] for pair in comparison["pairs"]] == ["paired:"] * 3
    records = [each for each in read_metrics(runs / "slow-1" / "metrics.jsonl") if each["kind"] == "train"]
    metrics = result["runs"]["slow-1"]["metrics"]
    assert metrics["loss/total"] == pytest.approx(np.mean([each["loss/total"] for each in records[18:]]))
    assert metrics["speed/tokens_per_s"] == pytest.approx(np.median([each["speed/tokens_per_s"] for each in records]))
    assert metrics["memory/resident_mib"] == 120
    assert result["decision"] == comparison["decision"] and result["compared_to_step"] is None
    assert result["groups"] == {"base-1": names("base"), "slow-1": names("slow")} and result["baseline"] == "base-1"
    assert result["config_differences"] == {"optim.lr": {"base-1": 0.001, "slow-1": 0.0003}}
    run = result["runs"]["base-2"]
    assert run["events"] == {"start": 1, "checkpoint": 2, "end": 1}
    assert (run["state"], run["step"], run["seed"]) == ("finished", 20, 2)


def test_single_runs_have_no_interval_over_seeds(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = write_run(tmp_path / "short", 1, shift=0.5, lr=3e-4, steps=13)
    result = compared(capsys, short, runs / "base-1", "--steps", 13)
    assert (result["baseline"], result["compared_to_step"]) == ("short", 13)
    comparison = result["comparison"]["base-1"]
    assert {tuple(row["relative_interval"]) for row in comparison["over_seeds"]} == {(None, None)}
    (pair,) = comparison["pairs"]
    (loss,) = [row for row in pair["differences"] if row["metric"] == "loss/total"]
    assert (loss["of"], loss["n"], loss["last"]) == ("records", 13, 13) and loss["relative_interval"][1] < 0
    assert cli.main(["compare", str(short), str(runs / "base-1")]) == 0
    printed = capsys.readouterr().out
    assert "(no interval)" in printed and "optim.lr differs: short 0.0003, base-1 0.001\n" in printed


def test_it_imports_no_torch(runs: Path, tmp_path: Path) -> None:
    seen = "import sys; from mmldlm import cli; assert cli.main(sys.argv[1:]) == 0; print({'torch'} & set(sys.modules))"
    shown = [str(runs / name) for name in ("base-1", "slow-1")]
    command = [sys.executable, "-c", seen, "compare", *shown, f"--figures={tmp_path / 'out'}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1:] == ["set()"], done.stderr


def test_a_missing_library_is_one_line(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["compare", str(runs / "base-1"), f"--figures={tmp_path / 'out'}"]) == 2
    assert "pip install 'matplotlib>=" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_is_no_run_or_cannot_be_written(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", str(tmp_path)]) == 65
    assert str(tmp_path) in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert cli.main(["compare", str(runs / "base-1"), f"--figures={tmp_path / 'file' / 'out'}"]) == 74
    assert capsys.readouterr().err.startswith("mmldlm: error: cannot read or write")


@pytest.fixture
def endless(tiny_config: Path, forked: ForkedRuns, tmp_path: Path) -> Iterator[list[int]]:
    """A run in a process of its own that does not end by itself, in `tmp_path/run`; of one mode: few curves to draw."""
    pids = forked.start(
        "single", [tiny_config, "train.steps=100000", "validation.every=0", "mode=t2l"], 1, tmp_path / "log"
    )
    yield pids
    forked.kill(pids)


def test_running_and_killed_run(
    endless: list[int], forked: ForkedRuns, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, metrics = tmp_path / "run", tmp_path / "run" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count('"kind": "train"') >= 5, "the first steps")
    result = compared(capsys, run, runs / "base-1")
    alive = result["runs"]["run"]
    assert (alive["state"], alive["total_steps"]) == ("running", 100_000) and alive["step"] >= 5

    forked.kill(endless)
    forked.wait(endless)
    with metrics.open("ab") as torn:
        torn.write(b'{"kind": "train", "step": 99999, "ti')
    result = compared(capsys, run)
    dead = result["runs"]["run"]
    assert dead["state"] == "killed" and alive["step"] <= dead["step"] < 99_999
    assert dead["events"]["failure"] == 1 and "exit.json" in dead["cause"]


def test_events_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    file = MetricsFile(run / "metrics.jsonl", None)
    file.write("start", 0, {"total_steps": 40, "engine": "ddp", "world_size": 2})
    for step in range(1, 31):
        if step == 12:
            file.write("skip", step, {"reason": "spike", "loss": 9.0, "optim/grad_norm": 123.0})
            continue
        file.write("train", step, {"loss/total": 5 - step / 10, "optim/lr": 1e-3, "optim/grad_norm": 1.0})
        if step % 10 == 0:
            file.write("validation", step, {"validation/total": 6.0, "quality/l2t_bleu": float(step)})
        if step == 10:
            file.write("checkpoint", step, {"path": "x/step-00000010", "stall_s": 0.25})
        if step == 20:
            file.write("end", step, {"stopped_by": "SIGTERM"})
            hybrid = {"engine": "fsdp2", "world_size": 4, "sharding": "2 replicas x 2 shards"}
            file.write("resume", step, {"total_steps": 40, **hybrid})
            file.write("micro_batch", step + 1, {"before": 8, "micro_batch_size": 4})
    words = {"code": 70, "rank": 0, "step": 30, "cause": "the loss is not finite", "time": 2e9}
    (run / "exit.json").write_text(json.dumps(words))
    result = compared(capsys, run)
    once = ("start", "skip", "checkpoint", "end", "resume", "micro_batch", "failure")
    assert result["runs"]["run"]["events"] == dict.fromkeys(once, 1)
    assert result["runs"]["run"]["metrics"]["quality/l2t_bleu"] == 30.0
    assert cli.main(["compare", str(run)]) == 0
    assert "the loss is not finite" in capsys.readouterr().out


def test_a_long_curve_keeps_its_means() -> None:
    values = np.random.default_rng(0).normal(size=10_000)
    steps, means = figures.shorten(Curve(np.arange(1, 10_001), values))
    assert len(steps) == 200 and steps[0] == 25.5 and means[0] == pytest.approx(values[:50].mean())


def test_what_a_folder_holds_is_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = "<img src=x onerror=alert(1)>$_"
    run = tmp_path / bad
    run.mkdir()
    file = MetricsFile(run / "metrics.jsonl", None)
    file.write("start", 0, {"total_steps": 9, "engine": bad})
    file.write("train", 1, {f"loss/{bad}": 1.0, "loss/total": 1.0})
    file.write("end", 1, {"stopped_by": bad})
    (run / "config.yaml").write_text(f"run: {{seed: '{bad}'}}\n")
    (run / "evaluation.json").write_text(json.dumps({bad: 1.0, "l2t": {"samples": [{bad: bad}, 3]}, "step": bad}))
    (name, values), *others = compared(capsys, run, "--figures", tmp_path / "out")["runs"].items()
    assert not others and (name, values["seed"], values["metrics"][f"evaluation/{bad}"]) == (bad, bad, 1.0)


@pytest.mark.parametrize("content", ["", '{"kind": "start", "st'])
def test_run_without_records(tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text(content)
    result = compared(capsys, tmp_path / "run", tmp_path / "run", "--figures", tmp_path / "out")
    assert list(result["runs"]) == ["run"] and result["runs"]["run"]["metrics"] == {}
    assert not list((tmp_path / "out").glob("*.png"))


def test_a_branch_that_was_left_is_shown_and_not_averaged(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run is equal to its own copy, whatever is in the branch that `mmldlm rewind` has set aside."""
    run, copy = tmp_path / "run", tmp_path / "copy"
    for folder in (run, copy):
        shutil.copytree(runs / "base-1", folder)
    branch = run / "branches/01-before-11"
    branch.mkdir(parents=True)
    shutil.copy(run / "config.yaml", branch)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["step"] <= 10 and record["kind"] != "end"]
    for record in records:
        record |= {key: 3 * value for key, value in record.items() if key.startswith(("loss/", "validation/"))}
    (branch / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    result = compared(capsys, run, runs / "slow-1")
    assert set(result["runs"]) == {"run", "slow-1", "01-before-11"} and result["groups"].keys() == {"run", "slow-1"}
    assert result["runs"]["01-before-11"]["state"] == "stopped"
    plain = compared(capsys, copy, runs / "slow-1")
    one, same = (each["comparison"]["slow-1"]["over_seeds"] for each in (result, plain))
    assert one == same and len(one) > 5
