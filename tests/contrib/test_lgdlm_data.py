"""`mmldlm convert lgdlm`: every sample is converted with its own latents, or refused by name."""

from __future__ import annotations

import json
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mmldlm import cli
from mmldlm.contrib.lgdlm.command import write_parquet
from mmldlm.contrib.lgdlm.folders import read_samples
from mmldlm.contrib.lgdlm.samples import Sample
from mmldlm.data.store import Store
from tests.helpers.lgdlm_folders import (
    Samples,
    make_samples,
    write_base,
    write_batches,
    write_dat,
    write_indexed_dat,
    write_pairs,
    write_texts,
    write_unified,
)

parquet = pytest.importorskip("pyarrow.parquet", reason="the extra `tables` is not installed")

PREPARE = ["--latent-dtype", "float32", "--validation-fraction", "0.1", "--test-fraction", "0.1"]
TOKENS = ["--tokens-field", "tokens"]


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    return make_samples(tmp_path_factory.mktemp("samples"))


def contents(store: Path) -> dict[str, list]:
    """Tokens and latents of each split, in an order of their own."""
    opened = Store.open(store)
    splits = {name: opened.split(name) for name in opened.manifest.splits}
    return {
        name: sorted((split.tokens(row).tolist(), split.latents(row).tolist()) for row in range(len(split)))
        for name, split in splits.items()
    }


@pytest.fixture(scope="module")
def expected(samples: Samples, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list]:
    """The store of the same texts and latents, prepared without `convert`."""
    folder = tmp_path_factory.mktemp("expected")
    rows = [{"id": row, "text": text} for row, text in enumerate(samples.texts)]
    (folder / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    np.save(folder / "latents.npy", samples.latents)
    latents = ["--encoder", f"precomputed:{folder / 'latents.npy'}", "--latent-ids", "position"]
    arguments = [str(folder / "texts.jsonl"), "--out", str(folder / "store"), *latents, *PREPARE]
    assert cli.main(["prepare", *arguments, "--tokenizer", str(samples.tokenizer)]) == 0
    return contents(folder / "store")


def convert(source: Path, out: Path, *options: object) -> int:
    return cli.main(["convert", "lgdlm", *map(str, [source, out, *options])])


WRITERS: dict[str, Callable[[Path, Samples], Path]] = {
    "pairs": write_pairs,
    "pairs with suffixes": lambda folder, samples: write_pairs(folder, samples, suffixed=True),
    "pairs below train": write_base,
    "batches": write_batches,
    "batches, a file of latents each": lambda folder, samples: write_batches(folder, samples, file_a_sample=True),
    "batches below train": write_unified,
    "dat": write_dat,
    "dat with masks": lambda folder, samples: write_dat(folder, samples, masked=True),
    "dat with an index": write_indexed_dat,
    "texts": write_texts,
    "texts with tokens": write_base,
}


@pytest.mark.parametrize("layout", WRITERS)
def test_layouts(layout: str, samples: Samples, expected: dict[str, list], tmp_path: Path) -> None:
    source = WRITERS[layout](tmp_path / "source", samples)
    assert convert(source, tmp_path / "out", *(["--layout", "texts"] if layout == "texts with tokens" else [])) == 0
    tokens = [] if layout.startswith("texts") else TOKENS
    arguments = [str(tmp_path / "out"), *tokens, "--tokenizer", str(samples.tokenizer), "--latents-field", "latents"]
    assert cli.main(["prepare", *arguments, "--key-field", "id", "--out", str(tmp_path / "store"), *PREPARE]) == 0
    assert contents(tmp_path / "store") == expected
    assert Store.open(tmp_path / "store").manifest.problems == {"over_length": 0}


def test_row_groups_are_bounded(tmp_path: Path) -> None:
    latents = np.random.default_rng(0).normal(size=(1100, 2, 6)).astype(np.float32)
    rows = [Sample(str(row), latents[row], np.arange(row % 9 + 1)) for row in range(1100)]
    assert write_parquet(tmp_path / "a.parquet", rows) == 1100
    file = parquet.ParquetFile(tmp_path / "a.parquet")
    assert file.metadata.num_row_groups == 3
    table = file.read().to_pydict()
    assert table["id"] == [row.id for row in rows] and table["tokens"] == [row.content.tolist() for row in rows]
    assert np.array_equal(np.float32(table["latents"]), latents)


def rewrite(path: Path, change: Callable[[np.ndarray], object], name: str | None = None) -> None:
    """Change a `.npy` file, or the array `name` of a `.npz` file."""
    loaded = np.load(path)
    arrays = {"": loaded} if name is None else dict(loaded)
    array = arrays[name or ""]
    changed = change(array)
    arrays[name or ""] = array if changed is None else changed
    np.save(path, arrays[""]) if name is None else np.savez(path, **arrays)


def rewrite_meta(folder: Path, change: Callable[[list], object]) -> None:
    path = folder / "tokens_latent0_batch1_meta.json"
    rows = json.loads(path.read_text())
    change(rows)
    path.write_text(json.dumps(rows))


def make_hole(mask: np.ndarray) -> None:
    mask[1] = 0


def write_bomb(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("input_ids.npy", bytes(1 << 27))


FAULTS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "no latents": ("pairs", lambda f: (f / "latents/00017.npy").unlink(), "00017.npz: sample 00017 has no latents"),
    "two files of latents": (
        "pairs",
        lambda f: shutil.copy(f / "latents/00017.npy", f / "latents/00017_latent.npy"),
        "sample 00017 has",
    ),
    "two files of tokens": (
        "pairs",
        lambda f: shutil.copy(f / "tokens/00017.npz", f / "00017_tokens.npz"),
        "both are the tokens of sample 00017",
    ),
    "mask with a hole": (
        "pairs",
        lambda f: rewrite(f / "tokens/00003.npz", make_hole, "attention_mask"),
        "00003.npz: the mask is not",
    ),
    "mask of another length": (
        "pairs",
        lambda f: rewrite(f / "tokens/00003.npz", lambda mask: mask[:-1], "attention_mask"),
        "00003.npz: ids [100] and mask [99]",
    ),
    "archive without mask": (
        "pairs",
        lambda f: np.savez(f / "tokens/00003.npz", input_ids=np.arange(3)),
        "00003.npz: holds the arrays input_ids, expected input_ids and attention_mask",
    ),
    "archive of objects": (
        "pairs",
        lambda f: np.savez(f / "tokens/00003.npz", allow_pickle=True, input_ids=np.array([{}]), attention_mask=[1]),
        "00003.npz: not a readable archive of arrays",
    ),
    "archive that expands": ("pairs", lambda f: write_bomb(f / "tokens/00003.npz"), "bytes uncompressed, expected"),
    "latents of zeros": (
        "pairs",
        lambda f: rewrite(f / "latents/00005.npy", np.zeros_like),
        "00005.npz: the latent is all zeros",
    ),
    "latents that are not finite": (
        "pairs",
        lambda f: rewrite(f / "latents/00005.npy", lambda latent: latent * np.nan),
        "00005.npz: the latent is not finite",
    ),
    "latents of objects": (
        "pairs",
        lambda f: np.save(f / "latents/00005.npy", np.array([{}]), allow_pickle=True),
        "00005.npy: not a readable array",
    ),
    "truncated latents": (
        "pairs",
        lambda f: (f / "latents/00005.npy").write_bytes((f / "latents/00005.npy").read_bytes()[:-2]),
        "00005.npy: not a readable array",
    ),
    "no meta": ("batches", lambda f: (f / "tokens_latent0_batch1_meta.json").unlink(), "batch1_meta.json: missing"),
    "meta that is nested too deep": (
        "batches",
        lambda f: (f / "tokens_latent0_batch1_meta.json").write_text("[" * 100_000),
        "batch1_meta.json: not readable as JSON",
    ),
    "meta without latent_idx": (
        "batches",
        lambda f: rewrite_meta(f, lambda rows: rows[3].pop("latent_idx")),
        "batch1_meta.json: not readable as JSON with a latent_idx",
    ),
    "meta of another count": (
        "batches",
        lambda f: rewrite_meta(f, lambda rows: rows.pop()),
        "batch1_meta.json: 49 latent_idx, expected 50",
    ),
    "latents used twice": (
        "batches",
        lambda f: rewrite_meta(f, lambda rows: rows[3].update(latent_idx=rows[9]["latent_idx"])),
        "batch1.npy: row 9: an earlier row has latent_idx",
    ),
    "latent_idx outside": (
        "batches",
        lambda f: rewrite_meta(f, lambda rows: rows[3].update(latent_idx=999)),
        "batch1.npy: row 3: latent_idx 999: ",
    ),
    "mask with a hole in a batch": (
        "batches",
        lambda f: rewrite(f / "tokens_latent0_batch0.npy", lambda array: make_hole(array[7, 1])),
        "batch0.npy: row 7: the mask is not",
    ),
    "tokens of objects": (
        "batches",
        lambda f: np.save(f / "tokens_latent0_batch0.npy", np.array([{}]), allow_pickle=True),
        "batch0.npy: not a readable array",
    ),
    "no file of latents": (
        "texts",
        lambda f: (f / "latents/00004.npy").unlink(),
        "train_data.json:5: its latent 'latents/00004.npy' is not in",
    ),
    "latents outside the folder": (
        "texts",
        lambda f: (f / "latents/00004.npy").rename(f.parent / "00004.npy") and write_paths(f, 4, "../00004.npy"),
        "train_data.json:5: its latent '../00004.npy' is not in",
    ),
    "other text in the file": (
        "texts",
        lambda f: (f / "texts/00005.txt").write_text("Something else."),
        "but 00005.txt 'Something else.'",
    ),
    "text of another encoding": ("texts", lambda f: (f / "texts/00005.txt").write_bytes(b"\xff\xfe"), "00005.txt: "),
    "half a surrogate pair": (
        "texts",
        lambda f: (f / "train_data.json").write_text(
            (f / "train_data.json").read_text().replace('"text": "', '"text": "\\ud800', 1)
        ),
        "train_data.json:1: 'utf-8' codec can't encode",
    ),
    "no list": ("texts", lambda f: (f / "train_data.json").write_text("{}"), "a JSON dict, expected a list"),
    "less room for latents": (
        "dat",
        lambda f: (f / "train_rank0_latents.dat").write_bytes((f / "train_rank0_latents.dat").read_bytes()[: 67 * 24]),
        "train_rank0_tokens.dat: room for 83 samples, but 67 of latents",
    ),
    "more lines than samples": (
        "dat with an index",
        lambda f: (f / "train_rank1_texts.txt").write_text("\n" * 54),
        "train_rank1_texts.txt: 54 lines, expected 53; the latents are not those of the tokens",
    ),
    "index without a rank": (
        "dat with an index",
        lambda f: (f / "train_rank1_tokens.dat").unlink(),
        "global_index.json: expected files, samples_per_rank, max_length or tokens",
    ),
    "no index": (
        "dat with an index",
        lambda f: (f / "global_index.json").unlink(),
        "global_index.json: missing; expected a JSON object of files",
    ),
}


def write_paths(folder: Path, row: int, latent_path: str) -> None:
    items = json.loads((folder / "train_data.json").read_text())
    items[row]["latent_path"] = latent_path
    (folder / "train_data.json").write_text(json.dumps(items))


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(fault: str, samples: Samples, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout, damage, message = FAULTS[fault]
    source = WRITERS[layout](tmp_path / "source", samples)
    damage(source)
    assert convert(source, tmp_path / "out") == 65
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not list(tmp_path.glob("out/*"))


def test_unusable_samples_are_left_out_and_reported(
    samples: Samples, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_pairs(tmp_path / "source", samples)
    (source / "latents/00017.npy").unlink()
    (source / "tokens/00080.npz").unlink()
    rewrite(source / "tokens/00003.npz", np.zeros_like, "attention_mask")
    assert convert(source, tmp_path / "out", "--on-problem", "skip") == 0
    output = capsys.readouterr()
    assert "117 samples of the layout pairs; 1 files of latents have no tokens; 2 samples left out" in output.out
    first, second = output.err.splitlines()
    assert "00003.npz: no tokens: the mask is all zeros" in first and "00017 has no latents" in second
    ids = parquet.read_table(tmp_path / "out/lgdlm.parquet")["id"].to_pylist()
    assert ids == [f"{row:05d}" for row in range(120) if row not in (3, 17, 80)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples_per_rank": [10]}, "global_index.json: expected files, samples_per_rank"),
        ({"samples_per_rank": [60, 53]}, "train_rank0_tokens.dat: row 60 is not empty, expected 60 samples"),
        ({"samples_per_rank": [900, 53]}, "train_rank0_tokens.dat: room for 83 samples, expected 900"),
        ({"samples_per_rank": [69, 53]}, "train_rank0_tokens.dat: row 67: "),
        ({"tokens": "int32:99"}, "bytes, expected rows of int32 [99], 396 bytes each"),
        ({"tokens": "object:9"}, "global_index.json: expected files, samples_per_rank"),
        ({"latents": "float32:0"}, "global_index.json: expected files, samples_per_rank"),
        ({"latents": "float32:3"}, "train_rank0_latents.dat: row 67 is not empty, expected 67 samples"),
        ({"latents": "int32:6"}, "row 0: the latent is int32 [6], expected float"),
        ({"pad_id": None}, "global_index.json: tokens without masks need pad_id"),
    ],
)
def test_contents_of_dat_files(
    change: dict, message: str, samples: Samples, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = write_dat(tmp_path / "source", samples) / "global_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | change))
    assert convert(index.parent, tmp_path / "out") == 65
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("out/*"))


def test_the_layout_can_be_chosen(samples: Samples, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_pairs(tmp_path / "source", samples)
    np.save(source / "tokens/batch.npy", np.ones((1, 2, 3), int))
    assert convert(source, tmp_path / "out") == 65
    assert "holds the layouts pairs and batches; expected one: choose it with --layout" in capsys.readouterr().err
    assert convert(source, tmp_path / "out", "--layout", "pairs") == 0
    assert convert(source, tmp_path / "out", "--layout", "pairs") == 2
    assert "lgdlm.parquet: exists already" in capsys.readouterr().err
    for absent in ("texts", "dat", "batches"):
        assert convert(write_pairs(tmp_path / absent, samples), tmp_path / "out" / absent, "--layout", absent) == 65
    (tmp_path / "empty").mkdir()
    for folder, message in (("empty", "no data of LGDLM: expected tokens/"), ("missing", "no such folder")):
        assert convert(tmp_path / folder, tmp_path / "none") == 65
        assert message in capsys.readouterr().err


def test_samples_are_read_in_a_fixed_order(samples: Samples, tmp_path: Path) -> None:
    source = write_base(tmp_path / "source", samples)
    ids = [sample.read().id for sample in read_samples(source, "pairs", [])]
    assert ids == sorted(ids) and ids[0] == "train/openwebtext_00000000_000_0000000000000000"


@pytest.mark.parametrize("format", ["lgdlm", "predecessor", "predecessor-dat"])
def test_prepare_names_the_command(format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["prepare", str(tmp_path), "--format", format, "--out", str(tmp_path / "store")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--format {format}: run `mmldlm convert lgdlm FOLDER OUT`" in line


def test_without_pyarrow_the_extra_is_named(
    samples: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_pairs(tmp_path / "source", samples)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert convert(source, tmp_path / "out") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install 'pyarrow" in line and not (tmp_path / "out").exists()
