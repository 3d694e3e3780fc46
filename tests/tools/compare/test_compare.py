"""`mmldlm compare` on real runs, and what docs/review.md says about it."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmldlm import train
from mmldlm.errors import UsageError
from mmldlm.tools.compare import command as compare
from mmldlm.tools.compare.paired import Difference
from tests.helpers.paths import ROOT
from tests.helpers.tiny_config import TINY
from tests.helpers.written_runs import write_run


def config(folder: Path, name: str, store: Path, **changes: str) -> Path:
    """A config of 60 steps into the folder of that name."""
    text = (
        TINY.format(run=folder / name, store=store).replace("every: 1,", "every: 2,").replace("steps: 8", "steps: 60")
    )
    text = (
        text.replace("every: 4, samples", "every: 20, samples")
        .replace("text_samples: 2", "text_samples: 0")
        .replace("every_steps: 4", "every_steps: 0")
    )
    for old, new in changes.items():
        assert f"{old}: " in text
        text = re.sub(rf"\b{old}: [^,}}]+", f"{old}: {new}", text)
    path = folder / f"{name}.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def compared(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    capsys.readouterr()
    assert compare.main([*map(str, arguments), "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def losses(run: Path, kind: str = "train", tag: str = "loss/total") -> list[float]:
    return [record[tag] for record in records(run) if record["kind"] == kind]


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def test_two_runs(tiny_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The difference is that of the records; a run that is stopped and goes on has the records of one at once."""
    paths = [config(tmp_path, "a", tiny_store), config(tmp_path, "b", tiny_store, lr="2e-3")]
    assert train.main([str(paths[0]), "--stop-at", "40"]) == 75
    assert json.loads((tmp_path / "a" / "exit.json").read_text())["cause"].startswith("stopped by --stop-at 40")
    for path in paths:
        assert train.main([str(path)]) == 0
    assert train.main([str(paths[0]), f"run.dir={tmp_path / 'whole'}", "--stop-at", "60"]) == 0, "the last step"
    assert losses(tmp_path / "a") == losses(tmp_path / "whole")
    runs = [tmp_path / arm for arm in "ab"]
    result, first = compared(capsys, *runs), compared(capsys, *runs, "--steps", "40")
    a, b = (np.array(losses(run)) for run in runs)
    differences = {row["metric"]: row for row in result["pairs"][0]["differences"]}
    total = differences["loss/total"]
    assert (total["n"], total["last"]) == (30, 60)
    assert total["relative_difference"] == pytest.approx((b - a).mean() / a.mean())
    low, high = total["relative_interval"]
    assert low < total["relative_difference"] < high
    assert [row["n"] for row in first["pairs"][0]["differences"] if row["metric"] == "loss/total"] == [20]
    held_out = differences["validation/total"]
    values = [losses(run, "validation", "validation/total")[-1] for run in runs]
    assert held_out["relative_difference"] == pytest.approx(values[1] / values[0] - 1)
    assert held_out["relative_interval"] == [None, None]
    assert compared(capsys, *runs, "--at-least", "90%")["decision"] == "equal"


@pytest.mark.quick
def test_runs_without_partners(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs of other seeds are compared as independent ones; each of three configs is compared with the first."""
    a = [write_run(tmp_path / f"a{seed}", seed) for seed in (1, 2, 3)]
    b = [write_run(tmp_path / f"b{seed}", seed, shift=1, lr=2e-3) for seed in (4, 5, 6)]
    assert compare.main([*map(str, a + b)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "A a1 and 2 more, B b4 and 2 more: final values, mean over 6 runs" in lines
    assert lines[-1] == "loss/total over seeds: B is above A"
    (row,) = [row for row in compared(capsys, *a, *b)["over_seeds"] if row["metric"] == "loss/total"]
    assert (row["of"], row["n"], row["verdict"]) == ("runs", 6, "worse") and row["relative_interval"][0] > 0
    low, high = row["relative_interval"]
    assert any(f"[{100 * low:+.3g}, {100 * high:+.3g}]" in line for line in lines)
    result = compared(capsys, *a, *b, write_run(tmp_path / "c", 1, lr=3e-3))
    assert result["comparison"].keys() == {"b4", "c"} and "decision" not in result


@pytest.mark.quick
def test_decisions() -> None:
    noise = np.random.default_rng(0).standard_normal(200)

    def decision(shift: float, at_least: float = 0.005, scale: float = 1e-3) -> str:
        steps = range(1, 201)
        return Difference.of_paired("x", "records", steps, np.ones(200), 1 + shift + scale * noise).decision(at_least)

    assert decision(0.01) == "higher" and decision(-0.01) == "lower"
    assert decision(0) == "equal" and decision(0, at_least=0) == "open" and decision(0.004, scale=0.1) == "open"
    short = Difference.of_paired("x", "records", [1, 2], np.ones(2), np.zeros(2))
    assert short.decision(0.5) == "open" and math.isinf(short.half_widths[-1])


@pytest.mark.quick
def test_a_single_pair_has_no_interval_of_a_validation(tmp_path: Path) -> None:
    runs = [str(write_run(tmp_path / str(seed), seed)) for seed in (1, 2)]
    with pytest.raises(UsageError, match="--loss"):
        compare.main([*runs, "--loss", "validation/total"])


@pytest.mark.slow
def test_page(tiny_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of the section on comparing, with fewer steps."""
    page = (ROOT / "docs" / "review.md").read_text(encoding="utf-8")
    section = page.partition("\n## Compare\n")[2].partition("\n## ")[0]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "own").symlink_to(tiny_store)
    (tmp_path / "configs").mkdir()
    (small,) = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    fewer = {"width: 64": "width: 32", "steps: 400": "steps: 20", "every: 2}": "every: 1, figures_every: 0}"}
    for old, new in fewer.items():
        assert old in small
        small = small.replace(old, new)
    (tmp_path / "configs" / "small.yaml").write_text(small, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    code = "\n".join(line[4:] for line in section.splitlines() if line.startswith("    "))
    assert code.count(".venv/bin/mmldlm") == 7
    program = f"{sys.executable} -m mmldlm"
    code = code.replace("for seed in 1 2 3", "for seed in 1 2")
    code = code.replace(".venv/bin/mmldlm", program)
    output = subprocess.run(["bash", "-ec", code], check=True, capture_output=True, text=True).stdout
    assert len(re.findall(r"^loss/total of these two runs alone: ", output, re.MULTILINE)) == 2
    assert "loss/total over seeds: " in output
    assert (tmp_path / "runs/figures/paired.png").exists()
