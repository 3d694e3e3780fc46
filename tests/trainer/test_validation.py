"""Validations: when they are due, which checkpoint is the best, and what a run says that has overfitted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmldlm import cli, train
from mmldlm.config import load_config
from mmldlm.tools.checkpoints import list_checkpoints


@pytest.mark.quick
@pytest.mark.parametrize(
    ("settings", "samples", "expected"),
    [
        # The quickstart: 5 % of its steps come before an epoch, of 162.
        ("train.steps=1800 validation.every=400", 10_343, [90, 180, 360, 400, 800, 1200, 1600, 1800]),
        # 300 texts are read once in 5 steps.
        ("train.steps=400 validation.every=400", 300, [5, 10, 20, 40, 80, 160, 320, 400]),
        ("train.steps=1000 validation.every=400", 30, [1, 2, 4, 8, 16, 32, 64, 128, 256, 400, 800, 1000]),
        ("train.steps=100 validation.every=40 validation.first=0", 300, [40, 80, 100]),
        ("train.steps=100 validation.every=40 validation.first=15", 300, [15, 30, 40, 80, 100]),
        ("train.steps=100 validation.every=40 validation.first=50", 300, [40, 80, 100]),
        ("train.steps=100000 validation.every=250", 10**9, [250 * number for number in range(1, 401)]),
        ("train.steps=100 validation.every=0", 300, []),
    ],
)
def test_a_short_run_is_validated_early(settings: str, samples: int, expected: list[int]) -> None:
    config = load_config(None, ["train.global_batch_size=64", *settings.split()])
    assert [step for step in range(1, config.train.steps + 1) if config.validation_due(step, samples)] == expected


@pytest.mark.quick
@pytest.mark.parametrize(
    ("mode", "metric"),
    [("l2t", "validation/text"), ("joint", "validation/text"), ("t2l", "validation/latent")],
)
def test_the_best_is_judged_by_what_the_mode_generates(mode: str, metric: str) -> None:
    config = load_config(None, [f"mode={mode}"])
    assert config.judged_by == metric and config.checkpoint.keep_best == 1


@pytest.mark.setting("validation.first", "train.stop_after_worse", "checkpoint.keep_best")
def test_a_run_that_overfits_says_so_and_keeps_its_best(
    tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    # A rate at which the few steps of a tiny network go wrong after a while.
    settings = ["train.steps=60", "validation.every=40", "validation.first=2", "validation.samples=40"]
    settings += [
        "optim.lr=0.3",
        "optim.warmup_steps=0.5",
        "schedule.lr=constant",
        "checkpoint={keep_last: 1, keep_best: 1}",
    ]
    command = [str(tiny_config), *settings, "checkpoint={every_steps: 0, keep_best: 1}", "log.tensorboard=false"]
    assert train.main(command) == 0
    validations = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {one["step"]: one["validation/text"] for one in validations if one["kind"] == "validation"}
    assert [*losses] == [2, 4, 8, 16, 32, 40, 60]
    best = min(losses, key=lambda step: losses[step])
    assert best < 40 and losses[60] > 1.02 * losses[best], "the run must overfit for this test to say anything"
    assert [row["step"] for row in list_checkpoints(run)] == [60, best], "the last, and the best"
    where = f"{run}/checkpoints/step-{best:08}"
    printed = capsys.readouterr().err
    assert f"was {losses[best]:.4g} at step {best}" in printed and where in printed
    assert cli.main(["monitor", "--once", str(run)]) == 69
    assert "overfitting" in capsys.readouterr().out
    few = ["--samples", "8", "--texts", "2", "--times", "2", "--modes", "l2t"]
    assert cli.main(["evaluate", str(run), *few]) == 0
    assert where in (printed := capsys.readouterr().out) and "given the latent: worse than unigram" in printed
    assert cli.main(["evaluate", str(run), "--checkpoint", where, *few]) == 0
    assert "overfitting" not in capsys.readouterr().out

    stopped = [*command, f"run.dir={tmp_path / 'stopped'}", "train.stop_after_worse=2"]
    order = [*losses]
    end = next(
        step
        for i, step in enumerate(order)
        if i > 1 and min(losses[one] for one in order[i - 1 : i + 1]) > min(losses[one] for one in order[: i - 1])
    )
    for again in ("", " again"):
        assert train.main(stopped) == 0, again
        report = json.loads((tmp_path / "stopped" / "exit.json").read_text())
        assert (report["code"], report["step"]) == (0, end), again
        assert "train.stop_after_worse" in capsys.readouterr().err
    assert end < 60 and {best, end} == {row["step"] for row in list_checkpoints(tmp_path / "stopped")}
