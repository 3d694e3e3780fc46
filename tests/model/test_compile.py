"""`compile.scope`: regional compilation changes speed only, and compiles once."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

from mmldlm import train
from mmldlm.config import load_config
from mmldlm.errors import ConfigError
from mmldlm.model.compile import REGIONS, CompileConfig, compile_regions
from mmldlm.model.mmdit import DataShape, MMDiT, ModelConfig
from mmldlm.train import train_step
from mmldlm.trainer.trainer import Trainer

Command = Callable[..., subprocess.CompletedProcess[str]]
REGIONAL = CompileConfig("regional")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler here")


def losses(run: Path) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["loss/total"] for record in records if record["kind"] == "train"]


@pytest.mark.quick
def test_unused_compile_settings_are_refused(tiny_config: Path) -> None:
    with pytest.raises(ConfigError, match=r"compile\.mode: does nothing under scope: none, expected default"):
        load_config(tiny_config, ["compile.mode=max-autotune-no-cudagraphs"])


@pytest.mark.setting("compile.mode")
@pytest.mark.quick
def test_compile_mode_reaches_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: asked.append(options.get("mode")) or function)
    model = MMDiT(ModelConfig(depth=2, width=16, num_heads=2), DataShape(20, 0, 1, 8, 1, 4))
    mode = "max-autotune-no-cudagraphs"
    assert compile_regions(model, CompileConfig("regional", mode), torch.device("cpu")) == f"regional, mode {mode}"
    assert asked == [None, *[mode] * (2 * 2 * len(REGIONS))], "a trial, and the regions of both streams of each block"


@pytest.mark.setting("compile.scope")
def test_missing_compiler_is_reported(
    command: Command, tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    done = command("mmldlm.train", tiny_config, "compile.scope=regional", "train.steps=2")
    assert done.returncode == 0, done.stderr
    assert "compile      none, though regional was requested: torch.compile does not run here" in done.stdout
    assert len(losses(tmp_path / "run")) == 2


@needs_compiler
@pytest.mark.parametrize(
    "setting",
    [
        "memory.activation_checkpointing=none",
        pytest.param("memory.activation_checkpointing=selective", marks=pytest.mark.slow),
        pytest.param("memory.activation_checkpointing=full", marks=pytest.mark.slow),
        pytest.param("train.micro_batch_tokens=100", marks=pytest.mark.slow),
    ],
)
def test_compiled_curve_is_equal_without_recompilation(tiny_config: Path, tmp_path: Path, setting: str) -> None:
    """Samples of 4 to 32 tokens: each step has other shapes, validation included, and with a budget other samples."""
    given = [setting, "train.steps=12", "validation.every=6"]
    assert train.main([str(tiny_config), *given]) == 0
    shutil.move(tmp_path / "run", tmp_path / "plain")
    torch._dynamo.reset()
    graphs = []
    with Trainer(load_config(tiny_config, [*given, "compile.scope=regional"])) as run:
        assert run.components.compiled == "regional, mode default"
        shapes = set()
        for step, batches in run.steps():
            shapes.update((len(batch.lengths), batch.layout.num_tokens) for batch in batches)
            train_step(run, step, batches)
            graphs.append(counters["stats"]["unique_graphs"])
    assert len(shapes) > 6
    assert graphs[1] == graphs[-1] > 0, graphs
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "plain"), rel=1e-4)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_compiled_ranks_agree_with_one_process(
    command: Command, tiny_config: Path, tmp_path: Path, engine: str
) -> None:
    assert train.main([str(tiny_config)]) == 0
    shutil.move(tmp_path / "run", tmp_path / "plain")
    arguments = [tiny_config, "compile.scope=regional"]
    arguments += [] if engine == "ddp" else ["--accelerate_config", f"accelerate_configs/{engine}.yaml"]
    done = command("torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "mmldlm.train", *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "compile      regional, mode default" in done.stdout
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "plain"), rel=1e-4)
