"""A run starts from its own records and checkpoints: those of another run in its folder are refused in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mmldlm import train
from mmldlm.checkpoint.manifest import read_manifest
from mmldlm.tools.spikes import rewind_main
from mmldlm.trainer.branches import read_rewinds
from tests.helpers.metrics import read_metrics
from tests.helpers.tiny_config import TINY
from tests.helpers.user_errors import assert_user_error


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, tiny_store: Path) -> Path:
    """Two runs of one config and other seeds, which were stopped after 4 of 6 steps, with checkpoints at 2 and 4."""
    folder = tmp_path_factory.mktemp("stopped")
    (folder / "config.yaml").write_text(TINY.format(run=folder / "run", store=tiny_store))
    for name, seed in (("a", 0), ("b", 7)):
        assert train.main([*arguments(folder, folder, name), f"run.seed={seed}", "--stop-at", "4"]) == 75
    return folder


def arguments(config_in: Path, runs_in: Path, name: str) -> list[str]:
    settings = ["train.steps=6", "validation.every=0", "checkpoint.every_steps=2"]
    return [str(config_in / "config.yaml"), f"run.dir={runs_in / name}", *settings]


@pytest.mark.parametrize("foreign", ["checkpoints", "checkpoints/step-00000004", "metrics.jsonl"])
def test_files_of_another_run(foreign: str, stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        shutil.copytree(stopped / name, tmp_path / name)
    (tmp_path / "a" / foreign).rename(tmp_path / "own")
    (tmp_path / "b" / foreign).rename(tmp_path / "a" / foreign)
    command = [*arguments(stopped, tmp_path, "a"), "run.seed=0"]
    capsys.readouterr()
    result = train.main(command), capsys.readouterr().err.splitlines()[-1] + "\n"
    assert_user_error(result, 65, "step-00000004", "metrics.jsonl", "run.dir")
    # As the line says: without what is not of this run, it goes on.
    (tmp_path / "a" / foreign).rename(tmp_path / "other")
    (tmp_path / "own").rename(tmp_path / "a" / foreign)
    assert train.main(command) == 0
    starts = [record["run_id"] for record in read_metrics(tmp_path / "a/metrics.jsonl") if "run_id" in record]
    saved = [read_manifest(path)["info"]["run_id"] for path in (tmp_path / "a/checkpoints").glob("step-*")]
    assert len(starts) == 2 and len(saved) == 3 and len({*starts, *saved}) == 1


def test_a_checkpoint_under_the_name_of_another_step_is_set_aside(stopped: Path, tmp_path: Path) -> None:
    shutil.copytree(stopped / "a", tmp_path / "a")
    folder = tmp_path / "a/checkpoints"
    (folder / "step-00000002").rename(folder / "step-00000005")
    assert train.main([*arguments(stopped, tmp_path, "a"), "--stop-at", "5"]) == 75
    assert {path.name for path in folder.iterdir()} == {"damaged-step-00000005", "step-00000004", "step-00000005"}


def test_starts_that_stay_possible(stopped: Path, tmp_path: Path) -> None:
    """Another run by `resume`, records that are lost, and a start over are runs with one identity each."""
    ids = {}
    for name in ("branch", "lost", "over"):
        if name != "branch":
            shutil.copytree(stopped / "a", tmp_path / name)
        if name == "lost":
            (tmp_path / name / "metrics.jsonl").unlink()
        resume = {"branch": f"resume={stopped / 'b/checkpoints/step-00000004'}", "over": "resume=never"}.get(name)
        for _ in range(2):
            assert train.main([*arguments(stopped, tmp_path, name), *filter(None, [resume])]) == 0
        ids[name] = json.loads((tmp_path / name / "startup.json").read_text())["run_id"]
    original = json.loads((stopped / "a/startup.json").read_text())["run_id"]
    assert ids["lost"] == original and len({original, ids["branch"], ids["over"]}) == 3


def test_a_run_that_is_at_its_stop_trains_no_step(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(stopped / "a", tmp_path / "a")
    for stop_at in (4, 3):
        assert train.main([*arguments(stopped, tmp_path, "a"), "--stop-at", str(stop_at)]) == 75
        assert f"stopped by --stop-at {stop_at} after step 4" in capsys.readouterr().err
    kinds = [record["kind"] for record in read_metrics(tmp_path / "a/metrics.jsonl") if record["step"] == 4]
    assert kinds.count("train") == kinds.count("checkpoint") == 1 and kinds.count("resume") == 2
    assert [path.name for path in sorted((tmp_path / "a/checkpoints").iterdir())][-1] == "step-00000004"


def test_a_torn_rewind_is_none(stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rewind that a kill has cut is left out, and the next one is whole; another line is named."""
    shutil.copytree(stopped / "a", tmp_path / "a")
    rewinds = tmp_path / "a/rewinds.jsonl"
    rewinds.write_text('{"before": 4, "step": 2, "sam')
    assert train.main([*arguments(stopped, tmp_path, "a"), "--stop-at", "5"]) == 75
    assert rewind_main([str(tmp_path / "a"), "--before", "5"]) == 0
    (rewind,) = read_rewinds(tmp_path / "a")
    assert rewind["before"] == 5 and rewind["step"] == 4
    rewinds.write_text(f'{{"before": 4}}\n{json.dumps(rewind)}\n')
    capsys.readouterr()
    code = train.main(arguments(stopped, tmp_path, "a"))
    assert_user_error((code, capsys.readouterr().err), 65, "rewinds.jsonl, line 1", "samples")
