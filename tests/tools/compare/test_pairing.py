"""What the line about pairing says is what the runs draw."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mmldlm.config import RunConfig, load_config, write_config
from mmldlm.data.loader import Loader
from mmldlm.data.store import Store
from mmldlm.run.factory import build_objective, corrupt_step
from mmldlm.telemetry.metrics import MetricsFile
from mmldlm.tools.report.paired import pairing
from mmldlm.tools.runs import History

pytestmark = pytest.mark.quick


def draws(config: RunConfig, step: int = 1) -> dict[str, Any]:
    """The samples of a step, and what their noise and masks make of them."""
    store = Store.open(config.data.path)
    data = replace(config.data, num_workers=0)
    loader = Loader(store, "train", data, config.run.seed, lambda _: config.train.batch_at(0, 1), 0, 1)
    size = config.train.batch_at(step, 1)
    batches = loader.read(config.train.samples_before(step), size, 0)
    noised = corrupt_step(config, build_objective(config, store.manifest), step, size.global_batch_size, batches)
    return {
        "samples": [sample for batch in batches for sample in batch.sample_ids],
        "tensors": [(name, value) for batch in noised for name, value in batch.tensors().items()],
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one["samples"] == other["samples"] and all(
        name == other_name and torch.equal(value, other_value)
        for (name, value), (other_name, other_value) in zip(one["tensors"], other["tensors"], strict=True)
    )


def line(folder: Path, *configs: RunConfig) -> str:
    for name, config in zip("ab", configs, strict=True):
        MetricsFile(folder / name / "metrics.jsonl", None).close()
        write_config(config, folder / name)
    return pairing(History(folder / "a"), History(folder / "b"))


@pytest.mark.parametrize(
    "change",
    [
        "optim.lr=1e-3",
        "model.width=64",
        "run.init_seed=7",
        "loss.latent=mse",
        "loss.latent_weight=3",
        "train.micro_batch_tokens=100",
        "schedule.lr=constant",
        "latent.prediction=v",
    ],
)
def test_paired_runs_draw_the_same(change: str, tiny_config: Path, tmp_path: Path) -> None:
    base, other = load_config(tiny_config), load_config(tiny_config, [change])
    assert line(tmp_path, base, other).startswith("paired")
    one, two = draws(base), draws(other)
    assert one["samples"] == two["samples"] or "micro_batch" in change
    assert sorted(one["samples"]) == sorted(two["samples"])
    if change.startswith(("optim", "model", "run", "schedule")):
        assert line(tmp_path, base, other) == "paired: the same samples, noise and masks in every step"
        assert same(one, two)
    if change.startswith("loss"):
        assert "other losses (" + change.partition("=")[0] in line(tmp_path, base, other)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("mode=l2t", "modes (mode"),
        ("text.masks=independent", "masks (text.masks)"),
        ("latent.time_sampling=logit_normal", "noise (latent.time_sampling)"),
    ],
)
def test_other_noise_of_the_same_samples(change: str, what: str, tiny_config: Path, tmp_path: Path) -> None:
    base, other = load_config(tiny_config), load_config(tiny_config, [change])
    assert line(tmp_path, base, other).startswith(f"paired except {what}")
    one, two = draws(base), draws(other)
    assert one["samples"] == two["samples"] and not same(one, two)


@pytest.mark.parametrize(
    "change",
    ["run.seed=4", "data.window=16", "train.global_batch_size=4", "train.batch_schedule={0: {global_batch_size: 4}}"],
)
def test_other_samples(change: str, tiny_config: Path, tmp_path: Path) -> None:
    base, other = load_config(tiny_config), load_config(tiny_config, [change])
    assert line(tmp_path, base, other).startswith(f"not paired because {change.partition('=')[0]}")
    assert draws(base)["samples"] != draws(other)["samples"]


def test_micro_batches_of_a_schedule(tiny_config: Path, tmp_path: Path) -> None:
    base = load_config(tiny_config, ["train.batch_schedule={5: {global_batch_size: 4}}"])
    other = load_config(tiny_config, ["train.batch_schedule={5: {global_batch_size: 4, micro_batch_size: 2}}"])
    assert line(tmp_path, base, other) == "paired: the same samples, noise and masks in every step"
    assert line(tmp_path, base, load_config(tiny_config, ["log.every=2"])).startswith("not paired because")
    (tmp_path / "b" / "config.yaml").unlink()
    assert pairing(History(tmp_path / "a"), History(tmp_path / "b")).startswith("not known to be paired: ")
