"""Conditions that are never masked: `prepare --prefix-field`, from the file to samples and likelihoods."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import mmldlm
from mmldlm import cli, train
from mmldlm.data.loader import collate
from mmldlm.data.mixture import open_data
from mmldlm.data.store import Store
from mmldlm.data.tokenizer import split_prefix
from mmldlm.diffusion.noise import MODES, draw_noise, mode_weights
from mmldlm.loading.load import load_run
from mmldlm.settings.successors import _noticed
from tests.helpers.tiny_config import TINY
from tests.helpers.user_errors import assert_user_error

# What the answer is follows from the question alone.
ANSWERS = {"rose": "red", "sea": "blue", "leaf": "green", "coal": "black", "snow": "white", "sun": "yellow"}
TAILS = ("", " indeed", " indeed today")
OPTIONS = ["--prefix-field=prefix", "--group-field=prefix", "--tokenizer=words", "--vocab-size=400", "--channels=8"]
OPTIONS += ["--test-fraction=0.1"]


def question(thing: str, number: int = 1) -> str:
    return f"question {number}: the color of {thing}?"


def write_questions(path: Path, count: int = 600, name: str = "prefix") -> Path:
    things = [sorted(ANSWERS)[number % len(ANSWERS)] for number in range(count)]
    rows = [
        {"text": f"it is {ANSWERS[thing]}{TAILS[number % 3]}", name: question(thing, number % 97)}
        for number, thing in enumerate(things)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("questions")
    given = ["prepare", str(write_questions(folder / "questions.jsonl")), "--out", str(folder / "store")]
    assert cli.main([*given, *OPTIONS]) == 0
    return folder / "store"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Path:
    folder = tmp_path_factory.mktemp("answers")
    config = folder / "config.yaml"
    config.write_text(TINY.format(run=folder / "run", store=store), encoding="utf-8")
    settings = "train.steps=300 train.global_batch_size=32 optim.lr=1e-2 mode.joint=0.6 mode.l2t=0.2 mode.t2l=0.2"
    settings += " validation.every=150 checkpoint.every_steps=0 log.every=100"
    assert train.main([str(config), *settings.split()]) == 0
    return folder / "run"


def test_samples_are_a_prefix_its_end_and_a_text(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened = Store.open(store)
    assert opened.manifest.has_prefixes
    split, pad = opened.split("train"), opened.manifest.pad_id
    assert (split.gather(np.arange(len(split)))[0] == pad).sum() == len(split)
    _, (text,), _ = split.samples(np.array([5]))
    assert 3 <= len(text) <= 5 and split_prefix(split.tokens(5).tolist(), pad)[1] == text.tolist()
    assert cli.main(["data", "sample", str(store), "-n", "1"]) == 0
    assert "?[PAD] it is" in capsys.readouterr().out
    assert cli.main(["data", "info", str(store)]) == 0
    assert ", prefixes included\n" in capsys.readouterr().out


def test_nothing_of_a_prefix_is_masked_or_counted(run_dir: Path, store: Path) -> None:
    run = load_run(run_dir)
    ids = np.arange(24)
    batch = collate(Store.open(store).split("train"), ids, ids)
    is_text, lengths = run.objective.text.find_texts(batch.tokens, batch.layout)
    assert (torch.tensor(batch.lengths) - lengths >= 8).all() and (lengths >= 3).all() and (lengths <= 5).all()
    for step in range(5):
        noise = draw_noise(batch, 0, step, len(ids), mode_weights({"l2t": 0.4, "t2l": 0.2, "joint": 0.4}))
        noised = run.objective.corrupt(batch, noise)
        sample = batch.layout.sample_of_token[noised.positions]
        assert is_text[noised.positions].all()
        masked = torch.bincount(sample, minlength=len(ids))
        assert torch.equal(masked, (noise.t_text.double() * lengths).ceil().long())
        assert torch.equal(noised.length_target, lengths - 1)
        trains = noise.mode != MODES.index("t2l")
        own = torch.zeros(len(ids)).index_add(0, sample, noised.token_weight) / noise.importance
        assert own[trains] == pytest.approx(lengths[trains].float())  # each text has its own tokens' weight
    run.objective.text.masks = "independent"
    everything = replace(noise, t_text=torch.ones(len(ids)))
    assert len(run.objective.corrupt(batch, everything).positions) == int(lengths.sum())


def test_texts_without_a_prefix_are_told(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], short_run_dir: Path
) -> None:
    """Once for a run, whatever way leads there."""
    (tmp_path / "texts.txt").write_text("it is red\n" * 3)
    batch = [str(tmp_path / "texts.txt"), "--batch", "1", "--out"]
    for number, (folder, arguments, notices) in enumerate(
        [
            (run_dir, ["sample", "--mode", "joint"], 1),
            (run_dir, ["sample", "--mode", "joint", "--prefix", question("rose", 9)], 0),
            (run_dir, ["score", *batch, f"{tmp_path}/score.jsonl", "--draws", "1"], 1),
            (short_run_dir, ["sample", "--mode", "joint"], 0),
        ]
    ):
        _noticed.clear()
        assert cli.main([arguments[0], str(folder), *arguments[1:]]) == 0, number
        assert capsys.readouterr().err.count("none was given") == notices, arguments


def test_answers_follow_questions(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = mmldlm.load(run_dir)
    questions = [question(thing, 9) for thing in ANSWERS]
    made = model.sample(mode="joint", prefixes=questions, lengths=3)
    expected = [f"it is {color}" for color in ANSWERS.values()]
    assert made.texts == expected
    assert model.sample(mode="joint", prefixes=questions[:1], count=2, lengths=3).texts == expected[:1] * 2
    # Those without a question are answers to none in particular.
    assert len(set(model.sample(mode="joint", count=24, lengths=3).texts)) > 1

    scores = [
        model.score(expected, prefixes=prefixes).nats.mean()
        for prefixes in (questions, [*questions[1:], questions[0]], None)
    ]
    assert scores[0] < 0.5 < scores[1] and scores[0] < scores[2]
    assert (model.score(expected[:1], prefixes=questions[:1]).tokens == 3).all()

    # The same by commands: with options, from a file, and of a bundle.
    given = ["--mode", "joint", "--prefix", questions[0], "--length", "3"]
    assert cli.main(["sample", str(run_dir), *given]) == 0
    assert capsys.readouterr().out.splitlines()[-1].strip() == expected[0]
    assert cli.main(["export", str(run_dir), str(tmp_path / "bundle")]) == 0
    rows = [{"text": text, "prefix": asked} for text, asked in zip(expected, questions, strict=True)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert cli.main(["score", str(tmp_path / "bundle"), str(file), "--out", str(tmp_path / "scored.jsonl")]) == 0
    scored = [json.loads(line) for line in (tmp_path / "scored.jsonl").read_text().splitlines()]
    assert all(row["nats"] < 1 and row["tokens"] == 3 for row in scored)
    out = tmp_path / "texts.jsonl"
    assert cli.main(["sample", str(tmp_path / "bundle"), "--texts", str(file), "--out", str(out)]) == 0
    texts = [json.loads(line)["texts"][0] for line in out.read_text().splitlines()]
    assert [text.split()[:3] for text in texts] == [text.split() for text in expected]


def test_evaluation_measures_the_texts_alone(run_dir: Path) -> None:
    assert cli.main(["evaluate", str(run_dir), "--texts", "16", "--samples", "40"]) == 0
    result = json.loads((run_dir / "evaluation.json").read_text())
    # Without a latent: what the question tells, which neither the words' frequencies do nor a model without it.
    assert result["bits_per_token"] < 0.6 < 1.5 < result["controls"]["unigram_bits_per_token"]
    assert result["l2t"]["exact_match_true_length"] > 0.9
    assert all("question" not in f"{sample}" for sample in result["l2t"]["samples"])
    assert all("question" not in sample for sample in result["joint"]["samples"])
    assert "question" not in (run_dir / "samples.md").read_text()
    assert result["joint"]["token_entropy_true"] < 3  # ten words


def test_a_mixture_of_stores_with_and_without(store: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain.jsonl"
    plain.write_text("".join(json.dumps({"text": f"it is {color} now"}) + "\n" for color in ANSWERS.values()) * 20)
    options = f"--tokenizer {store}/tokenizer --encoder {store} --test-fraction 0.2 --validation-fraction 0.2"
    assert cli.main(["prepare", str(plain), "--out", str(tmp_path / "plain"), *options.split()]) == 0
    assert not Store.open(tmp_path / "plain").manifest.has_prefixes
    assert open_data({str(tmp_path / "plain"): 9.0, str(store): 1.0}).manifest.has_prefixes


def test_refusals(run_dir: Path, short_run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["--text", "it", "--text", "is", "--prefix", "a", "--prefix", "b", "--prefix", "c"]
    file = write_questions(tmp_path / "questions.jsonl", 60, name="asked")
    prepare = ["prepare", file, "--out", tmp_path / "store", "--prefix-field"]
    for code, arguments, expected in (
        (2, ["sample", short_run_dir, "--mode", "joint", "--prefix", "why?"], "expected a run on data with prefixes"),
        (2, ["sample", run_dir, *texts], "one for each of 2 conditions, found 3"),
        (65, [*prepare, "prefix"], "no field 'prefix', found 'asked', 'text'"),
        (65, [*prepare, "asked", "--group-field", "asked", "--max-length", "6"], "leaves no room for a text"),
        (2, [*prepare, "asked", "--format", "lines"], "--prefix-field asked: lines has no"),
    ):
        capsys.readouterr()
        status = cli.main([*map(str, arguments)])
        shown = capsys.readouterr().err
        assert_user_error((status, shown), code, expected, alone=False)


def test_tables_and_csv_have_prefixes_too(store: Path, tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [json.loads(line) for line in write_questions(tmp_path / "questions.jsonl").read_text().splitlines()]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "questions.parquet")
    with (tmp_path / "questions.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["prefix", "text"])
        writer.writeheader()
        writer.writerows(rows)
    expected = Store.open(store).split("train").gather(np.arange(100))[0]
    for suffix in ("parquet", "csv"):
        out = tmp_path / suffix
        assert cli.main(["prepare", str(tmp_path / f"questions.{suffix}"), "--out", str(out), *OPTIONS]) == 0
        np.testing.assert_array_equal(Store.open(out).split("train").gather(np.arange(100))[0], expected)
