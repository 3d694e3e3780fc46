"""`mmldlm evaluate` on the command line: requested metrics and refused requests."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mmldlm import cli, train
from mmldlm.config import load_config, write_config
from mmldlm.evaluate import run
from tests.helpers.tiny_config import TINY


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, tiny_store: Path) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "config.yaml").write_text(TINY.format(run=folder / "run", store=tiny_store), encoding="utf-8")
    assert train.main([str(folder / "config.yaml"), "train.steps=1", "validation.every=0"]) == 0
    return folder / "run"


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["--modes", "l2t,latents"], 2, "--modes: expected some of l2t, t2l, joint"),
        (["--texts", "0"], 2, "--texts: expected at least 1, found 0"),
        (["--samples", "1"], 2, "--samples: expected at least 2, found 1"),
        (["--split", "dev"], 65, "no split 'dev', expected one of"),
        (["--sts", "/nowhere.tsv"], 65, "--sts /nowhere.tsv: cannot be read"),
        (
            ["--search", "8", "--modes", "t2l"],
            2,
            "--search: belongs to mode l2t",
        ),
        (["--sts", "/nowhere.tsv", "--modes", "l2t,joint"], 2, "--sts: belongs to mode t2l"),
        (["--checkpoint", "/nowhere"], 65, "/nowhere"),
        (["--weights", "ema"], 65, "has no EMA of the weights"),
        (
            ["train.steps=9"],
            64,
            "expected a key of sampling, evaluation, attention.backend or precision, found 'train.steps=9'",
        ),
        (["sampling.steps=0"], 64, "sampling.steps: "),
        (["--steps", "4"], 2, "evaluate --steps is gone, use sampling.steps=N, in t2l"),
    ],
)
def test_invalid_requests_are_refused_before_any_evaluation(
    run_dir: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, expected: str
) -> None:
    try:
        result = cli.main(["evaluate", str(run_dir), *arguments])
    except SystemExit as error:
        result = int(str(error.code))
    assert result == code
    assert expected in capsys.readouterr().err
    assert not (run_dir / "evaluation.json").exists()


def test_sampling_settings_replace_those_of_the_run(run_dir: Path, tmp_path: Path) -> None:
    folder, settings = tmp_path / "run", ["sampling.temperature=0", "sampling.steps=1"]
    shutil.copytree(run_dir, folder)
    config = load_config(folder / "config.yaml", may_extend=False)

    def evaluated(*arguments: str) -> dict[str, Any]:
        few = ["--modes", "l2t", "--samples", "12", "--texts", "6", "--times", "1"]
        assert cli.main(["evaluate", str(folder), *few, *arguments]) == 0
        return json.loads((folder / "evaluation.json").read_text())

    own, given = evaluated(), evaluated(*settings)
    assert "sampling" not in own and given.pop("sampling") == " ".join(settings)
    assert given["l2t"]["samples"] != own["l2t"]["samples"]
    assert given["l2t"]["bits_per_token"] == own["l2t"]["bits_per_token"]
    write_config(replace(config, sampling=replace(config.sampling, temperature=0.0, steps=1)), folder)
    assert evaluated() == given


def test_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["evaluate", str(tmp_path)]) == 65
    assert "not a run folder" in capsys.readouterr().err


def test_requested_metrics_are_measured(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = tmp_path / "pairs.jsonl"
    rows = (("The rose.", "The tulip.", 5), ("The rose.", "The wave.", 1), ("The oven.", "The flour.", 4))
    keys = ("sentence1", "sentence2", "score")
    pairs.write_text("".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows))
    asked = ["--modes", "t2l", "--sts", str(pairs), "--samples", "12", "--seed", "5", "--batch", "4"]
    assert cli.main(["evaluate", str(run_dir), *asked]) == 0
    shown = capsys.readouterr().out
    assert "12 documents of split test" in shown and "STS Spearman" in shown and "BLEU" not in shown
    result = json.loads((run_dir / "evaluation.json").read_text())
    assert result["modes"] == ["t2l"] and result["modes_trained"] == ["l2t", "t2l", "joint"]
    assert result["documents"] == result["t2l"]["candidates"] == 12 and result["t2l"]["sts_pairs"] == 3
    assert not {"l2t", "joint", "bits_per_token"} & result.keys()
    assert -1 <= result["t2l"]["sts_spearman"] <= 1 and 0 <= result["t2l"]["sts_recall_at_1_tfidf"] <= 1
    first = (run_dir / "evaluation.json").read_bytes()
    assert cli.main(["evaluate", str(run_dir), *asked]) == 0
    assert (run_dir / "evaluation.json").read_bytes() == first


def test_progress_lines_show_phases_and_micro_batches(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run([str(run_dir), "--samples", "12", "--texts", "6", "--times", "2", "--batch", "4"], interval=0)
    shown, printed = capsys.readouterr()
    assert shown.startswith("step 1") and "micro-batches" not in shown
    assert "\r" not in printed
    assert re.search(r"loading the run \.\.\.\n(loading the run: .*\n)*opening documents and encoder \.\.\.\n", printed)
    for phase, batches in (
        ("bound, no latent", 6),
        ("bound, latent own", 6),
        ("texts from latents, latent shuffled", 2),
        ("latents from texts", 3),
        ("latents from texts, by noise bin", 6),
        ("texts and latents from noise", 2),
    ):
        assert f"\n{phase} ...\n" in printed
        for done in range(1, batches + 1):
            assert f"\n{phase}: {done} of {batches} micro-batches, " in printed
    assert "\nre-encoding of the generated texts: 1 of 1 batches of the encoder, " in printed
