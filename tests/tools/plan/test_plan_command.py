"""`mmldlm plan` as a user calls it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from mmldlm import cli
from mmldlm.config import load_config
from mmldlm.tools.plan.command import launcher_file
from mmldlm.tools.runs import History
from tests.helpers.paths import ROOT
from tests.helpers.waiting import TEST_TIMEOUT_S


@pytest.mark.quick
def test_plan_of_a_gpu_says_that_it_is_unverified(tiny_config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(tiny_config), "--gpus", "2x80GB", "--device", "h200", "precision=bf16"]) == 0
    first, _, *rows, save = capsys.readouterr().out.splitlines()
    assert first.startswith("2 processes on h200 of 80 GB; step times UNVERIFIED")
    assert {row.split()[1] for row in rows} == {"ddp", "fsdp2", "zero1", "zero2", "zero3"}
    assert rows[0].split()[0] in ("best", "close") and sum(row.startswith("best") for row in rows) == 1
    assert save.startswith("checkpoint.every_steps=8: ")  # the whole run, which ends long before a failure


@pytest.mark.quick
def test_numbers_of_a_plan(tiny_config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", str(tiny_config), "--gpus", "2x80GB", "--json"]
    assert cli.main([*arguments, "--mtbf", "0.001", "--save-seconds", "0.001"]) == 0
    plan = json.loads(capsys.readouterr().out)
    (best,) = (one for one in plan["candidates"] if one["status"] == "best")
    value, low, high = best["step_s"]
    assert low < value < high and best["hours"][0] == pytest.approx(8 * value / 3600)
    fitting = [one for one in plan["candidates"] if one["status"] not in ("best", "too large")]
    assert all((one["status"] == "close") == (one["step_s"][1] <= high) for one in fitting)
    assert plan["save_every_steps"] == max(1, min(8, round((2 * 0.001 * 3.6) ** 0.5 / value)))


@pytest.mark.quick
def test_commands_of_the_page(
    tmp_path: Path,
    tiny_store: Path,
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


def test_the_command_of_apply_trains(tmp_path: Path, tiny_config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "planned"
    arguments = ["plan", str(tiny_config), "train.steps=3", "--gpus", "2x8GB"]
    assert cli.main([*arguments, "--apply", str(folder)]) == 0
    command = capsys.readouterr().out.splitlines()[-1]
    config = load_config(folder / "config.yaml")
    assert config.train.steps == 3 and config.model.width == 32
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TEST_TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    history = History(tmp_path / "run")
    assert history.step == 3
