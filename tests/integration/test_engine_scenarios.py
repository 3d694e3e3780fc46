"""Under every engine a run follows one process, and resumes with the same bits, whatever its settings change."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers.engine_runs import CURVE, Single, assert_same_tensors, difference, records, saved_tensors
from tests.helpers.forked_runs import ForkedRuns

COMMON = ("validation.every=0", "checkpoint.every_steps=0")


class Scenario(NamedTuple):
    """Settings, those of the one process where they are others, and what the records of each step must have."""

    settings: Sequence[str]
    kept: Sequence[int]  # steps after which the run is resumed
    single: Sequence[str] = ()
    shown: Sequence[str] = CURVE
    values: tuple[str, Sequence[float]] | None = None  # of a key, in each step


SIZES = "global_batch_size: {}, micro_batch_size: {}"
STAGES = {0: (8, 4), 2: (24, 2), 4: (48, 24), 5: (48, 12)}  # 1, 6, 1 and 2 micro-batches on each of two ranks
# As many samples as three ranks can share; from step 3 on larger batches and one micro-batch a rank.
TOKENS = ("train.steps=5", "train.global_batch_size=24", "train.micro_batch_size=null")
SCENARIOS = {
    "batch schedule": Scenario(
        (
            "train.batch_schedule={" + ", ".join(f"{s}: {{{SIZES.format(*n)}}}" for s, n in STAGES.items()) + "}",
            "train.steps=7",
        ),
        kept=(3, 5),  # in the midst of the second stage and on the edge of the last
        shown=(*CURVE, "data/epoch", "data/tokens"),
        values=("data/global_batch_size", [8] * 2 + [24] * 2 + [48] * 3),
    ),
    "token budget": Scenario(
        (
            *TOKENS,
            "train.micro_batch_tokens=60",
            "train.batch_schedule={3: {global_batch_size: 48, micro_batch_tokens: 5000}}",
        ),
        kept=(2,),
        single=(*TOKENS, "train.micro_batch_size=4", "train.batch_schedule={3: {global_batch_size: 48}}"),
        shown=(*CURVE, "data/tokens"),
        values=("data/micro_batch_tokens", [60] * 3 + [5000] * 2),
    ),
    # A plateau that takes nothing for progress: the rate is cut at steps that follow from the training loss of all
    # ranks. It is scaled by the root of the batch.
    "objective": Scenario(
        (
            "loss.latent_weighting=uncertainty",
            "loss.label_smoothing=0.1",
            "loss.z_loss=1e-3",
            "loss.text_weight_limit=4",
            "loss.latent_time_weighting=min_snr",
            "text.time_sampling=mode",
            "latent.time_sampling=mode",
            "latent.stratified=false",
            "schedule.lr=plateau",
            "schedule.patience=2",
            "schedule.threshold=0.02",
            "schedule.factor=0.8",
            "optim.lr_scaling=sqrt",
            "optim.lr_reference_batch=4",
            "train.batch_schedule={6: {global_batch_size: 16}}",
            "train.steps=12",
        ),
        kept=(5,),
        shown=(
            *CURVE,
            *(f"loss/{name}" for name in ("text", "latent", "z", "label_smoothing", "text_weight", "latent_weight")),
        ),
    ),
}
DEFAULT = {
    "token budget": (("ddp", 3), ("zero2", 2)),
    "objective": (("fsdp2", 2),),
}
SLOW = {
    "batch schedule": (("ddp", 2), ("fsdp2", 2), ("zero2", 2), ("zero3", 2)),
    "token budget": (("ddp", 2), ("fsdp2", 2), ("fsdp2", 4), ("zero1", 2), ("zero3", 2)),
    "objective": (("ddp", 2), ("zero2", 2), ("zero3", 2)),
}


@pytest.mark.parametrize(
    ("name", "engine", "processes"),
    [
        *((name, *each) for name, cases in DEFAULT.items() for each in cases),
        *(pytest.param(name, *each, marks=pytest.mark.slow) for name, cases in SLOW.items() for each in cases),
    ],
)
def test_a_run_follows_one_process_and_resumes_with_the_same_bits(
    name: str,
    engine: str,
    processes: int,
    parity_config: Path,
    single: Single,
    forked: ForkedRuns,
    tmp_path: Path,
) -> None:
    scenario, run = SCENARIOS[name], tmp_path / "run"
    given = (*scenario.settings, *COMMON, f"checkpoint.keep_steps={[*scenario.kept]}")
    reference = single(*(scenario.single or scenario.settings), *COMMON)
    forked.succeed(engine, run, processes, parity_config, *given)
    curve = records(run)
    assert difference(run, reference, CURVE if scenario.single else scenario.shown) < 1e-5
    assert_same_tensors(run, reference, "model", "optimizer", tolerance=1e-5)
    if scenario.values is not None:
        key, values = scenario.values
        assert [record[key] for record in curve.values()] == values
    for step in scenario.kept:
        resumed, kept = tmp_path / f"resumed-{step}", Path("checkpoints", f"step-{step:08}")
        shutil.copytree(run / kept, resumed / kept)
        forked.succeed(engine, resumed, processes, parity_config, *given)
        again = records(resumed)
        assert list(again) == list(range(step + 1, max(curve) + 1))
        assert all(again[each][key] == curve[each][key] for each in again for key in scenario.shown)
        assert_same_tensors(resumed, run, "model", "optimizer")


def test_the_objective_of_the_scenario_changes_what_it_names(single: Single) -> None:
    """Weights of the losses are trained, and the plateau cuts the rate."""
    run = single(*SCENARIOS["objective"].settings, *COMMON)
    curve = records(run)
    assert any(key.startswith("loss_weights.value") for key in saved_tensors(run, "optimizer"))
    assert curve[12]["loss/latent_weight"] != curve[1]["loss/latent_weight"]
    rates = {round(record["optim/lr"] / 1e-3 / (2 if step > 6 else 2**0.5), 9) for step, record in curve.items()}
    assert {1.0, 0.8} <= rates
