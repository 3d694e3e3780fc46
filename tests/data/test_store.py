"""A store is read back as it was written; missing, damaged and contradicting files are named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.store_writer import StoreWriter
from mmldlm.data.encoders import LsaEncoder
from mmldlm.data.manifest import CHECKSUM_NAME, MANIFEST_NAME
from mmldlm.data.store import Store
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.data.verify import verify_part
from mmldlm.errors import DataError
from tests.helpers.sample_corpus import write_manifest, write_store
from tests.helpers.user_errors import refused

pytestmark = pytest.mark.quick


def test_store_round_trip(tmp_path: Path) -> None:
    written = write_store(tmp_path / "store")
    store = Store.open(tmp_path / "store")
    assert verify_part(store) == (0, [])
    assert len(store.manifest.splits["train"].shards) == 6
    for name, samples in written.items():
        split = store.split(name)
        assert len(split) == len(samples) == len(split.characters)
        assert np.asarray(split.lengths).tolist() == [len(tokens) for tokens, _ in samples] == split.characters.tolist()
        for index, (tokens, latents) in enumerate(samples):
            assert np.array_equal(split.tokens(index), tokens)
            assert np.array_equal(split.latents(index), latents)
        picked = np.array([len(split) - 1, 0, 2, 0])
        tokens, _, latents = split.gather(picked)
        assert np.array_equal(tokens, np.concatenate([samples[i][0] for i in picked]))
        assert np.array_equal(latents, np.stack([samples[i][1] for i in picked]))
    assert store.token_counts.sum() == store.manifest.splits["train"].tokens


def test_standardized_latents_have_unit_mean_square(tmp_path: Path) -> None:
    written = write_store(tmp_path / "store")
    store = Store.open(tmp_path / "store")
    raw = np.stack([latents for _, latents in written["train"]])
    standard = store.standardize(raw)
    assert np.square(standard).sum(-1).mean() == pytest.approx(4, rel=1e-4)
    assert np.abs(standard.mean(axis=(0, 1))).max() < 1e-4
    assert np.allclose(store.restore(standard), raw, atol=1e-5)
    largest = np.linalg.norm(standard, axis=-1).max()
    assert store.manifest.latent.max_norm == pytest.approx(largest, rel=1e-5)


def test_manifest_round_trip(store: Store) -> None:
    manifest = store.manifest
    assert json.loads(manifest.to_json()) == json.loads((store.path / MANIFEST_NAME).read_text())
    assert isinstance(manifest.latent.mean, tuple) and manifest.splits["train"].shards[0].files["tokens.npy"].bytes > 0
    assert manifest.max_length == max(int(np.asarray(store.split(name).lengths).max()) for name in manifest.splits)
    assert Tokenizer.load(store.path / "tokenizer").identity == manifest.tokenizer["sha256"]


def all_files(path: Path) -> list[str]:
    return sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())


def test_every_truncated_or_missing_file_is_named(copy: Path) -> None:
    for name in all_files(copy):
        if name in (MANIFEST_NAME, CHECKSUM_NAME, "problems.jsonl"):
            continue
        path = copy / name
        content = path.read_bytes()
        path.write_bytes(content[:-1])
        with refused(DataError, name, len(content)):
            Store.open(copy)
        path.unlink()
        with refused(DataError, name, len(content)):
            Store.open(copy)
        path.write_bytes(content)
    verify_part(Store.open(copy))


def change_array(path: Path, **changes: object) -> None:
    array = np.load(path)
    for index, value in changes.items():
        array[int(index[1:])] = value
    np.save(path, array)


def test_malformed_arrays_are_named(copy: Path) -> None:
    lengths = np.asarray(Store.open(copy).split("train").lengths)
    offsets = copy / "train-00000.offsets.npy"
    good = offsets.read_bytes()
    change_array(offsets, i3=10**6)
    for sample in (2, 3):
        with refused(DataError, offsets, f"sample {sample} "):
            Store.open(copy).split("train").lengths[np.array([0, sample])]
    with refused(DataError, offsets, "sample 2 "):
        np.asarray(Store.open(copy).split("train").lengths)
    change_array(offsets, i0=1)
    with refused(DataError, offsets, 1):
        Store.open(copy)
    offsets.write_bytes(good)
    change_array(copy / "train-00000.tokens.npy", **{f"i{int(lengths[:5].sum())}": 60_000})
    with refused(DataError, "train-00000.tokens.npy", "sample 5 ", 60000):
        Store.open(copy).split("train").gather(np.array([2, 5, 6]))
    with refused(DataError, "'dev'", "train, validation, test"):
        Store.open(copy).split("dev")
    manifest = json.loads((copy / MANIFEST_NAME).read_text())
    write_manifest(copy, {**manifest, "latent_dtype": "float32"})
    with refused(DataError, "latents.npy", "float16", "float32"):
        Store.open(copy)


def twice(manifest: dict) -> None:
    """List the training shard twice."""
    train = manifest["splits"]["train"]
    train.update(samples=2 * train["samples"], tokens=2 * train["tokens"], shards=train["shards"] * 2)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda result: result.pop("mask_id"), "mask_id"),
        (lambda result: result.update(extra=1), "extra"),
        (lambda result: result.update(format=99), "99 1"),
        (lambda result: result.update(mask_id=result["pad_id"]), "mask_id"),
        (lambda result: result.update(vocab_size=True), "vocab_size True"),
        (lambda result: result.update(max_length="32"), "max_length '32'"),
        (lambda result: result.update(token_dtype="int8"), "token_dtype 'int8'"),
        (lambda result: result["latent"].update(rms=-1.0), "latent"),
        (lambda result: result["latent"].update(mean=["a"] * 8), ""),
        (lambda result: result["latent"].update(channels=9), "latent"),
        (lambda result: result["splits"]["train"].update(samples=7), "splits"),
        (lambda result: result["splits"].pop("test"), "splits"),
        (lambda result: result["files"].update({"../x": {"bytes": 1, "sha256": ""}}), "files"),
        (lambda result: result["tokenizer"].update(sha256="0" * 64), "tokenizer"),
        (twice, "files"),
        (lambda result: result.update(encoder={}), ""),
        (lambda result: result.update(sources=["a"], options=[]), "options"),
    ],
)
def test_inconsistent_manifest_is_refused(copy: Path, change, named: str) -> None:  # type: ignore[no-untyped-def]
    result = json.loads((copy / MANIFEST_NAME).read_text())
    change(result)
    (copy / MANIFEST_NAME).write_text(json.dumps(result))
    with refused(DataError, MANIFEST_NAME, CHECKSUM_NAME):
        Store.open(copy)
    write_manifest(copy, result)
    with refused(DataError, MANIFEST_NAME, *named.split()):
        Store.open(copy)


def test_folder_without_a_store_is_refused(copy: Path, tmp_path: Path) -> None:
    with refused(DataError, tmp_path / "nowhere"):
        Store.open(tmp_path / "nowhere")
    manifest = copy / MANIFEST_NAME
    manifest.write_text(manifest.read_text()[:200])
    with refused(DataError, manifest, CHECKSUM_NAME):
        Store.open(copy)
    manifest.unlink()
    with refused(DataError, copy, MANIFEST_NAME):
        Store.open(copy)


def test_unreadable_manifest_is_named(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_: object) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with refused(DataError, MANIFEST_NAME, "Permission denied"):
        Store.open(store_path)


def test_an_error_while_writing_leaves_nothing(tmp_path: Path) -> None:
    encoder = LsaEncoder.fit(["one two", "three four"], 2)
    with pytest.raises(ZeroDivisionError), StoreWriter(tmp_path / "store", Tokenizer.characters(), encoder) as writer:
        writer.add("train", [np.array([1])], np.ones((1, 1, 2)), [1])
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with (
        refused(DataError, "validation"),
        StoreWriter(tmp_path / "store", Tokenizer.characters(), encoder) as writer,
    ):
        writer.add("train", [np.array([1])], np.ones((1, 1, 2)), [1])
        writer.finish([], {}, {}, {})
    assert list(tmp_path.iterdir()) == []
