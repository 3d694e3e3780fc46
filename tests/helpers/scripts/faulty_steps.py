"""`mmldlm.train` with planted faults: FAULTS=[{"step", "kind", "rank", "micro_batch"}, ...], FACTS=folder.

Kinds are nan, inf and -inf in one latent, a loss that is infinite although its gradients are not (loss), and a gradient
of one parameter that becomes nan (bad_gradient) or huge. With REFERENCE=1 the engine does not see those steps: there is
no forward pass and no skip. With LATE=1 numbers of steps are fetched as on a GPU. Each rank records the digests of its
weights and moments after each step, which sample it planted something in, and after which steps it fetched numbers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from mmldlm import train
from mmldlm.batch import Batch
from mmldlm.diffusion.objective import NoisedBatch
from mmldlm.distributed.engine import Engine
from mmldlm.errors import exit_process
from mmldlm.trainer.step_numbers import StepResult, StepTotals
from mmldlm.trainer.trainer import Trainer

RANK = int(os.environ.get("RANK", "0"))
FAULTS = {fault["step"]: fault for fault in json.loads(os.environ["FAULTS"])}
REFERENCE, LATE = "REFERENCE" in os.environ, "LATE" in os.environ
FACTORS = {"bad_gradient": math.nan, "huge": 1e6}
facts: dict[str, Any] = {"digests": [], "planted": {}, "fetched": []}
fault: dict[str, Any] = {}  # of this rank in the step at hand


def tensors(engine: Engine) -> Iterator[torch.Tensor]:
    """This rank's weights, masters and moments."""
    parameters = list(engine.unwrapped_model.parameters())
    partitions = engine._master_params() if engine.name.startswith("zero") else []
    yield from (getattr(parameter, "ds_tensor", parameter) for parameter in parameters)
    yield from partitions
    for owner in partitions or parameters:
        state = engine.unwrapped_optimizer.state.get(owner, {})
        yield from (value for _, value in sorted(state.items()) if isinstance(value, torch.Tensor))


def local(tensor: torch.Tensor) -> torch.Tensor:
    result = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return result.detach().reshape(-1)


def digest(engine: Engine) -> str:
    result = hashlib.sha256()
    for tensor in map(local, tensors(engine)):
        if tensor.any():  # moments begin as zeros: the same as none
            result.update(tensor.view(torch.uint8).numpy())
    return result.hexdigest()


def poison(module: torch.nn.Module, inputs: Any) -> None:
    """Multiply the gradient of the weight, which under every engine is the right tensor in the forward pass."""
    if not fault or fault["kind"] not in FACTORS or not torch.is_grad_enabled():
        return
    if fault["calls"] == fault["micro_batch"]:
        factor = FACTORS[fault["kind"]]
        handle = module.weight.register_hook(lambda gradient: (handle.remove(), gradient * factor)[1])
    fault["calls"] += 1


class FaultyTrainer(Trainer):
    def __enter__(self) -> FaultyTrainer:
        super().__enter__()
        facts["digests"].append(digest(self.engine))
        self.engine.unwrapped_model.text_out.register_forward_pre_hook(poison)
        self.numbers.defer_fetch = LATE
        fetch = self.numbers.fetch

        def watched_fetch() -> None:
            facts["fetched"] += [step.step for step in self.numbers.pending][-1:]
            fetch()

        self.numbers.fetch = watched_fetch  # type: ignore[method-assign]
        return self

    @property
    def skips_engine(self) -> bool:
        """Return whether the engine must not see the present step."""
        return REFERENCE and self.state.step in FAULTS

    def corrupt(self, step: int, micro_batches: Sequence[Batch]) -> list[NoisedBatch]:
        fault.clear()
        if not REFERENCE and FAULTS.get(step, {}).get("rank") == RANK:
            fault.update(FAULTS[step])
            fault["calls"] = 0
        if fault and fault["kind"] not in FACTORS:
            batch = micro_batches[fault["micro_batch"]]
            facts["planted"][step + 1] = int(batch.sample_ids[-1])
            if fault["kind"] != "loss":
                latents = batch.latents.clone()
                latents[-1, 0, 0] = float(fault["kind"])
                micro_batches = [*micro_batches]
                micro_batches[fault["micro_batch"]] = dataclasses.replace(batch, latents=latents)
        return super().corrupt(step, micro_batches)

    def accumulate(self, noised: Sequence[NoisedBatch]) -> Iterator[NoisedBatch]:
        return iter(()) if self.skips_engine else super().accumulate(noised)

    def loss(self, batch: NoisedBatch, totals: Sequence[float] | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss, sums = super().loss(batch, totals)
        if fault and fault["kind"] == "loss":
            loss = loss + (math.inf if fault["calls"] == fault["micro_batch"] else 0.0)
            fault["calls"] += 1
        return loss, sums

    def update(self, step: int) -> StepResult:
        return StepResult(0.0, torch.tensor(math.nan)) if self.skips_engine else super().update(step)

    def end_step(self, step: int, totals: StepTotals, result: StepResult) -> None:
        facts["digests"].append(digest(self.engine))
        if self.skips_engine:
            self.state.step += 1
        else:
            super().end_step(step, totals, result)


status = train.main(trainer_cls=FaultyTrainer)
(Path(os.environ["FACTS"]) / f"facts.rank{RANK}.json").write_text(json.dumps(facts))
exit_process(status)
