"""Costs of a step against closed forms, and the roofline of GPUs on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mmldlm.config import load_config
from mmldlm.data.mixture import open_data
from mmldlm.distributed.launcher import DDP, FSDP2, SINGLE
from mmldlm.model.flops import BACKWARD_FACTOR, ModelFlops
from mmldlm.tools.plan.costs import StepCosts, step_costs
from mmldlm.tools.plan.devices import GPUS

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def costs(tiny_store: Path) -> StepCosts:
    """A step on one of 2 ranks of an H100."""
    model = "model={depth: 2, width: 64, num_heads: 2}"
    config = load_config(None, [f"data.path={tiny_store}", model, "train={steps: 4, global_batch_size: 16}"])
    return step_costs(config, open_data(str(tiny_store)), 2, "cuda", GPUS["h100"].rates("fp32"))


def test_products_are_those_of_the_closed_form(costs: StepCosts) -> None:
    flops = ModelFlops.from_model(costs.model)
    tokens = costs.estimate.tokens_per_step / costs.world_size
    low, high = (1 + BACKWARD_FACTOR) * flops.token * tokens * 0.5, costs.estimate.flops_per_step
    assert all(low < work.products < high for work in costs.work)


def test_ddp_reduces_each_gradient_once(costs: StepCosts) -> None:
    assert costs.traffic(DDP) == {("all_reduce", 2): 4.0 * costs.parameters}
    assert costs.traffic(SINGLE) == {}
    assert costs.traffic(FSDP2)["reduce_scatter", 2] >= 4.0 * costs.parameters


def test_sharding_saves_memory_by_what_is_sharded(costs: StepCosts) -> None:
    memory = {engine: costs.memory_mib(engine) for engine in (DDP, "zero1", "zero2", FSDP2)}
    assert memory[DDP] > memory["zero1"] >= memory["zero2"] and memory[DDP] > memory[FSDP2]
    more = replace(costs, world_size=16)
    assert more.memory_mib(FSDP2) < memory[FSDP2] and more.updated(FSDP2) == costs.updated(FSDP2) / 8


def test_the_roofline_grows_with_slower_devices_and_networks(costs: StepCosts) -> None:
    gpu = GPUS["h100"]
    value, low, high = gpu.predict(DDP, costs, 1, 50e9)
    assert low <= value <= high
    across = gpu.predict(DDP, costs, 2, 1e6)[0]
    assert across >= 4.0 * costs.parameters / (0.7 * 1e6)  # a ring of two sends all of it once
    assert value < gpu.predict(DDP, costs, 2, 50e9)[0] < across
    assert replace(gpu, memory=gpu.memory / 1000).predict(DDP, costs, 1, 50e9)[0] > value  # the update
    assert gpu.rates("bf16").product > 10 * gpu.rates("fp32").product
