"""One rank of a large run: the closed form of state and traffic against the real engines on a fake process group."""

from __future__ import annotations

import pytest

from benchmarks.common.fake_ranks import Network, simulate
from benchmarks.common.measure import in_new_process
from benchmarks.scale import BOUND, compared
from mmldlm.model.mmdit import DataShape
from mmldlm.trainer.engine_costs import Sharding, state_bytes, step_traffic

TINY = Network(2, 128, DataShape(300, mask_id=1, pad_id=0, max_length=64, latent_tokens=1, latent_channels=8))


@pytest.mark.parametrize(
    "sharding",
    [
        Sharding("fsdp2", "bf16", world_size=8, replicas=2),
        pytest.param(Sharding("fsdp2", "fp32", world_size=64), marks=pytest.mark.slow),
        pytest.param(Sharding("ddp", "fp32", world_size=64), marks=pytest.mark.slow),
        pytest.param(Sharding("zero1", "bf16", world_size=64), marks=pytest.mark.slow),
        pytest.param(Sharding("zero2", "bf16", world_size=64), marks=pytest.mark.slow),
        pytest.param(Sharding("zero3", "bf16", world_size=64), marks=pytest.mark.slow),
    ],
    ids=lambda sharding: f"{sharding.engine}-{sharding.precision}-{sharding.replicas}",
)
def test_the_closed_form_is_what_an_engine_holds_and_exchanges(sharding: Sharding) -> None:
    step = in_new_process({"OMP_NUM_THREADS": "1"}, simulate, TINY, sharding)
    assert abs(compared("tiny", sharding, step)["off by"]) < BOUND


def test_replicas_divide_the_shards_and_not_the_traffic_within_a_replica() -> None:
    """With replicas of 8 ranks, a rank holds and gathers as in a run of 8, whatever the number of replicas."""
    one, many = Sharding("fsdp2", "bf16", 8), Sharding("fsdp2", "bf16", 1024, replicas=128)
    assert state_bytes(one) == state_bytes(many)
    traffic = step_traffic(many, 1000, 100, accumulation=4)
    assert traffic.pop(("all_reduce", 128)) == 4 * 1000 / 8
    assert traffic == step_traffic(one, 1000, 100, accumulation=4)
