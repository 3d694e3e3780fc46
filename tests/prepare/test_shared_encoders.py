"""Stores of different corpora with latents of one encoder: another store's, or one that the user vouches for."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mmldlm import cli, train
from mmldlm.data.encoders import load_encoder
from mmldlm.data.inspect import verify_store
from mmldlm.data.mixture import open_data
from mmldlm.data.store import Store
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.errors import DataError, UsageError
from mmldlm.loading.load import load_run
from mmldlm.prepare.job import make_plan
from mmldlm.prepare.options import PrepareConfig
from mmldlm.prepare.pipeline import prepare
from tests.helpers.sample_corpus import flip_bit, small_config, write_corpus
from tests.helpers.tiny_config import TINY
from tests.helpers.user_errors import assert_user_error, refused


def other_corpus(folder: Path, seed: int = 7) -> Path:
    return write_corpus(folder / f"corpus-{seed}.txt", 300, seed)


def sharing(out: Path, first: Path, corpus: Path, **options: object) -> PrepareConfig:
    """Options for a store with tokenizer and encoder of the store `first`."""
    values: dict[str, object] = {"tokenizer": str(first / "tokenizer"), "encoder": str(first), "channels": None}
    return small_config(out, corpus, max_length=32, **{**values, **options})


def imported(out: Path, seed: int, **options: object) -> PrepareConfig:
    """Options for a store with latents [n, 6] in a file."""
    corpus = other_corpus(out.parent, seed)
    latents = np.random.default_rng(seed).normal(size=(len(corpus.read_text().splitlines()), 6)).astype(np.float32)
    np.save(out.with_suffix(".npy"), latents)
    values = {"encoder": f"precomputed:{out.with_suffix('.npy')}", "latent_ids": "position", "channels": None}
    return small_config(out, corpus, max_length=40, **{**values, **options})


def train_steps(folder: Path, steps: int, *settings: object) -> int:
    config = folder / "config.yaml"
    config.write_text(TINY.format(run=folder / "run", store=folder / "none"))
    common = ("validation.every=0", "checkpoint.every_steps=0", f"train.steps={steps}", "data.num_workers=0")
    return train.main([str(config), *common, *map(str, settings)])


def test_a_store_takes_the_encoder_of_another(tiny_store: Path, tmp_path: Path) -> None:
    """Its latents are those of the first store's encoder, and both can be mixed, trained on and evaluated with."""
    config = sharing(tmp_path / "second", tiny_store, other_corpus(tmp_path))
    manifest, first = prepare(config, progress=False), Store.open(tiny_store)
    assert manifest.encoder == first.manifest.encoder and verify_store(tmp_path / "second") == []
    second = Store.open(tmp_path / "second").split("test")
    tokens, lengths, latents = second.gather(np.arange(len(second)))
    ids = [part.tolist() for part in np.split(tokens, lengths.cumsum()[:-1])]
    texts = Tokenizer.load(tiny_store / "tokenizer").decode_batch(ids)
    encoded = load_encoder(tiny_store / "encoder").encode(texts)
    assert np.allclose(latents, encoded, atol=1e-3)
    mixture = {str(tiny_store): 1, str(tmp_path / "second"): 1}
    open_data(mixture)
    # A run on one store goes on with the other, and with both.
    assert train_steps(tmp_path, 2, f"data.path={tiny_store}") == 0
    assert train_steps(tmp_path, 3, f"data.path={tmp_path / 'second'}") == 0
    assert train_steps(tmp_path, 4, f"data.mixture={mixture}") == 0
    assert load_run(tmp_path / "run", data=str(tmp_path / "second")).step == 4


@pytest.mark.quick
def test_a_store_of_another_encoder_is_another_store(tiny_store: Path, tmp_path: Path) -> None:
    """What the encoder's files are is part of the store's sources."""
    shutil.copytree(tiny_store, tmp_path / "first")
    config = sharing(tmp_path / "second", tmp_path / "first", other_corpus(tmp_path))
    manifest = prepare(config, progress=False)
    assert manifest.sources[-1]["folder"] == str(tmp_path / "first/encoder")
    assert prepare(config, progress=False) == manifest
    path = tmp_path / "first/encoder/encoder.json"
    path.write_text(path.read_text() + "\n")
    with refused(DataError, "sources"):
        prepare(config, progress=False)


@pytest.mark.quick
def test_encoders_of_stores_that_cannot_be_taken(
    tiny_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = other_corpus(tmp_path)
    prepare(imported(tmp_path / "imported", 1, over_length="cut"), progress=False)
    shutil.copytree(tiny_store, tmp_path / "damaged")
    flip_bit(tmp_path / "damaged/encoder/encoder.json", 0)
    (tmp_path / "folder").mkdir()
    capsys.readouterr()
    for encoder, code, *named in (
        (tmp_path / "none", 2, "expected lsa, learned", "folder of a data store"),
        (tmp_path / "folder", 2, "expected lsa"),
        (tmp_path / "imported", 2, "imported latents", "--encoder-version"),
        (tmp_path / "damaged", 65, "encoder.json", "not a readable encoder"),
    ):
        status = cli.main(["prepare", str(corpus), "--out", str(tmp_path / "out"), "--encoder", str(encoder)])
        assert_user_error((status, capsys.readouterr().err), code, str(encoder), *map(str, named))
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.incomplete").exists()
    for option, value in {"channels": 4, "latent_tokens": 2, "encoder_steps": 5, "prompt": "a"}.items():
        with refused(UsageError, f"--{option.replace('_', '-')} {value}", "--encoder"):
            sharing(tmp_path / "out", tiny_store, corpus, **{option: value}).checked()


def test_a_version_makes_imported_latents_those_of_one_encoder(tmp_path: Path) -> None:
    """Equal names alone do not, since their revision is a hash of the sources."""
    named = {"latents_of": "SONAR", "tokenizer": "characters"}
    stores = {}
    for name, seed, options in (
        ("unnamed-1", 1, {}),
        ("unnamed-2", 2, {}),
        ("one", 1, {"encoder_version": "1.0"}),
        ("two", 2, {"encoder_version": "1.0"}),
        ("later", 3, {"encoder_version": "2.0"}),
    ):
        config = imported(tmp_path / name, seed, **named, **options)
        # Lower-case letters and spaces alone, for one tokenizer without a file.
        corpus = Path(config.inputs[0])
        corpus.write_text(corpus.read_text().lower().replace(".", ""))
        stores[name] = prepare(replace(config, over_length="cut"), progress=False)
    for first, second, difference in (("unnamed-1", "unnamed-2", "revision"), ("one", "later", "revision")):
        with refused(DataError, tmp_path / first, tmp_path / second, f"encoder {difference}"):
            open_data({str(tmp_path / first): 1, str(tmp_path / second): 1})
    mixed = open_data({str(tmp_path / "one"): 1, str(tmp_path / "two"): 1})
    assert mixed.manifest.encoder == stores["one"].encoder == stores["two"].encoder
    assert {key: mixed.manifest.encoder[key] for key in ("name", "revision")} == {"name": "SONAR", "revision": "1.0"}
    assert load_encoder(tmp_path / "one/encoder").identity == mixed.manifest.encoder
    assert verify_store(tmp_path / "one") == []
    assert stores["one"].options["encoder_version"] == "1.0"


def test_a_run_goes_on_with_more_imported_latents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Resumed on an extended store; without a version the other store is another encoder's."""
    for name, seed, options in (
        ("one", 1, {"encoder_version": "1"}),
        ("two", 2, {"encoder_version": "1"}),
        ("unnamed", 3, {}),
    ):
        first = {"tokenizer": str(tmp_path / "one/tokenizer")} if name != "one" else {}
        config = imported(tmp_path / name, seed, latents_of="SONAR", over_length="cut", **options, **first)
        prepare(config, progress=False)
    assert train_steps(tmp_path, 2, f"data.path={tmp_path / 'one'}") == 0
    assert train_steps(tmp_path, 3, f"data.mixture={ {str(tmp_path / 'one'): 2, str(tmp_path / 'two'): 1} }") == 0
    capsys.readouterr()
    status = train_steps(tmp_path, 4, f"data.path={tmp_path / 'unnamed'}")
    assert_user_error((status, capsys.readouterr().err), 65, "encoder.revision", alone=False)


@pytest.mark.quick
def test_an_embedded_corpus_takes_the_encoder_of_a_store(tiny_store: Path, tmp_path: Path) -> None:
    """Its plan names the encoder beside the packages."""
    config = PrepareConfig(str(tmp_path / "out"), corpus="simple-docs", encoder=str(tiny_store))
    config.checked()
    sources = make_plan(config).sources
    assert sources[0]["package"] == "python" and sources[-1]["folder"] == str(tiny_store / "encoder")
