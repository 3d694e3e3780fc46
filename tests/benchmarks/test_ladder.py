"""The ladder from its command line to its files; regressions; refusals; the other commands."""

from __future__ import annotations

import copy
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import benchmarks.__main__ as command_line
from benchmarks.common.counting import OTHER, PARTS, WAIT
from benchmarks.ladder import regressions
from mmldlm import cli
from mmldlm.errors import DataError
from tests.helpers.paths import ROOT

pytest.importorskip("mmdit", reason="mmdit is not installed: bash scripts/setup.sh --dev")
pytest.importorskip("matplotlib", reason="matplotlib is not installed: bash scripts/setup.sh --dev")
NAMES = ["reference", "old", "trainer"]
Result = dict[str, Any]


def ladder(store: Path, out: Path, *options: object) -> int:
    threads = torch.get_num_threads()
    given = ("--store", store, "--out", out, "--name", "result", "--patience", 0, *options)
    try:
        return command_line.main(["ladder", "--shape", "tiny", "--quick", *map(str, given)])
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def out(tiny_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out")
    assert ladder(tiny_store, folder) == 0
    return folder


@pytest.fixture
def result(out: Path) -> Result:
    return json.loads((out / "result.json").read_text()) | {"control": {"trusted": True}}


def test_result(out: Path, result: Result) -> None:
    assert (out / "result.png").read_bytes().startswith(b"\x89PNG")
    assert list(result["variants"]) == NAMES and result["base"] == "reference"
    assert torch.__version__.startswith(result["versions"]["torch"].split("+")[0])
    assert result["date"] and result["machine"]["cores"] >= 1 and result["useful_flops_per_step"] > 0
    for row in result["variants"].values():
        speed = row["speed"]
        assert all(math.isfinite(value) and value > 0 for value in speed.values())
        assert speed["low"] <= speed["median"] <= speed["high"] and len(row["seconds"]) == 3
        assert row["parts"].keys() == {WAIT, *PARTS, OTHER} and row["parts"]["backward"] > 0
    reference, old, trainer = (result["variants"][name]["counts"] for name in NAMES)
    assert result["variants"]["reference"]["speed"]["median"] == 1
    assert reference["fill"] == old["fill"] < trainer["fill"] == 1
    assert reference["logit_rows"] == old["logit_rows"] > trainer["logit_rows"] > 0
    assert reference["operators"] > old["operators"] > trainer["operators"] and trainer["host_syncs"] == 0


def slow(result: Result) -> None:
    result["variants"]["trainer"]["speed"] = {"median": 0.01, "low": 0.009, "high": 0.011}


def add_a_sync(result: Result) -> None:
    result["variants"]["trainer"]["counts"]["host_syncs"] += 1


def pad_more(result: Result) -> None:
    result["variants"]["trainer"]["counts"]["fill"] -= 0.01


def fail(result: Result) -> None:
    result["variants"]["trainer"] = {"about": "", "error": "out of memory"}


@pytest.mark.parametrize(
    ("planted", "line"),
    [
        (slow, "trainer: speed 0.01 [0.01, 0.01], was "),
        (add_a_sync, "trainer: host_syncs "),
        (pad_more, "trainer: fill 0.99, was 1"),
        (fail, "trainer: out of memory"),
    ],
)
def test_regressions(result: Result, planted: Callable[[Result], None], line: str) -> None:
    now = copy.deepcopy(result)
    assert regressions(result, now) == []
    planted(now)
    (message,) = regressions(result, now)
    assert message.startswith(line)
    if planted is not fail:
        assert regressions(now, result) == []  # the other way round it is better
    if planted is slow:
        now["variants"]["trainer"]["speed"]["high"] = 1e9
        assert regressions(result, now) == []
        slow(now)
        now["control"]["trusted"] = False
        assert regressions(result, now) == []


def test_other_tasks_are_not_compared(result: Result) -> None:
    now = copy.deepcopy(result)
    now["what"]["task"]["width"] = 65
    with pytest.raises(DataError, match="task was"):
        regressions(result, now)


def test_exit_code(tiny_store: Path, tmp_path: Path, result: Result, capsys: pytest.CaptureFixture[str]) -> None:
    result["variants"]["trainer"]["counts"]["operators"] -= 1
    (tmp_path / "earlier.json").write_text(json.dumps(result))
    assert ladder(tiny_store, tmp_path, "--variants", "trainer", "--against", tmp_path / "earlier.json") == 1
    assert "trainer: operators" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["--patience", "-1"], 2, "--patience: expected 0 or more, found -1"),
        (["--variants", "nothing"], 2, "--variants: expected some of reference, reference-1,"),
        (["--rounds", "0"], 2, "--rounds: expected at least 1, found 0"),
        (["ladder", "--quick", "--against", "/nowhere.json"], 65, "--against: /nowhere.json cannot be read"),
        (["scaling", "--axes", "height"], 2, "--axes: expected some of tokens, length,"),
        (["memory", "--only", "nothing"], 2, "--only: 'nothing' is in no name of a setting, expected a part of"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, expected: str) -> None:
    try:
        status = cli.main(["bench", *arguments])
    except SystemExit as ended:  # argparse's own
        status = ended.code
    assert status == code and expected in capsys.readouterr().err


def test_missing_package(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "mmdit" else find(name, *rest))
    assert cli.main(["bench", "--quick"]) == 2
    assert "this benchmark needs the packages mmdit: run `bash scripts/setup.sh" in capsys.readouterr().err


def test_every_benchmark_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name in command_line.BENCHMARKS:
        if name != "pages":  # which has no options
            with pytest.raises(SystemExit) as ended:
                command_line.main([name, "--help"])
            assert ended.value.code == 0
    assert cli.main(["bench", "--help"]) == 0
    assert "checkpoint_stall" in capsys.readouterr().out


def test_without_a_source_tree(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "mmldlm", tmp_path / "mmldlm")
    command = [sys.executable, "-m", "mmldlm.cli", "bench"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith(f"mmldlm: error: bench: there is no benchmarks/ in {tmp_path}; run it in a checkout")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: it would begin")
def test_gpu_bench_without_a_gpu() -> None:
    done = subprocess.run(["bash", "scripts/gpu_bench.sh"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "gpu_bench: error: no CUDA device" in done.stderr
    assert done.stdout == ""  # nothing was set up


@pytest.mark.slow
@pytest.mark.parametrize("name", ["loader", "sampling", "scaling", "log_overhead", "busy", "prepare"])
def test_quick_runs(tmp_path: Path, name: str) -> None:
    """Each smaller benchmark from its command line to its tables and its file."""
    options = {
        "scaling": ["--axes", "positions"],
        "log_overhead": ["--steps", "10", "sampling.steps=2", "validation.samples=64"],
        "busy": ["--threads", "1", "--loops", "1", "model={depth: 1, width: 64, num_heads: 1}"],
    }
    command = [sys.executable, "-m", "benchmarks", name, "--quick", "--out", str(tmp_path), "--name", "result"]
    done = subprocess.run([*command, *options.get(name, [])], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["benchmark"] == name and result["what"]["quick"] and result["versions"]["torch"]
    for title, rows in result["tables"].items():
        assert title in done.stdout and rows and len({tuple(row) for row in rows}) == 1  # the same columns
    if name == "scaling":  # padding would cost twice as much; only the head that predicts lengths grows
        assert result["tables"]["Exponents"][0]["of FLOPs"] == pytest.approx(0, abs=0.01)
