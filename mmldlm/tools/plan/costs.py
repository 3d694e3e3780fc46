"""What a step of a config computes, holds and exchanges on a rank: the same for all devices, by fake tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
from torch._subclasses.fake_tensor import FakeTensorMode

from mmldlm.config import RunConfig
from mmldlm.data.loader import Loader
from mmldlm.data.store import Store
from mmldlm.distributed.launcher import DDP, FSDP2, SINGLE
from mmldlm.model.mmdit import MMDiT
from mmldlm.model.ops import assume_device
from mmldlm.run.factory import build_fake_model, build_meta_model, build_objective, corrupt_step
from mmldlm.tools.plan.kernels import Rates, Recorder
from mmldlm.trainer.dry_run import MIB, Estimate, estimate, state_mib
from mmldlm.trainer.engine_costs import Sharding, padded_parameters, step_traffic
from mmldlm.trainer.memory_plan import FLOAT32_BYTES, fsdp2_bytes, zero3_bytes
from mmldlm.utils.meta_device import materialize

TYPICAL_STEPS = 2  # whose kernels are recorded, at evenly spaced ranks of the first `SEARCHED` by tokens
SEARCHED = 64
HSDP = "fsdp2_hsdp"  # FSDP2 within each node, and gradients all-reduced among nodes
BUCKET = 100_000_000  # elements of DeepSpeed's reduce_bucket_size in the shipped files


@dataclass(frozen=True)
class Work:
    """What one step computes on rank 0, without its update."""

    products: float  # FLOPs
    attention: float  # FLOPs of forward, and of backward
    attention_backward: float
    traffic: float  # bytes that the kernels read and write
    kernels: int
    roofline_s: float  # sum over the kernels, by the rates of a device; 0 without rates
    micro_batches: int


@dataclass(frozen=True)
class StepCosts:
    """Costs of a config on one of `world_size` ranks under any engine."""

    config: RunConfig
    store: Store
    world_size: int
    device: str
    work: Sequence[Work]  # of each recorded step
    model: MMDiT  # on fake tensors
    nodes: int = 1  # each of which has a replica under `HSDP`

    @cached_property
    def estimate(self) -> Estimate:
        """The dry run's estimate, for the largest micro-batch."""
        return estimate(self.config, self.store, self.world_size, steps_per_stage=1, device=self.device)

    @cached_property
    def _growing(self) -> Estimate:
        """The estimate with gradients that appear as backward computes them."""
        if self.world_size == 1:
            return self.estimate
        return estimate(self.config, self.store, self.world_size, 1, self.device, keep_gradients=False)

    @cached_property
    def micro_batches(self) -> float:
        """Micro-batches of a step, mean."""
        return sum(work.micro_batches for work in self.work) / len(self.work)

    @cached_property
    def trained_shapes(self) -> list[tuple[int, ...]]:
        return [tuple(parameter.shape) for parameter in self.model.parameters() if parameter.requires_grad]

    @cached_property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @cached_property
    def _blocks(self) -> list[int]:
        return [sum(parameter.numel() for parameter in block.parameters()) for block in self.model.blocks]

    @property
    def depth(self) -> int:
        return len(self._blocks)

    def _sharding(self, engine: str) -> Sharding:
        precision = "fp32" if self.config.precision == "auto" else self.config.precision
        if engine == HSDP:
            return Sharding(FSDP2, precision, self.world_size, self.nodes)
        return Sharding(engine, precision, self.world_size)

    def updated(self, engine: str) -> float:
        """Return the trained parameters that this rank's optimizer updates."""
        trained = padded_parameters(Sharding(DDP, "fp32", 1), self.trained_shapes)
        return trained / (1 if engine in (SINGLE, DDP) else self._sharding(engine).shards)

    def traffic(self, engine: str) -> dict[tuple[str, int], float]:
        """Return the bytes of the collectives of a step by (kind, ranks)."""
        if engine == SINGLE:
            return {}
        sharding = self._sharding(engine)
        parameters = padded_parameters(sharding, self.trained_shapes)
        # ZeRO-3 keeps up to `max_live_parameters` (10^9) gathered from forward to backward.
        once = self.parameters - sum(self._blocks) if engine in (FSDP2, HSDP) else min(parameters, 10**9)
        return step_traffic(sharding, parameters, once, max(1, round(self.micro_batches)))

    def memory_mib(self, engine: str) -> float:
        """Return the peak of a rank's memory on its device, without what the libraries themselves take.

        That of a CPU includes the staging copies of checkpoints.
        """
        one = self.estimate
        beside = one.kernels_mib + (one.checkpoint_mib if self.device == "cpu" else 0.0)
        if engine == SINGLE:
            return one.total_mib + beside
        sharding = self._sharding(engine)
        state, _ = state_mib(sharding.engine, one, sharding.precision, sharding.replicas)
        accumulating = self.micro_batches > 1
        if engine == DDP:  # has its buckets, and gradients of earlier micro-batches beside them
            earlier = FLOAT32_BYTES * one.trainable / MIB * accumulating
            at_peak = sum(one.peak_mib.get(kind, 0.0) for kind in ("weights", "ema", "gradients", "moments"))
            return state + beside + earlier + one.total_mib - at_peak
        # The peak is at the end of backward, which has all gradients and reduces the last ones, or where activations
        # and the gradients that are there by then, whole ones or a rank's part, take most.
        block, outside = max(self._blocks), self.parameters - sum(self._blocks)
        width, bucket = sharding.weight_bytes, min(one.trainable, BUCKET)
        part, peak = 1.0 if engine == "zero1" else sharding.share, self._growing.peak_mib
        activations = self._growing.total_mib - sum(
            peak.get(kind, 0.0) for kind in ("weights", "ema", "gradients", "moments")
        )
        gradients, present = FLOAT32_BYTES * one.trainable / MIB, peak["gradients"]
        missing = part * (gradients - present)
        now, at_end = 0.0, float(FLOAT32_BYTES * bucket)
        if sharding.engine == FSDP2:
            at_end = fsdp2_bytes(self.parameters, block, outside, width)
            now = width * (outside + 3 * block)
            if accumulating:  # whole ones of earlier micro-batches
                missing = part * gradients - present
        elif engine == "zero3":
            now = zero3_bytes(self.parameters, block, bucket, width, self.world_size)
            at_end = now + FLOAT32_BYTES * bucket * sharding.share  # what reduce-scatter returns
            # As gradients appear, the gathered weights of their blocks are released.
            missing = part * gradients * (not accumulating)
        return state + beside + max(at_end / MIB, now / MIB + activations - missing)


def step_costs(
    config: RunConfig, store: Store, world_size: int, device: str, rates: Rates | None = None, nodes: int = 1
) -> StepCosts:
    """Record the kernels of typical steps of a config, and time them by `rates` if given.

    Raises:
        ConfigError: The global batch cannot be divided among the ranks.
    """
    config.train.check_batches(world_size)
    batch_at = partial(config.train.batch_at, world_size=world_size)
    loader = Loader(store, "train", replace(config.data, num_workers=0), config.run.seed, batch_at, 0, world_size)
    size = batch_at(0).global_batch_size
    # The attention of GPUs is one kernel for the micro-batch, but in float32.
    is_varlen = device == "cuda" and config.precision in ("bf16", "fp16")
    model, mode = _fake_model(config, store, is_varlen)
    objective = build_objective(config, store.manifest)
    works = []
    for step in _typical_steps(config, loader):
        ((_, batches),) = loader.steps(step, step + 1, step * size)
        noised = corrupt_step(config, objective, step, size, batches)
        kernels = []
        for batch in noised:
            layout = batch.layout
            # Index tensors are made once for a micro-batch, on the host.
            _ = layout.groups, layout.sample_of_token, layout.position, layout.sample_of_latent
            _ = layout.joint_order, layout.joint_inverse, layout.joint_offsets
            recorder = Recorder(4.0 * layout.num_pairs * config.model.width if is_varlen else None)
            with mode, assume_device(device), recorder:
                loss, _ = objective(model, batch, batch.counts.tolist())
                recorder.phase = "backward"
                loss.backward()
            kernels += recorder.kernels
        model.zero_grad(set_to_none=True)
        flops = {"product": 0.0, "attention": 0.0, "backward": 0.0, "other": 0.0}
        for kernel in kernels:
            kind = "backward" if (kernel.kind, kernel.phase) == ("attention", "backward") else kernel.kind
            flops[kind] += kernel.flops
        works.append(
            Work(
                flops["product"],
                flops["attention"],
                flops["backward"],
                sum(kernel.traffic for kernel in kernels),
                len(kernels),
                sum(kernel.seconds(rates) for kernel in kernels) if rates else 0.0,
                len(noised),
            )
        )
    return StepCosts(config, store, world_size, device, works, model, nodes)


def _typical_steps(config: RunConfig, loader: Loader) -> list[int]:
    size, searched = loader.batch_at(0), min(SEARCHED, config.train.steps)
    tokens = [int(loader.micro_batch_tokens(step * size.global_batch_size, size).sum()) for step in range(searched)]
    count = min(TYPICAL_STEPS, searched)
    ranks = ((np.arange(count) + 0.5) / count * searched).astype(int)
    steps: list[int] = np.argsort(tokens, kind="stable")[ranks].tolist()
    return steps


def _fake_model(config: RunConfig, store: Store, is_varlen: bool) -> tuple[MMDiT, FakeTensorMode]:
    """Return the network on fake tensors, with the attention of a CPU or of GPUs in half precision, and their mode."""
    if not is_varlen:
        model = build_fake_model(config, store.manifest)
        return model, next(model.parameters()).fake_mode  # type: ignore[attr-defined]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    attention = replace(config.attention, backend="varlen")
    model = build_meta_model(replace(config, attention=attention), store.manifest, "cuda")
    with mode:
        materialize(model, "cpu")
    return model, mode
