"""Asynchronous checkpoints: what waits for what, who may ask for one, and what a failing writer does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mmldlm import train
from mmldlm.checkpoint.manifest import verify_checkpoint
from mmldlm.checkpoint.retention import Retention
from mmldlm.checkpoint.store import CheckpointStore
from mmldlm.diffusion.objective import NoisedBatch
from mmldlm.trainer import checkpointer as saving
from mmldlm.trainer.trainer import Trainer
from mmldlm.utils.files import FileInfo
from tests.helpers.engine_runs import difference, exit_record, records, run, wait_for_step
from tests.helpers.forked_runs import ForkedRuns
from tests.helpers.waiting import wait_until

Single = Callable[..., Path]


def steps_of(folder: Path) -> list[int]:
    """Steps with a checkpoint, each of which verifies."""
    store = CheckpointStore(folder / "checkpoints", Retention())
    return sorted(verify_checkpoint(path).step for path in store.paths())


def files_of(folder: Path, step: int) -> dict[str, bytes]:
    checkpoint = folder / "checkpoints" / f"step-{step:08}"
    return {file.name: file.read_bytes() for file in checkpoint.glob("*.safetensors")}


@pytest.mark.setting("checkpoint.async")
def test_async_and_sync_saves_are_equal(
    parity_config: Path, single: Single, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is saved is the state of its moment, although training went on before it was written."""
    settings = ("train.steps=12", "checkpoint.every_steps=3", "checkpoint.keep_last=9", "validation.every=0")
    waiting, asynchronous = single(*settings, "checkpoint.async=false"), tmp_path / "run"
    steps_done: list[int] = []
    at_once = saving.write_files

    class CountingTrainer(Trainer):
        def loss(self, batch: NoisedBatch, totals: Any) -> tuple[torch.Tensor, torch.Tensor]:
            steps_done.append(1)
            return super().loss(batch, totals)

    def later(folder: Path, files: Mapping[str, Any]) -> dict[str, FileInfo]:
        seen = len(steps_done)
        while len(steps_done) < seen + 4 and len(steps_done) < 48:  # 4 micro-batches a step
            time.sleep(0.001)
        return at_once(folder, files)

    monkeypatch.setattr(saving, "write_files", later)
    arguments = [str(parity_config), f"run.dir={asynchronous}", *settings]
    assert train.main(arguments, trainer_cls=CountingTrainer) == 0
    assert steps_of(asynchronous) == steps_of(waiting) == [3, 6, 9, 12]
    assert all(files_of(asynchronous, step) == files_of(waiting, step) for step in (3, 6, 9, 12))
    assert difference(asynchronous, waiting) == 0
    saves = records(waiting, "checkpoint")
    assert all(saves[step]["stall_s"] >= 0.9 * saves[step]["seconds"] for step in saves)


SHORT = ["train.steps=9", "checkpoint.every_steps=3", "validation.every=0"]


def test_a_slow_writer(parity_config: Path, single: Single, forked: ForkedRuns, tmp_path: Path) -> None:
    """At most one checkpoint in the making; the next and the end of the run wait for it; nothing is lost."""
    forked.succeed("ddp", tmp_path / "run", 2, parity_config, *SHORT, script="faulty_writer.py", WRITER="slow")
    assert steps_of(tmp_path / "run") == [3, 6, 9]
    assert "step 6: waiting for the checkpoint of step 3, still being written" in (tmp_path / "run.log").read_text()
    saves = records(tmp_path / "run", "checkpoint")
    assert all(saves[step]["seconds"] >= 1 for step in (3, 6, 9))
    assert difference(tmp_path / "run", single(*SHORT)) < 1e-5


def test_a_writer_that_fails_ends_the_run_on_all_ranks(
    parity_config: Path, two_ranks: Callable[..., list[int]], forked: ForkedRuns, tmp_path: Path
) -> None:
    folder, settings = tmp_path / "run", ["train.steps=100000", "checkpoint.every_steps=20", "validation.every=0"]
    ranks = two_ranks("ddp", parity_config, f"run.dir={folder}", *settings, script="faulty_writer.py", WRITER="fail")
    assert forked.wait(ranks) == dict.fromkeys(ranks, 74), (tmp_path / "log").read_text()[-3000:]
    record = exit_record(folder)
    assert record["code"] == 74 and "No space left on device" in str(record["cause"]), record
    assert [exit_record(folder, path.name)["code"] for path in folder.glob("exit.rank*.json")] == [74]
    assert 40 <= int(str(record["step"])) < 60, "noticed at a step, not only at the next save"
    assert steps_of(folder) == [20] and not list((folder / "checkpoints").glob(".tmp-*"))


def test_a_disk_that_fills_up(parity_config: Path, tmp_path: Path) -> None:
    """The run ends with code 74 and says what it lacks; what was saved is whole, and the run resumes from it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=10m none {disk}"
    if subprocess.run(["unshare", "-Urm", "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("no small file system can be mounted here: unshare -Urm is refused")
    settings = f"{parity_config} run.dir={disk} checkpoint.every_steps=1 checkpoint.keep_last=99 validation.every=0"
    train_it = f"{sys.executable} -m mmldlm.train {settings}"
    lines = [mount, f"{train_it} train.steps=20; echo code $?", f"cat {disk}/exit.json", f"ls -A {disk}/checkpoints"]
    lines += [f"rm -r {disk}/checkpoints/step-00000001", f"{train_it} train.steps=1"]
    done = run(["unshare", "-Urm", "sh", "-c", "\n".join(lines)])
    assert "code 74" in done.stdout and '"code": 74' in done.stdout, done.stdout[-3000:]
    assert "MiB needed" in done.stdout and "nothing was written or removed" in done.stdout
    assert "step-00000002" in done.stdout and ".tmp" not in done.stdout and "Traceback" not in done.stdout
    assert "train.steps: found 1, but" in done.stdout, "the newest was found good"


@pytest.mark.parametrize("engine", ["zero2", pytest.param("ddp", marks=pytest.mark.slow)])
def test_signals_to_one_rank_and_the_request_file(
    engine: str, parity_config: Path, tmp_path: Path, two_ranks: Callable[..., list[int]], forked: ForkedRuns
) -> None:
    folder, settings = tmp_path / "run", ["train.steps=100000", "checkpoint.every_steps=0", "validation.every=0"]
    ranks = two_ranks(engine, parity_config, f"run.dir={folder}", *settings)
    wait_for_step(folder, 3, tmp_path / "log", lambda: forked.wait(ranks, 0))
    os.kill(ranks[1], signal.SIGUSR1)
    wait_until(lambda: len(steps_of(folder)) == 1, "a checkpoint after the signal")
    (folder / "CHECKPOINT").touch()
    wait_until(lambda: len(steps_of(folder)) == 2, "a checkpoint after the request file")
    assert not (folder / "CHECKPOINT").exists()
    first, second = steps_of(folder)
    wait_for_step(folder, second + 2, tmp_path / "log", lambda: forked.wait(ranks, 0))
    os.kill(ranks[1], signal.SIGTERM)
    for _ in range(20):  # impatience changes nothing
        time.sleep(0.01)
        for rank in ranks:
            os.kill(rank, signal.SIGTERM)
    assert forked.wait(ranks) == dict.fromkeys(ranks, 75), (tmp_path / "log").read_text()[-3000:]
    record, last = exit_record(folder), max(records(folder))
    assert record["code"] == 75 and record["step"] == last, record
    assert steps_of(folder) == [first, second, last]


def test_save_schedule(parity_config: Path, tmp_path: Path) -> None:
    base = [str(parity_config), "train.steps=12", "checkpoint.every_steps=0", "validation.every=0"]
    assert train.main([*base, f"run.dir={tmp_path / 'clock'}", "checkpoint.every_minutes=1e-4"]) == 0
    assert len(steps_of(tmp_path / "clock")) == 3 and len(records(tmp_path / "clock", "checkpoint")) > 3
    steps = ["checkpoint.keep_steps=[2, 5]", "checkpoint.keep_every=4", "checkpoint.keep_last=1"]
    assert train.main([*base, f"run.dir={tmp_path / 'steps'}", *steps]) == 0
    assert steps_of(tmp_path / "steps") == [2, 4, 5, 8, 12]
    best = ["checkpoint.keep_best=2", "checkpoint.keep_last=1", "validation.every=2", "optim.lr=0.1"]
    assert train.main([*base, f"run.dir={tmp_path / 'best'}", *best]) == 0
    losses = {step: record["validation/text"] for step, record in records(tmp_path / "best", "validation").items()}
    wanted = sorted(losses, key=lambda step: losses[step])[:2]
    assert steps_of(tmp_path / "best") == sorted({*wanted, 12})


def test_checkpoint_is_self_contained(parity_config: Path, single: Single) -> None:
    """Weights by name, the config, the tokenizer; nothing but JSON, YAML and safetensors."""
    path = max((single() / "checkpoints").glob("step-*"))
    assert sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()) == [
        "config.yaml",
        "latents.json",
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
    ]
    info = json.loads((path / "manifest.json").read_text())["info"]
    assert info["engine"] == "single" and info["world_size"] == 1 and info["versions"]["torch"] and "git" in info
    assert info["identity"]["tokenizer"] and info["data_manifest"]
    assert all(tensor.isfinite().all() for tensor in load_file(path / "model.safetensors").values())
