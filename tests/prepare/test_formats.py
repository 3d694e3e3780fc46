"""Files are read as what they are: CSV, JSON and compressed files give the documents of the same lines of text."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest

from mmldlm import cli
from mmldlm.errors import DataError
from mmldlm.prepare.documents import Document
from mmldlm.prepare.inputs import find_inputs
from mmldlm.prepare.job import make_plan
from mmldlm.prepare.options import PrepareConfig
from mmldlm.prepare.pipeline import prepare
from mmldlm.prepare.read import chunk_documents
from tests.helpers.prepare_runs import differing
from tests.helpers.sample_corpus import small_config, write_corpus
from tests.helpers.user_errors import assert_user_error, refused

pytestmark = pytest.mark.quick
# With all that CSV has to quote.
TEXTS = ['plain, with "quotes"', "two\nlines\r\nand\ttabs", "wörd 漢字", "'", *(f"number {n}" for n in range(40))]


def write_csv(path: Path, delimiter: str = ",") -> None:
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(["label", "text", "id"])
        writer.writerows([str(number % 2), text, f"id {number}"] for number, text in enumerate(TEXTS))


def rows() -> list[dict[str, str]]:
    return [{"label": "0", "text": text, "id": f"id {number}"} for number, text in enumerate(TEXTS)]


WRITERS: dict[str, Callable[[Path], object]] = {
    "a.csv": write_csv,
    "a.TSV": lambda path: write_csv(path, "\t"),
    "a.json": lambda path: path.write_text(json.dumps(rows(), indent=1)),
    "a.jsonl": lambda path: path.write_text("\n".join(map(json.dumps, rows()))),
}


def zstd(content: bytes) -> bytes:
    pyarrow = pytest.importorskip("pyarrow", reason="the extra `tables` is not installed")
    half = len(content) // 2
    # Two frames, as parallel compressors write.
    return b"".join(pyarrow.compress(part, "zstd", asbytes=True) for part in (content[:half], content[half:]))


COMPRESSORS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}


def documents(*inputs: Path, part_bytes: int = 1 << 26, **options: object) -> list[Document]:
    config = small_config(Path("none"), *inputs, part_bytes=part_bytes, **options)
    read = [
        item
        for chunk in make_plan(config).chunks
        for item in chunk_documents(chunk, config, lambda documents, _: documents)
    ]
    assert all(isinstance(item, Document) for item in read), read
    return [item for item in read if isinstance(item, Document)]


@pytest.mark.parametrize("suffix", ["", *COMPRESSORS])
@pytest.mark.parametrize("name", WRITERS)
def test_rows_are_documents_for_any_number_of_parts(name: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / name
    WRITERS[name](path)
    if suffix:
        path = tmp_path / f"{name}{suffix}"
        path.write_bytes(COMPRESSORS[suffix]((tmp_path / name).read_bytes()))
    for part_bytes in (1, 1 << 26):
        result = documents(path, part_bytes=part_bytes, key_field="id")
        assert [item.text for item in result] == TEXTS
        assert [item.key for item in result] == [f"id {number}" for number in range(len(TEXTS))]
        assert [item.line for item in result] == sorted({item.line for item in result})
    assert [item.text for item in documents(path, field="label")][:2] == ["0", "0" if "js" in name else "1"]


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_a_compressed_file_gives_the_store_of_its_contents(suffix: str, tmp_path: Path) -> None:
    lines = write_corpus(tmp_path / "a.txt", 300)
    path = tmp_path / f"b.txt{suffix}"
    path.write_bytes(COMPRESSORS[suffix](lines.read_bytes()))
    prepare(small_config(tmp_path / "plain", lines), progress=False)
    prepare(small_config(tmp_path / "one", path, part_bytes=500), progress=False)
    assert differing(tmp_path / "plain", tmp_path / "one") == ["manifest.json", "manifest.sha256"]
    damaged = tmp_path / f"damaged.txt{suffix}"
    damaged.write_bytes(path.read_bytes()[:-30])
    with refused(DataError, f"damaged.txt{suffix}"):
        prepare(small_config(tmp_path / "none", damaged), progress=False)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.csv", "text,label\nfine,0\nfine,0,1\n", "a.csv:3: 3 columns, expected 2"),
        ("a.csv", 'text,label\n"two\nlines",0\n"open,1\n', "a.csv:4: not valid CSV"),
        ("a.csv", "body,label\nfine,0\n", "a.csv:2: no field 'text', found 'body', 'label'"),
        ("a.csv", "text,text\nfine,0\n", "a.csv:1: column 'text' is there 2 times"),
        ("a.csv", b"text,label\nfine,\xff\n\xff,0\n", "a.csv:3: field 'text' is not valid Unicode"),
        ("a.json", '[{"text": "fine"}, {"body": ""}]', "a.json:2: no field 'text', found 'body'"),
        ("a.json", '{"text":\n"fine"}', "a.json:1: a JSON dict, expected an array"),
        ("a.json", "[" * 10**5, "a.json:1: not valid JSON"),
        ("a.jsonl", "[" * 10**5, "a.jsonl:1: not valid JSON"),
        ("a.md", "# Title", "a.md: its suffix names no format; expected .txt"),
        ("a.md.gz", "", "a.md.gz: its suffix names no format"),
        ("a.parquet.gz", "", "a.parquet.gz: its suffix names no format"),
        ("text", "fine", "text: its suffix names no format"),
    ],
)
def test_what_cannot_be_read_is_named(
    name: str, content: str | bytes, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    status = cli.main(["prepare", str(path), "--out", str(tmp_path / "store")])
    assert_user_error((status, capsys.readouterr().err.splitlines()[-1] + "\n"), 65, expected)


def test_a_folder_says_what_it_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.txt", "b.csv.gz", "c.json", "d.TXT"):
        (tmp_path / name).write_text("x")
    assert [Path(path).name for path, _ in find_inputs(small_config(tmp_path, tmp_path))] == sorted(
        path.name for path in tmp_path.iterdir()
    )
    assert capsys.readouterr().err == ""
    for name in ("e.md", "f.pdf", "g", "h.html"):
        (tmp_path / name).write_text("x")
    assert len(find_inputs(small_config(tmp_path, tmp_path))) == 4
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1 and f"leaving out 4 files of another format: {tmp_path / 'e.md'}, " in shown
    assert "h.html" not in shown
    # With a format, those of this format; and each file that is named.
    config = PrepareConfig("none", (str(tmp_path), str(tmp_path / "e.md")), format="blocks")
    assert [Path(path).name for path, _ in find_inputs(config)] == ["a.txt", "d.TXT", "e.md"]
