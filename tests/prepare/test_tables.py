"""Parquet, Arrow and folders of `datasets`: every row comes in once, in order, and what cannot be read is named."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmldlm import cli
from mmldlm.data.store import Store
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.errors import DataError, UsageError
from mmldlm.prepare.documents import Columns, Document, Problem
from mmldlm.prepare.options import PrepareConfig
from mmldlm.prepare.pipeline import prepare
from mmldlm.prepare.readers.tables import (
    arrow_parts,
    datasets_parts,
    parquet_parts,
    read_arrow,
    read_parquet,
)
from tests.helpers.sample_corpus import small_config, write_corpus
from tests.helpers.user_errors import assert_user_error, refused

pytestmark = pytest.mark.quick


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with refused(UsageError, "pip install 'pyarrow>="):
        prepare(small_config(tmp_path / "store", tmp_path / "a.parquet"), progress=False)


@pytest.fixture
def pa() -> Any:
    return pytest.importorskip("pyarrow", reason="the extra `tables` is not installed")


def rows_of(tmp_path: Path, count: int = 300) -> dict[str, list]:
    texts = write_corpus(tmp_path / "corpus.txt", count).read_text().splitlines()
    latents = np.random.default_rng(0).normal(size=(count, 6)).astype(np.float32)
    return {"text": texts, "id": [f"doc-{row}" for row in range(count)], "vector": latents.tolist()}


def write_parquet(pa: Any, path: Path, rows: dict, group: int = 64, **types: Any) -> Path:
    import pyarrow.parquet

    table = pa.table({name: pa.array(values, types.get(name)) for name, values in rows.items()})
    pyarrow.parquet.write_table(table, path, row_group_size=group)
    return path


def write_arrow(pa: Any, path: Path, rows: dict, kind: str = "new_stream", batch: int = 50) -> Path:
    table = pa.table(rows)
    with getattr(pa.ipc, kind)(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=batch)
    return path


def write_dataset(pa: Any, folder: Path, rows: dict, shards: int = 3) -> Path:
    """Write a folder with the layout of `Dataset.save_to_disk`."""
    folder.mkdir(parents=True)
    names = [f"data-{index:05d}-of-{shards:05d}.arrow" for index in range(shards)]
    bounds = np.linspace(0, len(rows["text"]), shards + 1).astype(int)
    for name, begin, end in zip(names, bounds[:-1], bounds[1:], strict=True):
        write_arrow(pa, folder / name, {key: values[begin:end] for key, values in rows.items()})
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "1", "_format_type": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"splits": {}}))
    return folder


def write_dataset_dict(pa: Any, folder: Path, rows: dict) -> Path:
    folder.mkdir()
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    for split, part in (("train", slice(0, 200)), ("test", slice(200, None))):
        write_dataset(pa, folder / split, {name: values[part] for name, values in rows.items()}, 2)
    return folder


TABLES: dict[str, tuple[Callable[[Any, Path, dict], Path], Callable, Callable]] = {
    "parquet": (lambda pa, f, rows: write_parquet(pa, f / "a.parquet", rows), parquet_parts, read_parquet),
    "arrow stream": (lambda pa, f, rows: write_arrow(pa, f / "a.arrow", rows), arrow_parts, read_arrow),
    "arrow file": (lambda pa, f, rows: write_arrow(pa, f / "a.arrow", rows, "new_file"), arrow_parts, read_arrow),
    "dataset": (lambda pa, f, rows: write_dataset(pa, f / "set", rows), datasets_parts, read_arrow),
    "dataset dict": (lambda pa, f, rows: write_dataset_dict(pa, f / "sets", rows), datasets_parts, read_arrow),
}


@pytest.mark.parametrize("kind", TABLES)
def test_every_row_comes_once_in_order_from_any_parts(kind: str, pa: Any, tmp_path: Path) -> None:
    write, parts, read = TABLES[kind]
    rows = rows_of(tmp_path)
    path = write(pa, tmp_path, rows)
    columns = Columns(latents="vector", key="id")
    for target in (1, 5000, 1 << 30):
        result = [item for part in parts(str(path), target) for item in read(part, "text", columns)]
        assert [item.text for item in result] == rows["text"]
        assert [item.key for item in result] == rows["id"]
        assert np.array_equal(np.concatenate([item.latents for item in result]), np.float32(rows["vector"]))
        assert len({(item.source, item.line) for item in result}) == 300
    assert len(parts(str(path), 1)) > len(parts(str(path), 1 << 30))


@pytest.mark.parametrize("kind", TABLES)
def test_a_store_is_the_same_as_from_lines_of_text(kind: str, pa: Any, tmp_path: Path) -> None:
    rows = rows_of(tmp_path)
    path = TABLES[kind][0](pa, tmp_path, rows)
    expected = prepare(small_config(tmp_path / "lines", tmp_path / "corpus.txt"), progress=False)
    result = prepare(small_config(tmp_path / "store", path), progress=False)
    assert (
        result.splits == expected.splits and result.tokenizer == expected.tokenizer and result.latent == expected.latent
    )
    (source,) = result.sources
    assert source.get("file", source.get("folder")) == str(path) and len(source["sha256"]) == 64


def test_padding_is_left_out_by_a_mask_and_told_without_one(
    pa: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = write_corpus(tmp_path / "corpus.txt", 200).read_text().splitlines()
    tokenizer = Tokenizer.train(texts, 300)
    tokenizer.save(tmp_path / "tokenizer")
    ids = tokenizer.encode_batch(texts)
    rows = {"ids": [[*row[:60], *[65] * (60 - len(row))] for row in ids]}
    masks = {"attention_mask": [[1] * min(60, len(row)) + [0] * (60 - len(row)) for row in ids]}
    config = small_config(tmp_path / "store", tokens_field="ids", tokenizer=str(tmp_path / "tokenizer"), overwrite=True)
    shares = []
    for columns in (rows, {**rows, **masks}):
        path = write_parquet(pa, tmp_path / "a.parquet", columns)
        manifest = prepare(replace(config, inputs=(str(path),)), progress=False)
        shares.append(manifest.tokenizer["most_frequent"]["repeated"])
        assert ("warning: most frequent: " in capsys.readouterr().err) is (columns is rows)
    assert shares[0] > 0.2 > 0.01 > shares[1]
    assert sum(split.tokens for split in manifest.splits.values()) == sum(min(60, len(row)) for row in ids)
    holes = {"ids": [[1, 2, 3]] * 3, "attention_mask": [[1, 0, 1], [0, 0, 0], [1]]}
    kinds = [item.split(": ")[0] for item in problems(pa, tmp_path, holes, Columns(tokens="ids"))]
    assert kinds == ["1 invalid", "2 empty", "3 invalid"]


def test_a_column_that_is_there_twice_is_named(pa: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pa.parquet.write_table(pa.table([["a"], ["b"]], names=["text", "text"]), tmp_path / "a.parquet")
    status = cli.main(["prepare", str(tmp_path / "a.parquet"), "--out", str(tmp_path / "store")])
    assert_user_error((status, capsys.readouterr().err), 65, "2 columns 'text'", alone=False)


def test_tokens_latents_and_keys_of_any_column_type(pa: Any, tmp_path: Path) -> None:
    tokenizer = Tokenizer.train(write_corpus(tmp_path / "corpus.txt", 200).read_text().splitlines(), 300)
    tokenizer.save(tmp_path / "tokenizer")
    rows = rows_of(tmp_path, 200)
    rows["ids"] = tokenizer.encode_batch(rows["text"])
    texts, vectors = rows.pop("text"), np.float32(rows.pop("vector"))
    rows |= {"id": list(range(200)), "pair": np.stack([vectors, -vectors], 1).tolist()}
    for types in (
        {"ids": pa.list_(pa.int32()), "pair": pa.list_(pa.list_(pa.float32()))},
        {"ids": pa.large_list(pa.uint16()), "pair": pa.list_(pa.list_(pa.float64(), 6), 2), "id": pa.int16()},
    ):
        path = write_parquet(pa, tmp_path / "a.parquet", rows, **types)
        config = PrepareConfig(
            str(tmp_path / "store"), (str(path),), tokens_field="ids", latents_field="pair", key_field="id",
            encoder="included", tokenizer=str(tmp_path / "tokenizer"), latent_dtype="float32", overwrite=True,
            max_length=200, test_fraction=0.1,
        )  # fmt: skip
        manifest = prepare(config, progress=False)
        assert (manifest.latent.tokens, manifest.latent.channels) == (2, 6)
        store, result = Store.open(tmp_path / "store"), {}
        for name in manifest.splits:
            split = store.split(name)
            for row in range(len(split)):
                result[tokenizer.decode_batch([split.tokens(row).tolist()])[0]] = split.latents(row)
        # Copies of a text have latents of their own: the last one counts here.
        expected = {text: np.stack([vector, -vector]) for text, vector in zip(texts, vectors, strict=True)}
        assert result.keys() == expected.keys()
        unique = [text for text in expected if texts.count(text) == 1]
        assert len(unique) > 100 and all(np.array_equal(result[text], expected[text]) for text in unique)


def problems(pa: Any, tmp_path: Path, rows: dict, columns: Columns, **types: Any) -> list:
    path = write_parquet(pa, tmp_path / "bad.parquet", rows, **types)
    (part,) = parquet_parts(str(path), 1 << 30)
    return [
        f"{item.line} {item.kind}: {item.reason}" if isinstance(item, Problem) else item
        for item in read_parquet(part, "text", columns)
    ]


def test_rows_without_text_or_latent_are_named(pa: Any, tmp_path: Path) -> None:
    rows = {"text": ["one", None, " ", "four"], "vector": [[1.0, 2.0], [1.0, 2.0], [1.0, 2.0], None]}
    one, *others = problems(pa, tmp_path, rows, Columns(latents="vector"))
    assert isinstance(one, Document) and one.text == "one"
    assert others == [
        "2 empty: empty document",
        "3 empty: empty document",
        "4 no_latent: column 'vector' holds no latent, expected floats [C] or [M, C]",
    ]
    ragged = {"text": ["one", "two"], "vector": [[[1.0], [2.0, 3.0]], [[1.0], [2.0]]], "id": [None, "2"]}
    first, second = problems(pa, tmp_path, ragged, Columns(latents="vector", key="id"))
    assert first.startswith("1 no_latent") and second.latents.shape == (2, 1)


def test_bytes_that_are_no_text_spoil_their_row_alone(pa: Any, tmp_path: Path) -> None:
    raw = pa.array([b"one", b"\xff\xfe", b"three"], pa.binary())
    texts = pa.StringArray.from_buffers(3, *raw.buffers()[1:])
    with pa.ipc.new_stream(str(tmp_path / "bad.arrow"), pa.schema([("text", pa.string())])) as writer:
        writer.write_batch(pa.record_batch([texts], ["text"]))
    (part,) = arrow_parts(str(tmp_path / "bad.arrow"), 1 << 20)
    one, two, three = read_arrow(part, "text", Columns())
    assert isinstance(one, Document) and isinstance(three, Document) and three.line == 3
    assert isinstance(two, Problem) and (two.line, two.kind) == (2, "unreadable")


@pytest.mark.parametrize(
    ("columns", "field", "named"),
    [
        (Columns(), "body", "'body' 'text' 'id' 'vector'"),
        (Columns(), "vector", "'vector' list text"),
        (Columns(latents="id"), "text", "'id' string floats"),
        (Columns(tokens="vector"), "text", "'vector' list integers"),
        (Columns(key="vector"), "text", "'vector' list integers"),
    ],
)
def test_columns_that_do_not_fit_are_named(columns: Columns, field: str, named: str, pa: Any, tmp_path: Path) -> None:
    path = write_parquet(pa, tmp_path / "a.parquet", rows_of(tmp_path, 10))
    (part,) = parquet_parts(str(path), 1 << 30)
    with refused(DataError, "a.parquet", *named.split()):
        list(read_parquet(part, field, columns))


def test_damaged_files_and_folders_are_named(pa: Any, tmp_path: Path) -> None:
    rows = rows_of(tmp_path)
    path = write_parquet(pa, tmp_path / "a.parquet", rows)
    path.write_bytes(path.read_bytes()[:-50])
    with refused(DataError, "a.parquet"):
        prepare(small_config(tmp_path / "store", path), progress=False)
    arrow = write_arrow(pa, tmp_path / "a.arrow", rows)
    arrow.write_bytes(arrow.read_bytes()[:3000])
    with refused(DataError, "a.arrow"):
        prepare(small_config(tmp_path / "store", arrow), progress=False)
    folder = write_dataset(pa, tmp_path / "set", rows)
    shard = folder / "data-00001-of-00003.arrow"
    shard.rename(tmp_path / "aside")
    with refused(DataError, "data-00001-of-00003.arrow", "No such file"):
        prepare(small_config(tmp_path / "store", folder), progress=False)
    (tmp_path / "aside").rename(shard)
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | {"_indices_data_files": [{"filename": "indices.arrow"}]}))
    with refused(DataError, "state.json", "flatten_indices()"):
        prepare(small_config(tmp_path / "store", folder), progress=False)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "../a.arrow"}]}))
    with refused(DataError, "state.json", "../a.arrow"):
        prepare(small_config(tmp_path / "store", folder), progress=False)


def test_what_the_library_saves_is_read_as_it_reads_it(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = rows_of(tmp_path)
    whole = datasets.Dataset.from_dict(rows).shuffle(seed=0)
    whole.save_to_disk(str(tmp_path / "set"), num_shards=4)
    columns = Columns(latents="vector", key="id")
    result = [
        item for part in datasets_parts(str(tmp_path / "set"), 5000) for item in read_arrow(part, "text", columns)
    ]
    library = datasets.load_from_disk(str(tmp_path / "set"))
    assert [(item.text, item.key) for item in result] == [(row["text"], row["id"]) for row in library]
    assert all(
        np.array_equal(item.latents[0], np.float64(row["vector"])) for item, row in zip(result, library, strict=True)
    )
    halves = whole.train_test_split(0.5, seed=0)
    halves.save_to_disk(str(tmp_path / "sets"))
    result = [
        item for part in datasets_parts(str(tmp_path / "sets"), 5000) for item in read_arrow(part, "text", Columns())
    ]
    assert [item.text for item in result] == [*halves["train"]["text"], *halves["test"]["text"]]
