"""`mmldlm race` for real: processes, launchers, commits, kills."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmldlm import train
from mmldlm.contrib.race import command
from mmldlm.contrib.race.arms import BOUND, Arm
from mmldlm.contrib.race.ledger import Ledger
from mmldlm.contrib.race.race import Race, reached
from mmldlm.errors import ConfigError, UsageError
from mmldlm.tools.compare.run_summary import RunSummary
from tests.helpers.paths import BIN, ROOT
from tests.helpers.ports import free_port
from tests.helpers.waiting import wait_until

BASE = """
run: {{dir: {run}, seed: 3}}
data: {{path: {store}, num_workers: 0}}
model: {{depth: 1, width: 32, num_heads: 2, conditioning_width: 32, modulation_rank: 8}}
optim: {{lr: 1e-5, warmup_steps: 0}}
train: {{steps: 12, global_batch_size: 8}}
log: {{every: 1, tensorboard: false, figures_every: 0}}
validation: {{every: 6, samples: 32, text_samples: 0}}
checkpoint: {{every_steps: 0}}
"""
OPTIONS = ("--seeds", "3", "--looks", "1", "--risk", "90%", "--metric", "validation/text")


@pytest.fixture
def base(tmp_path: Path, tiny_store: Path) -> Path:
    path = tmp_path / "base.yaml"
    path.write_text(BASE.format(run=tmp_path / "run", store=tiny_store), encoding="utf-8")
    return path


def lines(base: Path, kind: str) -> list[dict[str, Any]]:
    """Lines of the ledger, without the seconds that runs took."""
    text = (base.parent / "run-race" / "experiments.jsonl").read_text(encoding="utf-8")
    found = [json.loads(line) for line in text.splitlines()]
    return [{key: line[key] for key in line if key != "seconds"} for line in found if line["kind"] == kind]


def decisions(base: Path) -> dict[str, str]:
    return {line["arm"]: line["decision"] for line in lines(base, "result") if line["decision"]}


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=folder, check=True)


def test_race(base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Settings, a commit, and what changes nothing; a second start trains nothing, and another metric is refused."""
    repository = base.parent / "repository"
    shutil.copytree(ROOT / "mmldlm", repository / "mmldlm", ignore=shutil.ignore_patterns("__pycache__", "project"))
    git(repository, "init", "-q")
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "as it is")
    schedule = repository / "mmldlm" / "optim" / "lr_schedule.py"
    text = schedule.read_text(encoding="utf-8")
    schedule.write_text(f"{text}\n_lr_at = lr_at\ndef lr_at(*given): return 50 * _lr_at(*given)\n", encoding="utf-8")
    git(repository, "commit", "-qam", "a rate fifty times as high")
    git(repository, "branch", "fast")
    git(repository, "checkout", "-q", "HEAD^")
    monkeypatch.chdir(repository)
    # A comma of a list separates no settings.
    arms = ["optim.lr=3e-3", "checkpoint.keep_steps=[4,5],checkpoint.keep_last=2", "git:fast"]
    arms.append("optim.lr=1e30,guard.nonfinite=stop")
    assert command.main([str(base), *arms, *OPTIONS]) == 0
    commit = lines(base, "proposal")[2]["changes"]["git"]
    assert decisions(base) == {
        "optim.lr=3e-3": "keep",
        "checkpoint.keep_steps=[4,5],checkpoint.keep_last=2": "no change",
        f"git:{commit}": "discard",
        arms[3]: "failed",
    }
    reasons = {line["n"]: line["reason"] for line in lines(base, "result")}
    assert reasons[3] == "not 0.2 % better than optim.lr=3e-3"
    assert reasons[4].startswith(f"{arms[3]}: exit code 70 at its training: "), reasons[4]
    fast = next(line for line in lines(base, "result") if line["n"] == 3)
    assert fast["gain"] > 0.02 and (fast["steps"], fast["seeds"]) == (12, 1)
    (race,) = (base.parent / "run-race").glob("*/base-0")
    assert {reached(race.parent / f"base-{seed}") for seed in range(3)} == {12}

    ledger = (base.parent / "run-race" / "experiments.jsonl").read_bytes()
    capsys.readouterr()
    assert command.main([str(base), arms[0], "git:fast", "run.init_seed=7", *OPTIONS]) == 0
    output = capsys.readouterr().out
    assert "experiments.jsonl: has it already: 1. optim.lr=3e-3: keep, better than the base" in output
    assert f"has it already: 3. git:{commit}" in output and "5. run.init_seed=7: no change" in output
    after = (base.parent / "run-race" / "experiments.jsonl").read_bytes()
    assert after.startswith(ledger) and after.count(b"\n") == ledger.count(b"\n") + 2
    for given, error, named in (
        (["optim.lr=1", *OPTIONS[:-1], "loss/text"], UsageError, "--metric: expected validation/text"),
        (["run.seed=4"], ConfigError, "run.seed: expected 3"),
        # Of all runs of the base, which costs no training here: another ledger has another metric.
        (
            ["optim.lr=1", *OPTIONS[:-1], "quality/l2t_bleu", "--ledger", "other.jsonl"],
            ConfigError,
            "validation/text_l2t",
        ),
        (["git:nowhere"], UsageError, "git:nowhere: expected a revision"),
    ):
        with pytest.raises(error, match=named):
            command.main([str(base), *given])
    assert (base.parent / "run-race" / "experiments.jsonl").read_bytes() == after


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_race_that_was_ended_continues(
    number: signal.Signals, base: Path, tmp_path: Path, started: Callable[..., subprocess.Popen[bytes]]
) -> None:
    """The same ledger, decisions and weights, bit by bit, also if runs go on side by side."""
    arms = ["optim.lr=3e-3", "optim.lr=1e-7", "optim.lr=3e-4"]
    text = base.read_text(encoding="utf-8")
    assert command.main([str(base), *arms, *OPTIONS, "--looks", "2"]) == 0
    whole = lines(base, "result")
    (kept,) = [line for line in whole if line["decision"] == "keep"]
    other = tmp_path / "other"
    other.mkdir()
    again = other / "base.yaml"
    again.write_text(text.replace(f"{tmp_path}/run", f"{other}/run"), encoding="utf-8")
    words = [sys.executable, "-m", "mmldlm", "race", str(again), *arms, *OPTIONS, "--looks", "2", "--jobs", "2"]
    for ended in ("base-1", f"{lines(base, 'proposal')[1]['key']}-0"):
        process = started(words)
        wait_until(lambda ended=ended: any((other / "run-race").glob(f"*/{ended}/metrics.jsonl")), ended)
        if number == signal.SIGKILL:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        assert process.wait() == {signal.SIGKILL: -9, signal.SIGINT: 130, signal.SIGTERM: 75}[number]
        with (other / "run-race" / "experiments.jsonl").open("ab") as file:
            file.write(b'{"kind": "resu')  # a line that the kill has torn
    assert command.main(words[4:]) == 0
    keys = {line["n"]: line["key"] for line in lines(base, "proposal")}
    renamed = {line["n"]: line["key"] for line in lines(again, "proposal")}
    assert keys.keys() == renamed.keys() and lines(again, "result") == whole
    weights = [
        next((folder / "run-race").glob(f"*/{key}-0/checkpoints/step-00000012/model*.safetensors")).read_bytes()
        for folder, key in ((tmp_path, keys[kept["n"]]), (other, renamed[kept["n"]]))
    ]
    assert weights[0] == weights[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "launch",
    [
        "torchrun --nproc_per_node 2 --master_port {port}",
        "deepspeed --num_gpus 2 --master_port {port} -- --deepspeed_config " + str(ROOT / "ds_configs/zero2.json"),
    ],
)
def test_under_launchers(launch: str, base: Path) -> None:
    """Two processes: each run of a turn is a launch, and the loss is that of one process."""
    launch = f"{BIN}/{launch.format(port=free_port())}"
    assert command.main([str(base), "optim.lr=3e-3", "optim.lr=1e-7", *OPTIONS, "--launch", launch]) == 0
    assert decisions(base) == {"optim.lr=3e-3": "keep", "optim.lr=1e-7": "discard"}
    (run,) = (base.parent / "run-race").glob("*/base-0")
    assert json.loads((run / "startup.json").read_text(encoding="utf-8"))["world_size"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("launch", ["", "torchrun --nproc_per_node 2 --master_port {port}"])
def test_the_best_of_sixteen_rates(launch: str, base: Path) -> None:
    """Within 0.2 % of the best of the full grid: arms for a quarter of its cost, all for one of three seeds of each."""
    text = base.read_text(encoding="utf-8").replace("steps: 12", "steps: 64").replace("every: 6,", "every: 4,")
    base.write_text(text, encoding="utf-8")
    rates = [f"optim.lr={10 ** (-5 + number / 4):.3g}" for number in range(16)]
    options = ["--seeds", "4", "--looks", "5", "--risk", "90%"]
    if launch:
        options += ["--launch", f"{BIN}/{launch.format(port=free_port())}"]
    assert command.main([str(base), *rates, *options]) == 0
    last = {line["n"]: line for line in lines(base, "result")}
    (run,) = (base.parent / "run-race").glob("*/base-0")
    arms = sum(line["steps"] for line in last.values()) / 64
    luck = sum(reached(run.parent / f"base-{seed}") for seed in range(4)) / 64
    values = []
    for number, rate in enumerate(rates):
        folder = base.parent / f"grid-{number}"
        assert train.main([str(base), rate, f"run.dir={folder}"]) == 0
        values.append(RunSummary(folder).final_values()[BOUND])
    (kept,) = [n for n, line in last.items() if line["decision"] == "keep"]
    print(f"kept {values[kept - 1]:.5g}, best {min(values):.5g}; arms {arms:.3g} runs, luck {luck:.3g}")
    assert values[kept - 1] <= 1.002 * min(values)
    assert arms <= 16 / 4 and arms + luck <= 3 * 16 / 4


def test_runs_side_by_side_share_gpus_and_cores(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = base.parent / "launcher.py"
    script.write_text("import os, sys; print(*map(os.environ.get, ('CUDA_VISIBLE_DEVICES', 'OMP_NUM_THREADS')))")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.delenv("OMP_NUM_THREADS")
    arm = Arm.base(base)
    for jobs, expected in ((1, ["4,5,6,7 None"]), (2, ["4,6", "5,7"])):
        race = Race(
            Ledger(base.parent / "l"), arm, base.parent, 0.05, 0.002, 3, 1, f"{sys.executable} {script}", jobs, 0
        )
        for place, given in enumerate(expected):
            assert race._start(arm, place, 12, place).wait() == 0
            assert (base.parent / f"base-{place}" / "race.log").read_text().startswith(given)
