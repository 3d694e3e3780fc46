"""Latents from files meet their texts by id, and what has no partner is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mmldlm.data.encoders import ImportedLatents, load_encoder
from mmldlm.data.inspect import verify_store
from mmldlm.data.store import Store
from mmldlm.errors import DataError, UsageError
from mmldlm.prepare.options import PrepareConfig
from mmldlm.prepare.pipeline import prepare
from mmldlm.prepare.readers.latents import LatentFile
from tests.helpers.lgdlm_folders import pairs_of
from tests.helpers.sample_corpus import small_config, write_corpus
from tests.helpers.user_errors import refused

pytestmark = pytest.mark.quick
COUNT = 120


@pytest.fixture
def corpus(tmp_path: Path) -> tuple[Path, dict[str, str], np.ndarray]:
    """A JSONL file, ids by text and latents [n, 6], of which row i is that of id "doc-i"."""
    texts = list(dict.fromkeys(write_corpus(tmp_path / "corpus.txt").read_text().splitlines()))[:COUNT]
    rows = [{"name": f"doc-{row}", "text": text} for row, text in enumerate(texts)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(map(json.dumps, rows)))
    latents = np.random.default_rng(0).normal(size=(COUNT, 6)).astype(np.float32)
    return tmp_path / "corpus.jsonl", {row["text"]: row["name"] for row in rows}, latents


def config_for(tmp_path: Path, corpus: Path, latents: Path, ids: object, **options: object) -> PrepareConfig:
    values: dict = {"channels": None, "latent_dtype": "float32", "key_field": "name", **options}
    encoder = f"precomputed:{latents}"
    return small_config(tmp_path / "store", corpus, encoder=encoder, latent_ids=ids and str(ids), **values)


def shuffled(folder: Path, latents: np.ndarray) -> tuple[np.ndarray, list[str]]:
    order = np.random.default_rng(1).permutation(COUNT)
    return latents[order], [f"doc-{row}" for row in order]


def as_parquet(folder: Path, rows: np.ndarray, ids: list[str]) -> tuple[Path, Path | None]:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    pyarrow.parquet.write_table(
        pa.table({"id": ids, "latents": rows.tolist()}), folder / "a.parquet", row_group_size=50
    )
    return folder / "a.parquet", None


def as_npy(folder: Path, rows: np.ndarray, ids: list[str]) -> tuple[Path, Path]:
    np.save(folder / "a.npy", rows)
    (folder / "ids.json").write_text(json.dumps(ids))
    return folder / "a.npy", folder / "ids.json"


def as_npy_of_one_token(folder: Path, rows: np.ndarray, ids: list[str]) -> tuple[Path, Path]:
    np.save(folder / "a.npy", rows[:, None])
    np.save(folder / "ids.npy", np.array(ids))
    return folder / "a.npy", folder / "ids.npy"


def as_safetensors(folder: Path, rows: np.ndarray, ids: list[str]) -> tuple[Path, Path]:
    save_file({"latents": rows, "other": rows[:3]}, folder / "a.safetensors")
    (folder / "ids.txt").write_text("\n".join(ids) + "\n")
    return folder / "a.safetensors", folder / "ids.txt"


@pytest.mark.parametrize("write", [as_npy, as_npy_of_one_token, as_safetensors, as_parquet])
def test_texts_get_the_latents_of_their_ids(
    write: Callable, corpus: tuple[Path, dict[str, str], np.ndarray], tmp_path: Path
) -> None:
    path, names, latents = corpus
    file, ids = write(tmp_path, *shuffled(tmp_path, latents))
    config = config_for(tmp_path, path, file, ids, latents_of="SONAR")
    manifest = prepare(config, progress=False)
    result = dict(pairs_of(Store.open(tmp_path / "store")))
    assert result.keys() == names.keys()
    for text, name in names.items():
        assert np.array_equal(result[text][0], latents[int(name.removeprefix("doc-"))])
    assert manifest.encoder["name"] == "SONAR" and str(file) in str(manifest.sources)
    encoder = load_encoder(tmp_path / "store/encoder")
    assert isinstance(encoder, ImportedLatents) and encoder.identity == manifest.encoder
    assert encoder.encode(["a", "b"]).shape == (2, 1, 6) and np.isnan(encoder.encode(["a"])).all()
    assert verify_store(tmp_path / "store") == []
    if file.suffix == ".npy":
        np.save(file, np.load(file) + 1)
        with refused(DataError, "sources"):
            prepare(config, progress=False)


@pytest.mark.parametrize(("scale", "center"), [(0.01, 100.0), (1e-7, 0.0)])
def test_latents_that_the_stored_type_would_move_are_refused(tmp_path: Path, scale: float, center: float) -> None:
    corpus = write_corpus(tmp_path / "corpus.txt", 300)
    latents = np.random.default_rng(0).normal(size=(300, 16)) * scale + center
    np.save(tmp_path / "latents.npy", latents.astype(np.float32))
    options = {"encoder": f"precomputed:{tmp_path / 'latents.npy'}", "latent_ids": "position", "channels": None}
    config = small_config(tmp_path / "store", corpus, **options)
    with refused(DataError, "rounded", "--latent-dtype float32"):
        prepare(config, progress=False)
    prepare(replace(config, latent_dtype="float32"), progress=False)
    store = Store.open(tmp_path / "store")
    train = store.split("train")
    standard = store.standardize(np.stack([train.latents(row) for row in range(len(train))]))
    assert len(np.unique(standard, axis=0)) == len(train) and np.square(standard).mean() == pytest.approx(1, rel=1e-3)


def test_ids_that_occur_twice_are_named(corpus: tuple[Path, dict[str, str], np.ndarray], tmp_path: Path) -> None:
    path, _, latents = corpus
    file, names = as_npy(tmp_path, latents, [f"doc-{max(row, 4)}" for row in range(COUNT)])
    with refused(DataError, "'doc-4'", "row 1", "row 0"):
        prepare(config_for(tmp_path, path, file, names), progress=False)
    file, names = as_npy(tmp_path, *shuffled(tmp_path, latents))
    path.write_text(path.read_text().replace('doc-9"', 'doc-8"'))
    with refused(DataError, "corpus.jsonl:10", "'doc-8'", "corpus.jsonl:9"):
        prepare(config_for(tmp_path, path, file, names), progress=False)
    path.write_text(path.read_text().replace('"name": "doc-8"', '"name": ""', 1))
    with refused(DataError, "corpus.jsonl:9", "'name'"):
        prepare(config_for(tmp_path, path, file, names), progress=False)


def test_places_count_only_when_asked_for(corpus: tuple[Path, dict[str, str], np.ndarray], tmp_path: Path) -> None:
    _, names, latents = corpus
    np.save(tmp_path / "a.npy", latents)
    lines = [*names, "", ""]
    lines[5], lines[-2] = "", lines[5]  # an empty line has a place, and a latent of its own
    (tmp_path / "lines.txt").write_text("\n".join(lines[:-1]) + "\n")
    with refused(UsageError, "--latent-ids position"):
        prepare(config_for(tmp_path, tmp_path / "lines.txt", tmp_path / "a.npy", None, key_field=None), progress=False)
    config = config_for(tmp_path, tmp_path / "lines.txt", tmp_path / "a.npy", "position", key_field=None)
    with refused(DataError, "a.npy", COUNT, COUNT + 1):
        prepare(replace(config, on_problem="skip"), progress=False)
    np.save(tmp_path / "a.npy", np.concatenate([latents, latents[:1] + 1]))
    assert prepare(config, progress=False).problems == {"empty": 1, "over_length": 0}
    for text, latent in pairs_of(Store.open(tmp_path / "store")):
        row = lines.index(text)
        assert np.array_equal(latent[0], latents[row] if row < COUNT else latents[0] + 1)


@pytest.mark.parametrize(
    ("array", "named"),
    [
        (np.zeros((COUNT, 2, 3, 4), np.float32), ["[120, 2, 3, 4]", "[n, C]", "[n, M, C]"]),
        (np.zeros((7, 6), np.float32), [120, 7]),
        (np.zeros((COUNT, 6), np.float32), ["row 0", "zeros"]),
        (np.full((COUNT, 6), np.nan, np.float32), ["row 0", "finite"]),
        (np.ones((COUNT, 6), np.int64), ["row 0", "int64 [6]", "float"]),
    ],
)
def test_files_that_are_no_latents(
    array: np.ndarray, named: list, corpus: tuple[Path, dict[str, str], np.ndarray], tmp_path: Path
) -> None:
    file, ids = as_npy(tmp_path, array, [f"doc-{row}" for row in range(COUNT)])
    with refused(DataError, *named):
        prepare(config_for(tmp_path, corpus[0], file, ids, max_problems=1000), progress=False)


def test_latents_are_truncated_and_normalized_if_asked(
    corpus: tuple[Path, dict[str, str], np.ndarray], tmp_path: Path
) -> None:
    path, names, latents = corpus
    file, ids = as_npy(tmp_path, latents, [f"doc-{row}" for row in range(COUNT)])
    truncated = latents[:, :4]
    unit = truncated / np.linalg.norm(truncated, axis=1, keepdims=True)
    for normalize, expected in ((True, unit), (False, truncated)):
        config = config_for(tmp_path, path, file, ids, channels=4, normalise=normalize, overwrite=True)
        prepare(config, progress=False)
        for text, latent in pairs_of(Store.open(tmp_path / "store")):
            assert np.allclose(latent[0], expected[int(names[text].removeprefix("doc-"))], atol=1e-6)


def test_a_long_document_with_latents_is_not_split(
    corpus: tuple[Path, dict[str, str], np.ndarray], tmp_path: Path
) -> None:
    file, ids = as_npy(tmp_path, corpus[2], [f"doc-{row}" for row in range(COUNT)])
    config = config_for(tmp_path, corpus[0], file, ids, max_length=20)
    with refused(DataError, "corpus.jsonl", "tokens", "--over-length cut"):
        prepare(config, progress=False)
    manifest = prepare(replace(config, over_length="cut"), progress=False)
    assert manifest.max_length == 20 and manifest.problems["over_length"] > 10
    assert sum(split.samples for split in manifest.splits.values()) == COUNT


def test_arrays_of_objects_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([{}]), allow_pickle=True)
    (tmp_path / "ids.txt").write_text("a\n")
    with refused(DataError, "a.npy"):
        LatentFile(tmp_path / "a.npy", str(tmp_path / "ids.txt"))
    np.save(tmp_path / "b.npy", np.ones((1, 3), np.float32))
    np.save(tmp_path / "ids.npy", np.array(["a"], object), allow_pickle=True)
    with refused(DataError, "--latent-ids", "ids.npy"):
        LatentFile(tmp_path / "b.npy", str(tmp_path / "ids.npy"))
