"""Quality metrics logged during training equal those computed from its checkpoints."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from mmldlm import train
from mmldlm.distributed.collectives import Collectives
from mmldlm.evaluation import Evaluation, EvaluationConfig
from mmldlm.evaluation.quality import SEED, quality
from mmldlm.evaluation.t2l import latent_metrics
from mmldlm.evaluation.validate import validation_ids
from mmldlm.loading.load import load_run
from tests.helpers.metrics import read_metrics

MODES = {"l2t": "bleu", "t2l": "cosine", "joint": "token_entropy"}


@pytest.mark.setting("validation.quality_samples")
@pytest.mark.parametrize("samples", [6, 18])
def test_quality_matches_the_checkpoint(samples: int, tiny_config: Path, tmp_path: Path) -> None:
    """With EMA, the averaged weights are the ones measured."""
    settings = [f"validation.quality_samples={samples}", "validation.quality_every=3", "train.steps=5", "ema.decay=0.9"]
    assert train.main([str(tiny_config), *settings, "validation.every=0"]) == 0
    records = [record for record in read_metrics(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "quality"]
    assert [record["step"] for record in records] == [3, 5]
    result = {key: value for key, value in records[-1].items() if key.startswith("quality/")}
    run = load_run(tmp_path / "run")
    assert run.weights == "ema"
    ids = validation_ids(run.store.split("validation"), samples)
    assert len(ids) == samples
    assert result == quality(run, ids, Collectives())
    assert result != quality(load_run(tmp_path / "run", weights="trained"), ids, Collectives())
    assert {f"quality/{mode}_{key}" for mode, key in MODES.items()} < result.keys()
    # And the metrics are those of `mmldlm evaluate`.
    config = EvaluationConfig("validation", samples, samples, seed=SEED, batch=16)
    direct = latent_metrics(Evaluation(run, config, ids=ids))
    assert result["quality/t2l_cosine"] == direct["cosine"]
    # Of eight channels, a Frechet distance needs nine samples.
    assert ("quality/joint_frechet_distance" in result) == (samples >= 9)
    assert all(map(math.isfinite, result.values()))


def test_only_trained_modes_are_measured_and_none_by_default(tiny_config: Path, tmp_path: Path) -> None:
    settings = ["train.steps=2", "validation.every=0", "validation.quality_samples=2"]
    for name, extra in (("off", []), ("on", ["mode=t2l", "validation.quality_every=2"])):
        assert train.main([str(tiny_config), f"run.dir={tmp_path / name}", *settings, *extra]) == 0
    off, on = (
        [record for record in read_metrics(tmp_path / name / "metrics.jsonl") if record["kind"] == "quality"]
        for name in ("off", "on")
    )
    assert off == [] and len(on) == 1
    keys = [key for key in on[0] if key.startswith("quality/")]
    assert keys and all(key.startswith("quality/t2l_") for key in keys)
