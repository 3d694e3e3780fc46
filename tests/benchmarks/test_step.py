"""The benchmarks from their command lines to their files; a regression is an exit code."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import benchmarks.__main__ as command_line
from benchmarks.common.counting import OTHER, PARTS, WAIT

pytest.importorskip("mmdit", reason="mmdit is not installed: bash scripts/setup.sh --dev")
NAMES = ["reference", "trainer"]
Result = dict[str, Any]


def step(store: Path, out: Path, *options: object) -> int:
    threads = torch.get_num_threads()
    given = ("--store", store, "--out", out, "--name", "result", "--patience", 0, *options)
    try:
        return command_line.main(["step", "--shape", "tiny", "--quick", *map(str, given)])
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def out(tiny_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out")
    assert step(tiny_store, folder) == 0
    return folder


@pytest.fixture
def result(out: Path) -> Result:
    return json.loads((out / "result.json").read_text()) | {"control": {"trusted": True}}


def test_result(result: Result) -> None:
    assert list(result["variants"]) == NAMES and result["base"] == "reference"
    assert torch.__version__.startswith(result["versions"]["torch"].split("+")[0])
    assert result["date"] and result["machine"]["cores"] >= 1 and result["useful_flops_per_step"] > 0
    for row in result["variants"].values():
        speed = row["speed"]
        assert all(math.isfinite(value) and value > 0 for value in speed.values())
        assert speed["low"] <= speed["median"] <= speed["high"] and len(row["seconds"]) == 3
        assert row["parts"].keys() == {WAIT, *PARTS, OTHER} and row["parts"]["backward"] > 0
    reference, trainer = (result["variants"][name]["counts"] for name in NAMES)
    assert result["variants"]["reference"]["speed"]["median"] == 1
    assert reference["fill"] < trainer["fill"] == 1
    assert reference["logit_rows"] > trainer["logit_rows"] > 0
    assert reference["operators"] > trainer["operators"] and trainer["host_syncs"] == 0


def test_exit_code(tiny_store: Path, tmp_path: Path, result: Result, capsys: pytest.CaptureFixture[str]) -> None:
    result["variants"]["trainer"]["counts"]["operators"] -= 1
    (tmp_path / "earlier.json").write_text(json.dumps(result))
    assert step(tiny_store, tmp_path, "--variants", "trainer", "--against", tmp_path / "earlier.json") == 1
    assert "trainer: operators" in capsys.readouterr().out


def test_every_benchmark_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name in command_line.BENCHMARKS:
        if name != "pages":  # which has no options
            with pytest.raises(SystemExit) as ended:
                command_line.main([name, "--help"])
            assert ended.value.code == 0
    assert command_line.main(["--help"]) == 0
    assert "real_run" in capsys.readouterr().out
