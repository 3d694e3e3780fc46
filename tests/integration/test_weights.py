"""`prepare --weight-field`: from the file to the gradient of a step, by every engine. Logged losses have no weights."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmldlm import cli, train
from mmldlm.config import load_config
from mmldlm.data.loader import fixed_batches
from mmldlm.data.mixture import open_data
from mmldlm.data.store import Store
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.diffusion.corruption import StaticSizes
from mmldlm.diffusion.objective import LossConfig, NoisedBatch, Objective
from mmldlm.errors import ExitCode
from mmldlm.model.heads import LossWeights
from mmldlm.model.mmdit import MMDiT
from mmldlm.trainer.trainer import Trainer
from tests.helpers.engine_runs import CURVE, PARITY, difference, record_list, records
from tests.helpers.forked_runs import ForkedRuns
from tests.helpers.noised_batch import noised_batch
from tests.helpers.sample_corpus import write_corpus
from tests.helpers.small_model import MAX_LENGTH, small_model
from tests.helpers.user_errors import assert_user_error

OPTIONS = ["--vocab-size=300", "--channels=8", "--validation-fraction=0.1", "--test-fraction=0.1"]
MIXED = {"joint": 1, "l2t": 1, "t2l": 1}
LENGTHS, WEIGHTS = (4, 4, 9, 2, 7, 12), (0.5, 0.0, 2.0, 1.5, 3.0, 0.25)
TERMS = LossConfig(label_smoothing=0.1, z_loss=1e-3, text_weight_limit=3.0, latent_time_weighting="min_snr")
LEARNED = LossConfig(latent_weighting="uncertainty", latent="normalized_mse", length_weight=0.5)


def weights_of(texts: Sequence[str]) -> list[float]:
    """Different ones, and none by which a text's length or words are known."""
    return [(0, 0.5, 1, 3)[sum(map(ord, text)) % 4] for text in texts]


def write_rows(folder: Path, weights: Callable[[Sequence[str]], Sequence[Any]] = weights_of) -> Path:
    texts = write_corpus(folder / "corpus.txt", 400).read_text().splitlines()
    rows = [{"text": text, "stars": weight} for text, weight in zip(texts, weights(texts), strict=True)]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepare(path: Path, out: Path, *options: str) -> Path:
    assert cli.main(["prepare", str(path), "--out", str(out), *OPTIONS, *options]) == 0
    return out


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same texts with weights, with equal ones, and without."""
    folder = tmp_path_factory.mktemp("weights")
    path = write_rows(folder)
    (folder / "equal").mkdir()
    equal = write_rows(folder / "equal", lambda texts: [7] * len(texts))
    return {
        "weighted": prepare(path, folder / "weighted", "--weight-field=stars"),
        "equal": prepare(equal, folder / "same", "--weight-field=stars"),
        "none": prepare(path, folder / "none"),
    }


def config_of(store: Path, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "config.yaml"
    path.write_text(PARITY.format(run=folder / "run", store=store))
    return path


def curve(store: Path, folder: Path, *settings: str) -> Path:
    assert train.main([str(config_of(store, folder)), "train.steps=6", "validation.every=0", *settings]) == 0
    return folder / "run"


# --- the store ------------------------------------------------------------------------------------------------


def test_every_format_gives_each_sample_its_weight(stores: dict[str, Path], tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [json.loads(line) for line in write_rows(tmp_path).read_text().splitlines()]
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text", "stars"], *([row["text"], row["stars"]] for row in rows)])
    table = pa.Table.from_pylist([{**row, "stars": float(row["stars"])} for row in rows])
    parquet.write_table(table, tmp_path / "rows.parquet")
    for suffix in ("csv", "parquet"):
        out = prepare(tmp_path / f"rows.{suffix}", tmp_path / suffix, "--weight-field=stars", "--part-bytes=4000")
        infos = [Store.open(path).manifest for path in (out, stores["weighted"])]
        assert infos[0].mean_weight == pytest.approx(infos[1].mean_weight, rel=1e-12)
        for name in ("train", "validation", "test"):
            split = Store.open(out).split(name)
            everything = np.arange(len(split))
            weights = split.weights(everything)
            given = [weight for part in split.shards for weight in part.weights.tolist()]
            texts = [text.tolist() for text in split.samples(everything)[1]]
            expected = weights_of(Tokenizer.load(out / "tokenizer").decode_batch(texts))
            assert given == expected and len({*given}) == 4
            np.testing.assert_allclose(weights, np.array(given) / infos[0].mean_weight, rtol=1e-6)
        assert Store.open(out).split("train").weights(np.arange(300)).mean() == pytest.approx(1, abs=0.1)


def test_parts_of_a_long_document_have_its_weight(tmp_path: Path) -> None:
    path = write_rows(tmp_path)
    documents = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    store = Store.open(prepare(path, tmp_path / "store", "--weight-field=stars", "--max-length=32"))
    split = store.split("train")
    given = np.concatenate([part.weights for part in split.shards])
    tokens = [text.tolist() for text in split.samples(np.arange(len(split)))[1]]
    for text, weight in zip(Tokenizer.load(store.path / "tokenizer").decode_batch(tokens), given.tolist(), strict=True):
        assert weight in {weights_of([document])[0] for document in documents if text in document}
    assert store.manifest.problems["over_length"] > 100 and store.manifest.mean_weight == pytest.approx(given.mean())


@pytest.mark.quick
@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("-0.5", "field 'stars' is -0.5, expected a weight of at least 0"),
        ("NaN", "field 'stars' is nan, expected a weight of at least 0"),
        ("Infinity", "field 'stars' is inf, expected a weight of at least 0"),
        ("1e39", "field 'stars' is 1e+39, expected a weight of at least 0"),
        ("null", "field 'stars' is None, expected a weight of at least 0"),
        ("true", "field 'stars' is True, expected a weight of at least 0"),
        ('"many"', "field 'stars' is 'many', expected a weight of at least 0"),
    ],
)
def test_what_is_no_weight_is_one_line(
    value: str, found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one two", "stars": 1}\n{"text": "three", "stars": VALUE}\n'.replace("VALUE", value))
    given = ["prepare", str(path), "--out", str(tmp_path / "store"), "--weight-field=stars"]
    result = cli.main(given), capsys.readouterr().err
    assert_user_error(result, ExitCode.DATA, f"{path}:2: {found}", alone=False)


def test_training_needs_a_weight_above_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_rows(tmp_path, lambda texts: [0] * len(texts))
    given = ["prepare", str(path), "--out", str(tmp_path / "store"), *OPTIONS, "--weight-field=stars"]
    result = cli.main(given), capsys.readouterr().err
    assert_user_error(result, ExitCode.DATA, "all weights of the training split are 0", alone=False)


def test_in_a_mixture_shares_stay(stores: dict[str, Path]) -> None:
    store = open_data({str(stores["weighted"]): 1, str(stores["none"]): 1})
    split = store.split("train")
    for source, first, stop in split.source_ranges():
        weights = split.weights(np.arange(first, stop))
        assert weights is not None and weights.mean() == pytest.approx(1, rel=1e-6)
        assert len({*weights.tolist()}) == (4 if source.name == "weighted" else 1)


# --- the loss -------------------------------------------------------------------------------------------------


def network(loss: LossConfig) -> MMDiT:
    model = small_model(1, "math").train()
    model.text_terms = loss.needs_text_terms
    model.loss_weights = LossWeights((1.0, 10.0)) if loss.latent_weighting == "uncertainty" else None
    return model


def gradient(objective: Objective, batch: NoisedBatch, model: MMDiT) -> tuple[torch.Tensor, torch.Tensor]:
    model.zero_grad()
    value, sums = objective(model, batch, objective.divisors(batch.counts.tolist(), batch))
    value.backward()
    named = ((name, part.grad) for name, part in model.named_parameters() if not name.startswith("loss_weights"))
    return torch.cat([grad.flatten() for _, grad in named if grad is not None]), sums


@pytest.mark.quick
@pytest.mark.parametrize("loss", [LossConfig(length_weight=0.5), TERMS, LossConfig(text="masked_mean"), LEARNED])
def test_a_weight_multiplies_the_gradient_of_its_sample(loss: LossConfig) -> None:
    """And no logged sum, and filled micro-batches of recorded passes have the same gradient."""
    model = network(loss)
    objective, plain = noised_batch(MIXED, 1, LENGTHS, loss, accuracy=True)
    expected, sums = torch.zeros(()), gradient(objective, plain, model)[1]
    for index, weight in enumerate(WEIGHTS):
        alone = [float(place == index) for place in range(len(WEIGHTS))]
        expected = (
            expected
            + weight * gradient(objective, noised_batch(MIXED, 1, LENGTHS, loss, alone, accuracy=True)[1], model)[0]
        )
    weighted = noised_batch(MIXED, 1, LENGTHS, loss, WEIGHTS, accuracy=True)[1]
    (filled,) = StaticSizes(MAX_LENGTH).fill([weighted], 128)
    for batch in (weighted, filled):
        found, logged = gradient(objective, batch, model)
        assert (found - expected).norm() <= 1e-5 * expected.norm()
        torch.testing.assert_close(logged[:7], sums[:7], rtol=1e-5, atol=1e-6)  # without what only training adds
    unweighted = gradient(objective, plain, model)[0]
    ones = noised_batch(MIXED, 1, LENGTHS, loss, [1.0] * len(WEIGHTS), accuracy=True)[1]
    assert (gradient(objective, ones, model)[0] - unweighted).norm() <= 1e-5 * unweighted.norm()
    assert (unweighted - expected).norm() > 0.1 * expected.norm()


# --- the run --------------------------------------------------------------------------------------------------


def test_equal_weights_are_no_weights(stores: dict[str, Path], tmp_path: Path) -> None:
    runs = {name: curve(store, tmp_path / name, "train.micro_batch_size=8") for name, store in stores.items()}
    assert difference(runs["equal"], runs["none"]) <= 1e-6
    assert difference(runs["weighted"], runs["none"]) > 1e-3
    assert records(runs["weighted"])[1]["loss/total"] == pytest.approx(records(runs["none"])[1]["loss/total"], rel=1e-6)


def test_a_worker_sends_the_weights_of_its_batches(stores: dict[str, Path], tmp_path: Path) -> None:
    config = load_config(config_of(stores["weighted"], tmp_path), ["data.num_workers=1", "train.steps=2"])
    with Trainer(config) as run:
        split = run.components.store.split("train")
        for steps_done, micro_batches in run.steps():
            for batch in run.components.corruption(steps_done, micro_batches):
                expected = split.weights(batch.sample_ids.numpy())
                assert batch.trained_length_weight.tolist() == expected.tolist()  # type: ignore[union-attr]
            break


def test_validations_are_not_weighted(stores: dict[str, Path], tmp_path: Path) -> None:
    """The weights of both networks are the initial ones, to the bit."""
    frozen = ("optim.lr=1e-30", "validation.every=3", "train.steps=3", "optim.weight_decay=0")
    found = [record_list(curve(stores[name], tmp_path / name, *frozen), "validation") for name in ("weighted", "none")]
    losses = [{key: value for key, value in run[0].items() if key.startswith("validation/")} for run in found]
    reports = [json.loads((tmp_path / name / "run/startup.json").read_text()) for name in ("weighted", "none")]
    assert ["samples have weights" in str(report["notices"]) for report in reports] == [True, False]
    assert losses[0] == losses[1] and len(losses[0]) > 5
    split = Store.open(stores["weighted"]).split("validation")
    assert split.weights(np.arange(9)) is not None
    assert all(batch.weights is None for batch in fixed_batches(split, range(9), 4))


@pytest.mark.parametrize(
    ("engine", "settings"),
    [
        ("single", ["data.num_workers=2"]),
        ("single", ["train.micro_batch_size=8"]),
        ("ddp", []),
        ("fsdp2", []),
        ("zero2", []),
        pytest.param("zero3", [], marks=pytest.mark.slow),
    ],
)
def test_every_engine_follows_one_process(
    engine: str, settings: list[str], stores: dict[str, Path], forked: ForkedRuns, tmp_path: Path
) -> None:
    reference = curve(stores["weighted"], tmp_path / "one")
    config, folder = config_of(stores["weighted"], tmp_path / "more"), tmp_path / "more/run"
    given = [config, "train.steps=6", "validation.every=0", *settings]
    forked.succeed(engine, folder, 1 if engine == "single" else 2, *given)
    bound = 0 if "data.num_workers=2" in settings else 1e-5
    assert len(records(folder)) == 6 and difference(folder, reference, CURVE) <= bound
