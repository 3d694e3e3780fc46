"""Results of `mmldlm evaluate` do not depend on the number of processes, the engine or the launcher."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmldlm.evaluation import EvaluationConfig
from mmldlm.evaluation.suite import evaluate
from mmldlm.loading.load import load_run
from tests.helpers.engine_runs import accelerate, records, run, torchrun
from tests.helpers.forked_runs import ForkedRuns
from tests.helpers.sample_corpus import overwrite_value

ASKED = ("--samples", "40", "--texts", "12", "--times", "2", "--batch", "7")


@pytest.fixture(scope="module")
def sts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sts") / "pairs.tsv"
    words = ("rose", "wave", "oven", "violin", "tulip")
    path.write_text("".join(f"The {a} of the.\tThe {b} and the.\t{len(a + b)}\n" for a in words for b in words))
    return path


def evaluated(folder: Path, runs: ForkedRuns, processes: int, sts: Path) -> tuple[dict[str, Any], str]:
    engine = "single" if processes == 1 else "ddp"
    log = folder.with_name(f"evaluated{processes}.log")
    log.unlink(missing_ok=True)
    given = [folder, *ASKED, "--sts", sts]
    pids = runs.start(engine, given, processes, log, script="evaluate.py")
    codes = runs.wait(pids, 120)
    assert [codes.get(pid) for pid in pids] == [0] * processes, log.read_text()[-3000:]
    assert log.read_text().count("written: ") == 1, "one process writes"
    return json.loads((folder / "evaluation.json").read_text()), (folder / "samples.md").read_text()


def test_results_do_not_depend_on_the_number_of_processes(
    single: Callable[..., Path], forked: ForkedRuns, sts: Path
) -> None:
    result = [evaluated(single(), forked, processes, sts) for processes in (1, 3)]
    assert result[0][0]["documents"] == 40 and result[0][0]["t2l"]["sts_pairs"] == 25
    assert result[0] == result[1]  # each number to its last bit


def test_error_of_one_rank_ends_all_ranks(single: Callable[..., Path], forked: ForkedRuns, tmp_path: Path) -> None:
    log, missing = tmp_path / "log", tmp_path / "none.tsv"
    pids = forked.start("ddp", [single(), *ASKED, "--sts", missing], 2, log, script="evaluate.py")
    assert set(forked.wait(pids).values()) == {65}
    assert f"mmldlm: error: --sts {missing}: cannot be read" in log.read_text()


def test_bad_training_sample_of_the_controls_ends_all_ranks(
    single: Callable[..., Path], tiny_store: Path, forked: ForkedRuns, tmp_path: Path
) -> None:
    """One rank fits the controls, which come first in l2t."""
    store, log = tmp_path / "store", tmp_path / "log"
    shutil.copytree(tiny_store, store)
    overwrite_value(store, "train-00000.latents", 0, math.nan)
    pids = forked.start("ddp", [single(), *ASKED, "--modes", "l2t", "--data", store], 3, log, script="evaluate.py")
    assert set(forked.wait(pids).values()) == {65}, log.read_text()[-3000:]
    errors = [line for line in log.read_text().splitlines() if line.startswith("mmldlm: error: ")]
    assert len(errors) == 3 and all("sample 0" in line for line in errors)
    assert sum("mmldlm: error: rank 0: " in line for line in errors) == 2


QUALITY = (
    "validation={every: 0, quality_every: 1, quality_samples: 20}",
    "train={steps: 1, global_batch_size: 6, micro_batch_size: 2}",
    "optim.lr=1e-9",  # so that engines part by nothing
    "sampling.steps=40",  # more than tokens: short texts are complete before the last step
)


@pytest.mark.parametrize(
    ("engine", "processes"), [("fsdp2", 3), *(pytest.param(e, 2, marks=pytest.mark.slow) for e in ("ddp", "zero3"))]
)
def test_quality_does_not_depend_on_the_engine(
    engine: str, processes: int, single: Callable[..., Path], parity_config: Path, forked: ForkedRuns, tmp_path: Path
) -> None:
    """20 samples are two micro-batches: of three ranks one has none, and goes through the gathers all the same."""
    size = "train.micro_batch_size=1" if processes == 2 else "train.micro_batch_size=2"
    forked.succeed(engine, tmp_path / "run", processes, parity_config, *QUALITY, size)
    ours, theirs = records(tmp_path / "run", "quality"), records(single(*QUALITY), "quality")
    assert list(ours) == list(theirs) == [1]
    for step, expected in theirs.items():
        keys = [key for key in expected if key.startswith("quality/")]
        assert len(keys) > 20
        for key in keys:
            assert ours[step][key] == pytest.approx(expected[key], rel=1e-4, abs=1e-6), key
    few = EvaluationConfig(samples=12, texts=4, times=1)
    sharded, whole = (
        evaluate(load_run(folder), few, ["l2t"])["l2t"] for folder in (tmp_path / "run", single(*QUALITY))
    )
    for key in ("bits_per_token", "token_accuracy", "chrf"):
        assert sharded[key] == pytest.approx(whole[key], rel=1e-4), key


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["accelerate ddp", "accelerate fsdp2", "accelerate zero2", "torchrun"])
def test_evaluate_runs_under_every_launcher(
    launcher: str, single: Callable[..., Path], forked: ForkedRuns, sts: Path
) -> None:
    expected, _ = evaluated(single(), forked, 1, sts)
    given = (single(), *ASKED, "--sts", sts)
    name, _, engine = launcher.partition(" ")
    command = torchrun(2, *given) if name == "torchrun" else accelerate(engine, 2, *given)
    command = ["mmldlm.evaluate" if part == "mmldlm.train" else part for part in command]
    done = run(command)
    assert done.returncode == 0, done.stdout[-3000:]
    assert json.loads((single() / "evaluation.json").read_text()) == expected
