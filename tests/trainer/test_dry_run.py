"""The dry run counts what a step computes and keeps, also where blocks are recomputed and parts are frozen."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.memory import BOUND, batch, checkpointing, measure
from mmldlm.config import load_config
from mmldlm.data.loader import Loader
from mmldlm.data.store import Store
from mmldlm.distributed.launcher import ENGINES
from mmldlm.model.activation_checkpoint import KEEP_ALL, MemoryConfig
from mmldlm.model.attention import Backend
from mmldlm.model.cpu_half import KERNEL_MIB, has_bf16_instructions
from mmldlm.model.mmdit import MMDiT, Precision
from mmldlm.trainer.dry_run import Estimate, estimate, print_estimate, state_mib
from mmldlm.trainer.memory_tracker import StepCostTracker
from tests.helpers.noised_batch import noised_batch
from tests.helpers.paths import ROOT
from tests.helpers.small_model import small_model

KINDS = [MemoryConfig(kind) for kind in ("none", "every_k", "selective", "full")]  # type: ignore[arg-type]
kinds = pytest.mark.parametrize("memory", KINDS, ids=lambda memory: memory.activation_checkpointing)
DEPTH, WIDTH, LATENT_WIDTH, SAMPLES, LENGTH = 4, 64, 32, 16, 16


def network(memory: MemoryConfig, **options: Any) -> MMDiT:
    return small_model(memory=memory, depth=DEPTH, width=WIDTH, **options).train()


def cost(model: MMDiT, lengths: tuple[int, ...] = (LENGTH,) * SAMPLES) -> tuple[int, int]:
    """Return the FLOPs of one micro-batch and the peak bytes of its activations."""
    objective, noised = noised_batch("joint", lengths=lengths)
    steps = StepCostTracker(model, objective)
    steps.micro_batches([noised])
    return steps.costs.flops, steps.costs.peak("activations")["activations"]


@kinds
def test_fake_tensors_cost_what_real_ones_cost(memory: MemoryConfig) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = network(memory, precision="bf16", dropout=0.1)
    real = network(memory, precision="bf16", dropout=0.1)
    assert cost(fake) == pytest.approx(cost(real), rel=2e-3)  # the batch itself is made into fake tensors on the way


def test_neither_weights_nor_gradients_are_activations() -> None:
    """The text has two tokens; a second backward has room for one more gradient of a weight at most."""
    model = network(KEEP_ALL)
    sizes = [parameter.nbytes for parameter in model.parameters()]
    first, second = (cost(model, (2,)) for _ in range(2))
    assert first[0] == second[0]
    assert first[1] < sum(sizes) / 4
    assert first[1] < second[1] <= first[1] + max(sizes)


@pytest.mark.parametrize("backend", ["sdpa", "math"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_memory_falls_and_flops_grow_by_what_is_recomputed(precision: Precision, backend: Backend) -> None:
    none, every_k, selective, full = (cost(network(memory, precision=precision, backend=backend)) for memory in KINDS)
    assert none[1] > selective[1] > full[1] and none[1] > every_k[1] > full[1]
    assert none[0] < selective[0] < every_k[0] < full[0]
    assert 2 * (full[0] - none[0]) == 3 * (every_k[0] - none[0])  # of 4 blocks three against two


def test_full_checkpointing_keeps_inputs_of_blocks() -> None:
    """The bounds leave out the head, the conditioning and elementwise products."""
    tokens = SAMPLES * LENGTH
    inputs = 4 * DEPTH * (tokens * WIDTH + SAMPLES * LATENT_WIDTH)
    model = network(KEEP_ALL)
    none = cost(model)[1]
    hidden = model.blocks[0].text.mlp.up.out_features
    one_block = 4 * tokens * (3 * WIDTH + hidden)  # what attention and the gate of the feed-forward need again
    full = cost(network(MemoryConfig("full")))[1]
    assert inputs + one_block < full < none - (DEPTH - 1) * one_block + inputs
    assert cost(network(MemoryConfig("selective")))[1] > inputs + DEPTH * one_block


@kinds
def test_what_is_counted_is_what_the_allocator_gives(memory: MemoryConfig) -> None:
    """The real peak has the gradients that are there by then, and kernels' scratch memory, on top."""
    counted = cost(network(memory))[1]
    model = network(memory)
    objective, noised = noised_batch("joint", lengths=(LENGTH,) * SAMPLES)
    gc.collect()  # tensors of earlier tests, which would be freed in between
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        loss, _ = objective(model, noised, noised.counts.tolist())
        loss.backward()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    assert counted * 0.99 < peak < counted * 1.05 + gradients


@kinds
def test_flops_match_pytorchs_counter(memory: MemoryConfig) -> None:
    counted = cost(network(memory))[0]
    model = network(memory)
    objective, noised = noised_batch("joint", lengths=(LENGTH,) * SAMPLES)
    with FlopCounterMode(display=False) as counter:
        objective(model, noised, noised.counts.tolist())[0].backward()
    product = 2 * SAMPLES * (LENGTH + 1) ** 2 * WIDTH  # one product of a block's attention; 1: the latent token
    forwards = DEPTH + {"none": 0, "every_k": 2, "selective": 3, "full": 3}[memory.activation_checkpointing]
    assert counted == counter.get_total_flops() + product * (2 * forwards + 5 * DEPTH)


@pytest.mark.parametrize("stay", [False, True])
def test_memory_of_a_step_by_purpose(stay: bool) -> None:
    """The first step makes the moments once its activations are gone; the second has them all the time."""
    model = network(KEEP_ALL)
    objective, noised = noised_batch("joint", lengths=(LENGTH,) * SAMPLES)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    still = weights + sum(buffer.nbytes for buffer in model.buffers())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    steps, peaks = StepCostTracker(model, objective, keep_gradients=stay), []
    for _ in range(2):
        steps.micro_batches([noised])
        steps.update(optimizer, clip_norm=1.0)
        peaks.append(steps.costs.peak())
    alone = steps.costs.peak("activations")["activations"]
    first, second = peaks
    assert first["weights"] == second["weights"] == still
    assert first.get("moments", 0) == 0 and 2 * weights <= second["moments"] < 2.01 * weights
    assert first["activations"] <= alone and second["activations"] <= alone
    assert (first["gradients"] == second["gradients"] == weights) if stay else (second["gradients"] < weights)
    assert sum(second.values()) > still + 2 * weights + alone / 2


def dry_run(store: Path, *overrides: str) -> Estimate:
    settings = ["train.global_batch_size=8", "train.steps=1", "model.width=64", "model.depth=3"]
    return estimate(load_config(None, [f"data.path={store}", *settings, *overrides]), Store.open(store), world_size=1)


def state_mib_of(costs: Estimate) -> float:
    return state_mib("ddp", costs, "fp32")[0]


def test_the_dry_run_follows_the_setting(tiny_store: Path) -> None:
    none, selective, full = (
        dry_run(tiny_store, f"memory.activation_checkpointing={kind}") for kind in ("none", "selective", "full")
    )
    assert none.activations_mib > selective.activations_mib > full.activations_mib > 0
    assert state_mib_of(none) == state_mib_of(selective) == state_mib_of(full)
    assert none.flops_per_step < selective.flops_per_step < full.flops_per_step


def test_the_dry_run_finds_the_largest_micro_batch_of_all_steps(tiny_store: Path) -> None:
    """The run has 40 steps, and the first is not the largest."""
    settings = ("train={steps: 40, global_batch_size: 8}", "data.window=8", "model={width: 16, depth: 1, num_heads: 2}")
    config, store = load_config(None, [f"data.path={tiny_store}", *settings, "mode=l2t"]), Store.open(tiny_store)
    loader = Loader(store, "train", config.data, config.run.seed, partial(config.train.batch_at, world_size=1))
    tokens = [sum(batch.lengths) for _, (batch,) in loader.steps(0, 40, 0)]
    _, result = loader.largest_step(range(40), 0, config.train.batch_at(0, 1))
    assert tokens[result] == max(tokens) > tokens[0]
    first = dry_run(tiny_store, *settings, "mode=l2t", "train.steps=1")
    assert estimate(config, store, 1, steps_per_stage=1).activations_mib > first.activations_mib


def test_the_dry_run_has_moments_from_the_second_step_on(tiny_store: Path) -> None:
    one, many = (dry_run(tiny_store, f"train.steps={steps}") for steps in (1, 9))
    assert one.total_mib < many.total_mib
    assert many.peak_mib["moments"] == pytest.approx(8 * many.trainable / 2**20, rel=0.01)
    assert many.total_mib >= state_mib_of(many)
    store = Store.open(tiny_store)  # a step takes all its samples, so that the first is as large as any
    whole = f"train={{steps: 9, global_batch_size: {len(store.split('train'))}}}"
    config = load_config(None, [f"data.path={tiny_store}", whole, "model={width: 16, depth: 1, num_heads: 2}"])
    looked_at_once = estimate(config, store, 1, steps_per_stage=1)
    assert looked_at_once.peak_mib["moments"] == pytest.approx(8 * looked_at_once.trainable / 2**20, rel=0.01)
    assert many.checkpoint_mib * 2**20 == 12 * many.trainable


def test_frozen_parts_have_no_gradients_or_moments(tiny_store: Path) -> None:
    whole, part = dry_run(tiny_store), dry_run(tiny_store, "freeze=[backbone]")
    frozen = whole.parameters["text_stream"] + whole.parameters["latent_stream"]
    assert whole.parameters == part.parameters
    assert whole.trainable == sum(whole.parameters.values()) == part.trainable + frozen
    assert (state_mib_of(whole) - state_mib_of(part)) * 2**20 == pytest.approx(12 * frozen)
    assert part.flops_per_step < whole.flops_per_step


def test_ema_decay_is_in_the_dry_run(tiny_store: Path) -> None:
    """4 bytes a trained parameter: next to the weights, and once more on the host, where checkpoints come from."""
    settings = ("train.steps=2", "freeze=[latent_stream]")
    without, with_it = (dry_run(tiny_store, *settings, f"ema.decay={decay}") for decay in (0, 0.9))
    more = 4 * with_it.trainable
    assert (state_mib_of(with_it) - state_mib_of(without)) * 2**20 == pytest.approx(more)
    assert (with_it.checkpoint_mib - without.checkpoint_mib) * 2**20 == pytest.approx(more)
    assert with_it.peak_mib["ema"] * 2**20 == more and "ema" not in without.peak_mib
    assert (with_it.total_mib - without.total_mib) * 2**20 == pytest.approx(more)
    million = Estimate({"backbone": 2**20}, [(2**20,)], 0, 0, {}, 4, 0)
    for engine in ENGINES:
        device, host = state_mib(engine, replace(million, ema=True), "bf16")
        before = state_mib(engine, million, "bf16")
        expected = {"ddp": (4, 0), "zero2_offload": (0, 1), "zero3_offload": (0, 1)}.get(engine, (1, 0))
        assert (device - before[0], host - before[1]) == expected, engine


def test_the_dry_run_counts_one_moment_of_muons_matrices(tiny_store: Path) -> None:
    adamw, muon = dry_run(tiny_store), dry_run(tiny_store, "optim.name=muon")
    part = dry_run(tiny_store, "optim.name=muon", "freeze=[latent_stream]")
    streams = muon.parameters["text_stream"] + muon.parameters["latent_stream"]
    assert adamw.one_moment == 0 < part.one_moment < muon.one_moment < streams
    assert muon.one_moment > 0.9 * streams  # all but norms and biases
    assert (state_mib_of(adamw) - state_mib_of(muon)) * 2**20 == pytest.approx(4 * muon.one_moment)
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
    for kept in (False, True):
        costs = Estimate({"backbone": 2**20}, [(2**20,)], 0, 0, {}, 4, 0, ema=kept)
        assert state_mib("fsdp2", costs, "fp32", 2) == state_mib("fsdp2", replace(costs, world_size=2), "fp32")
        assert state_mib("zero3", costs, "fp32", 2) == state_mib("zero3", costs, "fp32")


def test_the_dry_run_reports_the_step_that_needs_most(tiny_store: Path) -> None:
    one, two = (["model={width: 16, depth: 1, num_heads: 2}", f"train.steps={steps}"] for steps in (1, 2))
    with_head, without = dry_run(tiny_store, "mode=l2t", *one), dry_run(tiny_store, "mode=t2l", *two)
    assert with_head.activations_mib > without.activations_mib
    both = dry_run(tiny_store, "mode=l2t", "mode_schedule={1: t2l}", *two)
    assert both.activations_mib == with_head.activations_mib


def test_the_dry_run_goes_through_all_stages_of_the_modes(tiny_store: Path) -> None:
    """Three steps, all looked at: two schedules that swap the modes of each step cost what the modes cost alone."""

    def of(*overrides: str) -> Estimate:
        return dry_run(tiny_store, "train.steps=3", *overrides)

    l2t, t2l = of("mode=l2t"), of("mode=t2l")
    first, second = (
        of("mode=l2t", "mode_schedule={1: t2l, 9: joint}"),
        of("mode=joint", "mode_schedule={0: t2l, 1: l2t}"),
    )
    assert len({result.flops_per_step for result in (l2t, t2l, first, second)}) == 4
    assert first.flops_per_step + second.flops_per_step == pytest.approx(l2t.flops_per_step + t2l.flops_per_step)
    assert max(first.activations_mib, second.activations_mib) == max(l2t.activations_mib, t2l.activations_mib)


@pytest.mark.parametrize(
    ("engine", "precision", "device", "host"),
    [
        ("ddp", "fp32", 16, 0),
        ("ddp", "bf16", 16, 0),
        ("fsdp2", "fp32", 4, 0),
        ("zero1", "bf16", 2 + 4 + 3, 0),
        ("zero2", "fp32", 4 + 4, 0),
        ("zero2", "bf16", 2 + 4, 0),
        ("zero3", "bf16", 4.5, 0),
        ("zero2_offload", "bf16", 3, 3),
        ("zero3_offload", "fp32", 0, 5),
    ],
)
def test_memory_of_the_engines(engine: str, precision: str, device: float, host: float) -> None:
    """Bytes a parameter on four processes, as docs/engines.md has them; a frozen one costs no more than its weight."""
    million = Estimate({"backbone": 2**20}, [(2**20,)], 0, 0, {}, 4, 0)
    assert state_mib(engine, million, precision) == (device, host)
    still = Estimate({"backbone": 2**20}, [], 0, 0, {}, 4, 0)
    assert sum(state_mib(engine, still, precision)) <= 4


def test_rows_that_fsdp2_pads() -> None:
    """Three rows on four processes are four; with two replicas, on two processes each, they are four as well."""
    odd = Estimate({"backbone": 3 * 2**20}, [(3, 2**20)], 0, 0, {}, 4, 0)
    assert state_mib("fsdp2", odd, "fp32") == (16, 0) and state_mib("zero3", odd, "fp32") == (15, 0)
    assert state_mib("fsdp2", odd, "fp32", replicas=2) == (32, 0)
    assert state_mib("fsdp2", odd, "fp32", replicas=4) == (48, 0)


def test_memory_of_the_engines_under_muon() -> None:
    """All of a million parameters with one moment: 12 bytes, shared out by FSDP2."""
    million = Estimate({"backbone": 2**20}, [(2**20,)], 0, 0, {}, 4, 0, one_moment=2**20)
    assert (state_mib("ddp", million, "bf16"), state_mib("fsdp2", million, "fp32")) == ((12, 0), (3, 0))


def test_a_gpu_has_whole_temporaries_and_no_kernels_of_a_cpu(tiny_store: Path) -> None:
    """The estimate for a GPU needs no GPU."""
    settings = ("train={steps: 1, global_batch_size: 48}", "model={width: 128, depth: 2, num_heads: 2}")
    store = Store.open(tiny_store)

    def on(device: str, *more: str) -> Estimate:
        return estimate(load_config(None, [f"data.path={tiny_store}", *settings, *more]), store, 1, device=device)

    cpu, gpu = on("cpu"), on("cuda")
    assert gpu.activations_mib > cpu.activations_mib
    # A GPU has columns of logits that pad the vocabulary.
    assert cpu.flops_per_step <= gpu.flops_per_step == pytest.approx(cpu.flops_per_step, rel=0.05)
    assert on("cuda", "precision=bf16").kernels_mib == 0
    few = ("optim.fused=false", "train.global_batch_size=1")  # so that the update needs the most
    copies = on("cuda", *few).peak_mib["update"]  # for each operation of all tensors at once
    assert copies > 2 * on("cpu", *few).peak_mib["update"] > 0


MEASURED = "model={depth: 6, width: 256, num_heads: 4}"


@pytest.mark.parametrize(
    "settings",
    [
        (MEASURED, batch(64)),
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


COUNT_KERNELS = """
import sys
from mmldlm.config import load_config
from mmldlm.train import train
train(load_config(None, sys.argv[1:]))
"""


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.skipif(not has_bf16_instructions(), reason="a CPU with instructions for bf16")
def test_half_precision_kernels_match_a_run(tiny_store: Path, tmp_path: Path, optimizer: str) -> None:
    """The reference is what oneDNN itself reports in a run of which the dry run looks at all steps."""
    precision = "bf16" if optimizer == "adamw" else "fp32"  # Muon multiplies in bf16 anyway
    settings = ("train={steps: 3, global_batch_size: 16, micro_batch_size: 8}", f"precision={precision}")
    settings = (*settings, "model={width: 64, depth: 2, num_heads: 2}", f"optim.name={optimizer}")
    off = ("validation.every=0", "checkpoint.every_steps=0", "log.tensorboard=false")
    run = (f"run.dir={tmp_path}/run", f"data.path={tiny_store}", *settings, *off)
    done = subprocess.run(
        [sys.executable, "-c", COUNT_KERNELS, *run],
        env={**os.environ, "ONEDNN_VERBOSE": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    made = done.stdout.count("create:cache_miss")
    assert made > 10
    assert dry_run(tiny_store, *settings).kernels_mib == pytest.approx(made * KERNEL_MIB)


@pytest.mark.skipif(not has_bf16_instructions(), reason="a CPU with instructions for bf16")
def test_instructions_that_onednn_may_not_use_do_not_count() -> None:
    command = "from mmldlm.model.cpu_half import has_bf16_instructions as found; raise SystemExit(int(found()))"
    for isa, found in (("AVX2", 0), ("DEFAULT", 1)):
        environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": isa}
        assert subprocess.run([sys.executable, "-c", command], env=environment).returncode == found


def test_half_precision_kernels_are_bounded(tiny_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmldlm.model.cpu_half.has_bf16_instructions", lambda: True)
    few, many, others = (
        dry_run(tiny_store, f"train={{steps: {steps}, global_batch_size: 16, micro_batch_size: 8}}", *settings)
        for steps, settings in ((1, ["precision=bf16"]), (3, ["precision=bf16"]), (3, []))
    )
    assert others.kernels_mib == 0 < few.kernels_mib < many.kernels_mib
    assert few.total_mib < many.total_mib <= many.total_mib + many.kernels_mib
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "20")
    assert dry_run(tiny_store, "precision=bf16").kernels_mib == 20 * KERNEL_MIB
    monkeypatch.setattr("mmldlm.model.cpu_half.has_bf16_instructions", lambda: False)
    assert dry_run(tiny_store, "precision=bf16").kernels_mib == 0
