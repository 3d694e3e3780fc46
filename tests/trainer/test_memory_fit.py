"""`train.auto_micro_batch`, and runs out of memory: PyTorch's allocator refuses one rank what exceeds a limit."""

from __future__ import annotations

import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from mmldlm import train
from mmldlm.batch import BatchSize
from mmldlm.distributed.memory_probe import fits_in_memory
from mmldlm.tools import verify
from mmldlm.trainer.memory_fit import _halve, _too_large
from tests.helpers.engine_runs import CURVE, assert_same_tensors, difference, exit_record, records
from tests.helpers.forked_runs import ForkedRuns

quick = pytest.mark.quick
SCRIPT, AUTO = "limited_memory.py", "train.auto_micro_batch=true"
SETTINGS = ("model.depth=8", "validation.every=0", "schedule.lr=constant", "checkpoint.every_steps=0", "train.steps=4")
# MiB of tensors, between what the largest micro-batches of 64 and of 128 samples take: 80 and 127, under ZeRO-2 with
# its buffers 839 and 887.
LIMITS = {"LIMITED": "1", "LIMIT_MIB": "103"}
ZERO2 = {**LIMITS, "LIMIT_MIB": "860"}
WIDE = ("model.depth=2", "model.width=768")  # whose gradients alone take some 60 MiB


def changes_of(run: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "micro_batch"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("auto", [(), (AUTO,)])
def test_one_gpu_tries_its_micro_batches(
    auto: tuple[str, ...], tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main([str(tiny_config), *auto, f"run.dir={tmp_path / 'run'}"]) == 0
    assert len(records(tmp_path / "run")) == 8 and "fit into memory" in capsys.readouterr().out


@pytest.mark.setting("train.auto_micro_batch")
@pytest.mark.parametrize(
    ("engine", "limits"),
    [
        pytest.param("single", {**LIMITS, "LIMITED": "0"}, marks=pytest.mark.slow),
        ("ddp", LIMITS),
        pytest.param("zero2", ZERO2, marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_micro_batches_are_halved_once_before_the_first_step(
    engine: str, limits: dict[str, str], parity_config: Path, forked: ForkedRuns, tmp_path: Path
) -> None:
    """They fit in all steps, also in those to come with larger ones; another start takes what fits there."""
    run, limited = tmp_path / "run", int(limits["LIMITED"])
    processes = limited + 1
    given = (parity_config, *SETTINGS, f"train.global_batch_size={128 * processes}", "checkpoint.keep_steps=[2]")
    given = (*given, "train.steps=3")
    forked.succeed(engine, tmp_path / "by_hand", processes, *given, "train.micro_batch_size=64")
    later = ("train.micro_batch_size=64", "train.batch_schedule={2: {micro_batch_size: 128}}", AUTO)
    forked.succeed(engine, run, processes, *given, *later, script=SCRIPT, **limits)
    ours, theirs = records(run), records(tmp_path / "by_hand")
    assert [record["data/micro_batch_size"] for record in ours.values()] == [64] * 3
    assert list(ours) == [1, 2, 3] and all(ours[step][key] == theirs[step][key] for step in ours for key in CURVE)
    assert_same_tensors(run, tmp_path / "by_hand", "model", "optimizer")
    (change,) = changes_of(run)
    assert (change["step"], change["rank"], change["from_step"]) == (1, limited, 2)
    assert (change["before"], change["micro_batch_size"]) == (128, 64)
    log = (tmp_path / "run.log").read_text()
    assert "micro-batches of 64 samples from step 2 on fit into memory" in log

    resumed, kept = tmp_path / "resumed", Path("checkpoints", "step-00000002")
    shutil.copytree(run / kept, resumed / kept)
    forked.succeed(engine, resumed, processes, *given, *later, script=SCRIPT)
    ours = records(resumed)
    assert list(ours) == [3] and not changes_of(resumed)
    assert ours[3]["data/micro_batch_size"] == 128
    assert all(abs(ours[step][key] / theirs[step][key] - 1) < 1e-5 for step in ours for key in CURVE)


# The whole share of a rank, 128 samples, fits into the budget but not into memory.
BUDGET = ("train.global_batch_size=256", "train.micro_batch_size=null", "train.micro_batch_tokens=1000000")


@pytest.mark.parametrize("engine", [pytest.param(engine, marks=pytest.mark.slow) for engine in ("ddp", "zero2")])
def test_a_budget_is_lowered_to_what_fits(engine: str, parity_config: Path, forked: ForkedRuns, tmp_path: Path) -> None:
    run, given = tmp_path / "run", (parity_config, *SETTINGS, *BUDGET)
    limits = ZERO2 if engine == "zero2" else LIMITS
    forked.succeed(engine, tmp_path / "unlimited", 2, *given)
    forked.succeed(engine, run, 2, *given, AUTO, script=SCRIPT, **limits)
    assert difference(run, tmp_path / "unlimited") < 1e-5
    (change,) = changes_of(run)
    # Half of what did not fit, the whole share with its 128 latents.
    budget = (change["tokens"] + 128) // 2
    assert (change["before"], change["micro_batch_tokens"], change["rank"]) == (1000000, budget, 1)
    assert [record["data/micro_batch_tokens"] for record in records(run).values()] == [budget] * 4
    # The record of the start has what was fitted, with which a replay computes the same bits.
    (start,) = records(run, "start").values()
    (stage,) = start["config"]["train"]["batch_schedule"].values()
    assert start["micro_batch_tokens"] == budget == stage["micro_batch_tokens"]
    assert verify.main([str(run)]) == 0


@pytest.mark.parametrize(
    ("engine", "settings", "limits"),
    [
        ("ddp", ("train.micro_batch_size=4",), {"LIMIT_MIB": "150"}),
        # There is room for weights, activations and gradients, but not for the moments of the first update.
        ("single", ("train.micro_batch_size=1",), {"LIMIT_MIB": "210", "LIMITED": "0"}),
    ],
)
def test_a_sample_that_does_not_fit_ends_all_ranks(
    engine: str,
    settings: tuple[str, ...],
    limits: dict[str, str],
    parity_config: Path,
    forked: ForkedRuns,
    tmp_path: Path,
) -> None:
    run, log, limits = tmp_path / "run", tmp_path / "log", {**LIMITS, **limits}
    limited = int(limits["LIMITED"])
    arguments = (parity_config, *SETTINGS, *WIDE, AUTO, "train.global_batch_size=8", *settings, f"run.dir={run}")
    pids = forked.start(engine, arguments, limited + 1, log, SCRIPT, **limits)
    assert set(forked.wait(pids).values()) == {64}, log.read_text()[-3000:]
    cause = str(exit_record(run)["cause"])
    assert cause.startswith("train.micro_batch_size: ") and f"rank {limited}" in cause and cause in log.read_text()
    assert "auto_micro_batch" not in cause and "Traceback" not in log.read_text()


@quick
@pytest.mark.parametrize(("samples", "advice"), [(3, True), (1, False)])
def test_what_does_not_fit_says_what_to_change(samples: int, advice: bool) -> None:
    message = str(_too_large("micro_batch_tokens", [20] * samples, rank=2))
    assert message.startswith("train.micro_batch_tokens: ") and "rank 2" in message and str(20 * samples) in message
    assert ("train.auto_micro_batch=true" in message) == advice and "\n" not in message
    assert all(word in message for word in ("memory.activation_checkpointing=full", "fsdp2", "zero3_offload"))


@pytest.mark.parametrize(
    ("engine", "settings", "setting"),
    [
        ("single", ("train.global_batch_size=128", "train.micro_batch_size=128"), "train.micro_batch_size: rank 0"),
        ("ddp", BUDGET, "train.micro_batch_tokens: rank 1"),
    ],
)
def test_a_run_that_gets_out_of_memory_names_the_setting_to_lower(
    engine: str, settings: tuple[str, ...], setting: str, parity_config: Path, forked: ForkedRuns, tmp_path: Path
) -> None:
    run, log, limited = tmp_path / "run", tmp_path / "log", int(setting[-1])
    arguments = (parity_config, *SETTINGS, *settings, f"run.dir={run}")
    limits = {"LIMITED": str(limited), "LIMIT_MIB": "100"}
    pids = forked.start(engine, arguments, limited + 1, log, SCRIPT, **limits)
    codes = list(forked.wait(pids).values())
    assert codes[limited] == 64, log.read_text()[-3000:]
    (line,) = {line for line in log.read_text().splitlines() if line.startswith(f"mmldlm: error: {setting}")}
    for part in ("ran out of memory after step 0", "train.auto_micro_batch=true", "DefaultCPUAllocator"):
        assert part in line
    assert "Traceback" not in log.read_text()


OTHERWISE = (
    "precision=bf16",
    "memory.activation_checkpointing=full",
    "train.batch_schedule={5: {micro_batch_size: 8}, 10: {global_batch_size: 16}}",
)


@pytest.mark.parametrize(
    ("engine", "more"),
    [
        pytest.param("single", (), marks=pytest.mark.slow),
        ("single", OTHERWISE),
        ("ddp", ()),
        pytest.param("zero2", (), marks=pytest.mark.slow),
        pytest.param("zero2", OTHERWISE[:2], marks=pytest.mark.slow),
    ],
)
def test_trial_passes_are_few_and_leave_no_trace(
    engine: str, more: tuple[str, ...], parity_config: Path, forked: ForkedRuns, tmp_path: Path
) -> None:
    """Among what could be left are random numbers, gradients, and what DDP records in its first backward."""
    processes, run = 1 if engine == "single" else 2, tmp_path / "auto"
    given = (
        parity_config,
        "train.steps=12",
        "model.dropout=0.1",
        "validation.every=0",
        "checkpoint.every_steps=0",
        *more,
    )
    forked.succeed(engine, tmp_path / "plain", processes, *given)
    run.mkdir()
    forked.succeed(engine, run, processes, *given, AUTO, script=SCRIPT, FACTS=str(run))
    ours, theirs = records(run), records(tmp_path / "plain")
    assert len(ours) == 12 and all(ours[step][key] == theirs[step][key] for step in ours for key in CURVE)
    assert_same_tensors(run, tmp_path / "plain", "model", "optimizer")
    stages = 3 if more == OTHERWISE else 1
    for rank in range(processes):
        assert json.loads((run / f"facts.rank{rank}.json").read_text())["trials"] == stages


@quick
def test_sizes_that_samples_can_be_shared_into() -> None:
    for whole, micro, world, smaller in ((64, 8, 2, 4), (12, 6, 1, 3), (12, 3, 1, 1), (10, 5, 1, 2), (15, 5, 1, 1)):
        assert _halve(BatchSize(whole, micro), world, 99) == BatchSize(whole, smaller)
        assert whole % (smaller * world) == 0
    assert _halve(BatchSize(64, 8, 1000), 2, 300) == BatchSize(64, 8, 150)


@quick
def test_a_trial_pass_raises_other_errors_and_leaves_no_trace() -> None:
    model, cpu = torch.nn.Linear(4, 4), torch.device("cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    kept, heard, seen = torch.ones(4, 4), [], []
    model.weight.grad = kept
    model.weight.register_post_accumulate_grad_hook(heard.append)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()

    def loss_of(network: Any) -> torch.Tensor:
        seen.append(torch.rand(1))
        return network(torch.rand(2, 4)).sum()

    assert all(fits_in_memory(model, optimizer, loss_of, cpu, accumulates) for accumulates in (False, True))
    assert len(seen) == 2 and torch.equal(torch.get_rng_state(), state) and not heard
    assert model.weight.grad is kept and torch.equal(kept, torch.ones(4, 4)) and model.bias.grad is None
    assert not optimizer.state
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())

    def too_large(network: Any) -> torch.Tensor:
        return network(torch.empty(1 << 50, 4)).sum()

    def wrong(network: Any) -> torch.Tensor:
        return network(torch.rand(2, 5)).sum()

    assert not fits_in_memory(model, optimizer, too_large, cpu, False)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        fits_in_memory(model, optimizer, wrong, cpu, False)


class Kept(torch.autograd.Function):
    """Holds what stands for memory until its backward."""

    held: weakref.ref[torch.nn.Module]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.memory = torch.nn.Module()
        Kept.held = weakref.ref(ctx.memory)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the other branch comes first")


class OutOfMemory(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.empty(1 << 50)


@quick
def test_a_backward_pass_that_fails_holds_no_memory() -> None:
    def loss_of(network: Any) -> torch.Tensor:
        rows = network(torch.rand(2, 4))
        return Kept.apply(rows).sum() + OutOfMemory.apply(rows).sum()

    model = torch.nn.Linear(4, 4)
    assert not fits_in_memory(model, torch.optim.AdamW(model.parameters()), loss_of, torch.device("cpu"), False)
    assert Kept.held() is None
