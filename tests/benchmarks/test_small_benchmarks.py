"""The smaller benchmarks, each run with --quick from its command line to its tables and its file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import benchmarks.__main__ as command_line
from benchmarks.log_overhead import ALL, BOARD, BOOKKEEPING, DATA, FINISH, OF_A_RUN, RECORD, SETTLE
from benchmarks.measure import CONTROL
from benchmarks.random_store import random_store
from benchmarks.scaling import AXES, exponent
from mmldlm import cli
from mmldlm.data.store import Store

quick = pytest.mark.quick
Tables = dict[str, list[dict[str, Any]]]


@pytest.fixture
def tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Tables]:
    """The tables of a benchmark, as JSON has them."""

    def run(name: str, *options: object) -> Tables:
        threads = torch.get_num_threads()
        arguments = [name, "--quick", "--out", tmp_path, "--name", "found", *options]
        assert command_line.main([str(each) for each in arguments]) == 0
        assert torch.get_num_threads() == threads
        found = json.loads((tmp_path / "found.json").read_text())
        assert found["benchmark"] == name and found["what"]["quick"] and found["versions"]["torch"]
        printed = capsys.readouterr().out
        for title, rows in found["tables"].items():
            assert title in printed and rows
            assert len({tuple(row) for row in rows}) == 1  # the same columns
        return found["tables"]

    return run


def positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


@quick
def test_loader(tables: Callable[..., Tables]) -> None:
    found = tables("loader", "--samples", 500, 2000)
    assert len(found) == 4  # throughput and start-up, of samples of 100 tokens and of sentences
    for kind in ("100 tokens", "sentences"):
        rows = found[f"Loader, {kind}, 2,000 samples"]
        assert [row["micro-batch"] for row in rows] == [8, 32]
        for row in rows:
            assert positive(row["samples/s"]) and row["at least 50,000/s"] == (row["samples/s"] >= 50_000)
            assert positive(row["us a sample: order"]) and positive(row["gather"])
            assert 1000 - row["micro-batch"] < row["samples a round"] <= 1000
        starts = found[f"Start-up, {kind}"]
        assert [row["samples"] for row in starts] == [500, 2000]
        for row in starts:
            assert positive(row["first batch there after, ms"]) and row["shards"] == 1
            assert all(positive(row[part]) for part in ("open", "order and lengths", "first batch"))


@quick
def test_scaling_counts_real_tokens_only(tables: Callable[..., Tables]) -> None:
    found = tables("scaling", "--axes", "positions", "tokens", "--points", 3)
    exponents = {row["axis"]: row for row in found["Exponents"]}
    assert list(exponents) == ["tokens", "positions"]
    for axis, row in exponents.items():
        points = found[axis]
        assert len(points) == 3 and len(row["seconds"]) == 3 and all(len(each) == 2 for each in row["seconds"])
        assert math.isfinite(row["exponent"]) and positive(row[CONTROL])
        assert all(positive(point["ms"]) and positive(point["GFLOP"]) for point in points)
        assert points[0]["of the first"] == 1
    assert [point["real tokens"] for point in found["tokens"]] == [128, 256, 512]
    assert exponents["tokens"]["of FLOPs"] == pytest.approx(1, abs=0.25)
    # Old practice would have padded to four times the work; only the head that tells lengths grows.
    assert [point["padded"] for point in found["positions"]] == [1024, 2048, 4096]
    assert {point["real tokens"] for point in found["positions"]} == {1024}
    assert exponents["positions"]["of FLOPs"] == pytest.approx(0, abs=0.01)


@quick
def test_exponents() -> None:
    x = [1, 2, 4, 8]
    assert exponent(x, [3 * each**2 for each in x]) == pytest.approx(2)
    assert exponent(x, [5.0] * 4) == pytest.approx(0, abs=1e-12)


@quick
@pytest.mark.parametrize("axis", ["length", "longest", "depth", "vocabulary", "positions"])
def test_along_an_axis_one_thing_grows(axis: str) -> None:
    points = AXES[axis]()
    assert len({sum(point.lengths) for point in points}) == 1
    assert len({point.x for point in points}) == len(points)
    assert all(point.padded >= sum(point.lengths) for point in points)


@quick
@pytest.mark.slow
def test_log_overhead(tables: Callable[..., Tables]) -> None:
    little = ("sampling.steps=2", "validation.samples=64", "log.figure_samples=8")
    found = tables("log_overhead", "--steps", 10, *little)
    spent = {row["of a step"]: row["ms"] for row in found["Calls"]}
    assert all(positive(value) for value in spent.values())
    assert spent[BOARD] < spent[RECORD] < spent[FINISH] and spent[SETTLE] < spent[FINISH] < spent["whole step"]
    assert spent[ALL] == pytest.approx(sum(spent[what] for what in BOOKKEEPING))
    assert spent[ALL] + spent[DATA] < spent["whole step"]
    *parts, total = found[OF_A_RUN]
    assert [row["times in 1,000 steps"] for row in parts] == [1000, 1, 1, 0, 5, 5, 5]
    assert all(positive(row["s"]) for row in parts)
    assert total["s"] == pytest.approx(sum(row["s"] * row["times in 1,000 steps"] for row in parts))
    assert total["below 1%"] == (total["s"] < 10 * spent["whole step"] / 1000)
    (against,) = found["As it is against no records"]
    assert positive(against["s a step"]) and against["ratio"]["low"] <= against["ratio"]["high"]
    assert {len(each) for each in against["seconds"].values()} == {2} and len(against["seconds"]) == 3


@quick
def test_sampling(tables: Callable[..., Tables]) -> None:
    found = tables("sampling")
    assert list(found) == [f"Texts from latents, {steps} steps, 64 x 2" for steps in (2, 4)]
    for rows in found.values():
        assert [row["batch"] for row in rows] == [1, 4]
        assert all(positive(row["tokens/s"]) and positive(row["ms a sample"]) for row in rows)
        assert len({row["tokens of a round"] for row in rows}) == 1  # the same samples, however they are batched
        assert rows[0]["speed, 1 = 1"] == 1


@quick
def test_a_random_store_is_as_long_as_asked_for(tmp_path: Path) -> None:
    lengths = np.array([3, 1, 7, 2] * 30)
    store = Store.open(random_store(tmp_path / "store", lengths, vocab_size=50, max_length=40))
    split = store.split("train")
    assert np.asarray(split.lengths).tolist() == lengths.tolist()
    assert store.manifest.max_length == 40 and store.manifest.vocab_size == 50
    tokens, _, latents = split.gather(np.arange(len(split)))
    assert tokens.max() < store.manifest.mask_id < 50 and np.isfinite(latents).all()


@quick
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["scaling", "--axes", "height"], "--axes: 'height' is none here, expected some of tokens,"),
        (["sampling", "--steps", "0"], "--steps: expected at least 1, found 0"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str) -> None:
    try:
        code = cli.main(["bench", *arguments])
    except SystemExit as ended:  # argparse's own
        code = ended.code
    assert code == 2 and expected in capsys.readouterr().err


@pytest.mark.slow
def test_busy(tables: Callable[..., Tables]) -> None:
    """With one thread, so that it is quick on a busy machine, too."""
    small = ("model={depth: 1, width: 64, num_heads: 1}", "train.global_batch_size=4")
    alone, beside = tables("busy", "--threads", 1, "--loops", 1, *small)["Trainer"]
    assert (alone["busy loops"], alone["goal"], beside["busy loops"], beside["goal"]) == (0, 0.97, 1, 2.5)
    for row in (alone, beside):
        assert positive(row["default, tokens/s"]) and positive(row["chosen, tokens/s"])
        assert row["chosen / default"] == pytest.approx(row["chosen, tokens/s"] / row["default, tokens/s"])
        assert row["met"] == (row["chosen / default"] >= row["goal"]) and row["short spinning chosen"] == "0 of 1"
        openmp = {kind: [run["openmp"] for run in runs] for kind, runs in row["runs"].items()}
        assert openmp["default"] == ["GOMP_SPINCOUNT=300000, set by the environment"]
        assert openmp["chosen"] == ["a single thread, which never waits"]


def test_prepare(tables: Callable[..., Tables]) -> None:
    found = tables("prepare", "--processes", 1, 2)
    assert [row["processes"] for row in found["Preparation, by the clock"]] == [1, 2]
    for row in found["Preparation, by the clock"]:
        assert row["documents"] == 2000 and positive(row["documents/s"]) and row["bytes as the first"]
        assert 50 < row["peak resident, MiB"] < 2048
    stages = {row["stage"]: row["documents/s"] for row in found["Stages, one process, by the clock"]}
    assert list(stages) == ["read", "fit", "tokenize", "encode", "measure", "merge"]
    assert all(positive(rate) for rate in stages.values())
