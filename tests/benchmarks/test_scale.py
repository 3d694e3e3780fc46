"""One rank of a large run: the closed form of state and traffic against the real engines on a fake process group."""

from __future__ import annotations

import json

import pytest

from benchmarks.common.fake_ranks import Network, simulate
from benchmarks.common.measure import in_new_process
from benchmarks.common.report import RESULTS
from benchmarks.scale import BOUND, deviation, expected, largest_deviation, measured
from mmldlm.model.mmdit import DataShape
from mmldlm.trainer.engine_costs import Sharding, padded_parameters, state_bytes, step_traffic

TINY = Network(2, 128, DataShape(300, mask_id=1, pad_id=0, max_length=64, latent_tokens=1, latent_channels=8))


@pytest.mark.parametrize(
    "sharding",
    [
        Sharding("fsdp2", "bf16", world_size=96, replicas=2),  # 48 shards, which divide no number of rows
        pytest.param(Sharding("fsdp2", "fp32", world_size=64), marks=pytest.mark.slow),
        pytest.param(Sharding("ddp", "fp32", world_size=64), marks=pytest.mark.slow),
        pytest.param(Sharding("zero2", "bf16", world_size=64), marks=pytest.mark.slow),
        pytest.param(Sharding("zero3", "bf16", world_size=64), marks=pytest.mark.slow),
    ],
    ids=lambda sharding: f"{sharding.engine}-{sharding.precision}-{sharding.replicas}",
)
def test_the_closed_form_is_what_an_engine_holds_and_exchanges(sharding: Sharding) -> None:
    step = in_new_process({"OMP_NUM_THREADS": "1"}, simulate, TINY, sharding)
    form, simulated = expected("tiny", TINY, sharding), measured(step)
    assert abs(largest_deviation(form, simulated)) < BOUND, (form, simulated)


def test_committed_simulations_agree_with_the_closed_form() -> None:
    rows = json.loads((RESULTS / "scale-step.json").read_text(encoding="utf-8"))["rows"]
    simulated = [row for row in rows if row["simulated"]]
    assert simulated
    for row in simulated:
        assert abs(deviation(row)) < BOUND, row


def test_replicas_divide_the_shards_and_not_the_traffic_within_a_replica() -> None:
    """With replicas of 8 ranks, a rank holds and gathers as in a run of 8, whatever the number of replicas."""
    one, many = Sharding("fsdp2", "bf16", 8), Sharding("fsdp2", "bf16", 1024, replicas=128)
    assert state_bytes(one) == state_bytes(many)
    traffic = step_traffic(many, 1000, 100, accumulation=4)
    assert traffic.pop(("all_reduce", 128)) == 4 * 1000 / 8
    assert traffic == step_traffic(one, 1000, 100, accumulation=4)


def test_shards_of_rows_are_padded() -> None:
    shapes = [(2730, 10), (16,)]
    assert padded_parameters(Sharding("fsdp2", "bf16", 1024), shapes) == 3 * 1024 * 10 + 1024
    assert padded_parameters(Sharding("fsdp2", "bf16", 1024, replicas=512), shapes) == 27300 + 16
    assert padded_parameters(Sharding("zero3", "bf16", 1024), shapes) == 27300 + 16
