"""What a run will cost, without running it: `mmldlm train --dry-run`.

One typical micro-batch goes through the real model and objective on fake tensors, which have shapes but no
storage: PyTorch's own counter sees every matrix product, and the saved-tensor hooks see every activation
that backward will need.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from mmldlm.build import build_model, build_objective
from mmldlm.config import RunConfig
from mmldlm.data.loader import DataConfig, Loader
from mmldlm.data.shards import Store
from mmldlm.diffusion.noise import draw_noise, mode_weights
from mmldlm.diffusion.objective import NoisedBatch, Objective
from mmldlm.model.attention import AttentionConfig, resolve_backend
from mmldlm.model.mmdit import MMDiT, count_parameters
from mmldlm.optim import resolved_warmup
from mmldlm.runtime.engine import asked_world_size
from mmldlm.schema import to_yaml

BYTES_PER_PARAMETER = 16  # float32: weight, gradient, AdamW's two moments
MIB = 2**20


@dataclass(frozen=True)
class Estimate:
    parameters: dict[str, int]
    tokens_per_step: float
    flops_per_step: float  # of matrix products, forward and backward, over all ranks
    micro_batch_size: int
    accumulation: int
    world_size: int
    state_mib: float  # weights, gradients, moments; on one rank
    activations_mib: float  # the largest of the micro-batches looked at

    @property
    def total_mib(self) -> float:
        return self.state_mib + self.activations_mib


def estimate(config: RunConfig, store: Store, world_size: int, looked_at: int = 4) -> Estimate:
    """Costs of one optimizer step, from the first `looked_at` steps' real micro-batches."""
    global_batch = config.train.global_batch_size
    device = "cuda" if torch.cuda.is_available() else "cpu"
    resolve_backend(config.attention.backend, device, config.precision == "bf16")
    # Fake tensors lie on the CPU; the groups' attention has the same products and saves the same.
    config = replace(config, attention=AttentionConfig("sdpa"))
    micro = config.train.resolved_micro_batch_size(world_size)
    loader = Loader(
        store,
        "train",
        DataConfig(path=config.data.path, num_workers=0),
        config.run.seed,
        global_batch,
        micro,
        0,
        world_size,
    )
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build_model(config, store.manifest, "cpu")
    objective = build_objective(config, store.manifest)
    flops, saved = [], []
    for step, batches in loader.steps(0, looked_at):
        weights = mode_weights(config.mode)
        noised = [
            objective.corrupt(batch, draw_noise(batch, config.run.seed, step, global_batch, weights))
            for batch in batches
        ]
        costs = [_cost(config, model, objective, batch) for batch in noised]
        flops.append(sum(cost[0] for cost in costs) * world_size)
        saved.append(max(cost[1] for cost in costs))
    parameters = count_parameters(model)
    return Estimate(
        parameters=parameters,
        tokens_per_step=float(np.mean(store.split("train").lengths)) * global_batch,
        flops_per_step=float(np.mean(flops)),
        micro_batch_size=micro,
        accumulation=global_batch // (micro * world_size),
        world_size=world_size,
        state_mib=sum(parameters.values()) * BYTES_PER_PARAMETER / MIB,
        activations_mib=max(saved) / MIB,
    )


def _cost(config: RunConfig, model: MMDiT, objective: Objective, noised: NoisedBatch) -> tuple[int, int]:
    """(FLOPs of forward and backward, bytes saved for backward) of one micro-batch through a fake model."""
    own = {tensor.untyped_storage()._cdata for tensor in [*model.parameters(), *model.buffers()]}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage.nbytes()
        return tensor

    # Index tensors are made on first use, which must not be under the fake mode.
    _ = (noised.layout.sample_of_token, noised.layout.position, noised.layout.groups)
    mode = next(model.parameters()).fake_mode  # type: ignore[attr-defined]
    counter = FlopCounterMode(display=False)
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=config.precision == "bf16")
    with mode, counter, saved_tensors_hooks(pack, lambda tensor: tensor), autocast:
        loss, _ = objective(model, noised, noised.counts.tolist())
        loss.backward()
    return counter.get_total_flops(), sum(size for key, size in saved.items() if key not in own)


def print_estimate(config: RunConfig) -> None:
    """The resolved config and the estimate, on stdout."""
    store = Store.open(config.data.path)
    found = estimate(config, store, asked_world_size())
    print(to_yaml(config))
    print("parameters           " + ", ".join(f"{name} {count:,}" for name, count in found.parameters.items()))
    print(f"parameters in all    {sum(found.parameters.values()):,}")
    print(
        f"effective batch      {config.train.global_batch_size} samples = {found.world_size} processes x "
        f"{found.micro_batch_size} samples x {found.accumulation} micro-batches"
    )
    print(f"tokens per step      {found.tokens_per_step:,.0f} real tokens on average, none padded")
    print(f"FLOPs per step       {found.flops_per_step / 1e9:,.1f} G (matrix products, forward and backward)")
    print(f"warmup               {resolved_warmup(config.optim, config.train.steps)} of {config.train.steps} steps")
    print(
        f"memory per process   {found.total_mib:,.0f} MiB = {found.state_mib:,.0f} weights, gradients, moments "
        f"+ {found.activations_mib:,.0f} activations"
    )


__all__ = ["Estimate", "estimate", "print_estimate"]
