"""What a run will cost, without running it: `mmldlm train --dry-run`.

A few steps, with their real micro-batches, go through the real model, objective and optimizer on fake tensors, which
have shapes but no memory: see `costs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mmldlm.config import RunConfig
from mmldlm.data.batch_schedule import BatchSize
from mmldlm.data.loader import Loader
from mmldlm.data.mixture import open_data
from mmldlm.data.store import Store
from mmldlm.data.verify import without_bad
from mmldlm.diffusion.noise import draw_noise, mode_stages, mode_weights_at
from mmldlm.diffusion.objective import NoisedBatch, Objective
from mmldlm.distributed.grad_scaler import runs_in
from mmldlm.distributed.launcher import ENGINES, asked_world_size
from mmldlm.distributed.optimizers import build_optimizer, engines_of, implementation
from mmldlm.model.attention import AttentionConfig, resolve_backend
from mmldlm.model.mmdit import MMDiT, count_parameters
from mmldlm.model.ops import in_pieces
from mmldlm.optim.config import OptimConfig
from mmldlm.optim.lr_schedule import describe_lr
from mmldlm.optim.param_groups import muon_matrices
from mmldlm.run.factory import build_model, build_objective
from mmldlm.settings.fields import to_yaml
from mmldlm.trainer.memory_tracker import Kind, StepCosts
from mmldlm.trainer.onednn import kernels_mib, multiplies_bf16, rows_of

BYTES_PER_PARAMETER = 16  # float32: weight, gradient, AdamW's two moments
BYTES_PER_MOMENT = BYTES_PER_FROZEN = BYTES_OF_AVERAGE = 4
MIB = 2**20
FURTHEST = 4096  # steps of a stage that are looked through for the largest micro-batch
FEW_PIECES = 16  # of elementwise work on a CPU; small enough for what they leave to be little
STEPS_FOR_ROWS = 256  # of a stage, of which the numbers of rows are looked at too
NAMES: dict[Kind, str] = {
    "weights": "weights",
    "ema": "average of the weights",
    "gradients": "gradients",
    "moments": "moments",
    "batches": "batches",
    "activations": "activations",
    "update": "temporaries of the update",
}


@dataclass(frozen=True)
class Estimate:
    parameters: dict[str, int]  # by part
    trainable: int
    tokens_per_step: float  # mean over the run
    flops_per_step: float  # of matrix products, forward and backward, over all ranks; mean over the run
    batches: dict[int, BatchSize]  # by the step that they begin at
    world_size: int
    state_mib: float  # weights, their average, gradients, moments; on one rank
    activations_mib: float  # at their own peak in forward and backward, of the largest micro-batch looked at
    peak_mib: Mapping[Kind, float] = field(default_factory=dict)  # what is there when all of it is the most
    optimizer: str = ""  # the implementation
    one_moment: int = 0  # trained parameters of which the optimizer keeps one moment, not two: Muon's
    ema: bool = False  # whether an average of the trained weights is kept
    kernels_mib: float = 0.0  # of kernels that a CPU makes for half precision

    @property
    def total_mib(self) -> float:
        """Of a process, replicated where there are several; without kernels, nor copies to write a checkpoint from."""
        return sum(self.peak_mib.values())

    @property
    def checkpoint_mib(self) -> float:
        """Of the host: copies of this process's share of weights, average and moments, from the first checkpoint on."""
        weights = sum(self.parameters.values()) + (3 if self.ema else 2) * self.trainable - self.one_moment
        return weights * BYTES_PER_MOMENT / self.world_size / MIB


def estimate(
    config: RunConfig, store: Store, world_size: int, looked_at: int = 4, device: str | None = None
) -> Estimate:
    """Costs of one optimizer step, from the real micro-batches of the first `looked_at` steps of each stage.

    Memory is that of the stage's largest micro-batch too. A stage ends where modes or batch sizes change. `device`: cpu
    or cuda; this machine's if not given. ConfigError where a batch cannot be shared evenly.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    with in_pieces(1 if device == "cuda" else FEW_PIECES):
        return _estimate(config, store, world_size, looked_at, device)


def _estimate(config: RunConfig, store: Store, world_size: int, looked_at: int, device: str) -> Estimate:
    config.train.check_batches(world_size)
    resolve_backend(config.attention.backend, device, config.precision != "fp32")
    # Fake tensors lie on the CPU; the groups' attention has the same products and saves the same.
    config = replace(config, attention=AttentionConfig("sdpa"))
    loader = Loader(
        store,
        "train",
        replace(config.data, num_workers=0),
        config.run.seed,
        partial(config.train.batch_at, world_size=world_size),
        0,
        world_size,
    )
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build_model(config, store.manifest, "cpu")
    objective = build_objective(config, store.manifest)
    optimizer, name, one_moment = _optimizer(model, config.optim, device)
    trial = StepCosts(model, objective, gradients_stay=world_size > 1, ema=config.ema.decay > 0)
    steps = config.train.steps
    batches = config.train.batch_stages(world_size)
    starts = {*mode_stages(config.mode, config.mode_schedule), *batches}
    stages = list(pairwise([*sorted(start for start in starts if start < steps), steps]))
    if any(stop - start > looked_at for start, stop in stages):  # else every step is looked at, the first as it is
        trial.make_moments(optimizer)
    flops, samples = 0.0, 0
    makes_kernels = device == "cpu" and multiplies_bf16()
    rows_seen, rows = set[int](), set[int]()  # that there are products with
    for start, stop in stages:
        noised_at = partial(_noised, config, loader, objective, (start, samples))
        looked = min(looked_at, stop - start)
        largest = _largest_step(loader, (start, stop), samples)
        for step in dict.fromkeys([*range(start, start + looked), largest]):
            noised = noised_at(step)
            rows_seen |= rows_of(noised)
            products = trial.micro_batches(noised)
            trial.update(optimizer, config.optim.clip_norm)
            if step < start + looked:
                flops += products * world_size * (stop - start) / (steps * looked)
        if makes_kernels and config.precision != "fp32":
            others = range(start + looked, min(stop, start + STEPS_FOR_ROWS))
            rows = rows.union(*(rows_of(noised_at(step)) for step in others))
        samples += loader.batch_at(start).global_batch_size * (stop - start)
    parameters, trainable = count_parameters(model), sum(count_parameters(model, trainable_only=True).values())
    frozen = sum(parameters.values()) - trainable
    state = trainable * BYTES_PER_PARAMETER - one_moment * BYTES_PER_MOMENT + frozen * BYTES_PER_FROZEN
    state += trainable * BYTES_OF_AVERAGE if config.ema.decay else 0
    return Estimate(
        parameters=parameters,
        trainable=trainable,
        tokens_per_step=store.split("train").mean_length * samples / steps,
        flops_per_step=flops,
        batches=batches,
        world_size=world_size,
        state_mib=state / MIB,
        activations_mib=sum(trial.costs.peak("activations").values()) / MIB,
        peak_mib={kind: size / MIB for kind, size in trial.costs.peak().items()},
        optimizer=name,
        one_moment=one_moment,
        ema=config.ema.decay > 0,
        kernels_mib=kernels_mib(trial.costs, rows_seen, rows) if makes_kernels else 0.0,
    )


def _noised(
    config: RunConfig, loader: Loader, objective: Objective, stage: tuple[int, int], step: int
) -> list[NoisedBatch]:
    """This process's micro-batches of a step in the stage of (first step, its first sample's position)."""
    start, position = stage
    size, weights = loader.batch_at(start), mode_weights_at(start, config.mode, config.mode_schedule)
    ((_, micro_batches),) = loader.steps(step, step + 1, position + (step - start) * size.global_batch_size)
    samplers = config.text.sampler, config.latent.sampler
    noises = (
        draw_noise(batch, config.run.seed, step, size.global_batch_size, weights, *samplers) for batch in micro_batches
    )
    return list(map(objective.corrupt, micro_batches, noises))


def _largest_step(loader: Loader, stage: tuple[int, int], position: int) -> int:
    """The step of a stage (first, behind the last) that has the micro-batch of the most tokens.

    The stage's samples begin at `position`. It looks no further than an epoch, nor than `FURTHEST` steps.
    """
    start, stop = stage
    size = loader.batch_at(start)

    def tokens(step: int) -> int:
        return int(loader.tokens(position + (step - start) * size.global_batch_size, size)[0].max())

    epoch = -(-len(loader.order) // size.global_batch_size)
    return max(range(start, min(stop, start + epoch, start + FURTHEST)), key=tokens)


def _optimizer(model: MMDiT, config: OptimConfig, device_type: str) -> tuple[torch.optim.Optimizer, str, int]:
    """(optimizer to try, implementation that will step, parameters with one moment)."""
    if config.name == "deepspeed_adam":  # to make one is to compile its kernel; AdamW has the same state
        name = "deepspeed.DeepSpeedCPUAdam where the engine offloads it, else deepspeed.FusedAdam"
        return build_optimizer(model, replace(config, name="adamw"), device_type), name, 0
    one_moment = muon_matrices(model) if config.name == "muon" else []
    optimizer = build_optimizer(model, config, device_type)
    if device_type == "cuda":
        for group in optimizer.param_groups:  # what PyTorch does by itself where the parameters lie on CUDA
            if group.get("fused") is False:
                group["foreach"] = True
    return optimizer, implementation(optimizer), sum(matrix.numel() for matrix in one_moment)


def print_estimate(config: RunConfig) -> None:
    """The resolved config and the estimate, on stdout."""
    store = without_bad(open_data(config.data.place), "train", config.data.max_bad_samples)
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
    rate = describe_lr(config.train.steps, config.optim, config.schedule, found.batches[0].global_batch_size)
    print(f"learning rate        {rate}, of {config.train.steps} steps")
    parts = (f"{size:,.0f} {NAMES[kind]}" for kind, size in found.peak_mib.items() if size >= 0.5)
    print(f"memory per process   {found.total_mib:,.0f} MiB = {' + '.join(parts)}")
    print(f"  on the host        {found.checkpoint_mib:,.0f} MiB more from the first checkpoint on, to write it from")
    if found.kernels_mib >= 0.5:
        print(f"  kernels            {found.kernels_mib:,.0f} MiB more that this CPU makes for half precision")
    if found.world_size > 1:
        what = "weights, average, gradients and moments" if found.ema else "weights, gradients and moments"
        print(f"  {what} by engine, MiB on each of {found.world_size} devices, and on the host")
        for engine in filter(engines_of(config.optim.name).__contains__, ENGINES):
            if not runs_in(config.precision, engine):
                continue
            device, host = state_mib(engine, found, config.precision)
            print(f"    {engine:<15} {device:>12,.0f} {host:>12,.0f}")


def state_mib(engine: str, of: Estimate, precision: str) -> tuple[float, float]:
    """MiB of weights, their average, gradients, masters and moments on (a device, the host) for each process.

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
    average = BYTES_OF_AVERAGE * (1 if engine == "ddp" else share) if of.ema else 0.0  # shared out as the masters are
    if engine.endswith("_offload"):
        host += average
    else:
        device += average
    spared = of.one_moment * BYTES_PER_MOMENT * (1 if whole else share)  # of Muon, which runs where no host steps
    on_host = engine == "zero3_offload"
    return (
        (of.trainable * device - spared + (0 if on_host else still)) / MIB,
        (of.trainable * host + (still if on_host else 0)) / MIB,
    )


__all__ = ["Estimate", "estimate", "print_estimate", "state_mib"]
