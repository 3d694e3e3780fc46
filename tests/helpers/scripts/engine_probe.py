"""Train some steps under any launcher and write down what the engine really is: PROBE=file of rank 0."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from mmldlm import train
from mmldlm.batch import Batch
from mmldlm.diffusion.objective import NoisedBatch
from mmldlm.distributed.flight_recorder import collectives
from mmldlm.errors import exit_process
from mmldlm.trainer.step_numbers import StepResult
from mmldlm.trainer.trainer import Trainer

facts: dict[str, Any] = {"steps": []}


def large(result: list[dict[str, Any]]) -> int:
    """Return the number of collectives of more than a few values: parameters and gradients."""
    sizes = [entry["input_sizes"] + entry["output_sizes"] for entry in result]
    return sum(any(torch.Size(size).numel() > 512 for size in both) for both in sizes)


def tensor_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of all tensors alive in this process, each memory once, after a garbage collection."""
    gc.unfreeze()  # what `ScheduledCollection` has frozen is not listed
    gc.collect()
    storages: dict[int, int] = {}
    tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    tensors += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        with contextlib.suppress(RuntimeError, NotImplementedError):  # fake and meta tensors have no memory
            storage = local.untyped_storage()
            if storage.device.type != "meta":
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class ProbedTrainer(Trainer):
    def __enter__(self) -> ProbedTrainer:
        super().__enter__()
        engine = self.engine
        group = dist.distributed_c10d._get_default_group()
        facts["timeout_s"] = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        groups = dist.distributed_c10d._world.pg_map
        facts["timeouts_s"] = [
            each._get_backend(torch.device("cpu")).options._timeout.total_seconds() for each in groups
        ]
        facts["environment"] = {
            name: value for name, value in os.environ.items() if "NCCL" in name or name.startswith("TORCH_FR")
        }
        facts["fsdp_modules"] = [
            name for name, module in engine.unwrapped_model.named_modules() if isinstance(module, FSDPModule)
        ]
        facts["parameters"] = sorted({str(parameter.dtype) for parameter in engine.unwrapped_model.parameters()})
        for name in ("find_unused_parameters", "gradient_as_bucket_view", "static_graph", "bucket_bytes_cap"):
            facts[name] = getattr(engine.model, name, None)
        facts["broadcast_buffers"] = getattr(
            engine.model, "forward_sync_buffers", getattr(engine.model, "broadcast_buffers", None)
        )
        engine.check_precision()
        return self

    def corrupt(self, step: int, micro_batches: Sequence[Batch]) -> list[NoisedBatch]:
        facts["steps"].append({"before": len(collectives())})
        return super().corrupt(step, micro_batches)

    def backward(self, loss: torch.Tensor) -> None:
        start = len(collectives())
        super().backward(loss)
        facts["steps"][-1].setdefault("in_backward", []).append(large(collectives()[start:]))

    def update(self, step: int) -> StepResult:
        if len(facts["steps"]) > 1:  # from the first step on, the optimizer has its state
            model = self.engine.unwrapped_model
            trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
            # The least of all steps: in a single step a buffer of the exchange may still be alive.
            facts["held"] = min(facts.get("held", math.inf), tensor_bytes(model) / trained)
        return super().update(step)


status = train.main(trainer_cls=ProbedTrainer)
if os.environ["RANK"] == "0":
    Path(os.environ["PROBE"]).write_text(json.dumps(facts))
exit_process(status)
