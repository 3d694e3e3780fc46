"""What becomes of the keys of a DeepSpeed config: filled in from the run config, left out, or refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mmldlm.distributed.deepspeed_file import LEFT_OUT, QUANTIZED, DeepSpeedFile, StepPlan
from mmldlm.distributed.launch import LauncherEnv, read_launcher_env
from mmldlm.errors import ConfigError
from tests.helpers.engine_runs import ENGINES, LAUNCHED
from tests.helpers.paths import ROOT

PLAN = StepPlan(micro_batch_size=2, accumulation=4, global_batch_size=32, clip_norm=1.0, precision="bf16", width=64)
pytestmark = pytest.mark.quick

Read = Callable[..., DeepSpeedFile]


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    """Return the DeepSpeed config of four processes with a file of these keys."""
    monkeypatch.chdir(ROOT)

    def read(**content: Any) -> DeepSpeedFile:
        path = tmp_path / "ds.json"
        path.write_text(json.dumps({"zero_optimization": {"stage": 3}, **content}))
        launch = read_launcher_env({**LAUNCHED, "WORLD_SIZE": "4"}, deepspeed_file=str(path))
        assert launch.deepspeed is not None
        return launch.deepspeed

    return read


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        # Keys that DeepSpeed would ignore, or that change what a run computes.
        ({"zero_optimizatoin": {"stage": 2}}, "zero_optimizatoin: unknown .* did you mean 'zero_optimization'"),
        ({"gradient_cliping": 1.0}, "gradient_cliping: unknown .* did you mean 'gradient_clipping'"),
        *(({key: {}}, f"{key}: unknown or unsupported key") for key in ("tensor_parallel", "elasticity", "amp")),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1}}}, "optimizer: .* config's optim is the source.*'lr': 1"),
        ({"optimizer": {"type": "Lion", "params": {"lr": "auto"}}}, "optimizer: .* found .*'Lion'"),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "optimizer: .*'adam_w_mode': False"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}}, "the run config's schedule .* 9"),
        # Sections that are none.
        ({"bf16": "auto"}, "bf16: expected keys below it, found 'auto'"),
        ({"zero_optimization": True}, "zero_optimization: expected keys below it, found True"),
        ({"optimizer": 3}, "optimizer: expected keys below it, found 3"),
        # DeepSpeed's own keys and types.
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, "zero_optimization: mics_shard_size: Extra inputs"),
        ({"zero_optimization": {"stage": "two"}}, "zero_optimization: stage: Input should be .*found 'two'"),
        ({"zero_optimization": {"stage": 2, "reduce_bucket_size": "large"}}, "reduce_bucket_size: .* found 'large'"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}}, "offload_optimizer: Input should be"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "gpu"}}}, "offload_optimizer.device: "),
        ({"bf16": {"enable": True}}, "bf16: enable: Extra inputs are not permitted"),
        # Stages and offloads that are no engine.
        ({"zero_optimization": {}}, "stage: expected 1, 2 or 3, found 0; for DDP use distributed_type: MULTI_GPU"),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
            "none, or stage 2 or 3, found cpu",
        ),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "none, or stage 3, found cpu"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "nvme_path: expected a folder"),
        ({"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}, "zenflow.topk_ratio: expected nothing"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}}, "divides the 4 processes, .*; found 3"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 0}}, "divides the 4 processes, .*; found 0"),
        ({"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 2}}, "at stage 3; found 2 at stage 2"),
        # Values that contradict the run config.
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps is 2, but 4 by the run config"),
        ({"gradient_clipping": 0.5}, r"gradient_clipping is 0.5, but 1.0 by the run config \(optim.clip_norm\)"),
        ({"gradient_clipping": True}, "gradient_clipping is true, but 1.0"),
        ({"train_batch_size": 64}, "train_batch_size is 64, but 32"),
        ({"bf16": {"enabled": False}}, r"bf16.enabled is false, but true by the run config \(precision\)"),
        ({"bf16": {"bf16_master_weights_and_grads": True}}, "bf16_master_weights_and_grads is true, but false"),
        ({"fp16": {"enabled": True}}, "fp16.enabled is true, but false"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, 'grad_accum_dtype is "bf16", but "fp32" by the run config'),
        ({"prescale_gradients": "auto"}, 'prescale_gradients: "auto"'),
    ],
)
def test_refused_configs(config: dict[str, Any], complaint: str, read: Read, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        read(**config).resolve(PLAN)
    assert str(caught.value).startswith(f"{tmp_path / 'ds.json'}: ") and "\n" not in str(caught.value)


def test_all_contradictions_are_in_one_line(read: Read) -> None:
    with pytest.raises(ConfigError, match=r"gradient_accumulation_steps is 3, .*gradient_clipping is 9.0, "):
        read(gradient_accumulation_steps=3, gradient_clipping=9.0).resolve(PLAN)


def test_all_keys_without_a_meaning_are_named_beside_them(read: Read) -> None:
    """As in the configs of Hugging Face's and DeepSpeed's own examples."""
    optimizer = {"type": "Adam", "params": {"lr": 0.001}}
    file = read(train_batch_size=400, optimizer=optimizer, scheduler={"type": "WarmupLR", "params": {"x": 1}}, amp={})
    with pytest.raises(ConfigError) as caught:
        file.resolve(PLAN)
    for key in ("optimizer: ", "scheduler: ", "amp: ", "train_batch_size is 400"):
        assert key in str(caught.value)


@pytest.mark.parametrize(("enabled", "precision"), [(True, "bf16"), ("auto", "no"), (False, "no")])
def test_the_precision_of_the_file_is_the_launchers(enabled: Any, precision: str, tmp_path: Path) -> None:
    """As under Accelerate, whose own is "no" beside a file; with `precision: auto` the run then has it."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}, "bf16": {"enabled": enabled}}))
    launch = read_launcher_env({**LAUNCHED, "ACCELERATE_MIXED_PRECISION": "no"}, deepspeed_file=str(path))
    assert launch.mixed_precision == precision


@pytest.mark.parametrize(("text", "complaint"), [("[", "is not readable JSON"), ("[]", "JSON object, found list")])
def test_broken_files(text: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        read_launcher_env(dict(LAUNCHED), deepspeed_file=str(tmp_path / "ds.json"))


@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine.startswith("zero")])
def test_auto_is_filled_from_the_run_config(engine: str) -> None:
    launch = read_launcher_env(dict(LAUNCHED), deepspeed_file=str(ROOT / "ds_configs" / f"{engine}.json"))
    assert launch.deepspeed is not None and launch.engine == engine
    result = launch.deepspeed.resolve(PLAN)
    assert '"auto"' not in json.dumps(result)
    assert result["gradient_accumulation_steps"] == 4 and result["train_micro_batch_size_per_gpu"] == 2
    assert result["train_batch_size"] == 32 and result["gradient_clipping"] == 1.0 and result["bf16"]["enabled"] is True


@pytest.mark.parametrize("width", [64, 768])
def test_auto_buckets_follow_from_the_width(width: int, read: Read) -> None:
    names = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    file = read(zero_optimization={"stage": 3, **dict.fromkeys(names, "auto")})
    zero = file.resolve(dataclasses.replace(PLAN, width=width))["zero_optimization"]
    assert [zero[name] for name in names] == [width**2, int(0.9 * width**2), 10 * width]


def test_gradients_accumulate_in_float32(read: Read) -> None:
    for value in ({}, {"data_types": {"grad_accum_dtype": "auto"}}, {"data_types": {"grad_accum_dtype": "fp32"}}):
        assert read(**value).resolve(PLAN)["data_types"] == {"grad_accum_dtype": "fp32"}


def test_a_partition_of_a_node(read: Read) -> None:
    zero = {"stage": 3, "zero_hpz_partition_size": "auto"}
    file = read(zero_optimization=zero)
    assert file.secondary_partition == 2, "LOCAL_WORLD_SIZE"
    assert file.resolve(PLAN)["zero_optimization"] == {**zero, "zero_hpz_partition_size": 2}


def test_quantized_exchanges_are_reported(read: Read) -> None:
    for name in QUANTIZED:
        file = read(zero_optimization={"stage": 3, name: True})
        assert [f"zero_optimization.{name}: " in notice for notice in file.notices] == [True]


def test_keys_without_effect_are_left_out_with_one_notice(read: Read) -> None:
    plain = read()
    given = {key: {"type": "AdamW"} if key in ("optimizer", "scheduler") else 7 for key in LEFT_OUT}
    file = read(**given)
    assert file.resolve(PLAN) == plain.resolve(PLAN) and not plain.notices
    (notice,) = file.notices
    assert all(key in notice for key in LEFT_OUT)
    params = {"lr": "auto", "torch_adam": True, "adam_w_mode": True}
    assert read(optimizer={"type": "AdamW", "params": params}, scheduler={"params": {}}).content == plain.content
    # What is off anyway is not worth a line.
    assert not read(wall_clock_breakdown=False, flops_profiler=None).notices


def test_ema_is_refused_with_masters_on_disk(read: Read) -> None:
    on_disk = {"device": "nvme", "nvme_path": "/tmp"}
    file = read(zero_optimization={"stage": 3, "offload_optimizer": on_disk, "offload_param": {"device": "cpu"}})
    with pytest.raises(ConfigError, match=r"ema\.decay: 0\.9 .*\.offload_optimizer\.device nvme in .* expected cpu"):
        file.check_ema(0.9)
    file.check_ema(0.0)
    read(zero_optimization={"stage": 3, "offload_optimizer": {"device": "cpu"}}).check_ema(0.9)


def section_launch(folder: Path, **section: object) -> LauncherEnv:
    path = folder / "accelerate.yaml"
    path.write_text(yaml.safe_dump({"distributed_type": "DEEPSPEED", "deepspeed_config": section}))
    return read_launcher_env(dict(LAUNCHED), accelerate_file=str(path))


def test_section_becomes_a_deepspeed_config(tmp_path: Path) -> None:
    devices = {"offload_optimizer_device": "cpu", "offload_param_device": "cpu"}
    launch = section_launch(tmp_path, zero_stage=3, gradient_clipping=1, zero3_save_16bit_model=True, **devices)
    assert launch.deepspeed is not None
    resolved = launch.deepspeed.resolve(PLAN)
    zero = resolved["zero_optimization"]
    assert (zero["stage"], zero["offload_param"]["device"], zero["reduce_bucket_size"]) == (3, "cpu", 100_000_000)
    assert resolved["communication_data_type"] == "fp32"
    assert launch.engine == "zero3_offload" and launch.offloads_optimizer and not launch.notices
    assert section_launch(tmp_path).engine == "zero2", "Accelerate's default"


@pytest.mark.parametrize(
    ("section", "complaint"),
    [
        ({"zero_stage": 0}, "expected 1, 2 or 3, found 0; for DDP use distributed_type: MULTI_GPU"),
        ({"zero_stage": "two"}, r"deepspeed_config of the accelerate config: .*'two' \(ValueError in accelerate\)"),
        ({"zero_stage": 2, "offload_param_device": "cpu"}, "offload_param.device: expected none, or stage 3"),
        ({"zero_stage": 2, "offload_optimizer_device": "nvme"}, "offload_optimizer.nvme_path: expected a folder"),
        ({"zero_stage": 2, "gradient_accumulation_steps": 3}, "gradient_accumulation_steps is 3, but 4 by the run"),
        # What belongs in the file is refused by Accelerate.
        ({"deepspeed_config_file": "ds_configs/zero2.json", "zero_stage": 3}, r"zero2.json: When using .*zero_stage"),
    ],
)
def test_refused_sections(
    section: dict[str, object], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError, match=complaint):
        launch = section_launch(tmp_path, **section)
        assert launch.deepspeed is not None
        launch.deepspeed.resolve(PLAN)
