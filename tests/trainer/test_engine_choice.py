"""`mmldlm train CONFIG --dry-run --gpus 8x80GB`: what fits, which choice comes first, and how often to save."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from mmldlm import cli, train
from mmldlm.data.batch_schedule import TrainConfig
from mmldlm.data.store import Store
from mmldlm.errors import ConfigError
from mmldlm.tools.runs import History
from mmldlm.trainer.dry_run import (
    GPU_HOURS_BETWEEN_FAILURES,
    Choice,
    Gpus,
    first_choice,
    micro_batches,
    save_interval,
    table,
)
from tests.helpers.paths import ROOT
from tests.helpers.waiting import TEST_TIMEOUT_S

quick = pytest.mark.quick
GPUS = Gpus(nodes=1, per_node=8, gigabytes=80)


def choice(engine: str, checkpointing: str = "none", tokens: int = 20_000, gigabytes: float = 1.0) -> Choice:
    return Choice(f"size={tokens}", checkpointing, tokens, engine, gigabytes, gigabytes - 72)  # type: ignore[arg-type]


@quick
@pytest.mark.parametrize(
    ("better", "other"),
    [
        (choice("zero3", "full", 16_384), choice("ddp", "none", 16_000)),  # keeps a GPU busy
        (choice("fsdp2", "none", 16_384), choice("ddp", "selective", 40_000)),  # recomputes less
        (choice("zero1"), choice("zero2")),  # simpler
        (choice("zero2"), choice("fsdp2_hsdp")),
        (choice("fsdp2_hsdp"), choice("zero3")),
        (choice("ddp", tokens=40_000), choice("ddp", tokens=20_000)),
        (choice("zero3", gigabytes=72), choice("ddp", gigabytes=72.1)),  # fits
    ],
)
def test_the_first_choice(better: Choice, other: Choice) -> None:
    assert first_choice([better, other], GPUS) is better is first_choice([other, better], GPUS)


@quick
def test_what_does_not_fit_says_by_how_much() -> None:
    large, larger = choice("zero3", "full", 1, 100.0), choice("ddp", "full", 1, 120.0)
    _, head, row = table([larger, large], GPUS)
    assert head.split()[-2:] == ["ddp", "zero3"] and row.split() == [
        "size=1",
        "1",
        "full",
        "120",
        "(+48)",
        "100",
        "(+28)",
    ]
    with pytest.raises(ConfigError, match=r"--gpus: .*80 GB.*100 GB"):
        first_choice([larger, large], GPUS)


@quick
def test_the_save_interval_wastes_least() -> None:
    save, failures = 50.0, 86_400.0
    best = save_interval(save, failures)
    assert best == pytest.approx(2939.4, abs=0.1)

    def waste(interval: float) -> float:
        return save / interval + interval / 2 / failures  # saves, and half an interval lost at each failure

    assert all(waste(best) < waste(best * factor) for factor in (0.5, 0.95, 1.05, 2.0))
    assert pytest.approx(54 * 24 / 419) == GPU_HOURS_BETWEEN_FAILURES / 16_384


@quick
def test_micro_batches_divide_the_share_of_a_rank(tiny_store: Path) -> None:
    store = Store.open(tiny_store)
    assert micro_batches(TrainConfig(global_batch_size=48), store, 4) == ("micro_batch_size", [12, 6, 3, 1])
    assert micro_batches(TrainConfig(global_batch_size=4), store, 4) == ("micro_batch_size", [1])
    name, budgets = micro_batches(TrainConfig(micro_batch_tokens=256), store, 4)
    assert name == "micro_batch_tokens" and budgets[:3] == [1024, 512, 256]
    assert budgets[-1] >= store.split("train").mean_length > budgets[-1] // 2
    assert micro_batches(TrainConfig(micro_batch_tokens=1), store, 4) == ("micro_batch_tokens", [4])


def test_the_search_ends_where_all_engines_fit(tiny_config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With 80 GB at once; with little memory smaller micro-batches and more recomputation are tried first."""
    rows, arguments = [], [str(tiny_config), "--dry-run", "train.global_batch_size=4"]
    for gpus in ("2x80GB", "2x0.001GB"):
        assert train.main([*arguments, "--gpus", gpus]) == (0 if gpus == "2x80GB" else 64)
        captured = capsys.readouterr()
        rows.append([line.split() for line in captured.out.splitlines() if line.startswith("train.")])
    assert [row[:1] + row[2:3] for row in rows[0]] == [["train.micro_batch_size=2", "none"]]
    sizes = [f"train.micro_batch_size={size}" for size in (2, 1)]
    assert [row[:1] + row[2:3] for row in rows[1]] == [
        [size, kind] for kind in ("none", "selective", "full") for size in sizes
    ]
    assert "mmldlm: error: --gpus: " in captured.err and "0.001 GB" in captured.err


def test_several_nodes_have_hybrid_sharding(tiny_config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for nodes, hybrid in (("2", True), ("4", False)):
        arguments = [str(tiny_config), "--dry-run", "--gpus", f"{8 // int(nodes) // 2}x80GB", "--nodes", nodes]
        assert train.main([*arguments, "precision=bf16"]) == 0
        _, head, _, save, first, command = capsys.readouterr().out.splitlines()
        assert ("fsdp2_hsdp" in head) == hybrid and {"ddp", "zero1", "zero2", "fsdp2", "zero3"} <= set(head.split())
        assert save.startswith("save every ") and "an interruption every 12,669 h" in save
        assert first.startswith("first choice: ddp") and f"NNODES={nodes} " in command
        assert "precision=bf16 train.micro_batch_size=2 memory.activation_checkpointing=none" in command


@quick
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--gpus", "8x"], 2, "--gpus: expected number and memory of a node's GPUs, such as 8x80GB, found '8x'"),
        (["--gpus", "0x80GB"], 2, "--gpus: expected number and memory of a node's GPUs"),
        (["--gpus", "2x80GB", "--nodes", "0"], 2, "--nodes: expected at least 1, found 0"),
        (["--nodes", "2"], 2, "--nodes: expected together with --gpus"),
        (["--gpus", "3x80GB"], 64, "train.global_batch_size is 8, expected a multiple of 3 processes"),
        (["--gpus", "2x80GB", "data.path=/nowhere"], 65, "/nowhere: not a data store"),
        (
            ["--gpus", "1x80GB", "optim.name=deepspeed_adam"],
            64,
            "--gpus: no engine of 1 GPUs runs optim.name: deepspeed",
        ),
    ],
)
def test_errors_are_one_line(
    tiny_config: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    assert train.main([str(tiny_config), "--dry-run", *arguments]) == code
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"mmldlm: error: {message}")


@quick
def test_gpus_are_for_a_dry_run_and_plan_is_gone(tiny_config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main([str(tiny_config), "--gpus", "2x80GB"]) == 2
    assert cli.main(["plan", str(tiny_config), "--gpus", "2x80GB"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == "mmldlm: error: --gpus: expected together with --dry-run"
    assert "mmldlm train CONFIG --dry-run --gpus" in second


@pytest.mark.parametrize("gpus", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_command_trains(gpus: int, tmp_path: Path, tiny_config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(tiny_config), "train.steps=3", "--dry-run", "--gpus", f"{gpus}x8GB"]
    assert train.main(arguments) == 0
    command = capsys.readouterr().out.splitlines()[-1]
    path = f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"
    environment = {
        **os.environ,
        "PATH": path,
        "OMP_NUM_THREADS": "1",
        "NODE_CHECK": "skip",
        "LOG_DIR": str(tmp_path / "logs"),
    }
    done = subprocess.run(
        command, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TEST_TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert History(tmp_path / "run").step == 3
