"""Learning rates match closed forms and PyTorch's schedulers to 1e-12, across resume and in real runs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from mmldlm import train
from mmldlm.checkpoint.state import TrainState
from mmldlm.config import load_config
from mmldlm.errors import ConfigError
from mmldlm.optim.config import OptimConfig
from mmldlm.optim.lr_schedule import (
    Plateau,
    ScheduleConfig,
    ScheduleName,
    batch_scale,
    describe_lr,
    lr_at,
    resolved_warmup,
)
from tests.helpers.engine_runs import record_list

quick = pytest.mark.quick
PEAK, TOTAL = 3e-3, 100
OPTIM = OptimConfig(lr=PEAK, warmup_steps=10)


def schedule_and_torch(
    name: ScheduleName, floor: float, rest: int
) -> tuple[ScheduleConfig, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]]:
    """Return a schedule and PyTorch's scheduler for the `rest` steps after the first one that follows the warmup."""
    if name == "constant":
        return ScheduleConfig("constant"), lambda o: lr_scheduler.ConstantLR(o, factor=1.0)
    if name == "linear":
        return ScheduleConfig("linear", floor), lambda o: lr_scheduler.LinearLR(o, 1.0, floor, rest)
    if name == "cosine":
        return ScheduleConfig("cosine", floor), lambda o: lr_scheduler.CosineAnnealingLR(o, rest, PEAK * floor)
    if name == "cosine_restarts":
        schedule = ScheduleConfig("cosine_restarts", floor, restart_period=27)
        return schedule, lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 27, eta_min=PEAK * floor)
    return ScheduleConfig("wsd", floor, decay_steps=30), lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, factor=1.0), lr_scheduler.LinearLR(o, 1.0, floor, 30)], [rest - 30]
    )


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], PEAK)


def rates_of(scheduled: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
    rates = []
    for _ in range(steps):
        rates.append(scheduled.param_groups[0]["lr"])
        scheduled.step()
        scheduler.step()
    return rates


@quick
@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "cosine_restarts", "wsd"])
@pytest.mark.parametrize("floor", [0.0, 0.05, 1.0])
@pytest.mark.parametrize(("warmup_steps", "warmup"), [(0, 0), (10, 10), (0.1, 10), (0.25, 25)])
def test_schedules_match_torch(name: ScheduleName, floor: float, warmup_steps: float, warmup: int) -> None:
    optim = OptimConfig(lr=PEAK, warmup_steps=warmup_steps)
    assert resolved_warmup(optim, TOTAL) == warmup
    schedule, reference = schedule_and_torch(name, floor, rest=TOTAL - 1 - warmup)
    ours = [lr_at(step, TOTAL, optim, schedule) for step in range(TOTAL)]
    theirs: list[float] = []
    if warmup:
        warming = optimizer()
        theirs = rates_of(warming, lr_scheduler.LinearLR(warming, 1 / warmup, 1.0, warmup - 1), warmup)
    scheduled = optimizer()
    theirs += rates_of(scheduled, reference(scheduled), TOTAL - warmup)
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-12
    assert max(ours) <= PEAK * (1 + 1e-12)
    # After its end a schedule stays where it was.
    if name != "cosine_restarts":
        assert lr_at(10 * TOTAL, TOTAL, optim, schedule) == pytest.approx(ours[-1], rel=1e-12)


@quick
@pytest.mark.parametrize("total", [1, 2, 5])
def test_short_runs_have_a_positive_rate(total: int) -> None:
    for warmup in (0, 0.02, 0.5, 100):
        rates = [lr_at(s, total, OptimConfig(lr=PEAK, warmup_steps=warmup), ScheduleConfig()) for s in range(total)]
        assert all(0 < rate <= PEAK * (1 + 1e-12) for rate in rates)


@quick
def test_steps_may_be_fractions() -> None:
    """Fractions are relative to `train.steps`; those of periods to the steps after the warmup, which they divide."""
    period = ScheduleConfig("cosine_restarts", restart_period=0.25)
    rates = [lr_at(step, 110, OPTIM, period) for step in range(110)]
    assert [step for step in range(10, 110) if rates[step] == PEAK] == [10, 35, 60, 85]
    wsd = ScheduleConfig("wsd", decay_steps=0.3)
    rates = [lr_at(step, TOTAL, OPTIM, wsd) for step in range(TOTAL)]
    assert rates[69] == PEAK > rates[70] and rates[-1] == pytest.approx(PEAK * 0.1)
    # A fall that is longer than the run begins at the peak.
    short = [lr_at(step, 12, OPTIM, ScheduleConfig("wsd", decay_steps=500)) for step in range(12)]
    assert short[9:] == pytest.approx([PEAK, PEAK, PEAK * 0.1])


@pytest.mark.setting("schedule.patience", "schedule.factor", "schedule.min_lr", "schedule.threshold")
@quick
@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("threshold", [0.0, 0.01, 0.2])
def test_plateau_matches_torch_across_resume(every: int, threshold: float) -> None:
    """Losses that fall, rise, stand still and are not finite; the state goes through JSON after each."""
    draw = random.Random(7)
    losses = [math.exp(-n / 60) + 0.2 * draw.random() for n in range(300)]
    losses[40:90] = [math.inf, math.nan] * 25
    losses[150:200] = [losses[149]] * 50
    schedule = ScheduleConfig("plateau", patience=4 * every, factor=0.7, min_lr=2e-4, threshold=threshold)
    still = OptimConfig(lr=PEAK, warmup_steps=0)
    scheduled = optimizer()
    theirs = lr_scheduler.ReduceLROnPlateau(
        scheduled, factor=0.7, patience=4, threshold=threshold, min_lr=2e-4, eps=0.0
    )
    state = TrainState()
    for number, loss in enumerate(losses, 1):
        Plateau(schedule, state, 0, validates=True).observe(number * every, loss)
        state = TrainState.from_json(state.to_json())
        theirs.step(loss)
        ours = lr_at(number * every, 10**9, still, schedule, cuts=state.lr_cuts)
        assert abs(ours - scheduled.param_groups[0]["lr"]) < 1e-12
    assert scheduled.param_groups[0]["lr"] == 2e-4


@quick
def test_plateau_does_not_count_the_warmup() -> None:
    schedule, state = ScheduleConfig("plateau", patience=10), TrainState()
    plateau = Plateau(schedule, state, 100, validates=True)
    cuts = []
    for step in range(1, 130):
        plateau.observe(step, 1.0)
        cuts.append(state.lr_cuts)
    assert cuts.index(1) + 1 == 111 and cuts[-1] == 2
    # In a warmup the rate is the warmup's, and no cut raises a rate that is below min_lr.
    assert lr_at(49, 1000, OptimConfig(lr=PEAK, warmup_steps=100), schedule, cuts=3) == PEAK / 2
    assert lr_at(200, 1000, OptimConfig(lr=1e-7), schedule, cuts=3) == 1e-7


@quick
def test_plateau_of_the_training_loss_takes_means() -> None:
    """A restless loss with one lucky step is no progress; skipped steps do not count."""
    schedule, state = ScheduleConfig("plateau", patience=40), TrainState()
    plateau = Plateau(schedule, state, 0, validates=False)
    assert plateau.window == 4
    losses: list[float | None] = [5.0, 1.0, 3.0, 3.0, None, 0.1, None, 8.0]
    for step, loss in enumerate(losses, 1):
        plateau.observe_training_loss(step, loss)
        state = plateau.state = TrainState.from_json(state.to_json())
    assert state.plateau_best == 3.0 and state.plateau_since == 4 and state.plateau_losses == []
    for step in range(9, 49):
        plateau.observe_training_loss(step, 3.0)
    assert (state.lr_cuts, state.plateau_since) == (1, 48)
    assert Plateau(ScheduleConfig("plateau", patience=10**6), state, 0, False).window == 100


REFUSED = [
    ("lr=constant,min_lr_ratio=0.2", "min_lr_ratio: does nothing under lr: constant"),
    ("lr=plateau,min_lr_ratio=0.2", "min_lr_ratio: does nothing under lr: plateau"),
    ("restart_period=0.5", "restart_period: does nothing under lr: cosine, .* or lr: cosine_restarts"),
    ("lr=linear,decay_steps=0.5", "decay_steps: does nothing under lr: linear, .* lr: wsd"),
    ("patience=5", "patience: does nothing under lr: cosine, expected 1000 or lr: plateau"),
    ("factor=0.1", "factor: does nothing"),
    ("min_lr=1e-5", "min_lr: does nothing"),
    ("threshold=0.1", "threshold: does nothing"),
    ("lr=wsd,decay_steps=2.5", "decay_steps: expected a whole number or a fraction below 1, found 2.5"),
    ("lr=cosine_restarts,restart_period=1.5", "restart_period: expected a whole number or a fraction"),
    ("lr=plateau,factor=1", "schedule.factor: must be below 1"),
    ("lr=plateau,min_lr=1", "schedule.min_lr: expected at most optim.lr 0.0003, found 1"),
    ("lr=cosin", r"schedule.lr: expected 'constant', 'linear', 'cosine', 'cosine_restarts', 'wsd' or 'plateau'"),
]


@quick
@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_unused_schedule_settings_are_refused(settings: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        load_config(None, [f"schedule.{setting}" for setting in settings.split(",")])
    assert "\n" not in str(refusal.value) and "schedule." in str(refusal.value)


@quick
def test_optim_lr_scaling_and_its_lr_reference_batch() -> None:
    def scale(rule: str, batch: int, reference: int) -> float:
        return batch_scale(OptimConfig(lr_scaling=rule, lr_reference_batch=reference), batch)  # type: ignore[arg-type]

    assert batch_scale(OptimConfig(), 512) == 1
    assert scale("sqrt", 512, 128) == 2 and scale("linear", 512, 128) == 4
    assert scale("sqrt", 32, 128) == 0.5 and scale("linear", 512, 256) == 2
    rates = [lr_at(step, TOTAL, OPTIM, ScheduleConfig(), 2.0) for step in range(TOTAL)]
    assert rates == pytest.approx([2 * lr_at(step, TOTAL, OPTIM, ScheduleConfig()) for step in range(TOTAL)])
    with pytest.raises(ConfigError, match=r"optim\.lr_reference_batch: does nothing under lr_scaling"):
        load_config(None, ["optim.lr_reference_batch=64"])


@quick
def test_optim_warmup_bounds_hold_a_fraction() -> None:
    bounded = OptimConfig(warmup_steps=0.02, warmup_bounds=(1000, 5000))
    result = [resolved_warmup(bounded, total) for total in (10_000, 100_000, 10**6)]
    assert result == [1000, 2000, 5000]
    assert resolved_warmup(OptimConfig(warmup_steps=0.02), 10_000) == 200
    assert lr_at(499, 10_000, bounded, ScheduleConfig()) == pytest.approx(bounded.lr / 2)
    config = load_config(None, ["optim.warmup_bounds=[1000, 5000]"])
    assert config.optim.warmup_bounds == (1000, 5000)
    for settings, message in (
        (["optim.warmup_bounds=[5, 2]"], "warmup_bounds: expected [minimum, maximum], found"),
        (["optim.warmup_bounds=[-5, 2]"], "warmup_bounds: expected [minimum"),
        (["optim.warmup_bounds=[5]"], "warmup_bounds.1: expected a value"),
        (["optim.warmup_bounds=[1, 2]", "optim.warmup_steps=10"], "warmup_bounds: does nothing with warmup_steps: 10"),
        (["optim.warmup_bounds=[1, 2]", "optim.warmup_steps=0"], "warmup_bounds: does nothing with warmup_steps: 0"),
    ):
        with pytest.raises(ConfigError) as refusal:
            load_config(None, settings)
        assert f"optim.{message}" in str(refusal.value)


@quick
def test_report_shows_resolved_values() -> None:
    optim = OptimConfig(lr=1e-3, lr_scaling="sqrt", warmup_bounds=(7, 9))
    text = describe_lr(1000, optim, ScheduleConfig("cosine_restarts"), 512)
    assert text.startswith("0.002 = 0.001 x the root of 512 / 128 samples, 9 warmup steps, ")
    assert text.endswith("cosine to 0.0002 in periods of 248 steps")
    assert "over the last 200 steps" in describe_lr(1000, optim, ScheduleConfig("wsd"), 512)
    assert describe_lr(1000, OptimConfig(), ScheduleConfig("constant"), 8) == "0.0003, 20 warmup steps, constant"
    assert "times 0.5 after 1000 steps without progress" in describe_lr(9, optim, ScheduleConfig("plateau"), 8)


# ---- through real runs ---------------------------------------------------------------------------------------


def rates(run: Path) -> list[float]:
    return [record["optim/lr"] for record in record_list(run)]


def test_a_run_follows_optim_lr_scaling_and_a_ramp(
    tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each step's rate is that of its own global batch."""
    settings = ["validation.every=0", "optim.warmup_steps=2", "schedule.lr=linear", "optim.lr=1e-3"]
    settings += ["train.batch_schedule={4: {global_batch_size: 32}}", "optim.lr_scaling=sqrt"]
    assert train.main([str(tiny_config), *settings, "optim.lr_reference_batch=8"]) == 0
    output = capsys.readouterr().out
    assert "0.001 = 0.001 x the root of 8 / 8 samples, 2 warmup steps" in output
    assert "from step 4 on, peak rate 0.002" in output
    optim = OptimConfig(lr=1e-3, warmup_steps=2)
    expected = [lr_at(step, 8, optim, ScheduleConfig("linear"), 1 if step < 4 else 2) for step in range(8)]
    assert max(abs(a - b) for a, b in zip(rates(tmp_path / "run"), expected, strict=True)) < 1e-12


@pytest.mark.parametrize("validation", [1, 0])
def test_a_plateau_is_resumed_exactly(validation: int, tiny_config: Path, tmp_path: Path) -> None:
    """Nothing is progress enough, so that the rate is cut over and over: by validation and by training losses."""
    common = [str(tiny_config), f"validation.every={validation}", "validation.text_samples=0", "optim.warmup_steps=2"]
    common += ["schedule.lr=plateau", "schedule.patience=2", "schedule.threshold=0.9", "schedule.factor=0.5"]
    common += ["train.steps=14", "schedule.min_lr=4e-4", "checkpoint.keep_steps=[5]", "checkpoint.every_steps=0"]
    assert train.main([*common, f"run.dir={tmp_path / 'whole'}"]) == 0
    whole = rates(tmp_path / "whole")
    # Behind the warmup's two steps, a cut after each three without progress.
    assert whole == pytest.approx([1.5e-3, *[3e-3] * 4, *[1.5e-3] * 3, *[7.5e-4] * 3, *[4e-4] * 3], rel=1e-12)
    resumed = [*common, f"run.dir={tmp_path / 'resumed'}"]
    assert train.main([*resumed, f"resume={tmp_path / 'whole' / 'checkpoints' / 'step-00000005'}"]) == 0
    assert rates(tmp_path / "resumed") == whole[5:]
    # With another schedule, what the plateau took is forgotten.
    other = [*common[:4], "train.steps=16", "schedule.lr=constant", f"run.dir={tmp_path / 'whole'}"]
    assert train.main(other) == 0
    assert rates(tmp_path / "whole")[14:] == pytest.approx([3e-3, 3e-3])
