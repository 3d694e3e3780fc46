"""Costs of a step against closed forms, and the roofline of GPUs on them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mmldlm.config import load_config
from mmldlm.data.mixture import open_data
from mmldlm.distributed.launcher import DDP, FSDP2, SINGLE
from mmldlm.errors import UsageError
from mmldlm.model.flops import BACKWARD_FACTOR, ModelFlops
from mmldlm.tools.plan.costs import HSDP, StepCosts, step_costs
from mmldlm.tools.plan.devices import GPUS, measured_rates

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
    rates, across = gpu.rates("fp32"), replace(costs, nodes=2)
    value, low, high = gpu.predict(DDP, costs, rates, 50e9)
    assert low <= value <= high
    slow = gpu.predict(DDP, across, rates, 1e6)[0]
    assert slow >= 4.0 * costs.parameters / (0.7 * 1e6)  # a ring of two sends all of it once
    assert value < gpu.predict(DDP, across, rates, 50e9)[0] < slow
    assert gpu.predict(DDP, costs, replace(rates, traffic=rates.traffic / 1000), 50e9)[0] > value  # the update
    assert gpu.rates("bf16").product > 10 * rates.product


def test_hybrid_sharding_exchanges_only_its_shard_among_nodes(costs: StepCosts) -> None:
    two = replace(costs, world_size=16, nodes=2)
    whole, hybrid = two.traffic(FSDP2), two.traffic(HSDP)
    assert hybrid["all_gather", 8] == pytest.approx(whole["all_gather", 16], rel=0.1)  # but for padding
    assert hybrid["all_reduce", 2] * 8 == hybrid["reduce_scatter", 8]
    assert two.memory_mib(FSDP2) < two.memory_mib(HSDP) < two.memory_mib(DDP)
    assert two.updated(HSDP) == 2 * two.updated(FSDP2)
    gpu = GPUS["h100"]
    slow = [gpu.predict(engine, two, gpu.rates("bf16"), 1e9)[0] for engine in (HSDP, FSDP2)]
    assert slow[0] < slow[1] / 4


def test_measured_rates_of_a_gpu_replace_the_published_ones(tmp_path: Path) -> None:
    attention = {"512": {"forward_tflop_per_s": 300.0, "backward_tflop_per_s": 200.0}}
    ceilings = {"copy_tb_per_s": 4.0, "products_tflop_per_s": {"square": 700.0}, "launch_us": 3.0}
    path = tmp_path / "smoke.json"
    path.write_text(json.dumps({"ceilings": {**ceilings, "attention": attention}}), encoding="utf-8")
    rates = measured_rates(path, "bf16")
    assert (rates.product, rates.traffic, rates.launch_s) == (0.8 * 700e12, 0.85 * 4e12, pytest.approx(3e-6))
    assert (rates.attention_forward, rates.attention_backward) == (300e12, 200e12)
    path.write_text(json.dumps({"ceilings": ceilings}), encoding="utf-8")  # that of a CPU
    with pytest.raises(UsageError, match=f"--rates: {path} has no rates of a GPU: KeyError 'attention'"):
        measured_rates(path, "bf16")
    with pytest.raises(UsageError, match="--rates: these are rates of bf16, found precision fp32"):
        measured_rates(path, "fp32")
