"""Memory of a rank by engine: the table of docs/engines.md, what comes beside the state, and a real rank."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mmldlm.config import load_config
from mmldlm.data.store import Store
from mmldlm.distributed.launch import ENGINES
from mmldlm.trainer.memory import RankMemory, Sharding, StepMemory, estimate, rank_memory
from tests.helpers.forked_runs import ForkedRuns

quick = pytest.mark.quick
MILLION = StepMemory(2**20, [(2**20,)])  # so that MiB are bytes of a parameter


def memory(
    engine: str, step: StepMemory = MILLION, precision: str = "fp32", replicas: int = 1, world_size: int = 4
) -> RankMemory:
    return rank_memory(step, Sharding(engine, precision, world_size, replicas))


@quick
@pytest.mark.parametrize(
    ("engine", "precision", "device", "host"),
    [
        ("ddp", "fp32", 16, 0),
        ("ddp", "bf16", 16, 0),
        ("fsdp2", "fp32", 4, 0),
        ("zero1", "bf16", 2 + 4 + 3, 0),
        ("zero2", "fp32", 4 + 4, 0),
        ("zero2", "bf16", 2 + 4, 0),
        ("zero3", "bf16", 4.5, 0),
        ("zero2_offload", "bf16", 3, 3),
        ("zero3_offload", "fp32", 0, 5),
    ],
)
def test_state_of_the_engines(engine: str, precision: str, device: float, host: float) -> None:
    """Bytes a parameter on four processes, as docs/engines.md has them; a frozen one costs no more than its weight."""
    result = memory(engine, precision=precision)
    assert (result.state, result.host) == (device, host)
    frozen = memory(engine, replace(MILLION, trained_shapes=[]), precision)
    assert 0 < frozen.state + frozen.host <= 4 and (frozen.state == 0) == (engine == "zero3_offload")
    ema = memory(engine, replace(MILLION, ema=True), precision)
    expected = {"ddp": (4, 0), "zero2_offload": (0, 1), "zero3_offload": (0, 1)}.get(engine, (1, 0))
    assert (ema.state - device, ema.host - host) == expected


@quick
def test_rows_that_fsdp2_pads() -> None:
    """Three rows on four processes are four; with two replicas, on two processes each, they are four as well."""
    odd = StepMemory(3 * 2**20, [(3, 2**20)])
    assert memory("fsdp2", odd).state == 16 and memory("zero3", odd).state == 15
    assert [memory("fsdp2", odd, replicas=replicas).state for replicas in (2, 4)] == [32, 48]
    for step in (MILLION, replace(MILLION, ema=True)):
        assert memory("fsdp2", step, replicas=2) == memory("fsdp2", step, world_size=2)


@quick
def test_muon_saves_a_moment_of_its_matrices() -> None:
    """All of a million parameters: 12 bytes, shared out by FSDP2."""
    million = replace(MILLION, one_moment=2**20)
    assert (memory("ddp", million, "bf16").state, memory("fsdp2", million).state) == (12, 3)


# A block of a quarter million parameters and as many outside; 100 MiB of activations meet no gradients.
STEP = StepMemory(2**20, [(2**20,)], 2**18, 2**18, activations=100 * 2**20)


@quick
@pytest.mark.parametrize(
    ("engine", "beside", "accumulating"),
    [
        ("single", 100 - 4, 4),  # without gradients that are not there yet
        ("ddp", 100, 4),  # gradients of earlier micro-batches beside the buckets
        ("zero1", 100 - 4, 4),
        ("zero2", 100 - 4 / 4, 4 / 4),
        ("fsdp2", 100 + 4 * (1 / 4 + 3 / 4) - 4 / 4, 4),  # gathered blocks; accumulated gradients are whole
        ("zero3", 100 + 4 * (1 + 1 / 4) + 2 * 4 - 1, 1),  # all is gathered; two buckets
        ("zero3_offload", 100 + 4 * (1 + 1 / 4) + 2 * 4, 0),
    ],
)
def test_what_is_beside_the_state_when_activations_are_largest(engine: str, beside: float, accumulating: float) -> None:
    result = memory(engine, STEP)
    assert result.peak - result.state == beside
    more = memory(engine, replace(STEP, has_gradients=True)).peak - result.peak
    assert more == accumulating
    alone = memory("zero3", STEP, world_size=1)  # has all weights, and gathers none
    assert alone.peak - alone.state == 100 + 4 * (0 + 1 / 4) + 2 * 4 - 4


@quick
def test_what_is_beside_the_state_at_the_end_of_backward() -> None:
    """No activations any more: buckets, under fsdp2 a block's gradients in both types, and the update's temporaries."""
    step = replace(STEP, activations=0, update=2**20)
    beside = {engine: memory(engine, step).peak - memory(engine, step).state for engine in ("single", *ENGINES)}
    assert beside["single"] == 1 and beside["zero1"] == beside["zero2"] == 4
    assert beside["fsdp2"] == 4 + (4 + 4) * 2 / 4
    assert beside["zero3"] == 5 + 8 + 1


@quick
def test_one_process_by_purpose() -> None:
    """The parts add up to the peak, with many activations and with few."""
    for step in (STEP, replace(STEP, activations=0, update=2**20, ema=True), replace(STEP, has_gradients=True)):
        assert sum(step.parts.values()) / 2**20 == memory("single", step, world_size=1).peak
        assert step.parts["weights"] == 4 * 2**20 and step.parts["moments"] == 8 * 2**20


@quick
def test_more_sharing_needs_less() -> None:
    accumulating = replace(STEP, has_gradients=True)
    peaks = [memory(engine, accumulating, world_size=16).peak for engine in ("ddp", "zero1", "zero2", "fsdp2")]
    assert peaks[0] > peaks[1] > peaks[2] and peaks[0] > peaks[3]
    by_replicas = [memory("fsdp2", accumulating, replicas=replicas, world_size=16).peak for replicas in (1, 2, 4)]
    assert by_replicas == sorted(by_replicas) and by_replicas[0] < by_replicas[-1] < peaks[0]


MEASURED = ("model={depth: 4, width: 256, num_heads: 4}", "train={steps: 3, global_batch_size: 64}")


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch", [32, 8])
def test_estimate_of_a_real_rank(micro_batch: int, parity_config: Path, forked: ForkedRuns, tmp_path: Path) -> None:
    """Under DDP; the reference is the bytes of all tensors that a rank held at the same time.

    FSDP2 frees by resizing storages, which such a count does not see.
    """
    run = tmp_path / "run"
    run.mkdir()
    settings = (*MEASURED, f"train.micro_batch_size={micro_batch}", "validation.every=0", "checkpoint.every_steps=0")
    forked.succeed("ddp", run, 2, parity_config, *settings, script="limited_memory.py", FACTS=str(run))
    config = load_config(str(parity_config), list(settings))
    step = estimate(config, Store.open(config.data.path), 2).step
    estimated = rank_memory(step, Sharding("ddp", "fp32", 2)).peak
    measured = json.loads((run / "facts.rank0.json").read_text())["peak_mib"]
    assert estimated == pytest.approx(measured, rel=0.1)
