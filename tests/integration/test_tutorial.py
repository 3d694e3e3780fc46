"""Run docs/tutorial.md as a reader would: each command as printed, in an empty folder."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.pages import Reader, blocks, nothing_else_is_shown
from tests.helpers.paths import ROOT

PAGE = ROOT / "docs" / "tutorial.md"

# What a command says before it is interrupted, and how it may end then; TensorBoard has a moment between its line and
# its handler of Ctrl-C.
UNTIL: dict[str, tuple[str, set[int]]] = {
    "train": ("step 60/300 ", {75}),
    "monitor": ("step ", {0}),
    "tensorboard": ("http://127.0.0.1:", {0, -signal.SIGINT}),
}


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    (tmp_path / "scratch").mkdir()
    shutil.copytree(ROOT / "configs", tmp_path / "scratch" / "configs")
    result = Reader(tmp_path / "scratch", UNTIL)
    yield result
    (tmp_path / "printed").write_text(result.printed)
    result.close()


@pytest.mark.slow
def test_tutorial_runs(reader: Reader) -> None:
    page = PAGE.read_text(encoding="utf-8")
    result = blocks(page)
    assert len(result) > 12 and {block.kind for block in result} == {"bash", "bash goes-on", "text", "text by chance"}
    for kind, text in result:
        if kind == "bash":
            reader.interrupt()
            reader.run(text)
        elif kind == "bash goes-on":
            reader.start(text)
    reader.interrupt()
    nothing_else_is_shown(result, reader.printed)
    all_files_are_there(page, reader.folder)
    runs_are_as_described(reader.folder / "runs")


def all_files_are_there(page: str, folder: Path) -> None:
    promised = re.findall(r"`((?:configs|data|runs)/[^`\s]*)`", page)
    assert len(promised) > 5
    assert [name for name in promised if not (folder / name).exists()] == []


def runs_are_as_described(runs: Path) -> None:
    records = [json.loads(line) for line in (runs / "tutorial" / "metrics.jsonl").read_text().splitlines()]
    trained = [record["step"] for record in records if record["kind"] == "train"]
    assert trained == list(range(5, 301, 5)) and "resume" in {record["kind"] for record in records}
    result = json.loads((runs / "comparison.json").read_text())
    names = {name: [f"{name}-seed{seed}" for seed in (1, 2, 3)] for name in ("tutorial", "low-rate")}
    assert result["groups"] == {names["tutorial"][0]: names["tutorial"], names["low-rate"][0]: names["low-rate"]}
    (comparison,) = result["comparison"].values()
    losses = {entry["metric"]: entry for entry in comparison["over_seeds"]}
    assert losses["validation/total"]["n"] == 3 and losses["validation/total"]["relative_interval"][0] < 0
    # And as the page says: it writes from latents, and finds them.
    evaluated = json.loads((runs / "tutorial" / "evaluation.json").read_text())
    assert evaluated["t2l"]["recall_at_10"] > 0.3
    l2t = evaluated["l2t"]
    assert l2t["bits_per_token"] < l2t["bits_per_token_unigram"] / 2, "the page says that it has learned this"
