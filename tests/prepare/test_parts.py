"""Parts of inputs, cached documents, shards that are written as they come, and samples to fit to."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from benchmarks.common.store_writer import StoreWriter
from mmldlm.data.encoders import ImportedLatents
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.data.writer import ShardWriter
from mmldlm.errors import DataError
from mmldlm.prepare.corpus import DocumentCacheWriter, cached_documents
from mmldlm.prepare.documents import Document
from mmldlm.prepare.job import make_plan
from mmldlm.prepare.pipeline import main, prepare
from mmldlm.prepare.readers.text import read_text, text_parts
from tests.helpers.large_corpus import write_synthetic_corpus
from tests.helpers.prepare_runs import FORKING
from tests.helpers.sample_corpus import read_file, small_config, write_corpus
from tests.helpers.user_errors import refused

quick = pytest.mark.quick


@quick
@pytest.mark.parametrize("format", ["lines", "blocks", "jsonl"])
def test_parts_together_are_the_file(tmp_path: Path, format: str) -> None:
    draw = random.Random(0)
    for trial in range(60):
        ends = draw.choice([[b"\n"], [b"\n", b"\r\n"]])
        pieces = [b"", b" ", b"{}", b'{"text": "two words"}', b'{"text": ""}', b"\xff", b"word", "wörd 漢字".encode(),
                  b"\xef\xbb\xbf", b"long " * 20]  # fmt: skip
        content = b"".join(draw.choice(pieces) + draw.choice(ends) for _ in range(draw.randrange(30)))
        path = tmp_path / f"{trial}.txt"
        path.write_bytes(content + draw.choice(pieces))
        whole = list(read_file(path, format))  # type: ignore[arg-type]
        size = path.stat().st_size
        for target in (1, 7, 50, size or 1, 10**9):
            parts = text_parts(str(path), target, format)  # type: ignore[arg-type]
            assert [part.start for part in parts] + [size] == [0, *(part.stop for part in parts)] if size else not parts
            assert all(part.stop - part.start >= target for part in parts[:-1])
            order = draw.sample(parts, len(parts)) if trial % 2 else parts
            result = {part: list(read_text(part, "text", format)) for part in order}  # type: ignore[arg-type]
            assert [item for part in parts for item in result[part]] == whole


@quick
def test_small_inputs_are_prepared_together(tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text("x\n" * 50)
    (tmp_path / "large.txt").write_text("yy\n" * 200)
    config = small_config(tmp_path / "store", *sorted(tmp_path.glob("*.txt")), part_bytes=250)
    plan = make_plan(config)
    chunks = [[(Path(part.path).stem, part.stop - part.start) for _, part in chunk] for chunk in plan.chunks]
    pairs = [[(str(number), 100), (str(number + 1), 100)] for number in range(0, 10, 2)]
    assert chunks == [*pairs, [("large", 252)], [("large", 252)], [("large", 96)]]


@quick
def test_cached_documents_come_back(tmp_path: Path) -> None:
    random_numbers = np.random.default_rng(0)
    documents = [
        Document(text, "file.txt", number, key=f"id {number}", tokens=tokens, latents=latents)
        for number, (text, tokens, latents) in enumerate(
            [
                ("plain", None, None),
                ("two\nlines \u2028 漢字 \x00 \ud800", np.arange(5), None),
                ("", np.array([7, 9], np.uint16), random_numbers.normal(size=(3, 4)).astype(np.float32)),
                ("none", np.array([], np.int32), np.array([[np.nan, np.inf]], np.float16)),
                ("view", None, random_numbers.normal(size=(4, 6))[::2, ::3]),
            ]
        )
    ]
    with DocumentCacheWriter(tmp_path, small_config(tmp_path)) as writer:
        for document in documents:
            writer.add(document)
    for numbers in (None, [4, 1, 2], []):
        wanted = documents if numbers is None else [documents[number] for number in numbers]
        result = list(cached_documents(tmp_path, numbers))
        assert len(result) == len(wanted)
        for one, other in zip(result, wanted, strict=True):
            assert (one.text, one.source, one.line, one.key) == (other.text, other.source, other.line, other.key)
            for array, before in ((one.tokens, other.tokens), (one.latents, other.latents)):
                assert (array is None) is (before is None)
                if array is not None and before is not None:
                    assert array.dtype == before.dtype and array.shape == before.shape
                    assert array.tobytes() == before.tobytes()


@quick
@pytest.mark.parametrize("shard_samples", [1, 3, 10, 1000])
def test_shards_are_what_numpy_saves(tmp_path: Path, shard_samples: int) -> None:
    draw = np.random.default_rng(0)
    samples = [draw.integers(0, 50, draw.integers(1, 20)) for _ in range(23)]
    latents = draw.normal(size=(23, 2, 5)).astype(np.float32)
    with ShardWriter(tmp_path, 50, (2, 5), np.dtype("uint16"), np.dtype("float16"), shard_samples) as writer:
        for start in range(0, 23, 4):
            part = slice(start, start + 4)
            writer.add("train", samples[part], latents[part], [3] * len(samples[part]))
        for split in ("validation", "test"):
            writer.add(split, samples[:1], latents[:1], [3])
        contents = writer.finish()
    sizes = [min(shard_samples, 23 - start) for start in range(0, 23, shard_samples)]
    assert [shard.samples for shard in contents.shards["train"]] == sizes
    for index, shard in enumerate(contents.shards["train"]):
        part = slice(index * shard_samples, (index + 1) * shard_samples)
        expected = {
            "tokens": np.concatenate(samples[part]).astype(np.uint16),
            "offsets": np.cumsum([0, *map(len, samples[part])]),
            "latents": latents[part].astype(np.float16),
            "characters": np.full(shard.samples, 3, np.int32),
        }
        for kind, array in expected.items():
            np.save(tmp_path / "expected.npy", array)
            assert (tmp_path / f"{shard.name}.{kind}.npy").read_bytes() == (tmp_path / "expected.npy").read_bytes()
    assert contents.token_counts.tolist() == np.bincount(np.concatenate(samples), minlength=50).tolist()
    stored = latents.astype(np.float16).astype(np.float64)
    assert np.allclose(contents.mean(2), stored.mean(axis=(0, 1)), rtol=1e-14)
    assert contents.max_length == max(map(len, samples)) and contents.characters["train"] == 69


def test_statistics_do_not_cancel(tmp_path: Path) -> None:
    """Latents far from zero: a difference of squares would lose all digits."""
    draw = np.random.default_rng(0)
    latents = (draw.normal(size=(300, 1, 4)) * 0.1 + 4096).astype(np.float32)
    encoder = ImportedLatents("test", "1", (1, 4))
    with StoreWriter(tmp_path / "s", Tokenizer.characters(), encoder, "float32", 7) as writer:
        for split in ("train", "validation", "test"):
            writer.add(split, [np.array([1])] * 300, latents, [1] * 300)
        result = writer.finish([], {}, {}, {}).latent
    exact = latents.astype(np.longdouble)
    assert np.allclose(result.mean, exact.mean(axis=(0, 1)).astype(float), rtol=1e-15)
    assert result.rms == pytest.approx(float(np.sqrt(np.square(exact - exact.mean(axis=(0, 1))).mean())), rel=1e-9)


def test_part_bytes_and_fit_documents(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.txt", 900)
    shards, identities = {}, {}
    for part_bytes, fit_documents in [(1 << 26, 100_000), (9000, 100_000), (9000, 150), (5000, 150), (5000, 151)]:
        config = small_config(
            tmp_path / f"{part_bytes}-{fit_documents}", corpus, part_bytes=part_bytes, fit_documents=fit_documents
        )
        manifest = prepare(config, progress=False)
        shards[part_bytes, fit_documents] = len(manifest.splits["train"].shards)
        identities[part_bytes, fit_documents] = manifest.tokenizer["sha256"], manifest.encoder["revision"]
    assert shards[1 << 26, 100_000] == 1 and 5 < shards[9000, 150] < shards[5000, 150]
    assert identities[1 << 26, 100_000] == identities[9000, 100_000], "the fit depends on how the input is cut"
    assert identities[9000, 150] == identities[5000, 150] != identities[9000, 100_000]
    assert identities[5000, 151] != identities[5000, 150]
    with refused(DataError, "part_bytes"):
        prepare(replace(config, part_bytes=6000), progress=False)


@quick
def test_latents_are_made_by_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of floats depend on how many threads share them out."""
    seen = set()

    def record_threads(owner: ModuleType, name: str) -> None:
        function = getattr(owner, name)

        def recorded(*arguments: object, **options: object) -> object:
            seen.add((name, torch.get_num_threads()))
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, recorded)

    record_threads(torch, "svd_lowrank")  # which fits the encoder
    record_threads(torch.nn.functional, "embedding_bag")  # which encodes
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        prepare(small_config(tmp_path / "store", write_corpus(tmp_path / "corpus.txt")), progress=False)
        assert seen == {("svd_lowrank", 1), ("embedding_bag", 1)} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# --- memory --------------------------------------------------------------------------------------


def _peak(arguments: list[str], answer: object) -> None:
    assert main(arguments) == 0
    status = Path("/proc/self/status").read_text()
    answer.put(int(status.partition("VmHWM:")[2].split()[0]))  # type: ignore[attr-defined]


def peak_mib(arguments: list[str]) -> float:
    """Return the peak memory of a process that prepares."""
    answer = FORKING.Queue()
    process = FORKING.Process(target=_peak, args=(arguments, answer))
    process.start()
    result = answer.get(timeout=300) / 1024
    process.join()
    return result


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    peaks = []
    for documents in (3000, 30_000):
        corpus = write_synthetic_corpus(tmp_path / f"{documents}.txt", documents, (20, 30))
        options = ["--vocab-size", "300", "--fit-documents", "500", "--part-bytes", "200000", "--max-length", "250"]
        peaks.append(peak_mib([str(corpus), "--out", str(tmp_path / f"store-{documents}"), *options]))
    assert peaks[1] - peaks[0] < 10
