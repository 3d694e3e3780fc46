"""Imported latents are paired over all parts of an input, by any number of processes, to the same bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mmldlm.data.store import Store
from mmldlm.errors import run_command
from mmldlm.prepare.pipeline import main
from tests.helpers.lgdlm_folders import Samples, make_samples, pairs_of
from tests.helpers.prepare_runs import Preparation, differing, finished_tasks
from tests.helpers.waiting import wait_until

COUNT = 120


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    return make_samples(tmp_path_factory.mktemp("samples"), COUNT)


def table(folder: Path, samples: Samples) -> list[object]:
    """Two of the latents have another shape, in parts of their own; three rows have no tokens."""
    arrow = pytest.importorskip("pyarrow", reason="the extra `tables` is not installed")
    import pyarrow.parquet

    folder.mkdir()
    lengths = samples.masks.sum(1)
    lengths[[3, 17, 90]] = 0
    latents = [[row.tolist()] * (2 if number in (60, 110) else 1) for number, row in enumerate(samples.latents)]
    tokens = [ids[:length].tolist() for ids, length in zip(samples.ids, lengths, strict=True)]
    rows = arrow.table({"tokens": tokens, "latents": arrow.array(latents, arrow.list_(arrow.list_(arrow.float32())))})
    pyarrow.parquet.write_table(rows, folder / "a.parquet", row_group_size=20)
    columns = ["--tokens-field", "tokens", "--latents-field", "latents", "--tokenizer", samples.tokenizer]
    return [folder / "a.parquet", *columns, "--part-bytes", 900]


def ids(folder: Path, samples: Samples) -> list[object]:
    """Write latents by id: two ids occur twice, in distant parts, three have no document, one latent is zero."""
    folder.mkdir()
    names = [f"doc-{row}" for row in range(COUNT)]
    keys = dict(enumerate(names)) | {100: "doc-2", 101: "doc-100", 110: "doc-2", 40: "none"}
    rows = [{"name": keys[row], "text": text} for row, text in enumerate(samples.texts)]
    for part, some in enumerate((rows[:70], rows[70:])):
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    order = np.random.default_rng(1).permutation(COUNT)
    latents = samples.latents.copy()
    latents[5] = 0
    np.save(folder / "latents.npy", latents[order])
    (folder / "ids.json").write_text(json.dumps([names[row] for row in order]))
    chosen = ["--encoder", f"precomputed:{folder / 'latents.npy'}", "--latent-ids", folder / "ids.json"]
    return [folder / "0.jsonl", folder / "1.jsonl", *chosen, "--key-field", "name", "--part-bytes", 700]


def places(folder: Path, samples: Samples) -> list[object]:
    """Lines of two files, of which some cannot be used but count."""
    folder.mkdir()
    lines = [text.encode() for text in samples.texts]
    lines[30], lines[90] = b"", b"not \xff utf-8"
    (folder / "0.txt").write_bytes(b"\n".join(lines[:70]) + b"\n")
    (folder / "1.txt").write_bytes(b"\n".join(lines[70:]))
    np.save(folder / "latents.npy", samples.latents)
    chosen = ["--encoder", f"precomputed:{folder / 'latents.npy'}", "--latent-ids", "position"]
    return [folder / "0.txt", folder / "1.txt", *chosen, "--part-bytes", 700]


PROBLEMS = {
    "table": {"mismatch": 2, "empty": 3},
    # 40's own, 101's own and the others that lost their documents to another id; 5's is used, if to no end
    "ids": {"mismatch": 2, "no_latent": 2, "unused_latent": 3},
    "places": {"empty": 1, "unreadable": 1},
}


@pytest.mark.parametrize(
    "write", [pytest.param(table, marks=pytest.mark.slow), ids, places], ids=lambda write: write.__name__
)
def test_imported_latents_do_not_depend_on_processes(write: Callable, samples: Samples, tmp_path: Path) -> None:
    name = write.__name__
    given = write(tmp_path / "input", samples)
    given += ["--vocab-size", 300, "--latent-dtype", "float32", "--max-length", 99, "--on-problem", "skip"]
    given += ["--validation-fraction", 0.1, "--test-fraction", 0.1]
    assert main([*map(str, given), "--out", str(tmp_path / "one")]) == 0
    manifest = Store.open(tmp_path / "one").manifest
    assert len(manifest.splits["train"].shards) > 4
    assert manifest.problems == PROBLEMS[name] | {"over_length": 0}
    left = COUNT - sum(count for kind, count in PROBLEMS[name].items() if kind != "unused_latent")
    assert sum(split.samples for split in manifest.splits.values()) == left == manifest.grouping["documents"]
    assert manifest.grouping["groups"] == left, "texts that were left out are counted"
    for text, latent in pairs_of(Store.open(tmp_path / "one")):
        wanted = samples.texts.index(text)
        assert np.array_equal(latent[0], samples.latents[100 if (name, wanted) == ("ids", 101) else wanted]), text
    if name == "ids":
        printed = [json.loads(line) for line in (tmp_path / "one/problems.jsonl").read_text().splitlines()]
        reasons = {row["reason"]: row["line"] for row in printed}
        assert reasons[f"id 'none' has no latent in {tmp_path / 'input/latents.npy'}"] == 41
        assert f"id 'doc-2' is already used by {tmp_path / 'input/0.jsonl'}:3" in reasons
        assert "id 'doc-40' belongs to no document" in reasons
    arguments = list(map(str, given))
    for processes in (2, 3):
        out = tmp_path / str(processes)
        assert main([*arguments, "--out", str(out), "--processes", str(processes)]) == 0
        assert differing(tmp_path / "one", out) == []
    killed = tmp_path / "killed"
    for moment in (2, 9, 20):
        with Preparation([*given, "--out", killed], tmp_path / "log") as preparation:
            wait_until(lambda: len(finished_tasks(killed)) >= moment or not preparation.process.is_alive(), "progress")  # noqa: B023
    assert main([*arguments, "--out", str(killed)]) == 0
    assert differing(tmp_path / "one", killed) == []


def test_latents_are_counted_before_anything_is_read(
    samples: Samples, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = places(tmp_path / "input", samples)
    np.save(tmp_path / "input/latents.npy", samples.latents[:-1])
    arguments = [*map(str, given), "--out", str(tmp_path / "store"), "--processes", "2"]
    assert run_command(lambda: main(arguments)) == 65
    output = capfd.readouterr().err
    assert "latents.npy: 119 latents, expected 120, one for each document found" in output
    assert "fitting" not in output and not (tmp_path / "store.incomplete").exists()
