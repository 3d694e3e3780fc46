"""`mmldlm.train` with planted faults: FAULTS=[{"step", "kind", "rank", "micro_batch"}, ...], FACTS=folder.

Kinds are nan, inf and -inf in one latent, a loss that is infinite although its gradients are not (loss), and a gradient
of one parameter that becomes nan (bad_gradient) or huge. With REFERENCE=1 the engine hears nothing of those steps: no
forward pass, no skip. With LATE=1 steps are settled as on a GPU. Each rank writes down the digests of its weights and
moments after each step, which sample it planted something in, and after which steps it settled.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from mmldlm import train
from mmldlm.distributed.engine import Engine
from mmldlm.telemetry import StepStats
from mmldlm.trainer.trainer import Trainer

RANK = int(os.environ.get("RANK", "0"))
FAULTS = {fault["step"]: fault for fault in json.loads(os.environ["FAULTS"])}
REFERENCE, LATE = "REFERENCE" in os.environ, "LATE" in os.environ
FACTORS = {"bad_gradient": math.nan, "huge": 1e6}
facts: dict[str, Any] = {"digests": [], "planted": {}, "settled": []}
fault: dict[str, Any] = {}  # of this rank in the step at hand
_open, _corrupt, _forward = Trainer._open, Trainer.corrupt, Trainer.forward
_update, _finish_step, _fetch = Trainer.update, Trainer.finish_step, StepStats.fetch


def tensors(runtime: Engine) -> Iterator[torch.Tensor]:
    """This rank's weights, masters and moments."""
    parameters = list(runtime.unwrapped_model.parameters())
    partitions = runtime._partitions() if hasattr(runtime, "_partitions") else []
    yield from (getattr(parameter, "ds_tensor", parameter) for parameter in parameters)
    yield from partitions
    for owner in partitions or parameters:
        state = runtime.unwrapped_optimizer.state.get(owner, {})
        yield from (value for _, value in sorted(state.items()) if isinstance(value, torch.Tensor))


def local(tensor: torch.Tensor) -> torch.Tensor:
    found = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found.detach().reshape(-1)


def digest(runtime: Engine) -> str:
    found = hashlib.sha256()
    for tensor in map(local, tensors(runtime)):
        if tensor.any():  # moments begin as zeros: the same as none
            found.update(tensor.view(torch.uint8).numpy())
    return found.hexdigest()


def opened(self: Trainer) -> None:
    _open(self)
    facts["digests"].append(digest(self.runtime))
    self.runtime.unwrapped_model.text_out.register_forward_pre_hook(poison)
    self.runtime.accumulate = left_out(self.runtime.accumulate)  # type: ignore[method-assign]
    self.defer_fetch = LATE


def corrupt(self: Trainer, step: int, micro_batches: list[Any]) -> Any:
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
    return _corrupt(self, step, micro_batches)


def forward(self: Trainer, batch: Any, totals: list[float]) -> Any:
    loss, sums = _forward(self, batch, totals)
    if fault and fault["kind"] == "loss":
        loss = loss + (math.inf if fault["calls"] == fault["micro_batch"] else 0.0)
        fault["calls"] += 1
    return loss, sums


def poison(module: torch.nn.Module, inputs: Any) -> None:
    """In the forward pass the weight is, under every engine, what the gradient will be of."""
    if not fault or fault["kind"] not in FACTORS or not torch.is_grad_enabled():
        return
    if fault["calls"] == fault["micro_batch"]:
        factor = FACTORS[fault["kind"]]
        handle = module.weight.register_hook(lambda gradient: (handle.remove(), gradient * factor)[1])
    fault["calls"] += 1


def left_out(accumulate: Any) -> Any:
    def found(micro_batches: list[Any]) -> Generator[Any]:
        if not (REFERENCE and len(facts["digests"]) - 1 in FAULTS):
            yield from accumulate(micro_batches)

    return found


def update(self: Trainer, lr: float) -> torch.Tensor:
    return torch.tensor(math.nan) if REFERENCE and self.state.step in FAULTS else _update(self, lr)


def finish_step(self: Trainer, lr: float, norm: torch.Tensor, micro_batches: list[Any]) -> None:
    facts["digests"].append(digest(self.runtime))
    if REFERENCE and self.state.step in FAULTS:
        self.state.step += 1
    else:
        _finish_step(self, lr, norm, micro_batches)


def fetch(self: StepStats) -> Any:
    facts["settled"].append(self.pending[-1].step)
    return _fetch(self)


Trainer._open, Trainer.corrupt, Trainer.update = opened, corrupt, update  # type: ignore[method-assign]
Trainer.forward, Trainer.finish_step, StepStats.fetch = forward, finish_step, fetch  # type: ignore[method-assign]
status = train.main()
(Path(os.environ["FACTS"]) / f"facts.rank{RANK}.json").write_text(json.dumps(facts))
sys.stdout.flush()
sys.stderr.flush()
os._exit(status)
