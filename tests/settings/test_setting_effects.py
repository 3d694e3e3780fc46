"""Every setting does something: two short runs that differ in it alone differ in what they write.

A setting whose effect such runs cannot show is tested elsewhere, by a test with the marker `setting(KEY)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from mmldlm.config import RunConfig
from mmldlm.settings.declaration import leaves
from tests.helpers.observed_run import ASPECTS, EXPLODING, Aspect, observe

MUON = ("optim.name=muon",)
OFTEN = ("checkpoint.every_steps=1", "train.steps=5")
RECOMPUTED = ("model.depth=4", "memory.activation_checkpointing=every_k")
AVERAGED = ("ema.decay=0.999",)
DRAWN = ("log.tensorboard=true",)
WRITTEN = ("log={every: 1, tensorboard: true, figures_every: 0}",)


def effect(key: str, value: str, changes: Aspect, under: tuple[str, ...] = ()) -> Any:
    """`key=value`, as on a command line, changes an aspect of a run with the settings `under`."""
    return pytest.param(key, value, changes, under, id=key, marks=pytest.mark.setting(key))


EFFECTS = [
    effect("freeze", "[latent_stream]", "curve"),
    effect("mode", "l2t", "curve"),
    effect("mode_schedule", "{1: l2t}", "curve"),
    effect("precision", "bf16", "curve"),
    effect("run.seed", "4", "curve"),
    effect("run.init_seed", "4", "curve"),
    effect("data.num_workers", "1", "workers"),
    effect("data.window", "8", "batches"),
    effect("model.depth", "1", "curve"),
    effect("model.width", "64", "curve"),
    effect("model.latent_width", "16", "curve"),
    effect("model.num_heads", "4", "curve"),
    effect("model.mlp", "gelu", "curve"),
    effect("model.mlp_ratio", "2", "curve"),
    effect("model.conditioning_width", "16", "curve"),
    effect("model.modulation_rank", "0", "curve"),
    effect("model.tie_embeddings", "false", "curve"),
    effect("model.rope_base", "10", "curve"),
    effect("model.dropout", "0.5", "curve"),
    effect("attention.backend", "math", "parts"),
    effect("memory.activation_checkpointing", "selective", "parts"),
    effect("memory.every_k", "3", "parts", RECOMPUTED),
    effect("memory.kept_blocks", "3", "parts", RECOMPUTED),
    effect("latent.noise_schedule", "rectified_flow", "curve"),
    effect("latent.prediction", "v", "curve"),
    effect("latent.time_sampling", "logit_normal", "curve"),
    effect("latent.location", "1", "curve", ("latent.time_sampling=logit_normal",)),
    effect("latent.scale", "0.3", "curve", ("latent.time_sampling=logit_normal",)),
    effect("latent.mode_scale", "0.5", "curve", ("latent.time_sampling=mode",)),
    effect("latent.time_shift", "3", "curve"),
    effect("latent.pure_noise", "0.5", "curve"),
    effect("latent.stratified", "false", "curve"),
    effect("text.time_sampling", "mode", "curve"),
    effect("text.mode_scale", "0.5", "curve", ("text.time_sampling=mode",)),
    effect("text.stratified", "false", "curve"),
    effect("text.masks", "independent", "curve"),
    effect("loss.huber_delta", "0.1", "curve", ("loss.latent=huber",)),
    effect("loss.latent_weighting", "uncertainty", "curve"),
    effect("loss.text_weight_limit", "1.5", "curve"),
    effect("loss.latent_time_weighting", "min_snr", "curve"),
    effect("loss.min_snr_gamma", "0.1", "curve", ("loss.latent_time_weighting=min_snr",)),
    effect("loss.label_smoothing", "0.3", "curve"),
    effect("loss.z_loss", "0.1", "curve"),
    effect("loss.text", "masked_mean", "curve"),
    effect("loss.latent", "mse", "curve"),
    effect("loss.latent_weight", "1", "curve"),
    effect("loss.length_weight", "1", "curve"),
    effect("optim.name", "muon", "curve"),
    effect("optim.lr", "1e-2", "curve"),
    effect("optim.betas", "[0.5, 0.5]", "curve"),
    effect("optim.eps", "1e-2", "curve"),
    effect("optim.weight_decay", "5", "curve"),
    effect("optim.fused", "false", "parts"),
    effect("optim.clip_norm", "0.01", "curve"),
    effect("optim.warmup_steps", "3", "curve"),
    effect("optim.warmup_bounds", "[3, 3]", "curve"),
    effect("optim.lr_scaling", "sqrt", "curve"),
    effect("optim.lr_reference_batch", "64", "curve", ("optim.lr_scaling=sqrt",)),
    effect("optim.muon.momentum", "0.5", "curve", MUON),
    effect("optim.muon.nesterov", "false", "curve", MUON),
    effect("optim.muon.ns_steps", "1", "curve", MUON),
    effect("schedule.lr", "linear", "curve", ("train.steps=5",)),
    effect("schedule.min_lr_ratio", "0.5", "curve"),
    effect("schedule.restart_period", "2", "curve", ("schedule.lr=cosine_restarts", "train.steps=5")),
    effect("schedule.decay_steps", "3", "curve", ("schedule.lr=wsd", "train.steps=5")),
    effect("ema.decay", "0.9", "validation"),
    effect("ema.warmup", "false", "validation", AVERAGED),
    effect("ema.evaluate", "false", "validation", AVERAGED),
    effect("train.steps", "2", "records"),
    effect("train.global_batch_size", "4", "batches"),
    effect("train.micro_batch_size", "2", "batches"),
    effect("train.micro_batch_tokens", "30", "batches"),
    effect("train.batch_schedule", "{1: {micro_batch_size: 4}}", "batches"),
    effect("sampling.steps", "2", "texts", WRITTEN),
    effect("sampling.temperature", "1", "texts", WRITTEN),
    effect("sampling.top_p", "0.05", "texts", WRITTEN),
    effect("sampling.guidance", "9", "texts", WRITTEN),
    effect("sampling.decoding", "ancestral", "texts", WRITTEN),
    effect("sampling.remask", "1", "texts", WRITTEN),
    effect("sampling.latent_sampler", "euler", "latents", ("sampling.joint_latents=drawn",)),
    effect("sampling.joint_order", "together", "latents"),
    effect("sampling.joint_latents", "drawn", "latents"),
    effect("validation.every", "1", "records"),
    effect("validation.samples", "8", "validation"),
    effect("validation.text_samples", "1", "texts", WRITTEN),
    effect("validation.quality_every", "2", "records", ("validation.quality_samples=4",)),
    effect("log.every", "2", "records"),
    effect("log.noise_levels", "2", "validation"),
    effect("log.tensorboard", "true", "files"),
    effect("log.figures_every", "0", "validation", DRAWN),
    effect("log.figure_samples", "3", "validation", DRAWN),
    effect("profile.steps", "[2, 2]", "files"),
    effect("profile.ranks", "[1]", "files", ("profile.steps=[2, 2]",)),
    effect("checkpoint.every_steps", "2", "files"),
    effect("checkpoint.every_minutes", "1e-9", "files"),
    effect("checkpoint.keep_last", "1", "files", OFTEN),
    effect("checkpoint.keep_steps", "[1]", "files"),
    effect("checkpoint.keep_every", "2", "files"),
    effect("checkpoint.keep_best", "3", "files", ("validation.every=1", "checkpoint.keep_last=1")),
    effect("guard.nonfinite", "stop", "end", EXPLODING),
    effect("guard.max_consecutive", "2", "end", EXPLODING),
]
HOW_TO = f"""
For each add to EFFECTS in tests/settings/test_setting_effects.py, with a value that is not its default,
    effect("KEY", "VALUE", ASPECT)
where two runs of three steps then differ in ASPECT:
{chr(10).join(f"    {aspect:<11} {what}" for aspect, what in ASPECTS.items())}
or, where no such run can show it, write a test that fails when the key is ignored, marked with
    @pytest.mark.setting("KEY")"""


@pytest.mark.quick
def test_every_setting_has_a_test(tested_settings: set[str]) -> None:
    keys = {key for key, _ in leaves(RunConfig)}
    missing = sorted(keys - tested_settings)
    assert not missing, f"no test of the default suite shows that these settings do anything: {missing}.{HOW_TO}"
    assert tested_settings <= keys, f"unknown keys in marks: {sorted(tested_settings - keys)}"


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory, tiny_store: Path) -> Callable[..., Mapping[Aspect, Any]]:
    """Return what a run with the given settings shows; each is trained once."""
    known: dict[tuple[object, ...], Mapping[Aspect, Any]] = {}

    def run(*settings: str, samples: bool) -> Mapping[Aspect, Any]:
        if (settings, samples) not in known:
            folder = tmp_path_factory.mktemp("run") / "run"
            known[settings, samples] = observe(folder, tiny_store, *settings, samples=samples)
        return known[settings, samples]

    return run


@pytest.mark.parametrize(("key", "value", "changes", "under"), EFFECTS)
def test_setting_has_an_effect(
    key: str, value: str, changes: Aspect, under: tuple[str, ...], observed: Callable[..., Mapping[Aspect, Any]]
) -> None:
    samples = changes == "latents"
    before = observed(*under, samples=samples)
    after = observed(*under, f"{key}={value}", samples=samples)
    assert before[changes] != after[changes], f"{key}={value} changes nothing of {changes} ({ASPECTS[changes]})"


def test_equal_runs_show_the_same(tiny_store: Path, tmp_path: Path) -> None:
    first, second = (observe(tmp_path / name, tiny_store, *WRITTEN, samples=True) for name in ("a", "b"))
    assert first.keys() == second.keys() == ASPECTS.keys()
    assert [aspect for aspect in ASPECTS if first[aspect] != second[aspect]] == []
    assert all(first[aspect] for aspect in ASPECTS if aspect != "workers"), "an aspect that shows nothing"
