"""Damaged stores are refused and unusable samples are refused or skipped, by name."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mmldlm import cli, train
from mmldlm.config import load_config
from mmldlm.data.store import Store
from mmldlm.data.verify import partition_items, verify, verify_part
from mmldlm.errors import ConfigError, DataError
from mmldlm.evaluation.validate import validation_ids
from tests.helpers.forked_runs import ForkedRuns
from tests.helpers.metrics import read_metrics
from tests.helpers.sample_corpus import flip_bit, overwrite_value, write_corpus, write_store
from tests.helpers.user_errors import assert_user_error, refused

quick = pytest.mark.quick


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """40 + 7 + 3 samples in shards of 7."""
    write_store(tmp_path / "shards")
    return tmp_path / "shards"


@pytest.fixture
def copy(tiny_store: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_store, tmp_path / "copy"))


def alone(store: Store, max_bad_samples: int = 0, full: bool = True) -> tuple[Store, list[str]]:
    """`verify` in a run of one process."""
    engine: Any = SimpleNamespace(
        rank=0, gather=lambda value, what: [value], raise_on_all_ranks=lambda what: nullcontext()
    )
    return verify(store, full, max_bad_samples, engine)


def swap(folder: Path, kind: str) -> None:
    one, other = folder / f"train-00001.{kind}.npy", folder / f"train-00002.{kind}.npy"
    one.rename(folder / "aside")
    other.rename(one)
    (folder / "aside").rename(other)


@quick
def test_a_damaged_store_is_refused_before_anything_is_made(
    shards: Path, tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip_bit(shards / "train-00003.latents.npy")
    status = train.main([str(tiny_config), f"data.path={shards}"])
    assert_user_error((status, capsys.readouterr().err), 65, "train-00003.latents.npy: damaged: SHA-256")
    assert not (tmp_path / "run").exists()


@quick
def test_only_full_verification_sees_what_opening_does_not(shards: Path) -> None:
    assert alone(Store.open(shards))[1] == []
    swap(shards, "latents")
    store = Store.open(shards)
    assert alone(store, full=False) == (store, [])
    with refused(DataError, "train-0000", ".latents.npy", "SHA-256"):
        alone(store)


@quick
def test_parts_of_ranks_are_the_whole_and_nearly_equal(shards: Path) -> None:
    manifest = (store := Store.open(shards)).manifest
    for parts in (1, 2, 3, 50):
        local_items = partition_items(store, parts)
        names = sorted(name for part in local_items for _, _, name in part)
        assert names == sorted([*manifest.files, *(f"train-0000{i}" for i in range(6)), "validation-00000"])
        assert len(local_items) == parts
    overwrite_value(shards, "train-00002.latents", (3, 1, 2), np.inf)
    overwrite_value(shards, "validation-00000.tokens", 0, 999)
    result = [verify_part(Store.open(shards), part, 3, keep=5) for part in range(3)]
    assert sum(count for count, _ in result) == 2
    assert sorted((split, row) for _, bad in result for split, row, _ in bad) == [(0, 17), (1, 0)]


@quick
def test_bad_samples_are_left_out_up_to_the_number_allowed(shards: Path) -> None:
    offsets = np.load(shards / "train-00001.offsets.npy")
    overwrite_value(shards, "train-00001.tokens", int(offsets[4]), 27)  # sample 4: row 11; 27 is the mask
    assert alone(Store.open(shards))[1] == []
    overwrite_value(shards, "train-00001.tokens", [int(offsets[4]), int(offsets[5]) - 1], 400)
    overwrite_value(shards, "train-00001.latents", ([4, 6], 0, 0), np.nan)
    overwrite_value(shards, "validation-00000.latents", 2, -np.inf)
    store = Store.open(shards)
    good, lines = alone(store, 3)
    assert [line.rpartition("/")[2].partition(",")[0] for line in lines] == [
        "train-00001.latents.npy: sample 4 (row 11 of split train): the latent is not finite",
        "train-00001.latents.npy: sample 6 (row 13 of split train): the latent is not finite",
        "validation-00000.latents.npy: sample 2 (row 2 of split validation): the latent is not finite",
    ]
    assert good.split("train").skipped.tolist() == [11, 13] and good.split("test").skipped.tolist() == []
    for allowed in (0, 2):
        with refused(DataError, "sample 4 ", "3 bad samples", f"data.max_bad_samples is {allowed}"):
            alone(store, allowed)
    with refused(DataError, 7, "validation"):
        store.without({"validation": range(7)})


@quick
def test_validation_draws_the_same_samples_but_the_bad_ones(shards: Path) -> None:
    store = Store.open(shards)
    whole = store.split("validation")
    drawn = validation_ids(whole, 7)
    skipped = sorted(drawn[1:3])
    assert validation_ids(store.without({"validation": skipped}).split("validation"), 4) == [drawn[0], *drawn[3:6]]


@quick
def test_skipping_samples_needs_full_verification() -> None:
    with refused(ConfigError, "data.max_bad_samples: 2", "data.verify: full", "sizes"):
        load_config(None, ["data.max_bad_samples=2", "data.verify=sizes"])


@pytest.mark.setting("data.max_bad_samples")
def test_run_reports_skipped_samples(
    copy: Path, tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overwrite_value(copy, "train-00000.latents", (17, 0, 3), np.nan)
    overwrite_value(copy, "validation-00000.tokens", 0, 60_000)
    status = train.main([str(tiny_config), f"data.path={copy}", "data.max_bad_samples=1"])
    assert_user_error((status, capsys.readouterr().err), 65, "sample 17 ", "2 bad samples")
    settings = [str(tiny_config), f"data.path={copy}", "data.max_bad_samples=2", "train.steps=12", "log.every=4"]
    assert train.main([*settings, "validation.every=6", "validation.samples=40", "checkpoint.every_steps=0"]) == 0
    warnings = [line for line in capsys.readouterr().out.splitlines() if "warning" in line and "left out" in line]
    report = json.loads((tmp_path / "run" / "startup.json").read_text())
    assert len(report["skipped_samples"]) == len(warnings) == 2
    assert all(sample in line for sample, line in zip(report["skipped_samples"], warnings, strict=True))
    records = [record for record in read_metrics(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "train"]
    good = len(Store.open(copy).split("train")) - 1
    assert {record["data/skipped_samples"] for record in records} == {2}
    assert records[-1]["data/epoch"] == pytest.approx(12 * 8 / good)
    assert cli.main(["evaluate", str(tmp_path / "run"), "--samples", "8", "--texts", "2", "--times", "1"]) == 0
    # Also where bad samples would be among those that are looked at.
    everything = ["--split", "validation", "--samples", "1000", "--texts", "2", "--times", "1"]
    assert cli.main(["evaluate", str(tmp_path / "run"), *everything]) == 0
    evaluation = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert evaluation["t2l"]["candidates"] == len(Store.open(copy).split("validation")) - 1
    whole_epoch = ["train.steps=2", f"train.global_batch_size={good}", "--dry-run"]
    assert train.main([*settings, *whole_epoch]) == 0
    assert train.main([*settings, *whole_epoch, "data.max_bad_samples=0"]) == 65


@quick
def test_no_folder_is_taken_for_one_of_another_kind(
    copy: Path, tiny_config: Path, short_run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run in a store, or a store in a run, would be deleted with it; --overwrite replaces nothing but a store."""
    before = sorted(copy.rglob("*"))
    bundle, run = tmp_path / "bundle", Path(shutil.copytree(short_run_dir, tmp_path / "run"))
    assert cli.main(["export", str(run), str(bundle)]) == 0
    for folder in (copy, copy / "deep/run", bundle, next((run / "checkpoints").glob("step-*"))):
        status = train.main([str(tiny_config), f"run.dir={folder}"])
        assert_user_error((status, capsys.readouterr().err), 64, f"run.dir: {folder} ")
    assert sorted(copy.rglob("*")) == before
    (copy / "notes.txt").write_text("mine")
    corpus = write_corpus(tmp_path / "corpus.txt")
    checkpoint = next((run / "checkpoints").glob("step-*"))
    for out in (copy, copy / "store", run, run / "store", run / "data", bundle, bundle / "data", checkpoint, tmp_path):
        options = ["--out", out, "--overwrite", "--vocab-size", 300]
        status = cli.main(["prepare", str(corpus), *map(str, options)])
        assert_user_error((status, capsys.readouterr().err), 65, f"{out}")
    assert (copy / "notes.txt").exists() and cli.main(["verify", str(run)]) == 0 and (bundle / "data").is_dir()


def test_fault_found_by_one_rank_ends_both(shards: Path, tiny_config: Path, forked: ForkedRuns, tmp_path: Path) -> None:
    name = next(name for split, _, name in partition_items(Store.open(shards), 2)[1] if split == 0)
    flip_bit(shards / f"{name}.tokens.npy")
    ranks = forked.start("ddp", [tiny_config, f"data.path={shards}"], 2, tmp_path / "log")
    assert forked.wait(ranks) == dict.fromkeys(ranks, 65), (tmp_path / "log").read_text()[-3000:]
    log = (tmp_path / "log").read_text()
    errors = [line for line in log.splitlines() if "mmldlm: error" in line]
    assert len(errors) == 2 and all(f"{name}.tokens.npy: damaged" in line for line in errors), log
    assert sum("rank 1: " in line for line in errors) == 1 and "Traceback" not in log, "rank 0 names the other one"
    assert not (tmp_path / "run").exists()
