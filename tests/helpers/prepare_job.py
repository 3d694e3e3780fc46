"""A preparation with all that may differ between chunks, and the store that one process made of it."""

from __future__ import annotations

import json
from pathlib import Path

from mmldlm.data.store import Store
from mmldlm.prepare.pipeline import main
from tests.helpers.sample_corpus import write_corpus


class PrepareJob:
    """A corpus with problems and long documents, in several files and formats, and its store at `reference`."""

    def __init__(self, folder: Path, part_bytes: int = 4000):
        self.part_bytes = part_bytes
        lines = write_corpus(folder / "corpus.txt", 400).read_bytes().splitlines()
        lines[10], lines[200], lines[205] = b"not \xff utf-8", b"", "。。。".encode()
        (folder / "corpus.txt").write_bytes(b"\r\n".join(lines))
        texts = write_corpus(folder / "more.txt", 200, seed=1).read_text().splitlines()
        (folder / "more.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in [*texts, " "]))
        for number in range(5):
            write_corpus(folder / f"small-{number}.txt", 7, seed=number)
        self.inputs = [folder / "corpus.txt", folder / "more.jsonl", *sorted(folder.glob("small-*.txt"))]
        self.reference = folder / "reference"
        assert main(self.arguments(self.reference)) == 0
        self.chunks = len(Store.open(self.reference).manifest.splits["train"].shards)

    def arguments(self, out: Path, **changes: object) -> list[str]:
        """Return the arguments of `mmldlm prepare`, with `changes` of its options."""
        options = {
            "part_bytes": self.part_bytes,
            "vocab_size": 280,
            "channels": 8,
            "max_length": 30,
            "fit_documents": 300,
            "validation_fraction": 0.1,
            "test_fraction": 0.1,
            "on_problem": "skip",
            **changes,
        }
        given = [part for key, value in options.items() for part in (f"--{key.replace('_', '-')}", value)]
        return [*map(str, self.inputs), "--out", str(out), *map(str, given)]
