"""`mmldlm prepare` from its input to the store: splits, bytes, problems, options and kills."""

from __future__ import annotations

import filecmp
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from mmldlm import cli
from mmldlm.data.encoders import LsaEncoder, load_encoder
from mmldlm.data.manifest import SPLITS
from mmldlm.data.store import Store
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.data.verify import verify_part
from mmldlm.errors import DataError, UsageError, run_command
from mmldlm.prepare.options import PrepareConfig
from mmldlm.prepare.pipeline import main, prepare
from tests.helpers.paths import ROOT
from tests.helpers.sample_corpus import small_config, write_corpus
from tests.helpers.user_errors import assert_user_error, refused
from tests.helpers.waiting import TEST_TIMEOUT_S

quick = pytest.mark.quick


def texts_of(store: Store, split: str) -> list[str]:
    part = store.split(split)
    tokenizer = Tokenizer.load(store.path / "tokenizer")
    return tokenizer.decode_batch([part.tokens(i).tolist() for i in range(len(part))])


@quick
def test_every_document_is_in_one_split_with_its_own_latent(store: Store, store_path: Path) -> None:
    verify_part(store)
    lines = (store_path.parent / "corpus.txt").read_text().splitlines()
    encoder = load_encoder(store_path / "encoder")
    result: dict[str, list[str]] = {split: texts_of(store, split) for split in store.manifest.splits}
    assert sorted(text for texts in result.values() for text in texts) == sorted(lines)
    keys = [set(map(str.casefold, texts)) for texts in result.values()]
    assert not (keys[0] & keys[1] or keys[0] & keys[2] or keys[1] & keys[2])
    for split, texts in result.items():
        part = store.split(split)
        latents = np.stack([part.latents(i) for i in range(len(part))])
        assert np.allclose(latents, encoder.encode(texts), atol=1e-3)
        assert part.characters.tolist() == [len(text) for text in texts]
        assert store.manifest.splits[split].characters == sum(map(len, texts))
    assert encoder.identity == LsaEncoder.fit(result["train"], 8).identity, "fitted on more than the training split"


@quick
def test_the_same_input_gives_the_same_bytes(store_path: Path, tmp_path: Path) -> None:
    prepare(small_config(tmp_path / "again", store_path.parent / "corpus.txt"), progress=False)
    names = [file.relative_to(store_path) for file in store_path.rglob("*") if file.is_file()]
    assert len(names) > 12 and len(names) == sum(file.is_file() for file in (tmp_path / "again").rglob("*"))
    for name in names:
        assert filecmp.cmp(store_path / name, tmp_path / "again" / name, shallow=False), name


@quick
def test_near_duplicates_and_copies_lie_on_one_side(tmp_path: Path) -> None:
    names = ["Anna", "Ben", "Carla", "Dan", "Emil", "Fay", "Gus", "Hanna"]
    lines = [f"Yesterday {name} saw {number} birds near the lake {lake}." for lake in "KLMNOPQRSTUV" * 4
             for number in (3, 5) for name in names]  # fmt: skip
    extra = write_corpus(tmp_path / "extra.txt", 300)
    (tmp_path / "a.txt").write_text("\n".join(lines))
    config = small_config(tmp_path / "exact", tmp_path / "a.txt", extra)
    for near in (False, True):
        out = tmp_path / f"near-{near}"
        manifest = prepare(replace(config, out=str(out), near_duplicates=near), progress=False)
        result = [{t for t in texts_of(Store.open(out), s) if "birds" in t} for s in manifest.splits]
        assert sum(len(texts) for texts in result) == 12 * 2 * len(names), "copies of a text lie in two splits"
        assert (sum(bool(texts) for texts in result) == 1) is near
    assert manifest.grouping["largest_group"] >= len(lines)


@quick
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_documents_that_share_a_text_or_a_group_lie_on_one_side(suffix: str, tmp_path: Path) -> None:
    """The same text after three questions has one latent; stories of one book are alike in more than words."""
    answers = write_corpus(tmp_path / "corpus.txt", 300).read_text().splitlines()
    rows = [{"text": f"{answer} {number}", "question": question, "book": number // 3}
            for number, answer in enumerate(answers) for question in ("What?", "Who?", "Why?")]  # fmt: skip
    path = tmp_path / f"rows.{suffix}"
    if suffix == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        parquet, table = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow").Table
        parquet.write_table(table.from_pylist(rows), path)
    for group_field in (None, "book"):
        config = small_config(
            tmp_path / "store", path, prefix_field="question", group_field=group_field, overwrite=True
        )
        manifest = prepare(config, progress=False)
        splits = [{text.rsplit(" ", 1)[1] for text in texts_of(Store.open(tmp_path / "store"), s)} for s in SPLITS]
        books = [{int(number) // 3 for number in numbers} for numbers in splits]
        assert sum(map(len, splits)) == len(answers), "a text lies in two splits"
        assert (sum(map(len, books)) == manifest.grouping["groups"] == 100) is (group_field is not None)
    with refused(DataError, "group_field"):
        prepare(replace(config, group_field=None, overwrite=False), progress=False)


@quick
def test_too_long_documents_are_split_or_cut_and_counted(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.txt", 300)
    long = "".join(f"The wave and tide of reef {number} wash ashore. " for number in range(40))
    corpus.write_text(corpus.read_text() + long + "\n")
    totals = {}
    for over_length in ("split", "cut"):
        out = tmp_path / over_length
        manifest = prepare(small_config(out, corpus, max_length=120, over_length=over_length), progress=False)
        assert manifest.problems == {"over_length": 1} and manifest.max_length <= 120
        store = Store.open(out)
        texts = {split: [t for t in texts_of(store, split) if "ashore" in t] for split in manifest.splits}
        (split, pieces), *others = sorted(texts.items(), key=lambda item: -len(item[1]))
        assert not any(others_pieces for _, others_pieces in others), "pieces of one document lie in two splits"
        assert long.startswith(pieces[0]) and ("".join(pieces) == long) is (over_length == "split")
        every = texts_of(store, split)
        latents = store.split(split).latents(every.index(pieces[0]))
        assert np.allclose(latents, load_encoder(out / "encoder").encode([pieces[0]])[0], atol=1e-3)
        totals[over_length] = len(pieces)
    assert totals["cut"] == 1 and totals["split"] > 5


def bad_corpus(folder: Path) -> Path:
    lines = write_corpus(folder / "good.txt", 200).read_bytes().splitlines()
    lines[10] = b"not \xff utf-8"
    lines[20] = b""
    lines[30] = "。。。".encode()  # no word, so no latent
    path = folder / "bad.txt"
    path.write_bytes(b"\n".join(lines))
    return path


@quick
def test_problems_are_reported_with_file_and_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = bad_corpus(tmp_path)
    with refused(DataError, f"{path}:11", "byte 5", "0xff"):
        prepare(small_config(tmp_path / "store", path), progress=False)
    assert f"{path}:21: empty document" in capsys.readouterr().err
    assert not (tmp_path / "store").exists()
    manifest = prepare(small_config(tmp_path / "store", path, on_problem="skip"), progress=False)
    assert manifest.problems == {"empty": 1, "no_latent": 1, "over_length": 0, "unreadable": 1}
    assert f"{path}:31: the encoder gives no latent for '。。。'" in capsys.readouterr().err
    printed = [json.loads(line) for line in (tmp_path / "store/problems.jsonl").read_text().splitlines()]
    assert [(row["line"], row["kind"]) for row in printed] == [(11, "unreadable"), (21, "empty"), (31, "no_latent")]
    assert sum(split.samples for split in manifest.splits.values()) == 200 - 3
    with refused(DataError, "--max-problems 1"):
        prepare(small_config(tmp_path / "other", path, on_problem="skip", max_problems=1), progress=False)


@quick
def test_a_text_that_is_everywhere_and_a_word_without_end_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = write_corpus(tmp_path / "corpus.txt", 200).read_text().splitlines()
    (stories := tmp_path / "stories.txt").write_text("".join(f"{line}\n<eot>\n" for line in lines) + "x" * 5_000_000)
    config = small_config(tmp_path / "store", stories, on_problem="skip")
    manifest = prepare(config, progress=False)
    told = capsys.readouterr().err
    assert "stories.txt:401: a word of over" in told and manifest.problems["invalid"] == 1
    assert "warning: most frequent: " in told and manifest.grouping["most_frequent"] == {"text": "<eot>", "share": 0.5}
    manifest = prepare(replace(config, separator="<eot>", overwrite=True), progress=False)
    assert "warning" not in capsys.readouterr().err and manifest.grouping["documents"] == 200


@quick
def test_a_missing_latent_stops_by_default(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.txt", 200)
    corpus.write_text(corpus.read_text() + "???\n")
    with refused(DataError, "corpus.txt:201", "???"):
        prepare(small_config(tmp_path / "store", corpus), progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.txt"]


@quick
def test_preparing_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = write_corpus(tmp_path / "corpus.txt")
    config = small_config(tmp_path / "store", corpus)
    first = prepare(config, progress=False)
    before = (tmp_path / "store/manifest.json").stat().st_mtime_ns
    assert prepare(config, progress=False) == first
    assert "already prepared" in capsys.readouterr().err
    assert (tmp_path / "store/manifest.json").stat().st_mtime_ns == before
    with refused(DataError, "channels, seed"):
        prepare(replace(config, channels=4, seed=1), progress=False)
    write_corpus(corpus, seed=1)
    with refused(DataError, "sources"):
        prepare(config, progress=False)
    assert prepare(replace(config, overwrite=True), progress=False) != first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.txt", "store"]


@quick
def test_tokenizers_by_name_and_path(store_path: Path, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.txt")
    corpus.write_text(corpus.read_text().lower().replace(".", ""))
    manifest = prepare(small_config(tmp_path / "characters", corpus, tokenizer="characters", max_length=256))
    assert (manifest.vocab_size, manifest.token_dtype) == (29, "uint16")
    manifest = prepare(small_config(tmp_path / "same", corpus, tokenizer=str(store_path / "tokenizer")))
    assert manifest.tokenizer["sha256"] == Store.open(store_path).manifest.tokenizer["sha256"]
    corpus.write_text(corpus.read_text() + "CAPITALS\n")
    with refused(DataError, "corpus.txt:601"):
        prepare(small_config(tmp_path / "capitals", corpus, tokenizer="characters"))


@quick
def test_all_words_of_an_ordinary_corpus_are_tokens(tmp_path: Path) -> None:
    syllables = ["".join(pair) for pair in product("bdfgklmnprstvz", "aeiou")]
    corpus, words = tmp_path / "corpus.txt", ["".join(pair) for pair in product(syllables, syllables)]
    corpus.write_text("".join(f"{' '.join(words[start : start + 12])}\n" for start in range(0, len(words), 6)))
    options = {"vocab_size": None, "validation_fraction": 0.01, "test_fraction": 0.01}
    configs = {name: small_config(tmp_path / name, corpus, tokenizer=name, **options) for name in ("words", "bpe")}
    sizes = {name: prepare(config).vocab_size for name, config in configs.items()}
    assert len(words) < sizes["words"] < len(words) + 300 and sizes["bpe"] == 4096


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mmldlm.cli", "prepare", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=TEST_TIMEOUT_S)


def test_exit_codes_and_one_line_of_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = write_corpus(tmp_path / "corpus.txt")
    good = run(corpus, "--out", tmp_path / "store", "--channels", 8, "--vocab-size", 300)
    assert good.returncode == 0 and "train" in good.stderr
    missing = run(tmp_path / "none.txt", "--out", tmp_path / "failed")
    assert missing.returncode == 65 and missing.stderr.count("\n") == 1, missing.stderr
    assert missing.stderr.startswith(f"mmldlm: error: {tmp_path / 'none.txt'}: no such file")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "tiny.txt").write_text("One document alone.\n")
    for arguments, code, message in [
        (["empty.txt"], 65, "empty.txt: no documents"),
        (["tiny.txt"], 65, "has no documents of 1 in 1 groups"),
        (["corpus.txt", "--encoder", "other"], 2, "--encoder other"),
        (["corpus.txt", "--corpus", "python-docs"], 2, "either input files or --corpus"),
    ]:
        command = [str(tmp_path / arguments[0]), *arguments[1:], "--out", str(tmp_path / "failed")]
        assert run_command(lambda command=command: main(command)) == code  # type: ignore[misc]
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith("mmldlm: error: ") and message in last
        assert not (tmp_path / "failed").exists()


def killed_at(moment: str, arguments: list[str], done: bool = False) -> None:
    """SIGKILL where `mmldlm.prepare` + `moment` is called, or once it is `done`."""
    module = moment.partition(".")[0]
    script = (
        "import time\n"
        f"from mmldlm.prepare import pipeline, {module}\n"
        f"original = {moment}\n"
        f"def wait(*given): {'original(*given); ' * done}print('reached', flush=True); time.sleep(600)\n"
        f"{moment} = wait\n"
        f"pipeline.main({arguments!r})"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=ROOT, text=True)
    assert process.stdout is not None and process.stdout.readline() == "reached\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


@pytest.mark.parametrize("moment", ["encode.ShardWriter.add", "merge.publish"])
def test_a_killed_preparation_leaves_no_store(tmp_path: Path, moment: str) -> None:
    """The process dies in the middle of writing, or between the last byte of the manifest and the rename."""
    corpus = write_corpus(tmp_path / "corpus.txt")
    arguments = [str(corpus), "--out", str(tmp_path / "store"), "--channels", "8", "--vocab-size", "300"]
    killed_at(moment, arguments)
    assert not (tmp_path / "store").exists()
    with refused(DataError, tmp_path / "store"):
        Store.open(tmp_path / "store")
    assert len(list(tmp_path.glob("store.*"))) == 1
    assert main(arguments) == 0
    verify_part(Store.open(tmp_path / "store"))
    assert list(tmp_path.glob("store.*")) == []


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
def test_killed_behind_the_rename(tmp_path: Path, overwrite: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    corpus = write_corpus(tmp_path / "corpus.txt")
    arguments = [str(corpus), "--out", str(tmp_path / "store"), "--channels", "8", "--vocab-size", "300", *overwrite]
    killed_at("pipeline.merge", arguments, done=True)
    before = (tmp_path / "store/manifest.json").read_bytes()
    assert main(arguments) == 0
    assert ("already prepared" in capsys.readouterr().err) is not bool(overwrite)
    verify_part(Store.open(tmp_path / "store"))
    assert (tmp_path / "store/manifest.json").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.txt", "store"]


def test_sentence_transformers_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    config = small_config(tmp_path / "store", write_corpus(tmp_path / "a.txt"), encoder="sentence-transformers:some")
    with refused(UsageError, "pip install 'sentence-transformers>="):
        prepare(config, progress=False)


@pytest.mark.slow
def test_the_embedded_corpus(tmp_path: Path) -> None:
    manifest = prepare(PrepareConfig(str(tmp_path / "store"), corpus="python-docs"), progress=False)
    assert 25_000 < sum(split.samples for split in manifest.splits.values()) < 80_000
    assert manifest.grouping["largest_group"] < 200
    assert manifest.sources[0]["package"] == "python" and manifest.sources[0]["documents"] > 5_000
    for split in manifest.splits.values():
        assert 3.5 < split.characters / split.tokens < 5.5
    assert {t.casefold() for t in texts_of(Store.open(tmp_path / "store"), "test")}.isdisjoint(
        t.casefold() for t in texts_of(Store.open(tmp_path / "store"), "train")
    )


@quick
def test_the_default_number_of_channels_is_what_the_corpus_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = write_corpus(tmp_path / "corpus.txt", 400).read_text().splitlines()
    words = {"the", "of", "and", *"rose tulip soil water seed bloom leaf root".split()}  # noqa: SIM905
    short = [" ".join(word for word in line.lower().rstrip(".").split() if word in words) for line in lines]
    (tmp_path / "corpus.txt").write_text("\n".join(f"{text} rose" for text in short))
    command = ["prepare", str(tmp_path / "corpus.txt"), "--vocab-size", "300", "--validation-fraction", "0.1", "--out"]
    assert cli.main([*command, str(tmp_path / "store")]) == 0
    assert "--channels 11: the training split has only " in capsys.readouterr().err
    assert Store.open(tmp_path / "store").manifest.latent.channels == 11
    assert cli.main([*command, str(tmp_path / "asked"), "--channels", "11"]) == 0
    assert "has only" not in capsys.readouterr().err
    # What was asked for is not changed.
    status = cli.main([*command, str(tmp_path / "more"), "--channels", "64"])
    error = capsys.readouterr().err.splitlines()[-1] + "\n"
    assert_user_error((status, error), 65, "--channels 64", "expected at most 11 channels")
