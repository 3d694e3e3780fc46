"""All engines give the curve of one process, with the shipped config files, in real processes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from mmldlm import train
from tests.helpers.engine_runs import (
    CURVE,
    ENGINES,
    Single,
    accelerate,
    assert_same_run,
    assert_same_tensors,
    deepspeed,
    difference,
    records,
    saved_tensors,
    succeed,
    torchrun,
)
from tests.helpers.forked_runs import ForkedRuns

FP32, BF16, FP16 = 1e-5, 2e-2, 5e-3
LOSS, MUON = "validation/total", "optim.name=muon"
FROZEN = ("freeze=[latent_stream, text_encoder]", "memory.activation_checkpointing=full", "model.dropout=0.0")


@dataclass(frozen=True)
class Case:
    """A launch whose curve, weights and moments are those of one process."""

    file: str  # in accelerate_configs/
    settings: tuple[str, ...] = ("train.steps=14",)  # the modes change at 12
    processes: int = 2
    own: tuple[str, ...] = ()  # settings that the one process does not have
    tolerance: float = FP32  # of the curve; in fp32 weights and moments are compared as well
    script: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    slow: bool = False

    def __str__(self) -> str:
        return "-".join((self.file, str(self.processes), *self.settings[:1], *self.own, self.script))


def some(*default: str, **options: Any) -> list[Case]:
    """The cases of all engines, of which those that are not named run by --slow only."""
    return [Case(engine, slow=engine not in default, **options) for engine in ENGINES]


MICRO_1 = ("train.micro_batch_size=1",)
CASES = [
    # DDP and ZeRO-2 are compared in test_launchers, ZeRO-3 below and offloaded.
    *some("fsdp2", "zero1", "zero2_offload", "zero3_offload"),
    # Operators of a GPU: also where the weights of a block are whole in its own forward pass alone.
    *some("fsdp2", "zero3", script="gpu_operators.py"),
    # Groups of processes, also through the exchange of weights and EMA weights in the validation of step 10.
    Case("fsdp2_hsdp", ("train.steps=10", "ema.decay=0.9"), 4, MICRO_1),
    Case("zero3_hpz", ("train.steps=10", "ema.decay=0.9"), 4, MICRO_1, variables={"LOCAL_WORLD_SIZE": "2"}, slow=True),
    *(Case(engine, processes=4, own=MICRO_1, slow=True) for engine in ("fsdp2", "zero2")),
    Case("ddp", ("train.micro_batch_size=8",), 4, ("train.micro_batch_size=2",), slow=True),
    Case("ddp", ("train.micro_batch_size=8",), 2, ("train.micro_batch_size=4",), slow=True),
    *some("fsdp2", "zero2", settings=FROZEN),
    *some("fsdp2", "zero2", settings=("precision=bf16",), tolerance=BF16),
    *(Case(engine, own=("precision=fp16",), tolerance=FP16) for engine in ("ddp", "fsdp2")),
    Case("fsdp2_hsdp", ("precision=bf16",), 4, MICRO_1, BF16, slow=True),
    Case("fsdp2_hsdp", ("precision=fp16",), 4, MICRO_1, FP16, slow=True),
    Case("fsdp2_hsdp", (MUON, "latent.prediction=epsilon", "train.steps=12"), 4, MICRO_1, FP16, slow=True),
]


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow if c.slow else [], id=str(c)) for c in CASES])
def test_processes_follow_one(
    case: Case, parity_config: Path, single: Single, forked: ForkedRuns, tmp_path: Path
) -> None:
    folder, reference = tmp_path / "run", single(*case.settings)
    settings = (*case.settings, *case.own)
    forked.succeed(case.file, folder, case.processes, parity_config, *settings, script=case.script, **case.variables)
    log = folder.with_suffix(".log").read_text()
    assert f"engine       {case.file.partition('_h')[0]}, {case.processes} processes" in log
    assert_same_run(folder, reference, case.tolerance)
    precision = next((setting.partition("=")[2] for setting in settings if "precision=" in setting), "fp32")
    if precision != "fp32":
        # It computes in few bits, and the weights that it updates have more.
        assert records(folder)[1]["loss/total"] != records(single())[1]["loss/total"]
        low, saved = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision], saved_tensors(folder).values()
        assert all(tensor.dtype == torch.float32 for tensor in saved)
        assert any((tensor != tensor.to(low).float()).float().mean() > 0.5 for tensor in saved)
    if case.tolerance > FP32:
        return
    warnings = [line for line in log.lower().splitlines() if "warning" in line]
    # Steps of a few milliseconds may overtake the writing of a checkpoint.
    assert not [line for line in warnings if "still being written" not in line]
    groups = ("model", "optimizer", *(["ema"] if "ema.decay=0.9" in settings else []))
    assert_same_tensors(folder, reference, *groups, tolerance=1e-5)


def test_recomputing_changes_nothing_and_freezing_does(single: Single) -> None:
    assert difference(single(*FROZEN), single(FROZEN[0])) == 0
    assert difference(single(*FROZEN), single(), CURVE[:1]) > FP32


LAUNCHES = [
    *((accelerate, engine) for engine in (*ENGINES, "fsdp2_hsdp")),
    (torchrun, ""),
    (torchrun, "zero2"),
    (torchrun, "fsdp2_hsdp"),
    (deepspeed, "zero2"),
]
DEFAULT_LAUNCHES = [(torchrun, ""), (deepspeed, "zero2")]


@pytest.mark.parametrize(
    ("launcher", "file"),
    [pytest.param(*each, marks=[] if each in DEFAULT_LAUNCHES else pytest.mark.slow) for each in LAUNCHES],
)
def test_launchers(
    launcher: Callable[..., list[str]], file: str, parity_config: Path, single: Single, tmp_path: Path
) -> None:
    """The shipped files in the launchers' own hands; torchrun alone is DDP."""
    hybrid = file == "fsdp2_hsdp"
    given: list[object] = [4 if hybrid else 2, parity_config, f"run.dir={tmp_path}", *(MICRO_1 if hybrid else ())]
    if launcher is accelerate:
        given.insert(0, file)
    elif launcher is deepspeed:
        given += ["--deepspeed_config", f"ds_configs/{file}.json"]
    elif file:
        given += ["--accelerate_config", f"accelerate_configs/{file}.yaml"]
    output = succeed(launcher(*given))
    assert f"engine       {file.partition('_h')[0] or 'ddp'}, {given[launcher is accelerate]} processes" in output
    assert f"started by {'accelerate launch' if launcher is accelerate else launcher.__name__}" in output
    assert_same_run(tmp_path, single(), FP32)
    assert_same_tensors(tmp_path, single(), "model", "optimizer", tolerance=1e-5)


def test_run_resumes_under_other_engines(
    parity_config: Path, single: Single, forked: ForkedRuns, tmp_path: Path
) -> None:
    """FSDP2 x 3 to 2 x 2 hybrid shards to ZeRO-3 x 2 to one process: each resumes where the previous one stopped."""
    settings = ["train.global_batch_size=12", "checkpoint.every_steps=3", "checkpoint.keep_last=9"]
    settings += ["ema.decay=0.9", "validation.every=7", "train.steps=14"]  # the modes change at 12
    whole = single(*settings)
    at = [whole / "checkpoints" / "step-00000003"]
    for step, engine, processes in ((6, "fsdp2", 3), (9, "fsdp2_hsdp", 4), (12, "zero3", 2)):
        folder = tmp_path / engine
        sizes = ["train.micro_batch_size=3"] if processes == 4 else []  # of 12 samples
        forked.succeed(engine, folder, processes, parity_config, *settings, *sizes, f"resume={at[-1]}")
        ours, theirs = records(folder), records(whole)
        assert list(ours) == list(range(step - 2, 15))
        assert max(abs(ours[s][key] / theirs[s][key] - 1) for s in ours for key in CURVE) < FP32
        ours, theirs = records(folder, "validation"), records(whole, "validation")
        assert max(abs(ours[s][LOSS] / theirs[s][LOSS] - 1) for s in ours) < FP32 and ours[14]["weights"] == "ema"
        assert_same_tensors(folder, whole, "ema", tolerance=1e-5)
        at.append(folder / "checkpoints" / f"step-{step:08}")
    forked.succeed("single", tmp_path / "last", 1, parity_config, *settings, f"resume={at[-1]}")
    ours, theirs = records(tmp_path / "last"), records(whole)
    assert max(abs(ours[s][key] / theirs[s][key] - 1) for s in ours for key in CURVE) < FP32


RESUMED = [(engine, name) for engine in ("single", "ddp", "fsdp2") for name in ("adamw", "muon")]
RESUMED += [(engine, "adamw") for engine in ("zero2", "zero3", "fsdp2_hsdp")]
DEFAULT_RESUMED = [("single", "adamw")]  # FSDP2 and ZeRO-2: test_engine_scenarios.py


@pytest.mark.parametrize(
    ("engine", "optimizer"),
    [pytest.param(*each, marks=[] if each in DEFAULT_RESUMED else pytest.mark.slow) for each in RESUMED],
)
def test_resumed_run_is_bitwise_equal(
    engine: str, optimizer: str, parity_config: Path, forked: ForkedRuns, tmp_path: Path
) -> None:
    """Resumed twice, in the second epoch and in the third, with accumulation and dropout, on the same processes."""
    settings = ["train.steps=12", "train.global_batch_size=160", "train.micro_batch_size=20", "model.dropout=0.1"]
    settings += ["checkpoint.every_steps=4", "validation.every=0", "ema.decay=0.9", f"optim.name={optimizer}"]
    processes = {"single": 1, "fsdp2_hsdp": 4}.get(engine, 2)
    folders = [tmp_path / name for name in ("whole", "once", "twice")]
    for number, folder in enumerate(folders):
        if number:
            kept = Path("checkpoints", f"step-{4 * number:08}")
            shutil.copytree(folders[number - 1] / kept, folder / kept)
        forked.succeed(engine, folder, processes, parity_config, *settings)
    whole, ours = records(folders[0]), records(folders[2])
    assert list(ours) == [9, 10, 11, 12] and 1 < whole[4]["data/epoch"] < 2 < whole[8]["data/epoch"] < 3
    assert all(ours[step][key] == whole[step][key] for step in ours for key in CURVE)
    assert_same_tensors(folders[2], folders[0], "model", "optimizer", "ema")


def test_freezing_may_change_between_starts(
    parity_config: Path, forked: ForkedRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [str(parity_config), f"run.dir={tmp_path}", "checkpoint.every_steps=4"]
    assert train.main([*settings, "train.steps=4"]) == 0
    before = saved_tensors(tmp_path)
    assert train.main([*settings, "train.steps=8", "freeze=[latent_stream]"]) == 0
    assert "changed since: freeze: [] -> ['latent_stream']" in capsys.readouterr().out
    after = saved_tensors(tmp_path)
    assert all(torch.equal(before[name], after[name]) for name in after if ".latent." in name)
    assert not any(".latent." in name for name in saved_tensors(tmp_path, "optimizer"))
    forked.succeed("zero2", tmp_path, 2, *settings, "train.steps=12")
    thawed = saved_tensors(tmp_path)
    assert not any(torch.equal(after[name], thawed[name]) for name in after if ".latent.qkv.weight" in name)
    assert train.main([*settings, "train.steps=16", "freeze=[text_stream]"]) == 0
    assert train.main([*settings, "train.steps=20"]) == 0
    assert "parameters train from here on" in capsys.readouterr().out
