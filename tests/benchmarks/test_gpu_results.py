"""Committed results of `scripts/gpu_check.sh` pass the bars of `benchmarks/gpu_bars.py`."""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_check
from benchmarks.common.report import ROOT
from benchmarks.gpu_bars import BARS, Bar, committed, rows
from benchmarks.gpu_check import PARTS, STAGES, kernel_table

pytestmark = pytest.mark.quick


def judge(bar: Bar, results: dict[str, Any]) -> None:
    """Fail if the result is below the bar, and skip if there is none."""
    value = bar.measured(results)
    if value is None:
        pytest.skip(f"not measured yet: {bar.name}")
    assert bar.passes(value), f"{bar.name}: {value:.4g}, expected {bar.at_least:.4g} to {bar.at_most:.4g}"


@pytest.mark.parametrize("bar", BARS, ids=lambda bar: bar.name)
def test_the_committed_result_passes_or_says_why_not(bar: Bar) -> None:
    if not bar.missed:
        judge(bar, committed())
    else:  # and the reason goes once it passes
        value = bar.measured(committed())
        assert value is not None and not bar.passes(value)


def test_committed_results_are_of_a_gpu_and_whole() -> None:
    for stage, result in committed().items():
        assert result["stage"] == stage and not result["tiny"] and result["machine"]["device"] != "cpu"
        assert all(part.__name__ in result for part in PARTS[stage])


# --- the judge ------------------------------------------------------------------------------------


def limit_of(bar: Bar) -> float:
    return bar.at_least if bar.at_least > -math.inf else bar.at_most


def beyond(bar: Bar) -> float:
    """Return a number that misses the bar by a hundredth."""
    return limit_of(bar) + (-0.01 if bar.at_least > -math.inf else 0.01) * (abs(limit_of(bar)) or 100)


def planted(bar: Bar, value: float) -> dict[str, Any]:
    """Return results in which `bar` measures `value`."""
    results: dict[str, Any] = {}
    for path, number in ((bar.path, 50 * value), (bar.over, 50.0)) if bar.over else ((bar.path, value),):
        node = results
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = number
    return results


@pytest.mark.parametrize("bar", BARS, ids=lambda bar: bar.name)
def test_a_result_beyond_its_bar_is_red(bar: Bar) -> None:
    judge(bar, planted(bar, limit_of(bar)))
    judge(bar, planted(bar, 2 * limit_of(bar) - beyond(bar)))
    with pytest.raises(AssertionError, match="expected"):
        judge(bar, planted(bar, beyond(bar)))


@pytest.mark.parametrize("bar", BARS, ids=lambda bar: bar.name)
def test_what_is_missing_is_not_measured_and_what_failed_is_red(bar: Bar) -> None:
    for results in ({}, {bar.path[0]: {}}):
        with pytest.raises(pytest.skip.Exception, match="not measured yet"):
            judge(bar, results)
    results = planted(bar, limit_of(bar))
    node = results
    for key in bar.path[:-1]:
        node = node[key]
    del node[bar.path[-1]]
    node["error"] = "OutOfMemoryError: ..."
    with pytest.raises(AssertionError, match="expected"):
        judge(bar, results)


def test_the_table_shows_what_was_measured() -> None:
    (bar,) = (bar for bar in BARS if bar.name == "MFU, 24 x 1024, compiled")
    for value, expected in ((0.418, "0.418"), (0.25, f"0.25, missed: {bar.missed}")):
        (shown,) = (row for row in rows(planted(bar, value)) if row["measured"])
        assert bar.missed and shown == {
            "what": bar.name,
            "bar": "at least 0.38",
            "stretch": "0.42",
            "measured": expected,
        }


# --- the stages --------------------------------------------------------------------------


def test_kernels_of_a_trace(tmp_path: Path) -> None:
    """Two overlapping kernels, a pause, one more, and what is no kernel; a trace is of two steps."""

    def event(name: str, start: float, duration: float, kind: str = "kernel") -> dict[str, Any]:
        return {"name": name, "ts": start, "dur": duration, "cat": kind}

    events = [event("gemm<128, 64>", 0, 100), event("gemm<64, 64>", 50, 100), event("add", 200, 50), {"name": "meta"}]
    launch, trace = event("cudaGraphLaunch", 0, 1000, "cuda_runtime"), tmp_path / "trace.json.gz"
    with gzip.open(trace, "wt") as file:
        json.dump({"traceEvents": [*events, event("aten::add", 0, 999, "cpu_op"), launch]}, file)
    table = kernel_table(trace)
    assert table["kernels"] == 1.5 and table["busy_s"] == pytest.approx(100e-6)
    assert table["top"][0] == {"name": "gemm", "count": 1.0, "ms": 0.1}
    assert table["gaps"][0] == {"us": 50, "before": "add"} and table["graph_launch_ms"] == 0.5


def test_a_stage_writes_after_each_part_and_reports_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def good(_: object) -> dict[str, Any]:
        return {"answer": 1}

    def bad(_: object) -> dict[str, Any]:
        assert json.loads((tmp_path / "smoke.json").read_text())["good"] == {"answer": 1}
        raise RuntimeError("no kernel image")

    def diverged(_: object) -> dict[str, Any]:
        curves = {
            "base": {"exit": 0, "curve": [(1, 2.0), (2, 2.0)]},
            "other": {"exit": 0, "curve": [(1, math.nan), (2, 1.5)]},
        }
        return gpu_check.compared(curves, {"other": "base"})

    monkeypatch.setitem(gpu_check.STAGES, "smoke", (good, bad, diverged, good))
    assert gpu_check.main(["smoke", "--out", str(tmp_path), "--stores", str(tmp_path), "--tiny"]) == 1
    result = json.loads((tmp_path / "smoke.json").read_text())
    assert result["diverged"]["largest_difference"] == "NaN"
    assert (
        result["tiny"] and result["good"] == {"answer": 1} and result["bad"]["error"] == "RuntimeError: no kernel image"
    )


def test_parts_of_other_stages_go_into_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(_: object) -> dict[str, Any]:
        return {"answer": 2}

    before = {"stage": "speed", "plain": {"answer": 1}, "runs": {"answer": 1}}
    (tmp_path / "speed.json").write_text(json.dumps(before))
    monkeypatch.setitem(gpu_check.STAGES, "best", (plain,))
    monkeypatch.setitem(gpu_check.PARTS, "speed", (plain,))
    (tmp_path / "torch-2.10.0.dist-info").mkdir()
    (tmp_path / "torch-2.10.0.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.10.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert gpu_check.main(["best", "--out", str(tmp_path), "--stores", str(tmp_path), "--tiny"]) == 0
    after = json.loads((tmp_path / "speed.json").read_text())
    assert (after["plain"], after["runs"], after["stage"]) == ({"answer": 2}, {"answer": 1}, "speed")
    assert [problem.split(":")[0] for problem in after["outdated"]] == ["torch"]


def test_prepare_fetches_the_versions_that_the_tests_pass_with() -> None:
    def versions(path: Path) -> dict[str, str]:
        return dict(re.findall(r"(?m)(?:^|\s)([\w-]+)==([\w.]+)", path.read_text(encoding="utf-8")))

    fetched, pinned = versions(ROOT / "scripts" / "gpu_check.sh"), versions(ROOT / "constraints.txt")
    shared = fetched.keys() & pinned.keys()
    assert shared >= {"deepspeed", "pydantic", "mmdit"}
    assert {name: fetched[name] for name in shared} == {name: pinned[name] for name in shared}


ON_A_GPU = ("mfu", "kernels", "busy", "reserved_share")  # numbers that no CPU gives


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_tiny_stage_measures_what_its_bars_need(stage: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_check", stage, "--tiny", "--out", str(tmp_path)]
    command, env = [*command, "--stores", str(tmp_path / "stores")], {**os.environ, "GPU_CHECK_SECONDS": "3600"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = {} if stage == "best" else json.loads((tmp_path / f"{stage}.json").read_text())
    for bar in BARS:
        for path in (bar.path, bar.over):
            if path and path[0] == stage:
                *parents, key = path[1:]
                node = result
                for parent in parents:
                    node = node[parent]
                assert node.get("exit", 0) == 0 and (key in node or key in ON_A_GPU or "left out" in node), bar
