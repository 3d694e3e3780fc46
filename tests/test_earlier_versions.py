"""What earlier versions wrote is read by this one: the folders of tests/fixtures, by scripts/release_fixtures.py."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import mmldlm
from mmldlm import cli
from mmldlm.utils.nested import flatten
from scripts.release_fixtures import FIXTURES, SENTENCES
from tests.helpers.metrics import read_metrics
from tests.helpers.paths import ROOT

VERSIONS = sorted(path.name for path in FIXTURES.iterdir())
MAX_MIB = 0.6  # of one version, before git compresses it
BITS_TOLERANCE = 1e-4  # relative: processors differ by 1e-7
pytestmark = pytest.mark.parametrize("version", VERSIONS)


@pytest.fixture
def folder(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the folder of a version, in which the commands run, as its paths are relative."""
    shutil.copytree(FIXTURES / version, tmp_path / version)
    monkeypatch.chdir(tmp_path / version)
    return tmp_path / version


def mmldlm_command(line: str) -> None:
    assert cli.main(line.split()) == 0, line


def recorded(name: str) -> Any:
    return json.loads(Path(name).read_text(encoding="utf-8"))


def keys_of_json() -> dict[str, set[str]]:
    """Keys of the JSON files of the run, without entries of lists."""
    return {name: {*flatten(recorded(f"run/{name}"))} for name in ("startup.json", "exit.json", "evaluation.json")}


def test_files_are_small_and_name_no_machine(version: str) -> None:
    paths = [path for path in (FIXTURES / version).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in paths) < MAX_MIB * 2**20
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", FIXTURES / version],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    if not tracked.returncode:  # in a checkout
        assert {ROOT / name for name in tracked.stdout.split()} == {*paths}, "none is ignored"
    for path in paths:
        content = path.read_bytes()
        assert {*re.findall(rb'"host": "([^"]*)"', content)} <= {b"host"}, path
        if path.suffix != ".safetensors" and path.name != "tokenizer.json":
            assert re.findall(rb"""(?:^|[\s"'=:\[(,])(?:~|/[\w.-]+)/""", content) == [], path


def test_a_store_is_verified_and_trained_on(folder: Path) -> None:
    mmldlm_command("data verify store")
    mmldlm_command("data info store")
    mmldlm_command("train config.yaml run.dir=new train.steps=2")
    saved = [record["step"] for record in read_metrics("new/metrics.jsonl") if record["kind"] == "checkpoint"]
    assert saved == [1, 2], "the best of the first validation, and the last"


def test_a_run_is_resumed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = keys_of_json()
    mmldlm_command("verify run")
    mmldlm_command("train config.yaml train.steps=12 log.every=1")
    out = capsys.readouterr().out
    assert "resuming from run/checkpoints/step-00000008" in out
    steps = [record["step"] for record in read_metrics("run/metrics.jsonl") if record["kind"] == "train"]
    assert steps == [2, 4, 6, 8, 9, 10, 11, 12]
    mmldlm_command("evaluate run --samples 12 --texts 4 --times 1")
    after = keys_of_json()
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    for name, keys in before.items():
        gone = {key for key in keys - after[name] if f"`{key.rpartition('.')[2]}`" not in changes}
        assert gone == set(), f"{name}: neither there nor named in the changelog"
    mmldlm_command("verify run")


@pytest.mark.parametrize("trained", ["run", "bundle"])
def test_networks_compute_what_they_did(folder: Path, trained: str) -> None:
    """Bits of texts, and figures of an evaluation, of a run and of its bundle."""
    lines = [json.loads(line) for line in Path("scores.jsonl").read_text(encoding="utf-8").splitlines()]
    mmldlm_command(f"score {trained} sentences.txt --out again.jsonl --draws 2")
    again = [json.loads(line) for line in Path("again.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["bits_per_token"] for line in again] == [
        pytest.approx(line["bits_per_token"], rel=BITS_TOLERANCE) for line in lines
    ]
    before = recorded("run/evaluation.json")
    mmldlm_command(f"evaluate {trained} --samples 12 --texts 4 --times 1 --out . --data store")
    after = recorded("evaluation.json")
    figures = {key: value for key, value in flatten(before).items() if key.endswith("bits_per_token")}
    assert figures and {key: flatten(after)[key] for key in figures} == pytest.approx(figures, rel=BITS_TOLERANCE)


@pytest.mark.parametrize("trained", ["run", "bundle"])
def test_networks_are_sampled_from(folder: Path, trained: str) -> None:
    mmldlm_command(f"sample {trained} --text {SENTENCES[0].split()[1]}")
    mmldlm_command(f"sample {trained} --mode t2l --text rose --out latents.npy")
    mmldlm_command(f"sample {trained} --mode joint -n 2 sampling.steps=2")
    model = mmldlm.load(trained)
    samples = model.sample(texts=[*SENTENCES], mode="l2t", steps=2)
    assert len(samples.texts) == 3 and all(samples.texts)
    assert model.sample(texts=[*SENTENCES]).latents.shape == (3, 1, 4)
    assert model.score(SENTENCES).bits_per_token.value < 9


def test_a_new_run_starts_from_the_weights(folder: Path) -> None:
    for source in ("run", "bundle"):
        mmldlm_command(f"train config.yaml run.dir=from-{source} init.from={source} train.steps=1")
        start = json.loads(Path(f"from-{source}/startup.json").read_text(encoding="utf-8"))
        assert start["init"]["step"] == 8 and not any(start["init"]["new"].values())


def test_a_run_is_reported_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mmldlm_command("monitor run --once")
    mmldlm_command("checkpoints list run")
    mmldlm_command("config --changed run")
    out = capsys.readouterr().out
    assert "finished" in out and "8/8" in out and "run/config.yaml:" in out
    mmldlm_command("compare run --json")
    assert "validation/total" in json.loads(capsys.readouterr().out)["runs"]["run"]["metrics"]
    mmldlm_command("verify bundle")
    mmldlm_command("export run again")
