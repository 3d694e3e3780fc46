"""The dry run counts what a step computes and keeps, also where blocks are recomputed and parts are frozen."""

from __future__ import annotations

import gc
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
from mmldlm.distributed.launch import ENGINES
from mmldlm.model.activation_checkpoint import KEEP_ALL, MemoryConfig
from mmldlm.model.attention import Backend
from mmldlm.model.heads import GPU_VOCAB_MULTIPLE, TextHead
from mmldlm.model.mmdit import MMDiT, Precision
from mmldlm.model.ops import assume_device
from mmldlm.trainer.dry_run import print_estimate
from mmldlm.trainer.engine_memory import Sharding, rank_memory
from mmldlm.trainer.memory_estimate import Estimate, estimate
from mmldlm.trainer.memory_tracker import CostTracker, StepTracker
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
    steps = StepTracker(model, objective)
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


def test_memory_of_a_step_by_purpose() -> None:
    """The first step makes the moments once its activations are gone; the second has them all the time."""
    model = network(KEEP_ALL)
    objective, noised = noised_batch("joint", lengths=(LENGTH,) * SAMPLES)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    still = weights + sum(buffer.nbytes for buffer in model.buffers())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    steps, peaks = StepTracker(model, objective), []
    for _ in range(2):
        steps.micro_batches([noised])
        steps.update(optimizer, clip_norm=1.0)
        peaks.append(steps.costs.peak())
    alone = steps.costs.peak("activations")["activations"]
    first, second = peaks
    assert first["weights"] == second["weights"] == still
    assert first.get("moments", 0) == 0 and 2 * weights <= second["moments"] < 2.01 * weights
    assert first["activations"] <= alone and second["activations"] <= alone
    assert second["gradients"] < weights
    assert sum(second.values()) > still + 2 * weights + alone / 2


def dry_run(store: Path, *overrides: str) -> Estimate:
    settings = ["train.global_batch_size=8", "train.steps=1", "model.width=64", "model.depth=3"]
    return estimate(load_config(None, [f"data.path={store}", *settings, *overrides]), Store.open(store), world_size=1)


def state_mib(costs: Estimate) -> float:
    return rank_memory(costs.step, Sharding("ddp", "fp32", 1)).state


def working_mib(costs: Estimate) -> float:
    return costs.step.working / 2**20


def total_mib(costs: Estimate) -> float:
    return rank_memory(costs.step, Sharding("single", "fp32", 1)).peak


def test_the_dry_run_follows_the_setting(tiny_store: Path) -> None:
    none, selective, full = (
        dry_run(tiny_store, f"memory.activation_checkpointing={kind}") for kind in ("none", "selective", "full")
    )
    assert working_mib(none) > working_mib(selective) > working_mib(full) > 0
    assert state_mib(none) == state_mib(selective) == state_mib(full)
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
    assert working_mib(estimate(config, store, 1, steps_per_stage=1)) > working_mib(first)


def test_the_dry_run_has_moments_from_the_second_step_on(tiny_store: Path) -> None:
    one, many = (dry_run(tiny_store, f"train.steps={steps}") for steps in (1, 9))
    assert total_mib(one) < total_mib(many)
    assert many.step.peak["moments"] == pytest.approx(8 * many.step.trained, rel=0.01)
    assert total_mib(many) >= state_mib(many)
    store = Store.open(tiny_store)  # a step takes all its samples, so that the first is as large as any
    whole = f"train={{steps: 9, global_batch_size: {len(store.split('train'))}}}"
    config = load_config(None, [f"data.path={tiny_store}", whole, "model={width: 16, depth: 1, num_heads: 2}"])
    looked_at_once = estimate(config, store, 1, steps_per_stage=1)
    assert looked_at_once.step.peak["moments"] == pytest.approx(8 * looked_at_once.step.trained, rel=0.01)
    assert many.checkpoint_mib * 2**20 == 12 * many.step.trained


def test_frozen_parts_have_no_gradients_or_moments(tiny_store: Path) -> None:
    whole, part = dry_run(tiny_store), dry_run(tiny_store, "freeze=[backbone]")
    frozen = whole.parameters["text_stream"] + whole.parameters["latent_stream"]
    assert whole.parameters == part.parameters
    assert whole.step.trained == sum(whole.parameters.values()) == part.step.trained + frozen
    assert (state_mib(whole) - state_mib(part)) * 2**20 == pytest.approx(12 * frozen)
    assert part.flops_per_step < whole.flops_per_step


def test_ema_decay_is_in_the_dry_run(tiny_store: Path) -> None:
    """4 bytes a trained parameter: next to the weights, and once more on the host, where checkpoints come from."""
    settings = ("train.steps=2", "freeze=[latent_stream]")
    without, with_it = (dry_run(tiny_store, *settings, f"ema.decay={decay}") for decay in (0, 0.9))
    more = 4 * with_it.step.trained
    assert (state_mib(with_it) - state_mib(without)) * 2**20 == pytest.approx(more)
    assert (with_it.checkpoint_mib - without.checkpoint_mib) * 2**20 == pytest.approx(more)
    assert with_it.step.peak["ema"] == more and "ema" not in without.step.peak
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
    assert max(working_mib(first), working_mib(second)) == max(working_mib(l2t), working_mib(t2l))


def test_a_gpu_has_whole_temporaries(tiny_store: Path) -> None:
    """The estimate for a GPU needs no GPU."""
    settings = ("train={steps: 1, global_batch_size: 48}", "model={width: 128, depth: 2, num_heads: 2}")
    store = Store.open(tiny_store)

    def on(device: str, *more: str) -> Estimate:
        return estimate(load_config(None, [f"data.path={tiny_store}", *settings, *more]), store, 1, device=device)

    cpu, gpu = on("cpu"), on("cuda")
    assert working_mib(gpu) > working_mib(cpu)
    # A GPU has columns of logits that pad the vocabulary.
    assert cpu.flops_per_step <= gpu.flops_per_step == pytest.approx(cpu.flops_per_step, rel=0.05)
    few = ("optim.fused=false", "train.global_batch_size=1")  # so that the update needs the most
    copies = on("cuda", *few).step.peak["update"]  # for each operation of all tensors at once
    assert copies > 2 * on("cpu", *few).step.peak["update"] > 0
    # Graphs add to gradients that stay in memory.
    without = on("cuda", "compile.graphs=false").step
    assert without.peak.get("gradients", 0) < gpu.step.peak["gradients"] == 4 * without.trained


def test_a_gpu_keeps_logits_for_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a compiled head does, so one estimate holds for both; above the limit a product is computed twice."""
    rows, chunk, vocab, costs = 200, 16, 4 * GPU_VOCAB_MULTIPLE, []
    monkeypatch.setattr("mmldlm.model.heads.GPU_CHUNK_ROWS", chunk)
    head = TextHead(WIDTH, vocab, (0,), tied=False).eval()
    for limit in (rows * vocab, rows * vocab - 1):
        monkeypatch.setattr("mmldlm.model.heads.MAX_WHOLE_LOGITS", limit)
        with assume_device("cuda"), CostTracker() as tracker:
            head(torch.zeros(rows, WIDTH, requires_grad=True), head.weight, torch.zeros(rows).long())[
                0
            ].sum().backward()
        costs.append((tracker.flops, tracker.peak()["activations"]))
    assert costs[1][0] - costs[0][0] == 2 * rows * vocab * WIDTH
    assert costs[0][1] - costs[1][1] == pytest.approx(4 * (rows - chunk) * vocab, rel=0.1)


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
