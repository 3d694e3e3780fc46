"""`mmldlm plan` as a user calls it; calibrations are written, not measured, but for one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from mmldlm import cli
from mmldlm.config import load_config
from mmldlm.data.mixture import open_data
from mmldlm.tools.plan.calibration import STEPS, Calibration, jobs_of, launcher_file, timed
from mmldlm.tools.run_history import History
from tests.helpers.paths import ROOT
from tests.helpers.waiting import TEST_TIMEOUT_S


@pytest.fixture
def calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A calibration for 2 processes, in which fsdp2 takes twice as long as ddp."""
    path = tmp_path / "calibration.json"
    fits = {"single x1": {"coefficients": [1e-11, 1e-11, 0.0, 0.0, 0.0, 0.01], "factor": 1.1}}
    for slow, engine in enumerate(("ddp", "fsdp2", "zero1", "zero2", "zero3"), 1):
        fits[f"{engine} x2"] = {"coefficients": [slow, 0.0, 0.0, 0.0, 0.01 * slow], "factor": 1.2}
    path.write_text(json.dumps({"machine": Calibration(path).machine, "fits": fits}), encoding="utf-8")
    monkeypatch.setenv("MMLDLM_CALIBRATION", str(path))
    return path


@pytest.mark.quick
def test_plan_of_a_gpu_says_that_it_is_unverified(tiny_config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(tiny_config), "--gpus", "2x80GB", "--device", "h200", "precision=bf16"]) == 0
    first, _, *rows, save = capsys.readouterr().out.splitlines()
    assert first.startswith("2 processes on h200 of 80 GB; step times UNVERIFIED")
    assert {row.split()[1] for row in rows} == {"ddp", "fsdp2", "zero1", "zero2", "zero3"}
    assert rows[0].split()[0] in ("best", "close") and sum(row.startswith("best") for row in rows) == 1
    assert save.startswith("checkpoint.every_steps=8: ")  # the whole run, which ends long before a failure


@pytest.mark.quick
def test_plan_of_this_machine_by_its_calibration(
    tiny_config: Path, calibrated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", str(tiny_config), "--gpus", "2x8GB", "--device", "this", "--json"]
    assert cli.main([*arguments, "--mtbf", "0.001", "--save-seconds", "0.001"]) == 0
    plan = json.loads(capsys.readouterr().out)
    best, *others = [one for one in plan["candidates"] if one["status"] != "too large"]
    assert best["engine"] == "ddp" and best["status"] == "best"
    value, low, high = best["step_s"]
    assert low == pytest.approx(value / 1.2) and high == pytest.approx(value * 1.2)
    assert best["hours"][0] == pytest.approx(8 * value / 3600)
    assert all((one["status"] == "close") == (one["step_s"][1] <= high) for one in others)
    assert plan["save_every_steps"] == max(1, min(8, round((2 * 0.001 * 3.6) ** 0.5 / value)))


@pytest.mark.quick
def test_commands_of_the_page(
    tmp_path: Path,
    tiny_store: Path,
    calibrated: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (ROOT / "docs" / "trust.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "trust.yaml").write_text(page.split("```yaml\n")[1].split("```")[0], encoding="utf-8")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "own").symlink_to(tiny_store)
    lines = [line.split() for line in page.splitlines() if line.startswith("    .venv/bin/mmldlm plan ")]
    assert len(lines) == 2
    for _, *arguments in lines:
        assert cli.main(arguments) == 0
    assert capsys.readouterr().out.count("\nbest ") == 2
    assert load_config("plans/trust/config.yaml").run.dir == "runs/trust"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--gpus", "8x"], 2, "--gpus: expected number and memory of a node's GPUs, such as 8x80GB, found '8x'"),
        (["--gpus", "0x80GB"], 2, "--gpus: expected number and memory of a node's GPUs"),
        (["--gpus", "2x80GB", "--device", "abacus"], 2, "--device: expected one of a100, b200,"),
        (["--gpus", "2x80GB", "--nodes", "0"], 2, "--nodes: expected at least 1, found 0"),
        (["--gpus", "2x80GB", "--mtbf", "0"], 2, "--mtbf: expected a number above 0, found 0"),
        (["--gpus", "2x80GB", "--nodes", "2", "--device", "this"], 2, "--nodes: expected 1 with --device this"),
        (["--gpus", "2x80GB", "--rates", "no.json", "precision=bf16"], 2, "--rates: no.json has no rates of a GPU"),
        (["--gpus", "3x80GB"], 64, "train.global_batch_size is 8, expected a multiple of 3 processes"),
        (["--gpus", "2x80GB", "data.path=/nowhere"], 65, "/nowhere: not a data store"),
        (["--gpus", "2x0.001GB", "train.global_batch_size=2"], 64, "--gpus: nothing fits into 0.001 GB: "),
    ],
)
def test_errors_are_one_line(
    tiny_config: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    assert cli.main(["plan", str(tiny_config), *arguments]) == code
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"mmldlm: error: {message}")
    if "nothing fits" in message:
        assert "GB too many; what helps: more GPUs" in last


@pytest.mark.quick
def test_plan_of_two_nodes_has_hybrid_sharding(
    tmp_path: Path, tiny_config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", str(tiny_config), "--gpus", "2x80GB", "--nodes", "2", "--network", "0.000001", "--json"]
    assert cli.main([*arguments, "--apply", str(tmp_path / "planned")]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert {one["engine"] for one in plan["candidates"]} == {"ddp", "zero1", "zero2", "fsdp2", "fsdp2_hsdp", "zero3"}
    (best,) = (one for one in plan["candidates"] if one["status"] == "best")
    assert best["engine"] == "fsdp2_hsdp" and '--machine_rank "$NODE_RANK"' in plan["command"]
    launch = json.loads((tmp_path / "planned" / "accelerate.yaml").read_text(encoding="utf-8"))
    assert set(launch["parallelism_config"].values()) == {2} and launch["num_processes"] == 4


@pytest.mark.quick
def test_launcher_files_of_several_nodes(tmp_path: Path) -> None:
    tree = json.loads(launcher_file("zero2", tmp_path, num_processes=16, num_machines=2).read_text(encoding="utf-8"))
    assert (tree["num_processes"], tree["num_machines"]) == (16, 2)
    assert tree["deepspeed_config"]["deepspeed_multinode_launcher"] == "standard"
    assert json.loads(Path(tree["deepspeed_config"]["deepspeed_config_file"]).read_text(encoding="utf-8"))


def test_the_command_of_apply_trains(
    tmp_path: Path, tiny_config: Path, calibrated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "planned"
    arguments = ["plan", str(tiny_config), "train.steps=3", "--gpus", "2x8GB", "--device", "this"]
    assert cli.main([*arguments, "--apply", str(folder)]) == 0
    command = capsys.readouterr().out.splitlines()[-1]
    config = load_config(folder / "config.yaml")
    assert config.train.steps == 3 and config.train.micro_batch_size == 4 and config.model.width == 32
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        command, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TEST_TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    history = History(tmp_path / "run")
    assert history.step == 3
    assert "ddp" in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8")


def test_steps_of_several_networks_are_timed_in_one_launch(tiny_store: Path) -> None:
    networks = [(32, 1, 128, 1, "none"), (32, 2, 128, 2, "full")]
    jobs = jobs_of(networks, str(tiny_store), open_data(str(tiny_store)), 2)
    seconds = timed("fsdp2", 2, jobs)
    assert list(seconds) == [name for name, _ in jobs]
    assert all(len(times) == STEPS - 1 and min(times) > 0 for times in seconds.values())
