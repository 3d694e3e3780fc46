"""The dry run's estimate is what a real run takes; the table of GPUs follows from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.common.task import Task
from benchmarks.memory import BOUND, Line, batch, checkpointing, lines, measure, step_memory_mib
from mmldlm.trainer.dry_run import MIB, Estimate, state_mib

MODEL = "model={depth: 6, width: 256, num_heads: 4}"


@pytest.mark.parametrize(
    "settings",
    [
        (MODEL, batch(64)),
        pytest.param((MODEL, batch(64, 32), checkpointing("full")), marks=pytest.mark.slow),
        pytest.param((MODEL, batch(8), "optim.fused=false"), marks=pytest.mark.slow),
        pytest.param((MODEL, batch(16, 8), "precision=bf16"), marks=pytest.mark.slow),
    ],
    ids=["activations", "checkpointed", "update", "half precision"],
)
def test_estimate_of_a_real_run(tiny_store: Path, settings: tuple[str, ...]) -> None:
    memory = measure(tiny_store, settings)
    assert memory.measured > 80
    assert abs(memory.error) < BOUND, memory


def test_step_memory_under_activation_checkpointing(tiny_store: Path) -> None:
    task = Task(store=str(tiny_store), width=128, depth=6, heads=1, batch=32, precision="fp32")
    plain, full = (step_memory_mib(name, task) for name in ("trainer", "trainer-full"))
    assert 0 < plain[0] < plain[1]
    assert full[1] < 0.7 * plain[1]


@pytest.mark.quick
def test_samples_that_fit() -> None:
    line = Line.through({4: 140.0, 2: 120.0}, state=125.0)
    assert (line.fixed, line.per_sample) == (100, 10)
    assert [line.samples(capacity) for capacity in (90, 124, 125, 129, 130)] == [0, 0, 2, 2, 3]


@pytest.mark.quick
def test_sharding_divides_the_state_alone() -> None:
    def estimate(samples: int) -> Estimate:
        peak = {"weights": 4.0, "moments": 8.0, "activations": 2.0 * samples}
        return Estimate({"all": MIB}, MIB, 0, 0, {}, 1, 2 * samples, peak)  # type: ignore[arg-type]

    eight = Estimate({"all": MIB}, MIB, 0, 0, {}, 8, 0)
    alone, sharded = lines({samples: estimate(samples) for samples in (3, 6)}).values()
    assert (alone.fixed, alone.per_sample, alone.state) == (12 * MIB, 2 * MIB, 16 * MIB)
    assert sharded.fixed == sharded.state == state_mib("fsdp2", eight, "bf16")[0] * MIB == 2 * MIB
    assert sharded.per_sample == alone.per_sample
