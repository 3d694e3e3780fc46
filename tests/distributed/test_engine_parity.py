"""All engines give the curve of one process, with the shipped config files, in real processes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from mmldlm import train
from tests.helpers.engine_runs import (
    CURVE,
    ENGINES,
    Single,
    accelerate,
    assert_same_run,
    deepspeed,
    difference,
    records,
    saved_tensors,
    some,
    succeed,
    torchrun,
)
from tests.helpers.forked_runs import ForkedRuns

FP32, BF16 = 1e-5, 2e-2
LOSS = "validation/total"


@pytest.mark.parametrize("engine", ENGINES)
def test_two_processes_follow_one(
    engine: str, parity_config: Path, single: Single, forked: ForkedRuns, tmp_path: Path
) -> None:
    folder, short = tmp_path / "run", "train.steps=14"  # the modes change at 12
    forked.succeed(engine, folder, 2, parity_config, short)
    log = folder.with_suffix(".log").read_text()
    assert f"engine       {engine}, 2 processes" in log
    warnings = [line for line in log.lower().splitlines() if "warning" in line]
    # Steps of a few milliseconds may overtake the writing of a checkpoint.
    assert not [line for line in warnings if "still being written" not in line]
    assert_same_run(folder, single(short), FP32)
    # Not the curve alone: weights and moments, whole and by name, are those of one process.
    for name in ("model", "optimizer"):
        ours, theirs = saved_tensors(folder, name), saved_tensors(single(short), name)
        assert ours.keys() == theirs.keys()
        worst = max(float((ours[key] - theirs[key]).abs().max()) for key in ours if ours[key].numel())
        assert worst < 1e-5, f"{name}: {worst}"


@pytest.mark.parametrize("engine", some("ddp", "fsdp2", "zero3"))
def test_operators_of_a_gpu_follow_those_of_a_cpu(
    engine: str, parity_config: Path, single: Single, forked: ForkedRuns, tmp_path: Path
) -> None:
    """Also where the weights of a block are whole in its own forward pass alone."""
    folder, short = tmp_path / "run", "train.steps=14"
    forked.succeed(engine, folder, 2, parity_config, short, script="gpu_operators.py")
    assert_same_run(folder, single(short), FP32)


@pytest.mark.parametrize(
    ("file", "line", "variables"),
    [
        ("fsdp2_hsdp", "fsdp2, 4 processes, 2 replicas x 2 shards", {}),
        ("zero3_hpz", "zero3, 4 processes, secondary partition of 2", {"LOCAL_WORLD_SIZE": "2"}),
    ],
)
def test_groups_of_processes_follow_one(
    file: str,
    line: str,
    variables: dict[str, str],
    parity_config: Path,
    single: Single,
    forked: ForkedRuns,
    tmp_path: Path,
) -> None:
    """Also through the exchange of weights and EMA weights in the validation of step 10."""
    folder, settings = tmp_path / "run", ("ema.decay=0.9", "train.micro_batch_size=1", "train.steps=10")
    forked.succeed(file, folder, 4, parity_config, *settings, **variables)
    assert f"engine       {line}" in folder.with_suffix(".log").read_text()
    assert_same_run(folder, single(*settings), FP32)
    for name in ("model", "optimizer", "ema"):
        ours, theirs = saved_tensors(folder, name), saved_tensors(single(*settings), name)
        assert ours.keys() == theirs.keys()
        worst = max(float((ours[key] - theirs[key]).abs().max()) for key in ours if ours[key].numel())
        assert worst < 1e-5, f"{name}: {worst}"


@pytest.mark.parametrize("engine", some("fsdp2"))
def test_accelerate_launch(engine: str, parity_config: Path, single: Single, tmp_path: Path) -> None:
    """The shipped config file in the launcher's own hands."""
    output = succeed(accelerate(engine, 2, parity_config, f"run.dir={tmp_path}"))
    assert f"engine       {engine}, 2 processes" in output
    assert_same_run(tmp_path, single(), FP32)


@pytest.mark.parametrize("engine", some("fsdp2", "zero2"))
def test_bf16_follows_one_process_in_bf16(
    engine: str, parity_config: Path, single: Single, forked: ForkedRuns, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    forked.succeed(engine, folder, 2, parity_config, "precision=bf16")
    assert_same_run(folder, single("precision=bf16"), BF16)
    # bfloat16 it is, and the master weights it is not.
    assert records(folder)[1]["loss/total"] != records(single())[1]["loss/total"]
    saved = saved_tensors(folder)
    assert all(tensor.dtype == torch.float32 for tensor in saved.values())
    assert any((tensor != tensor.bfloat16().float()).float().mean() > 0.5 for tensor in saved.values())


FROZEN = ("freeze=[latent_stream, text_encoder]", "memory.activation_checkpointing=full", "model.dropout=0.0")


@pytest.mark.parametrize("engine", some("fsdp2", "zero2"))
def test_frozen_parts_and_recomputed_blocks(
    engine: str, parity_config: Path, single: Single, forked: ForkedRuns, tmp_path: Path
) -> None:
    settings, folder = (*FROZEN, "distributed.ddp.find_unused_parameters=false"), tmp_path / "run"
    forked.succeed(engine, folder, 2, parity_config, *settings)
    assert_same_run(folder, single(*settings), FP32)
    # Recomputing changes nothing, freezing does.
    assert difference(single(*settings), single(settings[0])) == 0
    assert difference(single(*settings), single(), CURVE[:1]) > FP32
    # What is frozen is what one process starts with, under engines that round their copy as well.
    start, end = saved_tensors(single(*settings, "train.steps=1")), saved_tensors(folder)
    frozen = [name for name in end if name.startswith("token_embedding") or ".latent." in name]
    assert frozen and all(torch.equal(start[name], end[name]) for name in frozen)
    assert not torch.equal(start["text_out.weight"], end["text_out.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero2"])
def test_four_processes_follow_one(engine: str, parity_config: Path, single: Single, tmp_path: Path) -> None:
    succeed(accelerate(engine, 4, parity_config, f"run.dir={tmp_path}", "train.micro_batch_size=1"))
    assert_same_run(tmp_path, single(), FP32)


@pytest.mark.parametrize(("processes", "micro_batch"), [(4, 2), pytest.param(2, 4, marks=pytest.mark.slow)])
def test_processes_times_micro_batch(
    processes: int, micro_batch: int, parity_config: Path, single: Single, forked: ForkedRuns, tmp_path: Path
) -> None:
    forked.succeed("ddp", tmp_path / "run", processes, parity_config, f"train.micro_batch_size={micro_batch}")
    assert_same_run(tmp_path / "run", single("train.micro_batch_size=8"), FP32)


@pytest.mark.parametrize("engine", some("zero2"))
def test_torchrun_brings_any_engine(engine: str, parity_config: Path, single: Single, tmp_path: Path) -> None:
    file = f"accelerate_configs/{engine}.yaml"
    output = succeed(torchrun(2, parity_config, f"run.dir={tmp_path}", "--accelerate_config", file))
    assert f"engine       {engine}, 2 processes" in output and "started by torchrun" in output
    assert_same_run(tmp_path, single(), FP32)


def test_torchrun_alone_is_ddp(parity_config: Path, single: Single, tmp_path: Path) -> None:
    assert "engine       ddp, 2 processes" in succeed(torchrun(2, parity_config, f"run.dir={tmp_path}"))
    assert_same_run(tmp_path, single(), FP32)


def test_the_deepspeed_launcher(parity_config: Path, single: Single, tmp_path: Path) -> None:
    command = deepspeed(2, parity_config, f"run.dir={tmp_path}", "--deepspeed_config", "ds_configs/zero2.json")
    output = succeed(command)
    assert "engine       zero2, 2 processes" in output and "started by deepspeed" in output
    assert_same_run(tmp_path, single(), FP32)


def test_run_resumes_under_other_engines(
    parity_config: Path, single: Single, forked: ForkedRuns, tmp_path: Path
) -> None:
    """FSDP2 x 3 to 2 x 2 hybrid shards to ZeRO-3 x 2 to one process: each resumes where the previous one stopped."""
    settings = ["train.global_batch_size=12", "checkpoint.every_steps=4", "checkpoint.keep_last=9"]
    settings += ["ema.decay=0.9", "validation.every=7"]
    whole = single(*settings)
    at, expected = [whole / "checkpoints" / "step-00000004"], saved_tensors(whole, "ema")
    for step, engine, processes in ((8, "fsdp2", 3), (12, "fsdp2_hsdp", 4), (16, "zero3", 2)):
        folder = tmp_path / engine
        sizes = ["train.micro_batch_size=3"] if processes == 4 else []  # of 12 samples
        forked.succeed(engine, folder, processes, parity_config, *settings, *sizes, f"resume={at[-1]}")
        ours, theirs = records(folder), records(whole)
        assert list(ours) == list(range(step - 3, 21))
        assert max(abs(ours[s][key] / theirs[s][key] - 1) for s in ours for key in CURVE) < FP32
        ours, theirs = records(folder, "validation"), records(whole, "validation")
        assert max(abs(ours[s][LOSS] / theirs[s][LOSS] - 1) for s in ours) < FP32 and ours[20]["weights"] == "ema"
        average = saved_tensors(folder, "ema")
        assert average.keys() == expected.keys()
        assert max(float((average[name] - expected[name]).abs().max()) for name in average) < 1e-5
        at.append(folder / "checkpoints" / f"step-{step:08}")
    forked.succeed("single", tmp_path / "last", 1, parity_config, *settings, f"resume={at[-1]}")
    ours, theirs = records(tmp_path / "last"), records(whole)
    assert max(abs(ours[s][key] / theirs[s][key] - 1) for s in ours for key in CURVE) < FP32


@pytest.mark.parametrize(
    "engine",
    [
        "single",
        "fsdp2",
        "zero2",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "zero3", "fsdp2_hsdp")),
    ],
)
def test_resumed_run_is_bitwise_equal(engine: str, parity_config: Path, forked: ForkedRuns, tmp_path: Path) -> None:
    """Resumed twice, in the second epoch and in the third, with accumulation and dropout, on the same processes."""
    settings = ["train.steps=12", "train.global_batch_size=160", "train.micro_batch_size=20", "model.dropout=0.1"]
    settings += ["checkpoint.every_steps=4", "validation.every=0", "ema.decay=0.9"]
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
    for name in ("model", "optimizer", "ema"):
        expected = saved_tensors(folders[0], name)
        assert expected.keys() == saved_tensors(folders[2], name).keys()
        assert all(torch.equal(tensor, expected[entry]) for entry, tensor in saved_tensors(folders[2], name).items())


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
