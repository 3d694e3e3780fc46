"""The run config: typed, strict, and refused in one line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
import yaml

from mmldlm.config import RunConfig, load_config
from mmldlm.errors import ConfigError, ExitCode
from mmldlm.model.parts import Part
from mmldlm.settings.declaration import dump, leaves
from mmldlm.settings.fields import build, nearest_key, to_yaml
from mmldlm.settings.yaml import parse_yaml

pytestmark = pytest.mark.quick
ALL_PARTS = ", ".join(get_args(Part))


# Unknown keys, with what an error message suggests.
SUGGESTIONS = {
    "optim.lrr": ["optim.lr"],
    "modle.depth": ["model.depth"],
    "model.widht": ["model.width"],
    "vaildation.every": ["validation.every"],
    "latent.predction": ["latent.prediction"],
    "checkpoint.keep_bst": ["checkpoint.keep_best"],
    "guard.non_finite": ["guard.nonfinite"],
    "ema_decay": ["ema.decay"],
    "num_heads": ["model.num_heads"],
    "optimizer.betas": ["optim.betas"],
    "training.warmup_steps": ["optim.warmup_steps"],
    "lr": ["optim.lr", "schedule.lr"],
    "model.t_eps": [],
    "hydra.run": [],
}


@pytest.mark.parametrize(("key", "suggested"), SUGGESTIONS.items())
def test_suggestions_end_alike_or_are_spelled_alike(key: str, suggested: list[str]) -> None:
    advice = nearest_key(key, {known for known, _ in leaves(RunConfig)})
    named = f"did you mean {' or '.join(map(repr, suggested))}?"
    assert advice == (named if suggested else "see docs/settings.md for the keys")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optim.lrr=1e-4", "unknown key 'optim.lrr': did you mean 'optim.lr'?"),
        ("num_heads=4", "did you mean 'model.num_heads'?"),
        ("distributed.timeout=4", "did you mean 'distributed.timeout_s'?"),
        ("optim.lr=fast", "optim.lr: expected number, found 'fast'"),
        ("train.steps=1.5", "train.steps: expected whole number, found 1.5"),
        ("train.steps=true", "train.steps: expected whole number, found True"),
        ("train.steps=0", "train.steps: must be at least 1, found 0"),
        ("optim.lr=-1", "optim.lr: must be above 0, found -1"),
        ("optim.lr=.nan", "optim.lr: expected finite number, found nan"),
        (
            "latent.noise_schedule=cosine",
            "latent.noise_schedule: expected 'vp_cosine', 'vp_linear', 'vp_sigmoid' or 'rectified_flow'",
        ),
        (
            "latent.prediction=eps",
            "latent.prediction: expected 'epsilon', 'x0' or 'v', found 'eps' (did you mean 'epsilon'?)",
        ),
        ("optim.betas=[0.9]", "optim.betas.1: expected a value, found [0.9]"),
        ("optim.betas=[0.9, 0.98, 1]", "optim.betas: expected at most 2 values, found [0.9, 0.98, 1]"),
        ("optim.betas=[0.9, 1.5]", "optim.betas: expected values in [0, 1), found [0.9, 1.5]"),
        ("mode.l2x=1", "mode: unknown mode 'l2x', expected l2t, t2l, joint"),
        ("mode={l2t: -1}", "mode: weights must be at least 0"),
        ("model.num_heads=3", "num_heads: model.width 256 must be a multiple of 2 x num_heads, found 3"),
        ("model=5", "model: expected keys below it, found 5"),
        ("optim.lr.peak=1", "optim.lr: expected number"),
        ("distributed.timeout_s=12e6", "distributed.timeout_s: must be at most 86400 (24 h), found 1.2e+07"),
        ("mode={l2t: much}", "mode.l2t: expected number, found 'much'"),
        ("mode=l2t sampling.guidance=2", "sampling.guidance: 2.0 needs a run that trained joint"),
        ("mode_schedule={0: l2t} sampling.guidance=2", "sampling.guidance: 2.0 needs a run that trained joint"),
        ("mode_schedule=l2t", "mode_schedule: expected map, found 'l2t'"),
        ("train.micro_batch_size=none", "train.micro_batch_size: expected whole number, found 'none'"),
        ("guard.grad_norm_spike=1", "guard.grad_norm_spike: must be above 1, found 1"),
        ("log.tensorboard=1", "log.tensorboard: expected true or false, found 1"),
        ("optim.lr='1e-3'", "optim.lr: expected number, found '1e-3'"),
        ("optim.lr=true", "optim.lr: expected number, found True"),
        ("run.seed=18446744073709551616", "run.seed: must be at most 9223372036854775807, found 18446744073709551616"),
        ("loss.huber_delta=2", "loss.huber_delta: does nothing under latent: cosine, expected 1.0 or latent: huber"),
        ("optim.muon.momentum=0.5", "optim.muon: does nothing under name: adamw, expected its defaults or name: muon"),
        ("loss.text=masked_mean loss.text_weight_limit=2", "does nothing under text: masked_mean, expected null or"),
        ("mode_schedule={soon: l2t}", "mode_schedule.soon: expected whole number, found 'soon'"),
        ("mode_schedule={1.5: l2t}", "mode_schedule.1.5: expected whole number, found '1.5'"),
        ("mode_schedule={-5: l2t}", "mode_schedule.-5: expected an optimizer step, at least 0, found -5"),
        ("mode_schedule={5: l2x}", "mode_schedule.5: expected 'l2t', 't2l' or 'joint' or map, found 'l2x'"),
        ("mode_schedule={5: {l2x: 1}}", "mode_schedule.5: unknown mode 'l2x', expected l2t, t2l, joint"),
        ("mode_schedule={5: {l2t: much}}", "mode_schedule.5.l2t: expected number, found 'much'"),
        ("mode_schedule.5=l2x", "mode_schedule.5: expected 'l2t'"),
        ("memory.activation_checkpointing=some", "expected 'none', 'full', 'selective' or 'every_k', found 'some'"),
        ("memory.every_k=0", "memory.every_k: must be at least 1, found 0"),
        (
            "memory.activation_checkpointing=full memory.kept_blocks=4",
            "memory.kept_blocks: expected fewer than model.depth 4",
        ),
        ("freeze=[texthead]", "found 'texthead' (did you mean 'text_head'?)"),
        ("freeze=text_head", "freeze: expected list, found 'text_head'"),
        (
            "freeze=[latent_encoder, noise_times, length_head]",
            "freeze: the length loss (loss.length_weight 0.01) needs",
        ),
        (
            "mode=t2l freeze=[backbone, text_encoder, latent_encoder, noise_times, latent_head]",
            "freeze: the latent loss (loss.latent_weight 10) needs one of text_encoder, latent_encoder, noise_times, "
            "text_stream, latent_stream, latent_head to train, found backbone",
        ),
        (f"mode=t2l loss.latent_weight=0 loss.length_weight=0 freeze=[{ALL_PARTS}]", "freeze: expected a part left"),
        ("sampling.remask=2", "sampling.remask: must be at most 1, found 2"),
    ],
)
def test_bad_value_is_refused_by_key(override: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, re.split(r" (?=\w+[.\w]*=)", override))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == ExitCode.CONFIG == 64


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["optim.lrr=1", "train.steps=x", "model.depth=0"])
    assert all(key in str(caught.value) for key in ("optim.lrr", "train.steps", "model.depth"))


def test_long_timeout_needs_permission() -> None:
    config = load_config(None, ["distributed.timeout_s=100000", "distributed.allow_long_timeout=true"])
    assert config.distributed.timeout_s == 100_000


@pytest.mark.parametrize("text", ["a: 1\na: 2", "a: {b: 1, b: 2}", "a: [1, {c: 1, c: 1}]"])
def test_duplicate_keys_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="twice"):
        parse_yaml(text, "x.yaml")


@pytest.mark.parametrize("text", ["a: !!python/object/apply:os.system [x]", "a: [", "{", "a: b: c", "\t- x", "a: *b"])
def test_broken_or_unsafe_yaml_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "x.yaml")
    assert "x.yaml" in str(caught.value) and "\n" not in str(caught.value)


def test_number_formats() -> None:
    assert load_config(None, ["optim.lr=1e-4"]).optim.lr == 1e-4
    assert load_config(None, ["optim.lr=1"]).optim.lr == 1.0
    assert load_config(None, ["optim.warmup_steps=0.1"]).optim.warmup_steps == 0.1
    assert load_config(None, ["train.micro_batch_size=null"]).train.micro_batch_size is None


SHARED = "text_encoder, latent_encoder, noise_times, backbone"


@pytest.mark.parametrize(
    ("override", "trains"),
    [
        (f"mode=t2l freeze=[{SHARED}]", True),
        (f"mode=l2t freeze=[{SHARED}]", True),
        (f"mode=l2t freeze=[{SHARED}, latent_head]", True),
        (f"mode=l2t freeze=[{SHARED}, text_head]", False),
        (f"mode=t2l freeze=[{SHARED}, text_head]", True),
        (f"mode=t2l freeze=[{SHARED}, latent_head]", False),
        (f"mode=t2l freeze=[{SHARED}, latent_head] loss.latent_weight=0", True),
        (f"mode=t2l freeze=[{SHARED}, length_head] loss.length_weight=0", True),
        (f"freeze=[{SHARED}, latent_head]", False),
        (f"mode=l2t mode_schedule={{10: t2l}} freeze=[{SHARED}, latent_head]", False),
        (f"mode=joint mode_schedule={{0: l2t}} freeze=[{SHARED}, latent_head]", True),
        (f"mode=l2t mode_schedule={{10: t2l}} freeze=[{SHARED}, text_head]", False),
    ],
)
def test_freezable_parts_depend_on_the_losses(override: str, trains: bool) -> None:
    overrides = re.split(r" (?=\w+[.\w]*=)", override)
    if trains:
        assert "backbone" in load_config(None, overrides).freeze
    else:
        with pytest.raises(ConfigError, match=r"^freeze: the (text|latent) loss"):
            load_config(None, overrides)


def test_guidance_may_come_from_a_later_mode() -> None:
    assert load_config(None, ["mode=l2t", "mode_schedule={10: joint}", "sampling.guidance=2"]).sampling.guidance == 2


def test_mode_schedule_formats_agree(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("mode_schedule:\n  0: l2t\n  100: {l2t: 1, joint: 3}\n")
    expected = {0: "l2t", 100: {"l2t": 1.0, "joint": 3.0}}
    assert load_config(path).mode_schedule == expected
    assert load_config(None, ["mode_schedule={0: l2t, 100: {l2t: 1, joint: 3}}"]).mode_schedule == expected
    dotted = ["mode_schedule.0=l2t", "mode_schedule.100.l2t=1", "mode_schedule.100.joint=3"]
    assert load_config(None, dotted).mode_schedule == expected
    assert load_config(path, ["mode_schedule.100=t2l"]).mode_schedule == {0: "l2t", 100: "t2l"}


def test_missing_file_and_wrong_content(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("- a\n")
    with pytest.raises(ConfigError, match="found list"):
        load_config(tmp_path / "list.yaml")


CHANGED = [
    "optim.lr=2e-5",
    "mode={l2t: 1, joint: 3}",
    "mode_schedule={0: l2t, 100: {joint: 1, t2l: 2}}",
    "freeze=[backbone, length_head]",
    "memory.activation_checkpointing=every_k",
    "model.mlp=gelu",
    "train.steps=7",
    "train.batch_schedule={5: {micro_batch_size: 4}, 9: {global_batch_size: 256}}",
]


def test_resolved_config_reads_back_as_itself() -> None:
    config = load_config(None, CHANGED)
    assert build(RunConfig, parse_yaml(to_yaml(config), "resolved")) == config
    assert yaml.safe_load(to_yaml(config)) == dump(config)


def test_every_setting_has_a_doc() -> None:
    assert [key for key, field in leaves(RunConfig) if not field.metadata.get("doc")] == []


def test_one_block_is_not_refused_for_a_default() -> None:
    assert load_config(None, ["model.depth=1", "memory.activation_checkpointing=full"]).memory.kept_blocks == 1


def test_keys_of_lgdlm_name_the_page_that_translates_them(tmp_path: Path) -> None:
    path = tmp_path / "mdlm.yaml"
    path.write_text("training: {dtype: bf16}\noptimizer: {lr: 1e-4}\nmodel: {hidden_size: 512}\n")
    with pytest.raises(ConfigError, match=r"training, optimizer: .*docs/migration.md"):
        load_config(path)
    path.write_text("training: {steps: 3}\n")  # a slip, not another trainer's file
    with pytest.raises(ConfigError, match="unknown key 'training'"):
        load_config(path)
