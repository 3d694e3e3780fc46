"""What a run will cost, without running it: `mmldlm train --dry-run`.

A few steps' micro-batches go through the real model and objective on fake tensors, which have shapes but no
memory: `_Costs` sees every matrix product, those of a recomputation among them, and every activation come and go.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from mmldlm.batch_sizes import BatchSize
from mmldlm.build import build_model, build_objective
from mmldlm.config import RunConfig
from mmldlm.data.loader import DataConfig, Loader
from mmldlm.data.shards import Store
from mmldlm.diffusion.noise import draw_noise, mode_stages, mode_weights_at
from mmldlm.diffusion.objective import NoisedBatch, Objective
from mmldlm.model.attention import AttentionConfig, resolve_backend
from mmldlm.model.mmdit import MMDiT, count_parameters
from mmldlm.optim import OptimConfig, resolved_warmup
from mmldlm.optimizers import build_optimizer, engines_of, implementation, muon_matrices
from mmldlm.runtime.launch import ENGINES, asked_world_size
from mmldlm.schema import to_yaml

BYTES_PER_PARAMETER = 16  # float32: weight, gradient, AdamW's two moments
BYTES_PER_MOMENT = BYTES_PER_FROZEN = 4
MIB = 2**20

_ATEN = torch.ops.aten
_FORMULAS = {  # PyTorch has none for attention on the CPU, where the fake tensors lie
    _ATEN._scaled_dot_product_flash_attention_for_cpu: flop_registry[_ATEN._scaled_dot_product_flash_attention],
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _ATEN._scaled_dot_product_flash_attention_backward
    ],
    **flop_registry,
}


@dataclass(frozen=True)
class Estimate:
    parameters: dict[str, int]  # by part
    trainable: int
    tokens_per_step: float  # mean over the run
    flops_per_step: float  # of matrix products, forward and backward, over all ranks; mean over the run
    batches: dict[int, BatchSize]  # by the step that they begin at
    world_size: int
    state_mib: float  # weights, gradients, moments; on one rank
    activations_mib: float  # at their peak in forward and backward, of the largest micro-batch looked at
    optimizer: str = ""  # the implementation
    one_moment: int = 0  # trained parameters of which the optimizer keeps one moment, not two: Muon's

    @property
    def total_mib(self) -> float:
        return self.state_mib + self.activations_mib


def estimate(config: RunConfig, store: Store, world_size: int, looked_at: int = 4) -> Estimate:
    """Costs of one optimizer step, from the real micro-batches of the first `looked_at` steps of each stage.

    A stage ends where modes or batch sizes change. ConfigError where a batch cannot be shared evenly.
    """
    config.train.check_batches(world_size)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    resolve_backend(config.attention.backend, device, config.precision == "bf16")
    # Fake tensors lie on the CPU; the groups' attention has the same products and saves the same.
    config = replace(config, attention=AttentionConfig("sdpa"))
    loader = Loader(
        store,
        "train",
        DataConfig(path=config.data.path, num_workers=0),
        config.run.seed,
        partial(config.train.batch_at, world_size=world_size),
        0,
        world_size,
    )
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build_model(config, store.manifest, "cpu")
    objective = build_objective(config, store.manifest)
    steps = config.train.steps
    batches = config.train.batch_stages(world_size)
    starts = {*mode_stages(config.mode, config.mode_schedule), *batches}
    flops, samples, peak = 0.0, 0, 0
    for start, stop in pairwise([*sorted(start for start in starts if start < steps), steps]):
        size, weights = loader.batch_at(start), mode_weights_at(start, config.mode, config.mode_schedule)
        looked = min(looked_at, stop - start)
        for step, micro_batches in loader.steps(start, start + looked, samples):
            model.zero_grad()
            for batch in micro_batches:
                noise = draw_noise(batch, config.run.seed, step, size.global_batch_size, weights)
                products, activations = micro_batch_cost(model, objective, objective.corrupt(batch, noise))
                flops += products * world_size * (stop - start) / (steps * looked)
                peak = max(peak, activations)
        samples += size.global_batch_size * (stop - start)
    parameters, trainable = count_parameters(model), sum(count_parameters(model, trainable_only=True).values())
    frozen = sum(parameters.values()) - trainable
    optimizer, one_moment = _optimizer(model, config.optim, device)
    state = trainable * BYTES_PER_PARAMETER - one_moment * BYTES_PER_MOMENT + frozen * BYTES_PER_FROZEN
    return Estimate(
        parameters=parameters,
        trainable=trainable,
        tokens_per_step=float(np.mean(store.split("train").lengths)) * samples / steps,
        flops_per_step=flops,
        batches=batches,
        world_size=world_size,
        state_mib=state / MIB,
        activations_mib=peak / MIB,
        optimizer=optimizer,
        one_moment=one_moment,
    )


def _optimizer(model: MMDiT, config: OptimConfig, device_type: str) -> tuple[str, int]:
    """(implementation, parameters with one moment)."""
    if config.name == "deepspeed_adam":  # to make one is to compile its kernel
        return "deepspeed.DeepSpeedCPUAdam where the engine offloads it, else deepspeed.FusedAdam", 0
    one_moment = muon_matrices(model) if config.name == "muon" else []
    return implementation(build_optimizer(model, config, device_type)), sum(matrix.numel() for matrix in one_moment)


class _Costs(TorchDispatchMode):
    """Adds up the FLOPs of matrix products, and follows the memory that operators ask for until it is free again.

    PyTorch's `FlopCounterMode` has the same formulas, but its hooks keep what is recomputed alive.
    """

    def __init__(self, known: Iterable[torch.Tensor]):
        """`known` are there already, and do not count."""
        super().__init__()
        self.flops = 0
        self._owner: dict[int, int] = {tensor.untyped_storage()._cdata: -1 for tensor in known}
        self._changes: list[tuple[int, int]] = []  # (allocation, bytes) of each allocation and, negative, its end

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in _FORMULAS:
            self.flops += _FORMULAS[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._meet(tensor.untyped_storage())
        return out

    def _meet(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._owner:
            allocation, size = len(self._changes), storage.nbytes()
            self._owner[storage._cdata] = allocation
            self._changes.append((allocation, size))
            weakref.finalize(storage, self._free, storage._cdata, allocation, size)

    def _free(self, key: int, allocation: int, size: int) -> None:
        del self._owner[key]
        self._changes.append((allocation, -size))

    def peak(self, without: Iterable[torch.Tensor]) -> int:
        """The most bytes at one time, not counting the memory of the tensors `without`."""
        left_out = {self._owner.get(tensor.untyped_storage()._cdata) for tensor in without}
        return max(accumulate(size for allocation, size in self._changes if allocation not in left_out), default=0)


def micro_batch_cost(model: MMDiT, objective: Objective, noised: NoisedBatch) -> tuple[int, int]:
    """(FLOPs of forward and backward, bytes of activations at their peak) of one micro-batch.

    `model` may have fake tensors; its gradients, of before or new, are no activations.
    """
    # Index tensors are made on first use, which must not be under the fake mode.
    _ = (noised.layout.sample_of_token, noised.layout.position, noised.layout.groups)
    costs = _Costs([*model.parameters(), *model.buffers()])
    with getattr(next(model.parameters()), "fake_mode", nullcontext()), costs:
        loss, _ = objective(model, noised, noised.counts.tolist())
        loss.backward()
    return costs.flops, costs.peak(without=_gradients(model))


def _gradients(model: MMDiT) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def print_estimate(config: RunConfig) -> None:
    """The resolved config and the estimate, on stdout."""
    store = Store.open(config.data.path)
    found = estimate(config, store, asked_world_size())
    print(to_yaml(config))
    print("parameters           " + ", ".join(f"{name} {count:,}" for name, count in found.parameters.items()))
    print(f"parameters in all    {sum(found.parameters.values()):,}, {found.trainable:,} trained")
    for step, size in found.batches.items():
        print(
            f"{f'  from step {step}' if step else 'effective batch':<20} {size.global_batch_size} samples = "
            f"{found.world_size} processes x {size.micro_batch_size} samples x "
            f"{size.accumulation(found.world_size)} micro-batches"
        )
    print(f"tokens per step      {found.tokens_per_step:,.0f} real tokens on average, none padded")
    print(f"FLOPs per step       {found.flops_per_step / 1e9:,.1f} G (matrix products: forward, recomputed, backward)")
    print(f"optimizer            {found.optimizer}")
    print(f"warmup               {resolved_warmup(config.optim, config.train.steps)} of {config.train.steps} steps")
    print(
        f"memory per process   {found.total_mib:,.0f} MiB = {found.state_mib:,.0f} weights, gradients, moments "
        f"+ {found.activations_mib:,.0f} activations"
    )
    if found.world_size > 1:
        print(f"  weights, gradients and moments by engine, MiB on each of {found.world_size} devices, and on the host")
        for engine in filter(engines_of(config.optim.name).__contains__, ENGINES):
            device, host = state_mib(engine, found, config.precision)
            print(f"    {engine:<15} {device:>12,.0f} {host:>12,.0f}")


def state_mib(engine: str, of: Estimate, precision: str) -> tuple[float, float]:
    """MiB of weights, gradients, masters and moments on (a device, the host) for each process.

    Not in it: communication buckets, and the blocks that FSDP2 and ZeRO-3 hold gathered for a moment.
    """
    share = 1 / of.world_size
    low = 2 if precision == "bf16" else 4  # bytes that DeepSpeed's weights and gradients have; its masters are apart
    device, host = {
        "ddp": (16.0, 0.0),
        "fsdp2": (16 * share, 0.0),
        "zero1": (2 * low + 12 * share, 0.0),
        "zero2": (low + (low + 12) * share, 0.0),
        "zero3": ((2 * low + 12) * share, 0.0),
        "zero2_offload": (low + low * share, 12 * share),
        "zero3_offload": (0.0, (2 * low + 12) * share),
    }[engine]
    frozen = sum(of.parameters.values()) - of.trainable
    whole = engine not in ("fsdp2", "zero3", "zero3_offload")
    width = low if engine.startswith("zero") else BYTES_PER_FROZEN
    still = frozen * width * (1 if whole else share)
    spared = of.one_moment * BYTES_PER_MOMENT * (1 if whole else share)  # of Muon, which runs where no host steps
    on_host = engine == "zero3_offload"
    return (
        (of.trainable * device - spared + (0 if on_host else still)) / MIB,
        (of.trainable * host + (still if on_host else 0)) / MIB,
    )


__all__ = ["Estimate", "estimate", "micro_batch_cost", "print_estimate", "state_mib"]
