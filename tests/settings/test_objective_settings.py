"""Every setting of losses and noise times changes the gradient of the first step."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmldlm import train
from tests.helpers.metrics import read_metrics

MODE, LOGIT, HUBER = "text.time_sampling=mode", "latent.time_sampling=logit_normal", "loss.latent=huber"
LATENT_MODE, MIN_SNR = "latent.time_sampling=mode", "loss.latent_time_weighting=min_snr"
# A setting behind those that it needs.
SETTINGS = [
    (MODE,),
    (MODE, "text.mode_scale=0.5"),
    ("text.stratified=false",),
    ("text.masks=exact",),
    (LOGIT,),
    (LOGIT, "latent.location=1"),
    (LOGIT, "latent.scale=0.3"),
    (LATENT_MODE,),
    (LATENT_MODE, "latent.mode_scale=0.5"),
    ("latent.stratified=false",),
    (HUBER,),
    (HUBER, "loss.huber_delta=0.1"),
    (MIN_SNR,),
    (MIN_SNR, "loss.min_snr_gamma=0.1"),
    ("loss.text_weight_limit=1.5",),
    ("loss.label_smoothing=0.3",),
    ("loss.z_loss=0.1",),
    ("loss.latent_weighting=uncertainty",),
]


def test_each_setting_changes_the_first_gradient(tiny_config: Path, tmp_path: Path) -> None:
    result: dict[tuple[str, ...], float] = {}
    common = [str(tiny_config), "train.steps=1", "validation.every=0", "data.num_workers=0", "data.verify=sizes"]
    common.append("loss.latent_weight=0.1")  # or the first gradient is nearly that of the latent loss alone
    for number, settings in enumerate([(), *SETTINGS]):
        folder = tmp_path / str(number)
        assert train.main([*common, f"run.dir={folder}", *settings]) == 0
        (record,) = (each for each in read_metrics(folder / "metrics.jsonl") if each["kind"] == "train")
        result[settings] = record["optim/grad_norm"]
    for settings in SETTINGS:
        assert result[settings] != pytest.approx(result[settings[:-1]], rel=1e-7), settings
