"""The dry run's formulas against real passes, and what the estimate of a run follows."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.memory import BOUND, batch, checkpointing, measure
from mmldlm import train
from mmldlm.config import RunConfig, load_config
from mmldlm.data.loader import Loader
from mmldlm.data.store import Store
from mmldlm.distributed.launch import ENGINES
from mmldlm.model.activation_checkpoint import KEEP_ALL, MemoryConfig
from mmldlm.model.ops import assume_device
from mmldlm.trainer.dry_run import print_estimate
from mmldlm.trainer.memory import Estimate, Sharding, activation_bytes, estimate, rank_memory
from tests.helpers.noised_batch import noised_batch
from tests.helpers.paths import ROOT
from tests.helpers.small_model import small_model

KINDS = [MemoryConfig(kind) for kind in ("none", "every_k", "selective", "full")]  # type: ignore[arg-type]
KEPT = MemoryConfig("full", kept_blocks=3)
LENGTHS = (16,) * 64


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("memory", "options"),
    [
        *((memory, {}) for memory in (*KINDS, KEPT)),
        *((memory, {"precision": "bf16"}) for memory in KINDS[::3]),
        (KEEP_ALL, {"mlp": "gelu", "dropout": 0.1}),
        (KEEP_ALL, {"latent_width": 128, "latent_tokens": 3}),
    ],
    ids=lambda value: value.activation_checkpointing if isinstance(value, MemoryConfig) else ",".join(value),
)
def test_activations_are_what_the_allocator_gives(memory: MemoryConfig, options: dict[str, Any], device: str) -> None:
    """Of one pass with the operators of the device; the real peak also has the gradients that are there by then."""
    model = small_model(memory=memory, depth=5, width=128, **options).train()
    objective, noised = noised_batch("joint", latent_tokens=options.get("latent_tokens", 1), lengths=LENGTHS)
    computed = activation_bytes(replace(RunConfig(), memory=memory), model, noised, device)
    gc.collect()  # tensors of earlier tests, which would be freed in between
    profiled = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with assume_device(device), profiled as profile:
        objective(model, noised, noised.counts.tolist())[0].backward()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    assert peak - gradients < 1.1 * computed and computed < 1.15 * peak


def dry_run(store: Path, *overrides: str) -> Estimate:
    settings = ["train.global_batch_size=8", "train.steps=1", "model.width=64", "model.depth=3"]
    return estimate(load_config(None, [f"data.path={store}", *settings, *overrides]), Store.open(store), world_size=1)


def state_mib(costs: Estimate) -> float:
    return rank_memory(costs.step, Sharding("ddp", "fp32", 1)).state


def working_mib(costs: Estimate) -> float:
    return costs.step.activations / 2**20


def total_mib(costs: Estimate) -> float:
    return rank_memory(costs.step, Sharding("single", "fp32", 1)).peak


def test_the_dry_run_follows_the_setting(tiny_store: Path) -> None:
    none, selective, full = (
        dry_run(tiny_store, f"memory.activation_checkpointing={kind}") for kind in ("none", "selective", "full")
    )
    assert working_mib(none) > working_mib(selective) > working_mib(full) > 0
    assert state_mib(none) == state_mib(selective) == state_mib(full)
    assert none.flops_per_step == selective.flops_per_step == full.flops_per_step, "recomputation does not count"


def test_the_dry_run_finds_the_largest_micro_batch_of_all_steps(tiny_store: Path) -> None:
    """The run has 40 steps, and the first is not the largest."""
    settings = ("train={steps: 40, global_batch_size: 8}", "data.window=8", "model={width: 16, depth: 1, num_heads: 2}")
    config, store = load_config(None, [f"data.path={tiny_store}", *settings, "mode=l2t"]), Store.open(tiny_store)
    loader = Loader(store, "train", config.data, config.run.seed, partial(config.train.batch_at, world_size=1))
    tokens = [sum(batch.lengths) for _, (batch,) in loader.steps(0, 40, 0)]
    _, result = loader.largest_step(range(40), 0, config.train.batch_at(0, 1))
    assert tokens[result] == max(tokens) > tokens[0]
    first = dry_run(tiny_store, *settings, "mode=l2t", "train.steps=1")
    assert working_mib(estimate(config, store, 1)) > working_mib(first)


def test_copies_of_a_checkpoint_are_on_the_host(tiny_store: Path) -> None:
    costs = dry_run(tiny_store)
    assert costs.checkpoint_mib * 2**20 == 12 * costs.step.trained and total_mib(costs) >= state_mib(costs)


def test_frozen_parts_have_no_gradients_or_moments(tiny_store: Path) -> None:
    whole, part = dry_run(tiny_store), dry_run(tiny_store, "freeze=[backbone]")
    frozen = whole.parameters["text_stream"] + whole.parameters["latent_stream"]
    assert whole.parameters == part.parameters
    assert whole.step.trained == sum(whole.parameters.values()) == part.step.trained + frozen
    assert (state_mib(whole) - state_mib(part)) * 2**20 == pytest.approx(12 * frozen)


def test_ema_decay_is_in_the_dry_run(tiny_store: Path) -> None:
    """4 bytes a trained parameter: next to the weights, and once more on the host, where checkpoints come from."""
    settings = ("train.steps=2", "freeze=[latent_stream]")
    without, with_it = (dry_run(tiny_store, *settings, f"ema.decay={decay}") for decay in (0, 0.9))
    more = 4 * with_it.step.trained
    assert (state_mib(with_it) - state_mib(without)) * 2**20 == pytest.approx(more)
    assert (with_it.checkpoint_mib - without.checkpoint_mib) * 2**20 == pytest.approx(more)
    assert with_it.step.parts["EMA"] == more and without.step.parts["EMA"] == 0
    assert (total_mib(with_it) - total_mib(without)) * 2**20 == pytest.approx(more)


def test_the_dry_run_counts_one_moment_of_muons_matrices(tiny_store: Path) -> None:
    adamw, muon = dry_run(tiny_store), dry_run(tiny_store, "optim.name=muon")
    part = dry_run(tiny_store, "optim.name=muon", "freeze=[latent_stream]")
    streams = muon.parameters["text_stream"] + muon.parameters["latent_stream"]
    assert adamw.step.one_moment == 0 < part.step.one_moment < muon.step.one_moment < streams
    assert muon.step.one_moment > 0.9 * streams  # all but norms and biases
    assert (state_mib(adamw) - state_mib(muon)) * 2**20 == pytest.approx(4 * muon.step.one_moment)
    assert adamw.optimizer == "torch.AdamW, fused"
    assert muon.optimizer.startswith("torch.Muon for 36 matrices") and "AdamW, fused" in muon.optimizer


def test_the_dry_run_prints_the_engines_that_the_optimizer_has(
    tiny_store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    shown = {}
    for name in ("adamw", "muon", "deepspeed_adam"):
        settings = ["train.global_batch_size=8", "train.steps=1", f"optim.name={name}"]
        print_estimate(load_config(None, [f"data.path={tiny_store}", *settings]))
        lines = capsys.readouterr().out.splitlines()
        shown[name] = [word for word in (line.partition("  ")[0] for line in map(str.strip, lines)) if word in ENGINES]
        (named,) = (line for line in lines if line.startswith("optimizer    "))
        assert {"adamw": "torch.AdamW", "muon": "torch.Muon", "deepspeed_adam": "DeepSpeedCPUAdam"}[name] in named
    assert shown["adamw"] == list(ENGINES) and shown["muon"] == ["ddp", "fsdp2"]
    assert shown["deepspeed_adam"] == [engine for engine in ENGINES if engine.startswith("zero")]


def test_the_dry_run_is_for_gpus_of_another_machine(tiny_config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def peaks(*options: str) -> dict[str, str]:
        assert train.main([str(tiny_config), "--dry-run", *options]) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        return {name: words[0] for name, *words in filter(None, lines) if name in ENGINES}

    two, four = peaks("--gpus", "2"), peaks("--gpus", "4")
    assert set(two) == set(four) == set(ENGINES)
    assert float(four["fsdp2"]) < float(two["fsdp2"])


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--dry-run", "--gpus", "8x80GB"], 2, "argument --gpus: invalid int value: '8x80GB'"),
        (["--dry-run", "--gpus", "0"], 2, "--gpus: expected at least 1, together with --dry-run, found 0"),
        (["--gpus", "2"], 2, "--gpus: expected at least 1, together with --dry-run, found 2"),
        (["--dry-run", "--gpus", "3"], 64, "train.global_batch_size is 8, expected a multiple of 3 processes"),
        (["--dry-run", "--gpus", "2", "data.path=/nowhere"], 65, "/nowhere: not a data store"),
    ],
)
def test_errors_of_gpus_are_one_line(
    tiny_config: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    try:
        result = train.main([str(tiny_config), *arguments])
    except SystemExit as error:  # of argparse
        result = error.code
    assert result == code
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_the_dry_run_names_the_attention_backend(tiny_store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for settings, shown in (([], "sdpa on cpu in fp32"), (["attention.backend=math"], "math on cpu in fp32")):
        print_estimate(load_config(None, [f"data.path={tiny_store}", "train.steps=1", *settings]))
        (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("attention    "))
        assert line.split(maxsplit=1)[1] == shown


def test_the_dry_run_knows_the_replicas_of_hybrid_sharding(
    tiny_store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank of 2 x 2 holds what one of 2 holds."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    config = load_config(None, [f"data.path={tiny_store}", "train.global_batch_size=8", "train.steps=1"])
    rows = []
    for name in ("fsdp2", "fsdp2_hsdp"):
        print_estimate(config, str(ROOT / f"accelerate_configs/{name}.yaml"))
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        rows.append({words[0]: words[1:] for words in lines if words and words[0] in ENGINES})
        assert (["fsdp2", "with", "2", "replicas", "x", "2", "shards"] in lines) == (name == "fsdp2_hsdp")
    assert {name: row for name, row in rows[0].items() if name != "fsdp2"}.items() <= rows[1].items()


def test_the_dry_run_reports_the_step_that_needs_most(tiny_store: Path) -> None:
    one, two = (["model={width: 16, depth: 1, num_heads: 2}", f"train.steps={steps}"] for steps in (1, 2))
    with_head, without = dry_run(tiny_store, "mode=l2t", *one), dry_run(tiny_store, "mode=t2l", *two)
    assert working_mib(with_head) > working_mib(without)
    both = dry_run(tiny_store, "mode=l2t", "mode_schedule={1: t2l}", *two)
    assert working_mib(both) == working_mib(with_head)


def test_the_dry_run_goes_through_all_stages_of_the_modes(tiny_store: Path) -> None:
    """Of the first step alone, and of the two others: schedules that swap the modes need what the larger one needs."""

    def of(*overrides: str) -> Estimate:
        return dry_run(tiny_store, "train.steps=3", *overrides)

    l2t, t2l = of("mode=l2t"), of("mode=t2l")
    mixed = of("mode=l2t", "mode_schedule={1: t2l, 9: joint}")
    assert t2l.flops_per_step < mixed.flops_per_step < l2t.flops_per_step, "t2l predicts no tokens"
    assert working_mib(mixed) == working_mib(l2t) > working_mib(t2l)


def test_a_gpu_keeps_more(tiny_store: Path) -> None:
    """The estimate for a GPU needs no GPU."""
    settings = ("train={steps: 1, global_batch_size: 48}", "model={width: 128, depth: 2, num_heads: 2}")
    store = Store.open(tiny_store)

    def on(device: str, *more: str) -> Estimate:
        return estimate(load_config(None, [f"data.path={tiny_store}", *settings, *more]), store, 1, device=device)

    cpu, gpu = on("cpu"), on("cuda")
    assert working_mib(gpu) > working_mib(cpu) and cpu.flops_per_step == gpu.flops_per_step
    # Without a fused kernel, an operation of all tensors at once copies them.
    unfused = on("cuda", "optim.fused=false").step
    assert unfused.update == 4 * unfused.trained > on("cpu", "optim.fused=false").step.update == 0
    # Graphs add to gradients that stay in memory.
    without = on("cuda", "compile.graphs=false").step
    assert without.parts["gradients"] == 0 < gpu.step.parts["gradients"] == 4 * without.trained


def test_a_gpu_keeps_logits_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (_, noised) = small_model(), noised_batch("joint", lengths=LENGTHS)
    kept = activation_bytes(RunConfig(), model, noised, "cuda")
    monkeypatch.setattr("mmldlm.trainer.memory.MAX_WHOLE_LOGITS", 0)
    computed_again = activation_bytes(RunConfig(), model, noised, "cuda")
    assert kept - computed_again == 4 * len(noised.positions) * 128  # columns, which pad the vocabulary


MEASURED = "model={depth: 6, width: 256, num_heads: 4}"


@pytest.mark.parametrize(
    "settings",
    [
        (MEASURED, batch(64, steps=4)),  # moments are there from the second step on
        pytest.param((MEASURED, batch(64, 32), checkpointing("full")), marks=pytest.mark.slow),
        pytest.param((MEASURED, batch(8), "optim.fused=false"), marks=pytest.mark.slow),
        pytest.param((MEASURED, batch(16, 8), "precision=bf16"), marks=pytest.mark.slow),
    ],
    ids=["activations", "checkpointed", "update", "half precision"],
)
def test_estimate_of_a_real_run(tiny_store: Path, settings: tuple[str, ...]) -> None:
    memory = measure(tiny_store, settings)
    assert memory.measured > 80
    assert abs(memory.error) < BOUND, memory
