"""`mmldlm align`: vectors of another encoder in place of a run's own latents."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import mmldlm
from mmldlm import cli
from mmldlm.data.prepare.pipeline import prepare
from mmldlm.run.load import LoadedRun
from tests.helpers.sample_corpus import small_config, write_corpus
from tests.helpers.user_errors import assert_user_error


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("pairs") / "pairs.txt", 200)


def align(*arguments: object) -> int:
    return cli.main(["align", *map(str, arguments)])


def rotated(short_run: LoadedRun, texts: Path) -> np.ndarray:
    """Vectors [n, 12] of an encoder that is a linear map of the run's own."""
    latents = short_run.encoder.encode(texts.read_text().splitlines())[:, 0]
    rng = np.random.default_rng(0)
    return (latents @ rng.normal(size=(latents.shape[1], 12)) + rng.normal(size=12)).astype(np.float32)


def test_a_linear_map_is_found(
    short_run: LoadedRun, short_run_dir: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vectors, out = rotated(short_run, texts), tmp_path / "bundle"
    np.save(tmp_path / "new.npy", vectors)
    assert align(short_run_dir, tmp_path / "new.npy", "--pairs", texts, "--out", out) == 0
    said = capsys.readouterr().out
    measured = json.loads((out / "manifest.json").read_text())["info"]["alignment"]
    assert measured["explained"] > 0.9999 and measured["held_out"] == 20 and "cosine 1.000" in said
    assert "taken as vectors of another one, 12 numbers" in (out / "README.md").read_text()

    latents = short_run.encoder.encode(texts.read_text().splitlines()[:5])
    own, other = mmldlm.load(short_run_dir), mmldlm.load(out)
    expected = own.sample(latents=latents, lengths=6)
    assert other.sample(latents=vectors[:5], lengths=6).texts == expected.texts
    np.testing.assert_allclose(other.sample(latents=vectors[:5], lengths=6).latents, expected.latents, atol=1e-3)

    # The same by the command, from a file, and from a bundle that was exported again.
    assert cli.main(["export", str(out), str(tmp_path / "again")]) == 0
    np.save(tmp_path / "few.npy", vectors[:5])
    arguments = ["--latents", str(tmp_path / "few.npy"), "--length", "6", "--out", str(tmp_path / "texts.jsonl")]
    assert cli.main(["sample", str(tmp_path / "again"), *arguments]) == 0
    lines = [json.loads(line)["texts"] for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    assert [text for (text,) in lines] == expected.texts


def test_another_encoder_of_a_store(
    short_run_dir: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(small_config(tmp_path / "store", write_corpus(tmp_path / "other.txt", 300, seed=5)), progress=False)
    assert align(short_run_dir, tmp_path / "store", "--pairs", texts, "--out", tmp_path / "out") == 0
    measured = json.loads((tmp_path / "out/manifest.json").read_text())["info"]["alignment"]
    assert 0 < measured["explained"] < 1 and 0 < measured["cosine"] < 1


def test_refusals(
    short_run: LoadedRun, short_run_dir: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vectors = rotated(short_run, texts)
    np.save(tmp_path / "new.npy", vectors)
    np.save(tmp_path / "few.npy", vectors[:50])
    out = tmp_path / "out"
    for code, new, expected in (
        (65, tmp_path / "few.npy", "found 50 vectors and 200 texts"),
        (65, tmp_path / "none.npy", "does not exist"),
        (65, tmp_path, "expected .npy, a folder with an encoder"),
    ):
        capsys.readouterr()
        status = align(short_run_dir, new, "--pairs", texts, "--out", out)
        assert_user_error((status, capsys.readouterr().err), code, expected)
    assert not out.exists()
    assert align(short_run_dir, tmp_path / "new.npy", "--pairs", texts, "--out", out) == 0
    own = short_run.encoder.encode(["The wave."])
    np.save(tmp_path / "own.npy", own)
    capsys.readouterr()
    status = cli.main(["sample", str(out), "--latents", str(tmp_path / "own.npy")])
    assert_user_error((status, capsys.readouterr().err), 65, "of the encoder that the bundle was aligned to")
