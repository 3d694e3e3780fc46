"""Which keys of a DeepSpeed file take effect, which have none, and what is said about the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from accelerate.utils import named_module_tensors
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig

from mmldlm.distributed.deepspeed_config import StepPlan, resolve_deepspeed_config
from mmldlm.distributed.deepspeed_keys import KNOWN, QUANTIZED, WITHOUT_EFFECT
from mmldlm.distributed.launcher import read_launcher_env
from mmldlm.distributed.setup_errors import library_errors_are_config_errors
from mmldlm.errors import ConfigError, NumericalError

LAUNCHED = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
PLAN = StepPlan(micro_batch_size=2, accumulation=1, global_batch_size=8, clip_norm=1.0, precision="bf16", width=64)
pytestmark = pytest.mark.quick


@pytest.fixture
def resolved(tmp_path: Path) -> Any:
    """The DeepSpeed config of a file of these sections, and the notices."""

    def resolve(config: dict[str, Any], device_type: str = "cpu") -> tuple[dict[str, Any], str]:
        path = tmp_path / "ds.json"
        path.write_text(json.dumps({"zero_optimization": {"stage": 3}, **config}))
        launch = read_launcher_env(dict(LAUNCHED), deepspeed_file=str(path))
        assert launch.deepspeed is not None
        config = resolve_deepspeed_config(launch.deepspeed, launch.deepspeed_file, PLAN, device_type)
        return config, "\n".join(launch.notices)

    return resolve


def test_known_keys_are_deepspeeds() -> None:
    for section, model in (
        ("zero_optimization", DeepSpeedZeroConfig),
        ("zero_optimization.offload_optimizer", DeepSpeedZeroOffloadOptimizerConfig),
        ("zero_optimization.offload_param", DeepSpeedZeroOffloadParamConfig),
    ):
        theirs = {field.alias or name for name, field in model.model_fields.items()}
        assert set(KNOWN[section]) <= theirs, set(KNOWN[section]) - theirs


@pytest.mark.parametrize(
    ("config", "must_name"),
    [
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel: expected nothing, found it; remove it"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size: expected nothing"),
        ({"elasticity": {"enabled": True}}, "elasticity: .* a run resumes with any number of processes"),
        ({"activation_checkpointing": {}}, "use memory.activation_checkpointing in the run config"),
        ({"zero_optimizatoin": {"stage": 2}}, "zero_optimizatoin: unknown .* did you mean 'zero_optimization'"),
        ({"gradient_cliping": 1.0}, "gradient_cliping: unknown .* did you mean 'gradient_clipping'"),
        ({"bfloat16": {"enabled": True}}, "bfloat16: expected nothing"),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op: unknown or unsupported"),
        ({"bf16": {"enable": True}}, "bf16.enable: unknown .* did you mean 'enabled'"),
        ({"bf16": "auto"}, 'bf16: expected keys below it, found \'auto\'; write "bf16": {"enabled": "auto"}'),
        ({"bf16": None}, "bf16: expected keys below it, found None; write"),
        ({"bf16": True}, "bf16: expected keys below it, found True; write"),
        ({"bf16": {"enabled": None}}, "bf16.enabled is null, but true by the run config"),
        ({"bf16": {"bf16_master_weights_and_grads": True}}, "bf16_master_weights_and_grads is true, but false"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, 'grad_accum_dtype is "bf16", but "fp32" by the run config'),
        ({"zero_optimization": True}, "zero_optimization: expected keys below it, found True"),
        ({"zero_optimization": {"stage": True}}, "stage: expected 1, 2 or 3, found True"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, "mics_shard_size: .* use zero_hpz_partition_size"),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, 'cpu_offload: .* use "offload_optimizer"'),
        ({"zero_optimization": {"stage": 3, "zeropp_loco_param": {}}}, "zeropp_loco_param: unknown or unsupported"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"ratio": 0.5}}}, "offload_param.ratio: unknown"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}}, "divides the 4 processes, found 3"),
        (
            {"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 2}},
            "expected ZeRO stage 3, found stage 2; remove the key",
        ),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, "none, or stage 2 or 3, found"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}, "optimizer: .* params.lr 0.001; remove the section"),
        ({"optimizer": {"type": "Lion", "params": {"lr": "auto"}}}, "optimizer: .* found type 'Lion'"),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "optimizer: .* params.adam_w_mode False"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}}, "the run config's schedule .* 9"),
        ({"optimizer": 3}, "optimizer: expected nothing, found 3"),
    ],
)
def test_refused_keys(config: dict[str, Any], must_name: str, resolved: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=must_name.replace("{", r"\{")) as caught:
        resolved(config)
    assert str(caught.value).startswith(f"{tmp_path / 'ds.json'}: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_exchanges_are_for_cuda_and_reported(name: str, resolved: Any) -> None:
    config = {"zero_optimization": {"stage": 3, name.rpartition(".")[2]: True}}
    with pytest.raises(ConfigError, match=f"{name}: expected false without CUDA, found true"):
        resolved(config)
    _, notices = resolved(config, "cuda")
    assert f"{name}: the curve differs" in notices


def test_keys_without_effect_are_dropped_and_reported(resolved: Any) -> None:
    plain, notices = resolved({})
    assert not notices
    nested: dict[str, Any] = {"zero_optimization": {"stage": 3}, "bf16": {}}
    for name in WITHOUT_EFFECT:
        section, _, key = name.rpartition(".")
        (nested[section] if section else nested)[key] = 7
    config, notices = resolved(nested)
    assert config == plain and all(name in notices for name in WITHOUT_EFFECT)
    assert notices.count("\n") == 0
    sections = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
        "scheduler": {"params": {}},
    }
    config, notices = resolved(sections)
    assert config == plain and "optimizer (optim)" in notices and "scheduler (schedule)" in notices
    # What is off anyway is not worth a line.
    assert resolved({"wall_clock_breakdown": False, "flops_profiler": None}) == (plain, "")


def test_gradients_accumulate_in_float32(resolved: Any) -> None:
    for value in ({}, {"data_types": {"grad_accum_dtype": "auto"}}, {"data_types": {"grad_accum_dtype": "fp32"}}):
        assert resolved(value)[0]["data_types"] == {"grad_accum_dtype": "fp32"}


def test_only_errors_of_the_libraries_are_config_errors() -> None:
    """A bug of ours keeps its traceback, and a user error its exit code."""
    line = r"f.json: stage: .*found 9 \(ValidationError in pydantic/"
    with pytest.raises(ConfigError, match=line) as caught, library_errors_are_config_errors("f.json"):
        DeepSpeedZeroConfig(stage=9)
    assert caught.value.__cause__ is not None
    for error in (AssertionError("ours"), NumericalError("nan")):
        with pytest.raises(type(error)) as raised, library_errors_are_config_errors("f.json"):
            raise error
        assert raised.value is error
    with pytest.raises(AttributeError), library_errors_are_config_errors("f.json"):
        list(named_module_tensors(None))  # in Accelerate, as where a version of it has changed
