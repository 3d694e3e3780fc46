"""Fields within fields: a path of keys and places in lists, alike in JSON and in tables."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mmldlm import cli
from mmldlm.data.store import Store
from mmldlm.errors import ExitCode
from mmldlm.prepare.documents import Columns, Document, Problem
from mmldlm.prepare.readers.tables import arrow_parts, parquet_parts, read_arrow, read_parquet
from mmldlm.prepare.readers.text import read_text, text_parts
from tests.helpers.sample_corpus import write_corpus
from tests.helpers.user_errors import assert_user_error

pytestmark = pytest.mark.quick
OPTIONS = ["--vocab-size=300", "--channels=8", "--validation-fraction=0.1", "--test-fraction=0.1"]
COLUMNS = Columns(key="meta.id", prefix="turns.0.content", group="meta.book.1", weight="meta.stars")


def write_json(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def shards(store: Path) -> list[Any]:
    return [shard for split in Store.open(store).manifest.splits.values() for shard in split.shards]


@pytest.mark.parametrize(
    ("field", "nest"),
    [
        ("translation.en", lambda text: {"translation": {"de": "Nein", "en": text}}),
        ("messages.-1.content", lambda text: {"messages": [{"content": "Hi", "role": "user"}, {"content": text}]}),
        ("parts.1", lambda text: {"parts": ["first", text, "last"]}),
        ("translation.en", lambda text: {"translation.en": text, "translation": {"en": "not this one"}}),
    ],
    ids=["struct", "chat", "list", "a literal name wins"],
)
def test_a_path_gives_the_store_of_the_plain_field(field: str, nest: Any, tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = write_corpus(tmp_path / "corpus.txt", 300).read_text().splitlines()
    rows = [nest(text) for text in texts]
    plain = write_json(tmp_path / "plain.jsonl", [{"text": text} for text in texts])
    assert cli.main(["prepare", str(plain), "--out", str(tmp_path / "plain"), *OPTIONS]) == 0
    write_json(tmp_path / "rows.jsonl", rows)
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=50)
    for suffix in ("jsonl", "json", "parquet"):
        given = ["prepare", str(tmp_path / f"rows.{suffix}"), "--field", field, "--out", str(tmp_path / suffix)]
        assert cli.main([*given, *OPTIONS]) == 0
        assert shards(tmp_path / suffix) == shards(tmp_path / "plain"), suffix


@pytest.mark.parametrize("seed", range(3))
def test_json_and_tables_read_the_same_documents(seed: int, tmp_path: Path) -> None:
    """Also with lists of other lengths, null rows, rows without a place, and batches within an array."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    draw = random.Random(seed)

    def row(number: int) -> dict[str, Any]:
        count = draw.choice([0, 1, 1, 2, 3])
        turns = [
            {"role": draw.choice(["user", "model"]), "content": f"turn {number}.{place}"} for place in range(count)
        ]
        meta = {"id": number, "book": [f"{number % 7}", f"{number % 5}"], "stars": draw.choice([0, 0.5, 2])}
        return {"turns": None if draw.random() < 0.1 else turns, "meta": meta}

    rows = [row(number) for number in range(3000)]
    turn = pa.struct([("role", pa.string()), ("content", pa.string())])
    meta = [("id", pa.int64()), ("book", pa.list_(pa.string(), 2)), ("stars", pa.float32())]
    schema = pa.schema([("turns", pa.large_list(turn)), ("meta", pa.struct(meta))])
    table = pa.Table.from_pylist(rows, schema)
    parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=700)
    with pa.OSFile(str(tmp_path / "rows.arrow"), "wb") as sink, pa.ipc.new_file(sink, schema) as file:
        file.write_table(table, max_chunksize=1300)
    path, field = str(write_json(tmp_path / "rows.jsonl", rows)), "turns.-1.content"
    by_json = [item for part in text_parts(path, 1 << 16, "jsonl") for item in read_text(part, field, "jsonl", COLUMNS)]
    expected = {item.line: replace(item, source="") for item in by_json if isinstance(item, Document)}
    assert len(expected) > 2000 and {document.weight for document in expected.values()} == {0, 0.5, 2}
    assert all(expected[line].prefix == rows[line - 1]["turns"][0]["content"] for line in expected)
    assert all(expected[line].text == rows[line - 1]["turns"][-1]["content"] for line in expected)
    for parts, read in ((parquet_parts, read_parquet), (arrow_parts, read_arrow)):
        name = str(tmp_path / f"rows.{'parquet' if read is read_parquet else 'arrow'}")
        items = [item for part in parts(name, 1 << 14) for item in read(part, field, COLUMNS)]
        assert {item.line: replace(item, source="") for item in items if isinstance(item, Document)} == expected
        assert {item.kind for item in items if isinstance(item, Problem)} == {"empty"}


def test_latents_and_tokens_in_structs(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"made": {"vectors": [[1.0 * n, 2.0], [3.0, 4.0]], "ids": [n, 2, 3]}, "text": f"t {n}"} for n in range(5)]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (part,) = parquet_parts(str(tmp_path / "rows.parquet"), 1 << 20)
    items = [*read_parquet(part, "text", Columns(tokens="made.ids", latents="made.vectors"))]
    for row, item in zip(rows, items, strict=True):
        assert isinstance(item, Document) and item.latents is not None and item.tokens is not None
        assert item.latents.tolist() == row["made"]["vectors"] and item.tokens.tolist() == row["made"]["ids"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("field", "found"),
    [
        ("translation.fr", "no field 'translation.fr', found 'translation.de', 'translation.en'"),
        ("messages.2.content", "no field 'messages.2.content', found 'messages.0', 'messages.1'"),
        ("messages.last.content", "no field 'messages.last.content', found 'messages.0', 'messages.1'"),
        ("text.en", "no field 'text.en', found none"),
        ("body", "no field 'body', found 'messages', 'text', 'translation'"),
        ("translation", "field 'translation' is dict, expected a string"),
    ],
)
def test_a_missing_path_is_one_line(field: str, found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"text": "a", "translation": {"en": "b", "de": "c"}, "messages": [{"content": "d"}, {"content": "e"}]}
    path = write_json(tmp_path / "rows.jsonl", [row])
    code = cli.main(["prepare", str(path), "--field", field, "--out", str(tmp_path / "store"), *OPTIONS])
    assert_user_error((code, capsys.readouterr().err), ExitCode.DATA, f"{path}:1: {found}", alone=False)


@pytest.mark.parametrize(
    ("field", "found"),
    [
        ("translation.fr", "no column 'translation.fr', found 'translation.en', 'translation.de', 'messages'"),
        ("messages.last.content", "no column 'messages.last.content', found 'translation.en'"),
        ("messages.0", "column 'messages.0' is struct<content: string>, expected text"),
        ("translation.en.0", "no column 'translation.en.0', found"),
    ],
)
def test_a_missing_path_of_a_table_is_one_line(
    field: str, found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"translation": {"en": "b", "de": "c"}, "messages": [{"content": "d"}]}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    given = ["prepare", str(tmp_path / "rows.parquet"), "--field", field, "--out", str(tmp_path / "store")]
    code = cli.main([*given, *OPTIONS])
    assert_user_error((code, capsys.readouterr().err), ExitCode.DATA, f"rows.parquet: {found}", alone=False)
