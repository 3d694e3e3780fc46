"""Inputs behind URLs give the same store as files, but for their names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mmldlm.errors import DataError, UsageError
from mmldlm.prepare.pipeline import prepare
from tests.helpers.prepare_runs import differing
from tests.helpers.sample_corpus import small_config, write_corpus
from tests.helpers.user_errors import refused

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """A folder with a file of each format that is no folder."""
    folder = tmp_path / "inputs"
    (folder / "more").mkdir(parents=True)
    texts = write_corpus(folder / "a.txt", 100).read_text().splitlines()
    (folder / "more/b.jsonl").write_text("".join(json.dumps({"text": text + "!"}) + "\n" for text in texts))
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"text": [f"{text} Again." for text in texts]})
    pytest.importorskip("pyarrow.parquet").write_table(table, folder / "c.parquet", row_group_size=20)
    with pyarrow.ipc.new_stream(folder / "d.arrow", table.schema) as stream:
        stream.write_table(table, 20)
    (folder / "notes.md").write_text("no input")
    return folder


@pytest.fixture
def memory(inputs: Path) -> Iterator[str]:
    system = fsspec.filesystem("memory")
    system.put(str(inputs), "/corpus", recursive=True)
    yield "memory://corpus"
    system.rm("/corpus", recursive=True)


def test_folder_and_patterns(inputs: Path, memory: str, tmp_path: Path) -> None:
    names = ["a.txt", "c.parquet", "d.arrow", "more/b.jsonl"]
    prepare(small_config(tmp_path / "files", inputs, part_bytes=2000), progress=False)
    patterns = (f"{memory}/*.txt", f"{memory}/c.*", f"{memory}/d.arrow", f"{memory}/**/*.jsonl")
    for store, urls in ((tmp_path / "folder", (memory,)), (tmp_path / "patterns", patterns)):
        manifest = prepare(replace(small_config(store, part_bytes=2000), inputs=urls), progress=False)
        assert [Path(source["file"]).name for source in manifest.sources] == [Path(name).name for name in names]
        assert differing(tmp_path / "files", store) == ["manifest.json", "manifest.sha256"]


def test_several_processes(inputs: Path, tmp_path: Path) -> None:
    for processes in (1, 2):
        config = small_config(tmp_path / str(processes), part_bytes=4000, processes=processes)
        config = replace(config, inputs=(f"file://{inputs}",))
        prepare(config, progress=False)
    assert differing(tmp_path / "1", tmp_path / "2") == []


def test_urls_that_cannot_be_read(memory: str, tmp_path: Path) -> None:
    for url, error, *named in (
        (f"{memory}/none.txt", DataError, "none.txt"),
        (f"{memory}/*.none", DataError, "*.none"),
        ("nonsense://a/b.txt", DataError, "nonsense://a/b.txt"),
        ("abfs://bucket/a.txt", UsageError, "abfs://bucket/a.txt", "adlfs"),
    ):
        with refused(error, *named):
            prepare(replace(small_config(tmp_path / "store"), inputs=(url,)), progress=False)
