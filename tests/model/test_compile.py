"""`compile.scope`: regional compilation changes speed only, and compiles once."""

from __future__ import annotations

import _bisect
import json
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch._dynamo
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

from mmldlm import train
from mmldlm.config import load_config
from mmldlm.diffusion.objective import LossConfig, Objective
from mmldlm.errors import ConfigError
from mmldlm.model.activation_checkpoint import MemoryConfig
from mmldlm.model.attention import Backend
from mmldlm.model.compile import CompileConfig, Region, compile_regions, regions, remove_torn_kernels
from mmldlm.model.heads import GPU_VOCAB_MULTIPLE, MAX_WHOLE_LOGITS
from mmldlm.model.mmdit import DataShape, MMDiT, ModelConfig, Precision
from mmldlm.model.ops import assume_device
from mmldlm.train import train_step
from mmldlm.trainer.trainer import Trainer
from tests.helpers.forked_runs import ForkedRuns
from tests.helpers.noised_batch import noised_batch
from tests.helpers.small_model import VOCAB, random_inputs, small_model

Command = Callable[..., subprocess.CompletedProcess[str]]
SHAPE = DataShape(20, 0, 1, 8, 1, 4)
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler here")


def losses(run: Path) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["loss/total"] for record in records if record["kind"] == "train"]


@pytest.mark.quick
def test_kernels_that_a_kill_has_left_are_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("mmldlm.model.compile.TORN_AFTER_S", 0.0)
    library = Path(_bisect.__file__).read_bytes()  # of Python: any that is whole
    (tmp_path / "ab").mkdir()
    kernels = {"whole.so": library, "empty.so": b"", "torn.so": library[: len(library) // 2], "torn.o": library[:-1]}
    kernels |= {"zeros.so": bytes(100), "source.cpp": b""}
    for name, content in kernels.items():
        (tmp_path / "ab" / name).write_bytes(content)
    remove_torn_kernels()
    assert {path.name for path in (tmp_path / "ab").iterdir()} == {"whole.so", "source.cpp"}


@pytest.mark.quick
def test_unused_compile_settings_are_refused(tiny_config: Path) -> None:
    with pytest.raises(ConfigError, match=r"compile\.mode: does nothing under scope: none, expected default"):
        load_config(tiny_config, ["compile={scope: none, mode: max-autotune-no-cudagraphs}"])


@pytest.mark.setting("compile.mode")
@pytest.mark.quick
@pytest.mark.parametrize(
    ("backend", "regions"),
    [("sdpa", 2 * 3), ("math", 1), ("varlen", 1)],  # around the attention in each stream; whole blocks
)
def test_compile_mode_reaches_the_compiler(backend: Backend, regions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool | None] = []

    def record(function: Callable[..., Any], **arguments: Any) -> Callable[..., Any]:
        asked.append(arguments.get("options", {}).get("max_autotune"))
        return function

    monkeypatch.setattr(torch, "compile", record)
    model = MMDiT(ModelConfig(depth=2, width=16, num_heads=2), SHAPE, backend)
    config = CompileConfig("regional", "max-autotune-no-cudagraphs")
    assert compile_regions(model, config, torch.device("cpu")) == f"regional, mode {config.mode}"
    heads = int(backend != "sdpa")  # text head and loss
    assert asked == [None, *[True] * (2 * regions + heads)], "a trial, and the regions of each block"


@pytest.mark.setting("compile.scope")
@pytest.mark.quick
@pytest.mark.parametrize(
    ("scope", "device", "is_supported", "compiled"),
    [
        ("auto", "meta", True, True),
        ("auto", "meta", False, False),
        ("auto", "cpu", True, False),
        ("regional", "cpu", True, True),
        ("none", "meta", True, False),
    ],
)
def test_devices_but_cpus_compile_by_default(
    scope: Literal["auto", "none", "regional"],
    device: str,
    is_supported: bool,
    compiled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    model = MMDiT(ModelConfig(depth=2, width=16, num_heads=2), SHAPE)
    described = compile_regions(model, CompileConfig(scope), torch.device(device), is_supported)
    assert described == ("regional, mode default" if compiled else "none")
    assert isinstance(model.blocks[0].text.project, Region) == compiled


@pytest.mark.setting("compile.scope")
def test_missing_compiler_is_reported(tiny_config: Path, forked: ForkedRuns, tmp_path: Path) -> None:
    script, run = tmp_path / "script.py", tmp_path / "run"
    script.write_text(
        "from torch._inductor import config\nfrom tests.helpers.trainer_scripts import train_and_exit\n"
        "config.cpp.cxx = ('/nowhere/g++',)  # as by CXX, which PyTorch has read\ntrain_and_exit()\n"
    )
    given = (tiny_config, "compile.scope=regional", "train.steps=2")
    forked.succeed("single", run, 1, *given, script=str(script), TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
    told = "compile      none, though regional was requested: torch.compile does not run here"
    assert told in run.with_suffix(".log").read_text() and len(losses(run)) == 2


@needs_compiler
@pytest.mark.parametrize(
    ("backend", "setting", "compiler"),
    [
        # Dynamo and autograd without Inductor, whose C++ takes most of the time.
        ("sdpa", "memory.activation_checkpointing=none", "aot_eager"),
        *(
            pytest.param(backend, setting, "inductor", marks=pytest.mark.slow)
            for backend, setting in (
                ("sdpa", "memory.activation_checkpointing=none"),
                ("math", "memory.activation_checkpointing=selective"),
                ("sdpa", "memory.activation_checkpointing=selective"),
                ("sdpa", "memory.activation_checkpointing=full"),
                ("sdpa", "train.micro_batch_tokens=100"),
                ("math", "memory.activation_checkpointing=none"),
                ("math", "memory.activation_checkpointing=full"),
            )
        ),
    ],
)
def test_compiled_curve_is_equal_without_recompilation(
    tiny_config: Path, tmp_path: Path, backend: str, setting: str, compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples of 4 to 32 tokens: each step has other shapes, validation included, and with a budget other samples."""
    given = [setting, f"attention.backend={backend}", "train.steps=12", "validation.every=6"]
    assert train.main([str(tiny_config), *given]) == 0
    shutil.move(tmp_path / "run", tmp_path / "plain")
    torch._dynamo.reset()
    graphs = []
    if compiler != "inductor":
        compile_function = torch.compile
        monkeypatch.setattr(
            torch,
            "compile",
            lambda function, options=None, **others: compile_function(function, backend=compiler, **others),
        )
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


@pytest.mark.quick
@pytest.mark.parametrize(
    ("precision", "loss", "max_logits"),
    [
        ("fp32", LossConfig(), MAX_WHOLE_LOGITS),
        ("bf16", LossConfig(label_smoothing=0.1, z_loss=1e-3), MAX_WHOLE_LOGITS),
        ("fp32", LossConfig(), 4 * VOCAB),
    ],
)
def test_head_and_text_loss_are_one_region(
    precision: Precision, loss: LossConfig, max_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the operators of a GPU: one product makes all logits for loss and accuracy; more logits go in chunks."""
    torch._dynamo.reset()
    counters.clear()
    products: list[torch.fx.Node] = []

    def record(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        nodes = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
        products.extend(node for node in nodes if node.meta["val"].shape[1] == GPU_VOCAB_MULTIPLE)
        return make_boxed_func(graph.forward)

    monkeypatch.setattr("mmldlm.model.heads.MAX_WHOLE_LOGITS", max_logits)
    networks = [small_model(backend="math", precision=precision).train() for _ in range(2)]
    (module, method), compiler = (
        regions(networks[1])[-1],
        partial(torch.compile, backend=aot_autograd(fw_compiler=record)),
    )
    monkeypatch.setattr(torch, "compile", lambda function, options, **others: compiler(function, **others))
    setattr(module, method, Region(getattr(module, method), {}))
    for lengths in ((9, 16, 3, 14), (16, 12, 5)):
        objective, noised = noised_batch("joint", lengths=lengths, loss=loss)
        objective, results = Objective(loss, objective.text, objective.latent, accuracy=True), []
        for network in networks:
            network.text_terms = loss.needs_text_terms
            network.zero_grad()
            with assume_device("cuda"):
                value, sums = objective(network, noised, noised.counts.tolist())
                value.backward()
            gradients = [p.grad for p in network.parameters() if p.grad is not None]
            results.append([value, sums, *gradients])
        tolerance = 1e-5 if precision == "fp32" else 2e-2
        for eager, compiled in zip(*results, strict=True):
            assert (eager - compiled).norm() <= tolerance * eager.norm() + 1e-6
    if max_logits == MAX_WHOLE_LOGITS:
        assert (len(products), counters["stats"]["unique_graphs"]) == (1, 1), "for all sizes"


def test_a_block_is_traced_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the operators of a GPU: blocks that leave their last addition to the next one, and one that does not."""
    compile_function = torch.compile
    eager = {"backend": "eager", "fullgraph": True}
    monkeypatch.setattr(torch, "compile", lambda function, **_: compile_function(function, **eager))
    model = small_model(latent_tokens=2, backend="math", memory=MemoryConfig("every_k", every_k=3), depth=3).train()
    compile_regions(model, CompileConfig("regional"), torch.device("cpu"))
    with assume_device("cuda"):
        random_inputs((3, 5), latent_tokens=2).run(model).text.sum().backward()


@needs_compiler
@pytest.mark.slow
def test_a_block_is_one_region_that_compiles_once() -> None:
    """200 micro-batches of other shapes, as on a GPU: sums by offsets, attention inside of the region."""
    torch._dynamo.reset()
    random = torch.Generator().manual_seed(0)
    model, compiled = (small_model(latent_tokens=2, backend="math") for _ in range(2))
    compile_regions(compiled, CompileConfig("regional"), torch.device("cpu"))
    graphs = []
    with assume_device("cuda"):
        for batch in range(200):
            count = int(torch.randint(2, 6, (), generator=random))
            lengths = tuple(torch.randint(1, 80, (count,), generator=random).tolist())
            inputs = random_inputs(lengths, latent_tokens=2, seed=batch)
            results = []
            for network in (model, compiled)[batch % 50 > 0 :]:
                network.zero_grad()
                prediction = inputs.run(network)
                (prediction.text.square().mean() + prediction.latent.square().mean()).backward()
                results.append([prediction.text, prediction.latent, *(p.grad for p in network.parameters())])
            graphs.append(counters["stats"]["unique_graphs"])
            for eager, fused in zip(*results, strict=True) if len(results) == 2 else ():
                if eager is not None:
                    assert (fused - eager).norm() <= 1e-4 * eager.norm() + 1e-6
    # The last block's region differs: it computes predicted tokens alone.
    assert graphs[0] - graphs[-1] == 0, graphs


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
