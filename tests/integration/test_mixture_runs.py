"""Runs on several stores: exact resume, a fixed latent scale, and reports per store."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mmldlm import cli, train
from mmldlm.batch import Batch
from mmldlm.config import load_config
from mmldlm.data.mixture import open_data
from mmldlm.data.sampler import count_draws
from mmldlm.data.store import Store
from mmldlm.diffusion.objective import NoisedBatch
from mmldlm.loading.compatibility import LATENTS_NAME
from mmldlm.loading.load import load_run
from mmldlm.trainer.start_check import check_store
from mmldlm.trainer.trainer import Trainer
from tests.helpers.engine_runs import record_list
from tests.helpers.sample_corpus import overwrite_value
from tests.helpers.stores import random_letters_store

SHARES = {"one": 0.7, "two": 0.2, "three": 0.1}
SIZES = {"one": 90, "two": 25, "three": 6}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("stores")
    for seed, (name, samples) in enumerate(SIZES.items()):
        random_letters_store(made / name, samples, seed, center=seed, spread=1 + seed, longest=20 - 5 * seed)
    return made


@pytest.fixture
def run(folder: Path, tiny_config: Path, tmp_path: Path) -> Callable[..., Path]:
    """Train on the mixture in `tmp_path/NAME`."""

    def trained(
        name: str,
        *settings: str,
        code: int = 0,
        shares: dict[str, float] = SHARES,
        trainer_cls: type[Trainer] = Trainer,
    ) -> Path:
        mixture = {str(folder / store): share for store, share in shares.items()}
        common = [str(tiny_config), f"data.mixture={mixture}", f"run.dir={tmp_path / name}"]
        arguments = [*common, "data.window=32", "validation.every=0", *settings]
        assert train.main(arguments, trainer_cls=trainer_cls) == code
        return tmp_path / name

    return trained


def test_resumed_run_is_bitwise_equal(run: Callable[..., Path], tmp_path: Path) -> None:
    settings = ("train.steps=40", "checkpoint.every_steps=0", "checkpoint.keep_steps=[17]")
    whole, kept = run("whole", *settings), Path("checkpoints", "step-00000017")
    shutil.copytree(whole / kept, tmp_path / "parts" / kept)
    parts = run("parts", *settings, "data.num_workers=2")
    assert [record["step"] for record in record_list(parts)] == list(range(18, 41))
    for ours, theirs in zip(record_list(parts), record_list(whole)[17:], strict=True):
        same = [key for key in theirs if key.startswith(("loss/", "optim/", "data/"))]
        assert len(same) > 8 and all(ours[key] == theirs[key] for key in same)
    last = [load_file(each / "checkpoints/step-00000040/model.safetensors") for each in (whole, parts)]
    assert all(torch.equal(tensor, last[1][name]) for name, tensor in last[0].items())
    epochs = [record_list(whole)[-1][f"data/epoch/{name}"] for name in SHARES]
    drawn = count_draws(
        8 * 40, [source.share for source in open_data(load_config(whole / "config.yaml").data.location).sources]
    )
    assert epochs == [count / size for count, size in zip(drawn, SIZES.values(), strict=True)] and epochs[2] > 5


@pytest.mark.setting("data.mixture")
def test_the_report_and_the_validation_name_each_store(
    run: Callable[..., Path], capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    result = run("run", "validation.every=4", "validation.samples=20")
    report = json.loads((result / "startup.json").read_text())["mixture"]
    assert [(each["name"], each["share"], each["samples"]) for each in report] == [
        (name, pytest.approx(share), SIZES[name]) for name, share in SHARES.items()
    ]
    assert [each["epochs"] for each in report] == [45 / 90, 13 / 25, 6 / 6]
    shown = capsys.readouterr().out
    assert "70.00% from one: 90 samples, read 0.5 times" in shown and "10.00% from three: 6 samples" in shown
    for record in record_list(result, "validation"):
        own = [record[f"validation/{name}/text"] for name in SHARES]
        assert min(own) < record["validation/text"] < max(own)
    (start,) = record_list(result, "start")
    assert start["samples"]["train"] == sum(SIZES.values())
    config = load_config(result / "config.yaml")
    assert check_store(config)[1].status == "ok" and "121 samples" in check_store(config)[1].found


def test_a_checkpoint_keeps_the_scale_of_its_latents(
    run: Callable[..., Path], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The scale also holds after a change of shares, and with one of the stores alone."""
    result = run("run")
    pooled = open_data(load_config(result / "config.yaml").data.location).manifest
    for data in (None, str(folder / "three"), str(folder / "one")):
        loaded = load_run(result, data=data)
        assert loaded.store.manifest.latent == pooled.latent != Store.open(folder / "three").manifest.latent
        assert loaded.store.manifest.max_length == pooled.max_length
    arguments = ["sample", str(result), "--mode", "joint", "--count", "2", "--data", str(folder / "three")]
    assert cli.main(arguments) == 0
    capsys.readouterr()
    run("run", "train.steps=12", shares={"one": 0.1, "two": 0.2, "three": 0.7})
    assert "latents are standardized as in the checkpoint" in capsys.readouterr().out
    saved = json.loads((result / "checkpoints/step-00000012" / LATENTS_NAME).read_text())
    assert saved == {**asdict(pooled.latent), "mean": list(pooled.latent.mean)}
    run("run", "train.steps=12", shares={"one": 0.1, "two": 0.2, "three": 0.7})
    assert load_run(result).store.manifest.latent == pooled.latent


def test_latents_have_the_scale_of_the_checkpoint(run: Callable[..., Path]) -> None:
    run("run", "train.steps=2")
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    class RecordingTrainer(Trainer):
        def corrupt(self, step: int, micro_batches: Sequence[Batch]) -> list[NoisedBatch]:
            seen.extend((batch.sample_ids, batch.latents) for batch in micro_batches)
            components = self.components
            assert components.objective.latent.max_norm == components.store.manifest.latent.max_norm
            return super().corrupt(step, micro_batches)

    shares = {"one": 0.1, "two": 0.2, "three": 0.7}
    result = run("run", "train.steps=3", shares=shares, trainer_cls=RecordingTrainer)
    store = open_data(load_config(result / "config.yaml").data.location)
    scale = load_run(result).store.manifest.latent
    assert scale != store.manifest.latent and len(seen) == 1
    for rows, latents in seen:
        raw = store.split("train").gather(rows.numpy())[2]
        assert torch.equal(latents, torch.from_numpy(scale.standardize(raw)))


def test_skipped_steps_name_stores_and_rows(run: Callable[..., Path]) -> None:
    explosion = ("optim.lr=1e38", "optim.warmup_steps=0", "guard.max_consecutive=3", "train.steps=50")
    result = run("run", *explosion, code=70)
    lines = [json.loads(line) for line in (result / "skipped_steps.jsonl").read_text().splitlines()]
    skips = [part["samples"] for line in lines if line["kind"] == "skip" for rank in line["ranks"] for part in rank]
    assert len(skips) >= 3
    for samples in skips:
        assert sum(map(len, samples.values())) == 8
        assert all(0 <= row < SIZES[name] for name, rows in samples.items() for row in rows)


def test_bad_samples_of_any_store_are_left_out_by_name(
    run: Callable[..., Path], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = shutil.copytree(folder / "two", tmp_path / "bad")
    overwrite_value(bad, "train-00000.latents", (3, 0, 0), float("nan"))
    overwrite_value(bad, "test-00000.latents", (1, 0, 0), float("nan"))
    shares = {"one": 0.7, str(bad): 0.3}
    run("refused", code=65, shares=shares)
    assert f"{bad}/train-00000.latents.npy: sample 3 (row 3 of split train)" in capsys.readouterr().err
    result = run("run", "data.max_bad_samples=1", shares=shares)
    (left_out,) = json.loads((result / "startup.json").read_text())["skipped_samples"]
    assert f"{bad}/train-00000.latents.npy: sample 3 (row 3 of split train)" in left_out
    assert record_list(result)[-1]["data/epoch/bad"] == 19 / 24
