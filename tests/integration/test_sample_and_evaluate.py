"""A short trained run, sampled and evaluated through the commands."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from mmldlm import cli
from mmldlm.diffusion.sampling import SamplingConfig
from mmldlm.inference import encode_texts, sample
from mmldlm.loading.load import LoadedRun, load_run
from tests.helpers.tiny_config import TINY
from tests.helpers.user_errors import assert_user_error

TEXT = "The rose of soil and water."


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, tiny_store: Path) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    config = folder / "config.yaml"
    config.write_text(TINY.format(run=folder / "run", store=tiny_store), encoding="utf-8")
    arguments = ["train.steps=150", "train.global_batch_size=16", "validation.every=0", "log.every=50"]
    from mmldlm import train

    assert train.main([str(config), *arguments]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def run(run_dir: Path) -> LoadedRun:
    return load_run(run_dir)


def test_evaluation_has_every_metric_with_its_baseline(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["evaluate", str(run_dir), "--texts", "8", "--samples", "30"]) == 0
    shown = capsys.readouterr().out
    result = json.loads((run_dir / "evaluation.json").read_text())
    for key in ("bits_per_token", "bits_per_character"):
        assert math.isfinite(result[key])
    assert result["controls"]["unigram_bits_per_token"] > 0
    for key in ("token_accuracy", "exact_match", "bleu", "chrf", "reencoded_cosine"):
        assert {key, f"{key}_shuffled", f"{key}_mean_latent", f"{key}_unigram"} <= result["l2t"].keys()
    assert {"bits_per_token", "bits_per_token_ci95", "bits_per_token_shuffled", "by_length"} <= result["l2t"].keys()
    assert {"cosine", "cosine_mean_latent", "recall_at_1", "recall_at_10", "candidates"} <= result["t2l"].keys()
    for key in ("token_entropy", "distinct_1", "distinct_2", "distinct_3", "repetition_4", "trigram_bits_per_token"):
        assert {key, f"{key}_true", f"{key}_unigram"} <= result["joint"].keys()
    assert result["joint"]["frechet_distance"] is None  # eight samples of eight channels
    assert result["t2l"]["candidates"] == 30 and result["l2t"]["texts"] == 8
    assert "recall@1" in shown and "baseline" in shown and "by noise bin" in shown
    samples = (run_dir / "samples.md").read_text()
    assert samples.count("reference:") == samples.count("generation:") == 8
    # It has learned: even 150 steps of a tiny model beat the unigram on so simple a language.
    assert result["l2t"]["bits_per_token"] < result["controls"]["unigram_bits_per_token"]
    assert result["l2t"]["bits_per_token"] < result["l2t"]["bits_per_token_shuffled"]


@pytest.mark.parametrize("extra", ["", "temperature=0", "top_p=0.8", "decoding=confidence", "remask=0.5", "guidance=2"])
def test_l2t_generates_texts(run_dir: Path, capsys: pytest.CaptureFixture[str], extra: str) -> None:
    settings = [f"sampling.{setting}" for setting in ("steps=4", extra) if setting]
    arguments = ["sample", str(run_dir), "--text", TEXT, "-n", "2", "--length", "8", *settings]
    assert cli.main(arguments) == 0
    first = capsys.readouterr().out
    assert first.startswith(f"from: {TEXT}") and len(first.splitlines()) == 3
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out == first  # the seed decides
    assert cli.main([*arguments, "--seed", "1"]) == 0
    assert extra == "temperature=0" or capsys.readouterr().out != first


def test_latents_are_exported_and_read(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "latents.npy"
    arguments = ["sample", str(run_dir), "--mode", "t2l", "--text", TEXT, "--text", "The wave.", "--out", str(result)]
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out.count("cosine") == 2
    assert np.load(result).shape == (2, 1, 8)
    assert cli.main(["sample", str(run_dir), "--latents", str(result), "--length", "5"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_joint_generates_both(run_dir: Path, run: LoadedRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sample", str(run_dir), "--mode", "joint", "-n", "3"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    made, texts = sample(run, "joint", SamplingConfig(steps=4), seed=0, count=5)
    assert made.latents.isfinite().all() and len(texts) == 5
    assert not (made.tokens == run.store.manifest.mask_id).any()
    assert all(1 <= length <= run.store.manifest.max_length for length in made.lengths)


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["--mode", "joint", "sampling.guidance=2"], 2, "sampling.guidance"),
        (["--text", TEXT, "--length", "999"], 2, "--length: expected 1 to"),
        (["--text", TEXT, "sampling.top_p=2"], 64, "sampling.top_p: must be at most 1"),
        (
            ["--text", TEXT, "optim.lr=1"],
            64,
            "expected a key of sampling, evaluation",
        ),
        (["--text", "zzz qqq"], 65, "no latent for 'zzz qqq'"),
        (["--latents", "/nowhere.npy"], 65, "/nowhere.npy does not exist"),
    ],
)
def test_sample_refuses(
    run_dir: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, expected: str
) -> None:
    assert_user_error((cli.main(["sample", str(run_dir), *arguments]), capsys.readouterr().err), code, expected)


def test_bad_latent_files_are_refused(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "nan.npy", np.full((2, 8), np.nan, np.float32))
    np.savez(tmp_path / "archive.npz", a=np.zeros(8))
    np.save(tmp_path / "wide.npy", np.zeros((2, 9), np.float32))
    for name, problem in (("nan.npy", "row 0 is not finite"), ("archive.npz", "an archive"), ("wide.npy", "[2, 1, 9]")):
        status = cli.main(["sample", str(run_dir), "--latents", str(tmp_path / name)])
        assert_user_error((status, capsys.readouterr().err), 65, problem)


def test_guidance_needs_a_run_that_saw_no_condition(run: LoadedRun) -> None:
    from dataclasses import replace

    from mmldlm.errors import UsageError

    narrow = replace(run, config=replace(run.config, mode="l2t"))
    with pytest.raises(UsageError, match="guidance"):
        sample(narrow, "l2t", SamplingConfig(guidance=2.0), 0, encode_texts(run, [TEXT]))
