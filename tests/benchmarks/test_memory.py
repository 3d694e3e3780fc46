"""What the dry run says a step needs is what the process of a real run takes; the table of GPUs follows from it.

And how the ladder measures it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import benchmarks.__main__ as command_line
from benchmarks.gpu_memory import Line, lines
from benchmarks.memory import BOUND, batch, measure, recomputing
from benchmarks.step_memory import step_memory_mib
from mmldlm.trainer.dry_run import MIB, Estimate, state_mib
from tests.helpers.bench_runs import task_on

MODEL = "model={depth: 6, width: 256, num_heads: 4}"


@pytest.mark.parametrize(
    "settings",
    [
        (MODEL, batch(64)),
        pytest.param((MODEL, batch(64, 32), recomputing("full")), marks=pytest.mark.slow),
        pytest.param((MODEL, batch(8), "optim.fused=false"), marks=pytest.mark.slow),
        pytest.param((MODEL, batch(16, 8), "precision=bf16"), marks=pytest.mark.slow),
    ],
    ids=["activations", "recomputed", "update", "half precision"],
)
def test_a_real_run_takes_what_is_estimated(tiny_store: Path, settings: tuple[str, ...]) -> None:
    found = measure(tiny_store, settings)
    assert found.measured > 80
    assert abs(found.error) < BOUND, found


def test_memory_of_a_step_is_what_recomputation_saves(tiny_store: Path) -> None:
    task = replace(task_on(tiny_store), width=128, depth=6, batch=32)
    plain, full = (step_memory_mib(name, task) for name in ("trainer", "trainer-full"))
    assert 0 < plain[0] < plain[1]
    assert full[1] < 0.7 * plain[1]


@pytest.mark.quick
def test_a_line_gives_the_samples_that_fit() -> None:
    line = Line.through({4: 140.0, 2: 120.0}, state=125.0)
    assert (line.fixed, line.per_sample) == (100, 10)
    assert [line.samples(capacity) for capacity in (90, 124, 125, 129, 130)] == [0, 0, 2, 2, 3]


@pytest.mark.quick
def test_sharding_takes_the_state_from_a_gpu_and_leaves_the_activations() -> None:
    def of(samples: int) -> Estimate:
        peak = {"weights": 4.0, "moments": 8.0, "activations": 2.0 * samples}
        return Estimate({"all": MIB}, MIB, 0, 0, {}, 1, 16, 2 * samples, peak)  # type: ignore[arg-type]

    eight = Estimate({"all": MIB}, MIB, 0, 0, {}, 8, 16, 0)
    alone, shared = lines({samples: of(samples) for samples in (3, 6)}).values()
    assert (alone.fixed, alone.per_sample, alone.state) == (12 * MIB, 2 * MIB, 16 * MIB)
    assert shared.fixed == shared.state == state_mib("fsdp2", eight, "bf16")[0] * MIB == 2 * MIB
    assert shared.per_sample == alone.per_sample


@pytest.mark.quick
def test_an_unknown_setting_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["memory", "--only", "nothing"]) == 2
    assert "--only: 'nothing' is in no name of a setting, expected a part of 256 x 4," in capsys.readouterr().err
