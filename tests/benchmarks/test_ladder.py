"""The ladder from its command line to its files; what it calls worse; its refusals."""

from __future__ import annotations

import copy
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd.profiler_util import FunctionEvent

import benchmarks.__main__ as command_line
from benchmarks import against
from benchmarks.apart import Here
from benchmarks.counting import compiled_regions_of, covered, is_kernel, useful_flops
from benchmarks.ladder import counted
from benchmarks.measure import CONTROL, OTHER, PARTS, WAIT, Probe, Ratio, run_rounds, trusted
from benchmarks.variants import SWITCHES, opened, variants
from benchmarks.workload import largest_batch, lengths_of, typical_batches
from mmldlm import cli
from mmldlm.data.sampler import SampleOrder
from mmldlm.data.store import Store
from mmldlm.errors import DataError
from tests.helpers.bench_runs import task_on
from tests.helpers.paths import ROOT
from tests.helpers.waiting import PATIENCE_S

pytestmark = pytest.mark.quick
pytest.importorskip("mmdit", reason="mmdit is not installed: bash scripts/setup.sh --dev")
pytest.importorskip("matplotlib", reason="matplotlib is not installed: bash scripts/setup.sh --dev")
NAMES = ["reference", "old", "trainer"]


def ladder(store: Path, out: Path, *options: object) -> int:
    threads = torch.get_num_threads()
    try:
        arguments = (
            "ladder",
            "--shape",
            "tiny",
            "--quick",
            "--store",
            store,
            "--out",
            out,
            "--name",
            "found",
            "--patience",  # with a busy machine: nothing here is a speed
            0,
            *options,
        )
        return command_line.main([str(each) for each in arguments])
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def out(tiny_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a quick run leaves."""
    folder = tmp_path_factory.mktemp("out")
    assert ladder(tiny_store, folder) == 0
    return folder


@pytest.fixture
def result(out: Path) -> dict[str, Any]:
    return json.loads((out / "found.json").read_text())


def test_a_result_says_what_where_and_how_fast(out: Path, result: dict[str, Any]) -> None:
    assert (out / "found.png").read_bytes().startswith(b"\x89PNG")
    assert list(result["variants"]) == NAMES and result["base"] == "reference"
    assert torch.__version__.startswith(result["versions"]["torch"].split("+")[0])
    assert result["date"] and result["machine"]["cores"] >= 1 and result["useful_flops_per_step"] > 0
    for row in result["variants"].values():
        speed = row["speed"]
        assert all(math.isfinite(value) and value > 0 for value in speed.values())
        assert speed["low"] <= speed["median"] <= speed["high"]
        assert len(row["seconds"]) == 3 and row["tokens_per_s"] > 0
        assert row["parts"].keys() == {WAIT, *PARTS.values(), OTHER}
        assert row["parts"]["forward"] > 0 and row["parts"]["backward"] > 0
    base, old, trainer = (result["variants"][name] for name in NAMES)
    assert base["speed"]["median"] == 1
    counts = [row["counts"] for row in (base, old, trainer)]
    assert counts[0]["fill"] == counts[1]["fill"] < counts[2]["fill"] == 1
    assert counts[0]["logit_rows"] == counts[1]["logit_rows"] > counts[2]["logit_rows"] > 0
    assert counts[0]["operators"] > counts[1]["operators"] > counts[2]["operators"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler here")
def test_what_compiles_is_compiled_until_it_is_counted(tiny_store: Path, tmp_path: Path) -> None:
    task, rows = task_on(tiny_store), [np.arange(4)]
    variant = variants("fp32", "cpu")["trainer-compiled"]
    with opened(variant, task, rows, tmp_path / "run") as run:
        regions = compiled_regions_of(run, 0)
        assert regions >= 2 * 2 * 3, "of two streams in two blocks: project, normalize, finish"
        assert counted(Here(run), variant, 1, 1, 99)["counts"].keys() == {"host_syncs", "logit_rows", "fill"}
        assert compiled_regions_of(run, 3) == 0


def test_a_variant_that_does_not_compile_is_refused(tiny_store: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "ladder", "--shape", "tiny", "--quick", "--variants"]
    command += ["trainer-compiled", "--store", str(tiny_store), "--out", str(tmp_path)]
    without = os.environ | {"TORCHDYNAMO_DISABLE": "1"}
    found = subprocess.run(command, cwd=ROOT, env=without, capture_output=True, text=True, timeout=PATIENCE_S)
    assert found.returncode == 2, found.stderr
    assert "trainer-compiled: torch.compile does not run here" in found.stderr.splitlines()[-1]


def test_it_is_not_worse_than_itself(result: dict[str, Any]) -> None:
    assert against.regressions(result, copy.deepcopy(result)) == []


def slow(result: dict[str, Any]) -> None:
    result["variants"]["trainer"]["speed"] = {"median": 0.01, "low": 0.009, "high": 0.011}


def add_a_sync(result: dict[str, Any]) -> None:
    result["variants"]["trainer"]["counts"]["host_syncs"] += 1


def add_an_operator(result: dict[str, Any]) -> None:
    result["variants"]["old"]["counts"]["operators"] += 0.5


def pad_more(result: dict[str, Any]) -> None:
    result["variants"]["trainer"]["counts"]["fill"] -= 0.01


def fail(result: dict[str, Any]) -> None:
    result["variants"]["trainer"] = {"about": "", "error": "out of memory"}


@pytest.mark.parametrize(
    ("planted", "line"),
    [
        (slow, "trainer: speed 0.01 [0.01, 0.01], was "),
        (add_a_sync, "trainer: host_syncs "),
        (add_an_operator, "old: operators "),
        (pad_more, "trainer: fill 0.99, was 1"),
        (fail, "trainer: out of memory"),
    ],
)
def test_what_is_worse_is_named(result: dict[str, Any], planted: Callable[[dict], None], line: str) -> None:
    result["control"]["trusted"] = True
    now = copy.deepcopy(result)
    planted(now)
    (found,) = against.regressions(result, now)
    assert found.startswith(line)
    if planted is not fail:
        assert against.regressions(now, result) == []  # the other way round it is better


def test_speed_is_not_judged_on_a_busy_machine_nor_within_the_intervals(result: dict[str, Any]) -> None:
    result["control"]["trusted"] = True
    now = copy.deepcopy(result)
    slow(now)
    now["control"]["trusted"] = False
    assert against.regressions(result, now) == []
    now["control"]["trusted"] = True
    now["variants"]["trainer"]["speed"]["high"] = 1e9
    assert against.regressions(result, now) == []


def test_other_work_is_not_compared(result: dict[str, Any]) -> None:
    now = copy.deepcopy(result)
    now["what"]["task"]["width"] = 65
    with pytest.raises(DataError, match="task was"):
        against.regressions(result, now)


def test_a_regression_is_the_exit_code(
    tiny_store: Path, tmp_path: Path, result: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    result["variants"]["trainer"]["counts"]["operators"] -= 1
    (tmp_path / "earlier.json").write_text(json.dumps(result))
    options = ("--variants", "trainer", "--against", tmp_path / "earlier.json")
    assert ladder(tiny_store, tmp_path, *options) == 1
    assert "trainer: operators" in capsys.readouterr().out


def test_useful_flops_are_three_times_the_products_of_a_forward_pass(tiny_store: Path) -> None:
    """Between the linear maps of the text stream, and those with attention, latents and logits at their most."""
    lengths = np.asarray(Store.open(tiny_store).split("train").lengths)
    task = task_on(tiny_store)
    short, long = int(lengths.argmin()), int(lengths.argmax())
    found = [useful_flops(task, [np.array([row])]) for row in (short, long)]
    assert useful_flops(task, [np.array([short]), np.array([long])]) > found[0] < found[1]
    hidden = 168  # of the SwiGLU network: 2/3 x 4 x 64, to a multiple of 8
    a_token = 2 * task.depth * (64 * 3 * 64 + 64 * 64 + 3 * 64 * hidden)
    assert found[1] > 3 * a_token * int(lengths[long])
    assert found[1] < 3 * 1.6 * a_token * (int(lengths[long]) + 1)


def test_a_gpu_is_busy_while_any_kernel_runs() -> None:
    assert covered([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.75)]) == 4
    assert covered([]) == 0
    cuda = torch.autograd.DeviceType.CUDA
    given = [
        ("gemm", cuda, False, True),
        ("gemm", torch.autograd.DeviceType.CPU, False, False),
        ("Memcpy HtoD (Pinned -> Device)", cuda, False, False),
        ("Optimizer.step#AdamW.step", cuda, True, False),
    ]
    for name, device_type, is_user_annotation, expected in given:
        event = FunctionEvent(0, name, 0, 0.0, 1.0, device_type=device_type, is_user_annotation=is_user_annotation)
        assert is_kernel(event) is expected, name


def test_micro_batches_have_the_lengths_of_an_epoch() -> None:
    lengths = lengths_of("documents", 4096)

    split: Any = SimpleNamespace(lengths=lengths)
    order = SampleOrder(lengths, seed=0)
    rows = typical_batches(order, split, 8, 8)
    assert np.mean([lengths[each].mean() for each in rows]) == pytest.approx(lengths.mean(), rel=0.05)
    assert lengths[largest_batch(order, split, 8)].sum() >= max(lengths[each].sum() for each in rows)


def test_the_ladder_leaves_one_practice_on_each_rung() -> None:
    found = variants("bf16", "cuda")
    rungs = [found["old"], *(each for name, each in found.items() if name.startswith("rung-")), found["trainer"]]
    assert rungs[0].old == frozenset(SWITCHES) and rungs[-1].old == frozenset()
    assert [len(upper.old - lower.old) for upper, lower in pairwise(rungs)] == [1] * len(SWITCHES)
    assert [found[f"without-{name}"].old for name in SWITCHES] == [{name} for name in SWITCHES]
    assert "without-attention" not in variants("fp32", "cuda")


def test_ratios_and_their_interval() -> None:
    found = Ratio.of([2.0, 2.2, 1.8, 2.0, 40.0], [1.0, 1.0, 1.0, 1.0, 1.0])
    assert found.median == 2.0 and found.low >= 1.8 and found.high <= 40.0
    assert trusted(Ratio(1.04, 1, 1)) and not trusted(Ratio(0.94, 1, 1))


class Recorder:
    def __init__(self) -> None:
        self.numbers: list[int] = []

    def step(self, number: int) -> None:
        self.numbers.append(number)


@pytest.mark.parametrize(("patience", "again"), [(0.0, []), (0.3, [11]), (1.0, [11, 14, 14])])
def test_turns_of_a_disturbed_machine_are_taken_again(patience: float, again: list[int]) -> None:
    one, two, asked = Recorder(), Recorder(), count()

    def probe() -> float:
        """Asked four times a turn, before its first step and behind each: half the rate at 11 once, at 14 twice."""
        return 50.0 if next(asked) // 4 in slow else 100.0

    slow = {1, 4, 7}  # turns, counted from 0: 10 to 15, then 11, 14 and 14 once more
    found = run_rounds({"one": one, "two": two}, rounds=3, steps=2, first=10, patience=patience, probe=probe)
    assert two.numbers == [*range(10, 16), *again]
    assert one.numbers == sorted([*range(10, 16)] * 2) + [number for number in again for _ in range(2)]
    assert {name: len(rounds) for name, rounds in found.seconds.items()} == {"one": 3, "two": 3, CONTROL: 3}
    steady = found.steadiness
    assert (steady.turns, steady.repeated, steady.disturbed) == (6, len(again), 2 - len(set(again)))
    assert steady.slowest == (1.0 if patience == 1 else 0.5)


def test_the_probe_tells_a_rate() -> None:
    rates = [Probe()() for _ in range(5)]
    assert all(1e8 < rate < 1e13 for rate in rates)


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["--patience", "-1"], 2, "--patience: expected 0 or more, found -1"),
        (["--variants", "nothing"], 2, "--variants: 'nothing' is none here, expected some of reference,"),
        (["--rounds", "0"], 2, "--rounds: expected at least 1, found 0"),
        (["ladder", "--quick", "--against", "/nowhere.json"], 65, "--against: /nowhere.json cannot be read"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, expected: str) -> None:
    assert cli.main(["bench", *arguments]) == code
    assert expected in capsys.readouterr().err


def test_other_benchmarks_are_reached_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("checkpoint_stall", "optimizers", "engines", "memory", "gpu_memory", "characters"):
        with pytest.raises(SystemExit) as ended:
            command_line.main([name, "--help"])
        assert ended.value.code == 0
    assert cli.main(["bench", "--help"]) == 0
    assert "checkpoint_stall" in capsys.readouterr().out


def test_an_installed_package_has_no_benchmarks(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "mmldlm", tmp_path / "mmldlm")
    done = subprocess.run(
        [sys.executable, "-m", "mmldlm.cli", "bench"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr == (
        f"mmldlm: error: bench: there is no benchmarks/ in {tmp_path}; "
        "run it in a checkout that was installed with pip -e\n"
    )


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As mmdit is where only mmldlm is installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "mmdit" else find(name, *rest))
    assert cli.main(["bench", "--quick"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("mmldlm: error: this benchmark needs the packages mmdit: run `bash scripts/setup.sh")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: it would begin")
def test_gpu_bench_refuses_without_a_gpu() -> None:
    done = subprocess.run(
        ["bash", "scripts/gpu_bench.sh"], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 2 and "gpu_bench: error: no CUDA device" in done.stderr
    assert done.stdout == ""  # nothing was set up
