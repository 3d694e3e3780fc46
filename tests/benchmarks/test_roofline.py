"""The kernels of a block on a GPU, counted on fake tensors, and the roofline's arithmetic."""

from __future__ import annotations

import json

import pytest

from benchmarks.common.report import RESULTS
from benchmarks.roofline import (
    HOST_SIZE,
    RATES,
    VOCABULARY,
    block_costs,
    compiled_block_costs,
    fuse,
    host_ms,
    predict,
    record,
)
from mmldlm.model.flops import ModelFlops
from mmldlm.tools.plan.kernels import Access, Kernel

pytestmark = pytest.mark.quick

MIB = 2**20


def kernel(kind: str, reads: str, writes: str, flops: float = 0.0) -> Kernel:
    """Return a kernel on tensors of 4 MiB, one for each letter."""
    accesses = ([Access(ord(name), (), 4 * MIB) for name in names] for names in (reads, writes))
    return Kernel("forward", kind, kind, flops, *map(tuple, accesses))  # type: ignore[arg-type]


def test_a_block_takes_no_more_kernels_and_traffic_than_recorded() -> None:
    """On a GPU, eagerly. A change that adds some has to be measured there; one that saves some, to be recorded."""
    committed = json.loads((RESULTS / "roofline.json").read_text(encoding="utf-8"))["block"]
    costs = block_costs()
    for phase in ("forward", "backward"):
        assert costs[phase]["kernels"] <= committed[phase]["kernels"]
        assert costs[phase]["kb_per_token"] <= committed[phase]["kb_per_token"] * 1.001


def test_a_compiled_block_takes_no_more_kernels_and_traffic_than_recorded() -> None:
    """By Inductor's plan for a GPU; a change that adds some has to be measured there."""
    committed = json.loads((RESULTS / "roofline.json").read_text(encoding="utf-8"))["compiled_block"]
    for phase, costs in compiled_block_costs().items():
        assert costs["kernels"] <= committed[phase]["kernels"]
        assert costs["kb_per_token"] <= committed[phase]["kb_per_token"] * 1.001


def test_the_host_is_ahead_of_the_gpu() -> None:
    """By the committed measurement, which a slower host path has to repeat."""
    committed = json.loads((RESULTS / "roofline.json").read_text(encoding="utf-8"))
    assert sum(committed["host"].values()) <= 0.5 * committed["sizes"][HOST_SIZE]["eager"]["step_ms"]
    assert all(value > 0 for value in host_ms(depth=1, steps=1).values())


def test_a_kernel_takes_its_products_or_its_traffic_or_a_launch() -> None:
    assert kernel("product", "a", "b", flops=1e12).seconds(RATES) == 1e12 / RATES.product
    assert kernel("product", "a", "b", flops=1e6).seconds(RATES) == 8 * MIB / RATES.traffic
    assert Kernel("forward", "other", "add", 0.0, (), (Access(1, (), 4),)).seconds(RATES) == RATES.launch_s


def test_fusing_keeps_what_enters_and_leaves() -> None:
    kernels = [
        kernel("other", "a", "b"),
        kernel("other", "bx", "c"),  # c enters the product and is read later; b is an intermediate
        kernel("product", "cw", "d"),
        kernel("other", "d", "e"),
        kernel("other", "e", "f"),  # which nobody reads: a gradient
        kernel("product", "cw", "g"),
    ]
    first, product, second, last = fuse(kernels)
    assert (product, last) == (kernels[2], kernels[5])
    assert ([chr(a.storage) for a in first.reads], [chr(a.storage) for a in first.writes]) == (["a", "x"], ["c"])
    assert ([chr(a.storage) for a in second.reads], [chr(a.storage) for a in second.writes]) == (["d"], ["f"])


def test_the_prediction_counts_the_products_of_the_network() -> None:
    kernels, model = record(depth=2, width=128, samples=4, length=64)
    row = predict(kernels, model, samples=4, length=64)
    expected = ModelFlops.from_model(model).step_flops(256, 128, 4, 1, 4 * 65**2)
    # Attention's backward takes five products for the forward's two, of which the model's FLOPs have four.
    attention = 3 * 4 * 4 * 65**2 * 128 * 2
    recomputed = 2 * 128 * 128 * VOCABULARY  # the logits, in backward
    assert sum(kernel.flops for kernel in kernels if kernel.kind == "product") + attention == pytest.approx(
        expected + recomputed, rel=0.01
    )
    assert {kernel.flops / (attention / 6) for kernel in kernels if kernel.kind == "attention"} == {1.0, 2.5}
    assert row["kernels"] == len(kernels) and row["step_ms"] == pytest.approx(sum(row["ms"].values()))
    assert predict(fuse(kernels), model, 4, 64)["step_ms"] < row["step_ms"]
