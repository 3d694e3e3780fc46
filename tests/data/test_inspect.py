"""`mmldlm data info`, `verify` and `sample`: statistics of the data, and detection of every flipped bit."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from mmldlm import cli
from mmldlm.data.inspect import info, samples, verify_store
from mmldlm.data.manifest import CHECKSUM_NAME, MANIFEST_NAME, Manifest
from mmldlm.data.nearest import nearest_neighbors
from mmldlm.data.store import Store
from mmldlm.errors import DataError
from tests.helpers.sample_corpus import flip_bit, overwrite_value, write_store
from tests.helpers.user_errors import assert_user_error, refused


def test_info_says_what_is_in_the_store(store: Store, store_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data", "info", str(store_path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads(json.dumps(info(store)))
    for name, split in result["splits"].items():
        part = store.split(name)
        lengths = np.asarray(part.lengths)
        assert (split["samples"], split["tokens"]) == (len(part), lengths.sum())
        assert (split["lengths"]["shortest"], split["lengths"]["longest"]) == (lengths.min(), lengths.max())
        assert split["lengths"]["mean"] == pytest.approx(lengths.mean())
        assert split["lengths"]["50%"] == np.sort(lengths)[-(-len(lengths) // 2) - 1]
        width = split["length_histogram"]["width"]
        bins = np.bincount((lengths - 1) // width, minlength=len(split["length_histogram"]["samples"]))
        assert split["length_histogram"]["samples"] == bins.tolist()
        assert split["latent_norms"]["mean"] == pytest.approx(1, abs=1e-3) and split["latent_norms"]["of"] == len(part)
    assert result["tokenizer"] == store.manifest.tokenizer and result["encoder"]["name"] == "lsa"
    assert result["identity"] == store.identity and result["sources"][0]["file"].endswith("corpus.txt")
    assert cli.main(["data", "info", str(store_path)]) == 0
    printed = capsys.readouterr().out
    for part in ("train: ", "name lsa", "problems   none", "corpus.txt", "#####", "300 tokens"):
        assert part in printed, printed


def test_sample_shows_texts_lengths_norms_and_neighbors(
    store: Store, store_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["data", "sample", str(store_path), "-n", "3", "--split", "validation", "--neighbors", "2"]
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    assert cli.main(command) == 0 and capsys.readouterr().out == printed
    assert cli.main([*command, "--seed", "1"]) == 0 and capsys.readouterr().out != printed
    lines = (store_path.parent / "corpus.txt").read_text().splitlines()
    heads, texts = printed.splitlines()[::4], printed.splitlines()[1::4]
    assert len(heads) == 3 and all(text.strip() in lines for text in texts)
    row = int(heads[0].split(":")[0].removeprefix("validation "))
    split = store.split("validation")
    assert f"{split.lengths[np.array([row])][0]} tokens, {split.characters[row]} characters, latent norm " in heads[0]
    standard = store.standardize(np.stack([split.latents(index) for index in range(len(split))])).reshape(
        len(split), -1
    )
    standard /= np.linalg.norm(standard, axis=1, keepdims=True)
    cosines = standard @ standard[row]
    cosines[row] = -2
    ((first, second),) = nearest_neighbors(store, split, split.gather(np.array([row]))[2], 2, [row])
    assert first[1] == pytest.approx(cosines.max()) and second[1] == pytest.approx(np.sort(cosines)[-2])
    assert cosines[first[0]] == pytest.approx(first[1])
    assert len(list(samples(store, "test", 10**6, 0, 0))) == 2 * len(store.split("test"))


def test_no_escape_sequence_reaches_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents = [json.dumps({"text": f"a\x1b[2Jb\x9bJ\nc é {number}"}) for number in range(60)]
    hostile = tmp_path / "corpus\x1b]0;title\x07.jsonl"
    hostile.write_text("\n".join([*documents, "{}"]))
    options = ["--vocab-size", "300", "--channels", "8", "--validation-fraction", "0.1", "--test-fraction", "0.1"]
    command = ["prepare", str(hostile), "--out", str(tmp_path / "store"), *options]
    assert cli.main(command) == 65
    assert cli.main([*command, "--on-problem", "skip"]) == 0
    outputs = list(capsys.readouterr())
    for arguments in (["sample", "-n", "1", "--neighbors", "1"], ["info"], ["info", "--json"], ["verify"]):
        assert cli.main(["data", arguments[0], str(tmp_path / "store"), *arguments[1:]]) == 0
        outputs.append(capsys.readouterr().out)
    assert cli.main(["data", "info", str(hostile)]) == 65
    outputs.append(capsys.readouterr().err)
    assert "a\\x1b[2Jb\\x9bJ\\nc é" in outputs[2]
    for output in outputs:
        assert all(line.isprintable() for line in output.split("\n")), output


def test_intact_store_passes(store_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_store(tmp_path / "shards")
    for path in (store_path, tmp_path / "shards"):
        assert cli.main(["data", "verify", str(path)]) == 0
        assert f"{path}: intact: " in capsys.readouterr().out


def test_every_flipped_bit_is_found_in_the_file_that_has_it(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(0)
    for path in sorted(file for file in copy.rglob("*") if file.is_file() and file.stat().st_size):
        content = path.read_bytes()
        for at in {0, len(content) - 1, *(draw.randrange(len(content)) for _ in range(3))}:
            flip_bit(path, at)
            status = cli.main(["data", "verify", str(copy)])
            name = {CHECKSUM_NAME: MANIFEST_NAME, MANIFEST_NAME: ""}.get(path.name, path.name)
            assert_user_error((status, capsys.readouterr().err), 65, name)
            path.write_bytes(content)
    assert verify_store(copy) == []
    (copy / CHECKSUM_NAME).unlink()
    with refused(DataError, "manifest.json"):
        verify_store(copy)


def test_all_faults_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_store(tmp_path / "store")
    store = tmp_path / "store"
    overwrite_value(store, "train-00001.tokens", 3, 60_000)
    overwrite_value(store, "test-00000.latents", (2, 0, 1), np.nan)
    Manifest.read(store).write(store)  # seals it again
    flip_bit(store / "train-00004.latents.npy")
    flip_bit(store / "test-00000.characters.npy")
    assert cli.main(["data", "verify", str(store), "--threads", "2"]) == 65
    printed = capsys.readouterr()
    assert printed.out.count("\n") == 3 and "3 problems; the first: " in printed.err
    for part in (
        "train-00001.tokens.npy: sample",
        "train-00004.latents.npy: damaged",
        "test-00000.characters.npy: dam",
    ):
        assert part in printed.out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["info", "/nowhere"], 65, "/nowhere: not a data store"),
        (["sample", "STORE", "--split", "dev"], 65, "no split 'dev'"),
        (["sample", "STORE", "-n", "0"], 2, "--count 0: expected at least 1"),
    ],
)
def test_invalid_requests_are_refused(
    arguments: list[str], code: int, message: str, store_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["data", *(argument.replace("STORE", str(store_path)) for argument in arguments)]) == code
    assert message in capsys.readouterr().err
