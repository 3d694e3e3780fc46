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
from tests.helpers.user_errors import assert_user_error

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


META = "tokens_latent0_batch1_meta.json"


def rewrite_meta(folder: Path, change: Callable[[list], object]) -> None:
    path = folder / META
    rows = json.loads(path.read_text())
    change(rows)
    path.write_text(json.dumps(rows))


def make_hole(mask: np.ndarray) -> None:
    mask[1] = 0


def write_bomb(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("input_ids.npy", bytes(1 << 27))


FAULTS: list[tuple[str, Callable[[Path], object], str]] = [
    # no latents, two files of latents, two files of tokens
    ("pairs", lambda f: (f / "latents/00017.npy").unlink(), "00017.npz"),
    ("pairs", lambda f: shutil.copy(f / "latents/00017.npy", f / "latents/00017_latent.npy"), "00017_latent.npy"),
    ("pairs", lambda f: shutil.copy(f / "tokens/00017.npz", f / "00017_tokens.npz"), "00017_tokens.npz"),
    # masks with a hole and of another length; archives without a mask, of objects, and that expand
    ("pairs", lambda f: rewrite(f / "tokens/00003.npz", make_hole, "attention_mask"), "00003.npz mask"),
    ("pairs", lambda f: rewrite(f / "tokens/00003.npz", lambda m: m[:-1], "attention_mask"), "00003.npz [100] [99]"),
    ("pairs", lambda f: np.savez(f / "tokens/00003.npz", input_ids=np.arange(3)), "00003.npz attention_mask"),
    ("pairs", lambda f: np.savez(f / "tokens/00003.npz", allow_pickle=True, input_ids=np.array([{}])), "00003.npz"),
    ("pairs", lambda f: write_bomb(f / "tokens/00003.npz"), "00003.npz bytes"),
    # latents of zeros, not finite, of objects, truncated
    ("pairs", lambda f: rewrite(f / "latents/00005.npy", np.zeros_like), "00005.npz zeros"),
    ("pairs", lambda f: rewrite(f / "latents/00005.npy", lambda latent: latent * np.nan), "00005.npz finite"),
    ("pairs", lambda f: np.save(f / "latents/00005.npy", np.array([{}]), allow_pickle=True), "00005.npy"),
    ("pairs", lambda f: (file := f / "latents/00005.npy").write_bytes(file.read_bytes()[:-2]), "00005.npy"),
    # no meta file, one that is nested too deep, without an index, and of another length
    ("batches", lambda f: (f / META).unlink(), META),
    ("batches", lambda f: (f / META).write_text("[" * 100_000), META),
    ("batches", lambda f: rewrite_meta(f, lambda rows: rows[3].pop("latent_idx")), f"{META} latent_idx"),
    ("batches", lambda f: rewrite_meta(f, lambda rows: rows.pop()), f"{META} 49 50"),
    # latents that are used twice, or not there; a mask with a hole; tokens of objects
    (
        "batches",
        lambda f: rewrite_meta(f, lambda rows: rows[3].update(latent_idx=rows[9]["latent_idx"])),
        "batch1.npy 9",
    ),
    ("batches", lambda f: rewrite_meta(f, lambda rows: rows[3].update(latent_idx=999)), "batch1.npy 3 999"),
    ("batches", lambda f: rewrite(f / "tokens_latent0_batch0.npy", lambda a: make_hole(a[7, 1])), "batch0.npy 7 mask"),
    ("batches", lambda f: np.save(f / "tokens_latent0_batch0.npy", np.array([{}]), allow_pickle=True), "batch0.npy"),
    # latents that are not there or outside the folder; another text, another encoding, half a surrogate pair; no list
    ("texts", lambda f: (f / "latents/00004.npy").unlink(), "train_data.json:5 'latents/00004.npy'"),
    (
        "texts",
        lambda f: (f / "latents/00004.npy").rename(f.parent / "00004.npy") and write_paths(f, 4, "../00004.npy"),
        "train_data.json:5 '../00004.npy'",
    ),
    ("texts", lambda f: (f / "texts/00005.txt").write_text("Something else."), "00005.txt Something"),
    ("texts", lambda f: (f / "texts/00005.txt").write_bytes(b"\xff\xfe"), "00005.txt"),
    (
        "texts",
        lambda f: (file := f / "train_data.json").write_text(
            file.read_text().replace('"text": "', '"text": "\\ud800', 1)
        ),
        "train_data.json:1 'utf-8'",
    ),
    ("texts", lambda f: (f / "train_data.json").write_text("{}"), "train_data.json dict"),
    # less room for latents; more lines than samples; no tokens of a rank; no index
    (
        "dat",
        lambda f: (file := f / "train_rank0_latents.dat").write_bytes(file.read_bytes()[: 67 * 24]),
        "train_rank0_tokens.dat 83 67",
    ),
    ("dat with an index", lambda f: (f / "train_rank1_texts.txt").write_text("\n" * 54), "rank1_texts.txt 54 53"),
    ("dat with an index", lambda f: (f / "train_rank1_tokens.dat").unlink(), "global_index.json samples_per_rank"),
    ("dat with an index", lambda f: (f / "global_index.json").unlink(), "global_index.json files"),
]


def write_paths(folder: Path, row: int, latent_path: str) -> None:
    items = json.loads((folder / "train_data.json").read_text())
    items[row]["latent_path"] = latent_path
    (folder / "train_data.json").write_text(json.dumps(items))


@pytest.mark.parametrize(("layout", "damage", "named"), FAULTS)
def test_faults(
    layout: str,
    damage: Callable[[Path], object],
    named: str,
    samples: Samples,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = WRITERS[layout](tmp_path / "source", samples)
    damage(source)
    assert_user_error((convert(source, tmp_path / "out"), capsys.readouterr().err), 65, *named.split())
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
    ("change", "named"),
    [
        ({"samples_per_rank": [10]}, "global_index.json samples_per_rank"),
        ({"samples_per_rank": [60, 53]}, "train_rank0_tokens.dat 60"),
        ({"samples_per_rank": [900, 53]}, "train_rank0_tokens.dat 83 900"),
        ({"samples_per_rank": [69, 53]}, "train_rank0_tokens.dat 67"),
        ({"tokens": "int32:99"}, "train_rank0_tokens.dat int32 [99] 396"),
        ({"tokens": "object:9"}, "global_index.json tokens"),
        ({"latents": "float32:0"}, "global_index.json latents"),
        ({"latents": "float32:3"}, "train_rank0_latents.dat 67"),
        ({"latents": "int32:6"}, "row 0 int32 [6] float"),
        ({"pad_id": None}, "global_index.json pad_id"),
    ],
)
def test_contents_of_dat_files(
    change: dict, named: str, samples: Samples, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = write_dat(tmp_path / "source", samples) / "global_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | change))
    assert_user_error((convert(index.parent, tmp_path / "out"), capsys.readouterr().err), 65, *named.split())
    assert not list(tmp_path.glob("out/*"))


def test_the_layout_can_be_chosen(samples: Samples, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_pairs(tmp_path / "source", samples)
    np.save(source / "tokens/batch.npy", np.ones((1, 2, 3), int))
    assert convert(source, tmp_path / "out") == 65
    assert "pairs and batches" in (told := capsys.readouterr().err) and "--layout" in told
    assert convert(source, tmp_path / "out", "--layout", "pairs") == 0
    assert convert(source, tmp_path / "out", "--layout", "pairs") == 2
    assert "lgdlm.parquet: exists already" in capsys.readouterr().err
    for absent in ("texts", "dat", "batches"):
        assert convert(write_pairs(tmp_path / absent, samples), tmp_path / "out" / absent, "--layout", absent) == 65
    (tmp_path / "empty").mkdir()
    for folder in ("empty", "missing"):
        capsys.readouterr()
        status = convert(tmp_path / folder, tmp_path / "none")
        assert_user_error((status, capsys.readouterr().err), 65, str(tmp_path / folder))


def test_samples_are_read_in_a_fixed_order(samples: Samples, tmp_path: Path) -> None:
    source = write_base(tmp_path / "source", samples)
    ids = [sample.read().id for sample in read_samples(source, "pairs", [])]
    assert ids == sorted(ids) and ids[0] == "train/openwebtext_00000000_000_0000000000000000"


def test_without_pyarrow_the_extra_is_named(
    samples: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_pairs(tmp_path / "source", samples)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert convert(source, tmp_path / "out") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install 'pyarrow" in line and not (tmp_path / "out").exists()
