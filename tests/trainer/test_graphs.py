"""Replayed passes add the gradients, and have the losses, of ordinary ones; what cannot be replayed is computed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmldlm.batch import Batch
from mmldlm.config import load_config
from mmldlm.diffusion.corruption import StaticSizes
from mmldlm.diffusion.gaussian import GaussianDiffusion, LatentConfig
from mmldlm.diffusion.masked import MaskedDiffusion
from mmldlm.diffusion.noise import draw_noise, mode_weights
from mmldlm.diffusion.objective import LossConfig, NoisedBatch, Objective
from mmldlm.errors import ConfigError
from mmldlm.model.activation_checkpoint import MemoryConfig
from mmldlm.trainer import graphs
from mmldlm.trainer.graphs import GraphReplays, why_no_graphs
from tests.helpers.engine_runs import Single, difference
from tests.helpers.forked_runs import ForkedRuns
from tests.helpers.host_graphs import HostGraphs
from tests.helpers.small_model import MASK, MAX_LENGTH, random_inputs, small_model

OBJECTIVE = Objective(
    LossConfig(), MaskedDiffusion(MASK, "elbo"), GaussianDiffusion(LatentConfig(), "cosine"), accuracy=True
)


def micro_batches(step: int) -> list[NoisedBatch]:
    """Two micro-batches of a step, of one of two buckets each."""
    made = []
    for part in range(2):
        generator = torch.Generator().manual_seed(10 * step + part)
        lengths = tuple(torch.randint(1, MAX_LENGTH + 1, (4 + (step + part) % 2 * 4,), generator=generator).tolist())
        inputs, index = random_inputs(lengths, seed=10 * step + part), torch.arange(len(lengths))
        batch = Batch(inputs.tokens.clamp_max(MASK - 1), inputs.latents, lengths, index, index)
        noise = draw_noise(batch, 0, step, len(lengths), mode_weights("joint"))
        made += StaticSizes(MAX_LENGTH).fill([OBJECTIVE.corrupt(batch, noise)], micro_batch_tokens=128)
    return made


@dataclass
class Training:
    """Some steps of a small network: losses, loss sums, and the weights at the end."""

    results: list[tuple[Tensor, ...]] = field(default_factory=list)
    weights: Tensor = field(default_factory=lambda: torch.empty(0))

    def run(
        self,
        steps: int,
        wrap: Callable[[Any, Any], Any] = lambda compute, _: compute,
        backend: Any = "math",
        **options: Any,
    ) -> Training:
        model = small_model(backend=backend, **options).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)

        def compute(batch: NoisedBatch, divisors: Tensor) -> tuple[Tensor, Tensor]:
            device = next(model.parameters()).device
            loss, sums = OBJECTIVE(model, batch.to(device), divisors.to(device))
            loss.backward()
            return loss.detach(), sums

        one_pass = wrap(compute, lambda: [parameter.grad for parameter in model.parameters()])
        for step in range(steps):
            noised = micro_batches(step)
            totals = torch.stack([batch.counts for batch in noised]).sum(0).tolist()
            for batch in noised:
                self.results.append(one_pass(batch, OBJECTIVE.divisors(totals, batch)))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        self.weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        return self


def replays(compute: Any, gradients: Any) -> GraphReplays:
    return GraphReplays(compute, gradients, torch.device("cpu"), HostGraphs(gradients))


def assert_same(one: Training, other: Training) -> None:
    for ours, theirs in zip(one.results, other.results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert torch.equal(one.weights, other.weights)


@pytest.fixture(scope="module")
def ordinary() -> Training:
    return Training().run(8)


@pytest.mark.quick
@pytest.mark.parametrize("recomputed", ["none", "selective", "full"])
def test_replayed_passes_are_ordinary_ones_to_the_bit(recomputed: Any, ordinary: Training) -> None:
    made: list[GraphReplays] = []
    memory = MemoryConfig(activation_checkpointing=recomputed)
    found = Training().run(8, lambda *given: made.append(replays(*given)) or made[-1], memory=memory)
    assert_same(ordinary, found)
    # Two buckets of 8 passes each: the first of each is ordinary, the second one recorded, and one of all is checked.
    assert made[0].graphs.counts == {"run": 3, "recorded": 2, "replayed": 14} and made[0].is_checked


@pytest.mark.quick
def test_a_number_that_was_recorded_is_found(ordinary: Training, caplog: pytest.LogCaptureFixture) -> None:
    """Divisors as numbers of Python would be those of the micro-batch that was recorded."""
    made: list[GraphReplays] = []
    inputs: list[Tensor] = []

    def wrap(compute: Any, gradients: Any) -> Callable[..., Any]:
        made.append(replays(lambda batch, _: compute(batch, inputs[-1].clone()), gradients))

        def one_pass(batch: NoisedBatch, divisors: Tensor) -> Any:
            inputs.append(divisors)
            return made[0](batch, divisors)

        return one_pass

    assert_same(ordinary, Training().run(8, wrap))
    assert not made[0].is_on and made[0].graphs.counts["replayed"] == 3
    assert ["differs from an ordinary one" in record.message for record in caplog.records] == [True]


@pytest.mark.quick
def test_recording_that_raises_turns_graphs_off(ordinary: Training, caplog: pytest.LogCaptureFixture) -> None:
    made: list[GraphReplays] = []

    def wrap(compute: Any, gradients: Any) -> GraphReplays:
        made.append(replays(compute, gradients))
        made[0].graphs.fails = True
        return made[0]

    assert_same(ordinary, Training().run(8, wrap))
    assert made[0].graphs.counts == {"run": 3, "recorded": 0, "replayed": 0}, "the first of each bucket, and the failed"
    assert [record.message.endswith("when stream is capturing") for record in caplog.records] == [True], "one line"


@pytest.mark.quick
@pytest.mark.parametrize("limit", [1, 2])
def test_only_so_many_graphs_are_kept(limit: int, ordinary: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPHS", limit)
    made: list[GraphReplays] = []
    assert_same(ordinary, Training().run(8, lambda *given: made.append(replays(*given)) or made[-1]))
    # The passes of the two buckets alternate, except for those around the start of a step.
    assert len(made[0].buckets) == limit and made[0].graphs.counts["recorded"] == (7 if limit == 1 else 2)


@pytest.mark.quick
def test_a_step_that_is_not_finite_leaves_the_check_to_a_later_one() -> None:
    made: list[GraphReplays] = []

    def wrap(compute: Any, gradients: Any) -> Callable[..., Any]:
        made.append(replays(compute, gradients))
        calls: list[None] = []

        def one_pass(batch: NoisedBatch, divisors: Tensor) -> Any:
            calls.append(None)
            results = made[0](batch, divisors * (torch.nan if len(calls) == 5 else 1))
            if len(calls) == 5:
                assert results[0].isnan() and not made[0].is_checked
                torch._foreach_zero_(gradients())
            return results

        return one_pass

    Training().run(5, wrap)
    assert made[0].is_on and made[0].is_checked


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_cuda_graphs_compute_what_the_stand_in_does(precision: Any) -> None:
    made: list[GraphReplays] = []
    options: Any = {"backend": "efficient", "device": "cuda", "precision": precision, "width": 128}
    ordinary = Training().run(8, **options)
    found = Training().run(
        8, lambda *given: made.append(GraphReplays(*given, torch.device("cuda"))) or made[-1], **options
    )
    assert made[0].is_on and made[0].is_checked
    tolerance = 1e-5 if precision == "fp32" else 1e-2
    for one, other in zip(ordinary.results, found.results, strict=True):
        torch.testing.assert_close(other, one, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found.weights, ordinary.weights, rtol=tolerance, atol=tolerance)


CUDA = ("single", "cuda", "varlen")


@pytest.mark.setting("compile.graphs")
@pytest.mark.quick
@pytest.mark.parametrize(
    ("settings", "where", "reason"),
    [
        ([], CUDA, ""),
        (["compile.graphs=off"], CUDA, "compile.graphs is false"),
        ([], ("single", "cpu", "sdpa"), "graphs need CUDA, found cpu"),
        ([], ("single", "cuda", "sdpa"), "attention.backend sdpa"),
        ([], ("ddp", "cuda", "varlen"), "compile.graphs: auto"),
        (["compile.graphs=on"], ("ddp", "cuda", "varlen"), ""),
        ([], ("fsdp2", "cuda", "varlen"), "fsdp2"),
        ([], ("zero2", "cuda", "varlen"), "zero2"),
        (["model.dropout=0.1"], CUDA, ""),
        (["model.dropout=0.1", "memory.activation_checkpointing=full"], CUDA, "recomputed dropout"),
        (["distributed.ddp.comm_hook=fp16"], ("ddp", "cuda", "varlen"), "distributed.ddp.comm_hook fp16"),
    ],
)
def test_where_graphs_are_used(tiny_config: Path, settings: list[str], where: Any, reason: str) -> None:
    config = load_config(tiny_config, settings)
    found = why_no_graphs(config, *where)
    assert found.startswith(reason) and bool(found) == bool(reason)
    if reason and not reason.startswith("compile.graphs"):
        with pytest.raises(ConfigError, match=rf"^compile\.graphs: found true, but {re.escape(found)}; expected auto"):
            why_no_graphs(load_config(tiny_config, [*settings, "compile.graphs=true"]), *where)


SETTINGS = ("attention.backend=math", "train.micro_batch_tokens=64", "precision=fp32")
EVERY_STEP = ("guard.verify_updates_every=2", "train.steps=12", "validation.every=6")


@pytest.mark.parametrize(("engine", "ranks"), [("single", 1), ("ddp", 2)])
def test_a_run_by_graphs_has_the_curve_of_one_without(
    engine: str, ranks: int, forked: ForkedRuns, single: Single, parity_config: Path, tmp_path: Path
) -> None:
    counts, settings = tmp_path / "counts.json", (*SETTINGS, *EVERY_STEP)
    script = {"script": "replayed_passes.py", "REPLAYS": str(counts)}
    forked.succeed(engine, tmp_path / "run", ranks, parity_config, *settings, **script)
    counted, reference = json.loads(counts.read_text()), single(*settings)
    assert counted["recorded"] > 0 and counted["replayed"] > counted["run"], counted
    assert difference(tmp_path / "run", reference) < 1e-4
    assert difference(tmp_path / "run", reference, ("validation/total",), "validation") < 1e-4
    # What a run by graphs has saved, one without goes on from; and the other way around.
    more = (*settings, "train.steps=16")
    forked.succeed(engine, tmp_path / "run", ranks, parity_config, *more)
    forked.succeed("single", tmp_path / "other", 1, parity_config, *settings)
    forked.succeed(engine, tmp_path / "other", ranks, parity_config, *more, **script)
    assert difference(tmp_path / "run", tmp_path / "other") < 1e-4
