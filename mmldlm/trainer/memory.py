"""Memory and FLOPs of an optimizer step in closed form: the network has sizes but no weights, and nothing is run.

`estimate` reads how large the micro-batches of a run get, `activation_bytes` says how much memory one of them takes,
and `rank_memory` adds everything else that an engine keeps on a rank (table in docs/engines.md). We do not count
workspaces of kernels, NCCL's buffers, fragmentation, or the copies that CUDA graphs keep. An estimate of at most 90 %
of a device's memory leaves room for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import prod
from typing import NamedTuple

import torch

from mmldlm.config import RunConfig
from mmldlm.data.loader import Loader
from mmldlm.data.store import Store
from mmldlm.diffusion.noise import mode_stages
from mmldlm.diffusion.objective import NoisedBatch
from mmldlm.distributed.capabilities import OFFLOAD_ENGINES, WEIGHT_SHARDING_ENGINES, ZERO_ENGINES
from mmldlm.distributed.launch import DDP, FSDP2, SINGLE
from mmldlm.distributed.optimizers import build_optimizer, describe_optimizer
from mmldlm.loading.factory import build_corruption, build_meta_model, build_objective
from mmldlm.model.attention import AttentionConfig
from mmldlm.model.flops import ModelFlops
from mmldlm.model.heads import CHUNK_ROWS, GPU_CHUNK_ROWS, GPU_VOCAB_MULTIPLE, MAX_WHOLE_LOGITS
from mmldlm.model.layers import FeedForward
from mmldlm.model.mmdit import DTYPES, MMDiT, MMDiTBlock, count_parameters
from mmldlm.optim.param_groups import muon_matrices
from mmldlm.telemetry.resources import MIB

FLOAT32 = 4  # bytes of a number
LOGITS_AT_ONCE = 3  # float32 copies of a chunk of logits that the text head holds at once
ZERO_BUCKET = 100_000_000  # gradients that ZeRO reduces together, in the shipped files
ZERO3_GATHERED = 550_000_000  # parameters that zero3 keeps gathered and fetches ahead
MAX_SEARCHED_STEPS = 4096  # steps of a stage that we search for the largest micro-batch


# --- the activations of a micro-batch -------------------------------------------------------------------------


def activation_bytes(config: RunConfig, model: MMDiT, batch: NoisedBatch, device_type: str) -> int:
    """Return the most bytes that the forward and backward pass of a micro-batch need on top of weights and gradients.

    All blocks together hold the tensors that the autograd functions of `mmldlm.model.ops` save. Memory then peaks at
    the end of the forward pass, in the backward pass of the last block, or where a block is recomputed.
    """
    shape, sizes, on_gpu = model.shape, model.config, device_type != "cpu"
    item = DTYPES[model.precision].itemsize  # bytes of a number in matrix products
    width, latent_width = sizes.width, sizes.resolve_latent_width(shape.latent_channels)
    layout, predicted = batch.layout.without_filler(), len(batch.positions)
    tokens, latents = layout.num_tokens, layout.num_samples * shape.latent_tokens
    blocks: list[MMDiTBlock] = [*model.blocks]
    text_mlp, latent_mlp = blocks[0].text.mlp, blocks[0].latent.mlp

    def row(stream_width: int, mlp: FeedForward) -> tuple[int, int, int]:
        """Return the bytes per row that a block saves before its attention, for its attention, and after it."""
        hidden = mlp.up.out_features + (mlp.down.in_features if sizes.mlp == "gelu" else 0)
        normalized = FLOAT32 * stream_width + item * stream_width * on_gpu  # a GPU also keeps the norm's output
        masks = 2 * (1 + FLOAT32) * stream_width * (sizes.dropout > 0)
        before = normalized + item * 4 * width  # q, k and v, and the attention's output
        attention = item * 4 * width  # normalized q, k and v, and the output in the order of the samples
        return before, attention, normalized + item * (2 * stream_width + hidden) + masks

    text, latent = row(width, text_mlp), row(latent_width, latent_mlp)
    modulation = 2 * FLOAT32 * 6 * (width + latent_width) * layout.num_samples
    whole = tokens * sum(text) + latents * sum(latent) + modulation
    kept, recomputed = 0, 0
    for index in range(sizes.depth - 1):
        mode = config.memory.mode_for_block(index, sizes.depth)
        if mode == "none":
            kept += whole
        elif mode == "selective":
            kept += whole - tokens * text[1] - latents * latent[1]
        else:  # only inputs are kept, and a recomputed block adds to everything before it
            kept += FLOAT32 * (tokens * width + latents * latent_width) + modulation * on_gpu
            backward = tokens * (2 * FLOAT32 * width + 2 * item * text_mlp.up.out_features)
            recomputed = kept + whole + backward
    # After the attention of the last block, only predicted tokens continue.
    last = tokens * sum(text[:2]) + predicted * (text[2] + (FLOAT32 + item) * width)
    last += latents * sum(latent) + modulation
    # Autocast keeps a copy of every matrix. The text head holds its logits, and inputs and outputs of two layers.
    copies = item * sum(weight.numel() for weight in model.parameters() if weight.ndim == 2) * (item < FLOAT32)
    head = predicted * (3 * FLOAT32 + 2 * item) * width + _logit_bytes(shape.vocab_size, predicted, item, on_gpu)
    head += 2 * FLOAT32 * shape.vocab_size * width * (predicted > 0)  # gradients of the head's matrix
    # In the backward pass of the last block: gradients of its input, and of q, k and v before and after their norm.
    backward = tokens * (sum(text[:2]) + (FLOAT32 + 6 * item) * width) + predicted * FLOAT32 * width
    return max(kept + last + head + copies, kept + backward + copies, recomputed)


def _logit_bytes(vocab_size: int, rows: int, item: int, on_gpu: bool) -> int:
    """Return the bytes of the text head's logits (see `mmldlm.model.heads`)."""
    columns = vocab_size + on_gpu * (-vocab_size % GPU_VOCAB_MULTIPLE)
    kept = item * rows * columns * (on_gpu and rows * columns <= MAX_WHOLE_LOGITS)
    return kept + LOGITS_AT_ONCE * FLOAT32 * columns * min(rows, GPU_CHUNK_ROWS if on_gpu else CHUNK_ROWS)


# --- a rank under each engine ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepMemory:
    """Memory of a step in a single process that holds all state, with the sizes that engines divide it by."""

    parameters: int
    trained_shapes: Sequence[tuple[int, ...]]
    largest_block: int = 0  # parameters
    outside_blocks: int = 0
    activations: int = 0  # bytes for the largest micro-batch, plus the inputs of its whole step
    update: int = 0  # bytes of the optimizer's temporaries
    has_gradients: bool = False  # gradients exist during a forward pass: from earlier micro-batches, or for CUDA graphs
    one_moment: int = 0  # trained parameters with one moment instead of two (Muon's)
    ema: bool = False

    @classmethod
    def of(cls, config: RunConfig, model: MMDiT, activations: int, has_gradients: bool, device_type: str) -> StepMemory:
        """Return the memory of a step of this network, whose optimizer need not exist."""
        blocks = [sum(parameter.numel() for parameter in block.parameters()) for block in model.blocks]
        parameters = sum(parameter.numel() for parameter in model.parameters())
        shapes = [tuple(parameter.shape) for parameter in model.parameters() if parameter.requires_grad]
        one_moment = muon_matrices(model) if config.optim.name == "muon" else []
        copies = FLOAT32 * sum(map(prod, shapes)) * (device_type == "cuda" and not config.optim.fused)
        return cls(
            parameters=parameters,
            trained_shapes=shapes,
            largest_block=max(blocks),
            outside_blocks=parameters - sum(blocks),
            activations=activations,
            update=copies,
            has_gradients=has_gradients,
            one_moment=sum(matrix.numel() for matrix in one_moment),
            ema=config.ema.decay > 0,
        )

    @property
    def trained(self) -> int:
        """Number of trained parameters."""
        return sum(map(prod, self.trained_shapes))

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by purpose in a single process, at the moment when memory peaks."""
        gradients = FLOAT32 * self.trained
        during = {"gradients": gradients * self.has_gradients, "activations": self.activations}
        after = {"gradients": gradients, "temporaries of the update": self.update}
        return {
            "weights": FLOAT32 * self.parameters,
            "EMA": FLOAT32 * self.trained * self.ema,
            "moments": FLOAT32 * (2 * self.trained - self.one_moment),
            **max(during, after, key=lambda parts: sum(parts.values())),
        }


@dataclass(frozen=True)
class Sharding:
    """How an engine divides the state among ranks."""

    engine: str
    precision: str
    world_size: int
    replicas: int = 1  # groups of ranks under fsdp2, each with all shards

    @property
    def shards(self) -> int:
        return 1 if self.engine in (SINGLE, DDP) else self.world_size // self.replicas

    @property
    def weight_bytes(self) -> int:
        """Bytes of a gathered weight, which is also the size of the copy that ZeRO keeps beside its master weight."""
        return FLOAT32 if self.precision == "fp32" else 2


class RankMemory(NamedTuple):
    """Memory of a rank in MiB."""

    state: float  # weights, EMA, gradients, master weights and moments on the device
    peak: float  # the most that is on the device at once
    host: float  # state on the host


def rank_memory(step: StepMemory, sharding: Sharding) -> RankMemory:
    """Return the memory that a rank of this engine needs for the step."""
    device, host = _state(step, sharding)
    return RankMemory(device / MIB, (device + _beside_state(step, sharding)) / MIB, host / MIB)


def _state(step: StepMemory, sharding: Sharding) -> tuple[float, float]:
    """Return the bytes of weights, EMA, gradients, master weights and moments, as (device, host)."""
    engine, low, share = sharding.engine, sharding.weight_bytes, 1 / sharding.shards
    # Bytes per trained parameter: 4 for gradients in float32, 12 for ZeRO's master weights and two moments, and 16 for
    # both together, which equals weights, gradients and moments under the other engines.
    device, host = {
        SINGLE: (16.0, 0.0),
        DDP: (16.0, 0.0),
        FSDP2: (16 * share, 0.0),
        "zero1": (low + 4 + 12 * share, 0.0),
        "zero2": (low + 16 * share, 0.0),
        "zero3": ((low + 16) * share, 0.0),
        "zero2_offload": (low + 4 * share, 12 * share),
        "zero3_offload": (0.0, (low + 16) * share),
    }[engine]
    ema = FLOAT32 * share * step.ema  # divided like the master weights
    device, host = (device, host + ema) if engine in OFFLOAD_ENGINES else (device + ema, host)
    # FSDP2 cuts parameters by rows and pads, so every rank holds as many as the fullest one. ZeRO pads next to nothing.
    shards = sharding.shards if engine == FSDP2 else 1
    trained = sum(-(-rows // shards) * shards * prod(columns) for rows, *columns in step.trained_shapes)
    weights_share = share if engine in WEIGHT_SHARDING_ENGINES else 1.0
    frozen = (step.parameters - step.trained) * (low if engine in ZERO_ENGINES else FLOAT32) * weights_share
    frozen_on_host = frozen if engine == "zero3_offload" else 0.0
    missing_moments = step.one_moment * FLOAT32 * weights_share  # no engine that offloads runs Muon
    return trained * device - missing_moments + frozen - frozen_on_host, trained * host + frozen_on_host


def _beside_state(step: StepMemory, sharding: Sharding) -> float:
    """Return the most bytes on the device on top of the state, either with activations or at the end of backward."""
    engine, share, low = sharding.engine, 1 / sharding.shards, sharding.weight_bytes
    gradients = FLOAT32 * step.trained
    bucket = min(gradients, FLOAT32 * ZERO_BUCKET)
    # The state includes all gradients. Without earlier micro-batches there are none yet when activations peak.
    absent = 0 if step.has_gradients else gradients
    if engine == SINGLE:
        return max(step.activations - absent, step.update)
    if engine == DDP:  # the buckets hold all gradients, in addition to gradients of earlier micro-batches
        return step.activations + gradients - absent
    if engine == "zero1":  # each rank keeps whole gradients
        return max(step.activations - absent, bucket)
    if engine.startswith("zero2"):
        return max(step.activations - share * absent, bucket)
    if engine == FSDP2:
        # Three blocks: the one that computes, the next one, and the buffer that a gather is copied from.
        gathered = low * (step.outside_blocks + 3 * step.largest_block)
        # Gradients of earlier micro-batches are not sharded.
        earlier = (1 - share) * gradients if step.has_gradients else -share * gradients
        # A block's gradients exist twice: as backward computes them, and in float32 for the reduction.
        return gathered + max(step.activations + earlier, (low + FLOAT32) * 2 * step.largest_block)
    gathered = min(step.parameters, ZERO3_GATHERED) if sharding.world_size > 1 else 0
    # The gradients of a block, and two copies of a bucket: one converted, one reordered for the exchange.
    buffers = low * (gathered + step.largest_block) + 2 * bucket
    # Gathered weights of a block are released as its gradients appear. Reduce-scatter returns a part of a bucket.
    appearing = share * absent if engine == "zero3" else 0
    return buffers + max(step.activations - appearing, bucket * share)


# --- a run ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """Cost of an optimizer step."""

    parameters: dict[str, int]  # by part of the network
    step: StepMemory
    tokens_per_step: float  # mean over the run
    flops_per_step: float  # matrix products of forward and backward on all ranks, mean over the run
    largest_micro_batch: int  # text and latent tokens
    world_size: int
    optimizer: str  # the implementation

    @property
    def checkpoint_mib(self) -> float:
        """MiB on the host for staging copies of weights, EMA and moments, per process, from the first checkpoint on."""
        # One number for every parameter, and two moments (three numbers with an EMA) for every trained one.
        step = self.step
        numbers = step.parameters + (3 if step.ema else 2) * step.trained - step.one_moment
        return numbers * FLOAT32 / self.world_size / MIB


def estimate(config: RunConfig, store: Store, world_size: int, device: str | None = None) -> Estimate:
    """Estimate the cost of one optimizer step, by default on this machine's kind of device.

    We read the largest micro-batch of each stage, because its lengths and masks determine the cost. A stage is a range
    of steps with the same modes and batch sizes. If a global batch cannot be divided evenly, this is a `ConfigError`.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    config.train.check_batches(world_size)
    batch_at = partial(config.train.batch_at, world_size=world_size)
    loader = Loader(
        store, "train", replace(config.data, num_workers=0), config.run.seed, batch_at, world_size=world_size
    )
    # Only sizes are read from the network, so its attention need not run on this machine.
    model = build_meta_model(replace(config, attention=AttentionConfig("sdpa")), store.manifest, "cpu")
    corruption = build_corruption(config, build_objective(config, store.manifest))
    model_flops, split = ModelFlops.from_model(model), store.split("train")
    steps, modes = config.train.steps, mode_stages(config.mode, config.mode_schedule)
    starts = {*modes, *config.train.batch_stages(world_size)}
    flops, samples, most_tokens, activations = 0.0, 0, 0, 0
    # CUDA graphs add to gradients that stay in memory.
    has_gradients = device == "cuda" and world_size == 1 and bool(config.compile.graphs)
    for start, stop in pairwise([*sorted(start for start in starts if start < steps), steps]):
        size = batch_at(start)
        tokens, step = loader.largest_step(range(start, min(stop, start + MAX_SEARCHED_STEPS)), samples, size)
        place = samples + (step - start) * size.global_batch_size
        rank = int(loader.micro_batch_tokens(place, size).max(axis=1).argmax())
        micro_batches = loader.read(place, size, rank)
        noised = corruption(step, micro_batches)
        inputs = sum(tensor.nbytes for batch in noised for tensor in batch.tensors().values())
        largest = max(activation_bytes(config, model, batch, device) for batch in noised)
        most_tokens, activations = max(most_tokens, tokens), max(activations, inputs + largest)
        has_gradients |= len(noised) > 1
        # Tokens follow the mean length of all samples. Masked tokens and pairs per token are as we just read them.
        layouts, count = [batch.layout for batch in noised], size.global_batch_size
        mean_tokens = split.mean_length * count
        factor = mean_tokens / sum(layout.num_tokens for layout in layouts)
        masked = factor * sum(len(batch.positions) for batch in noised)
        pairs = factor * sum(layout.num_pairs for layout in layouts)
        flops += model_flops.step_flops(mean_tokens, masked, count, model.shape.latent_tokens, pairs) * (stop - start)
        samples += count * (stop - start)  # where the next stage begins in the order of samples
    optimizer = "deepspeed.DeepSpeedCPUAdam if the engine offloads it, else deepspeed.FusedAdam"
    if config.optim.name != "deepspeed_adam":  # creating DeepSpeed's would compile its kernel
        optimizer = describe_optimizer(build_optimizer(model, config.optim))
    return Estimate(
        parameters=count_parameters(model),
        step=StepMemory.of(config, model, activations, has_gradients, device),
        tokens_per_step=split.mean_length * samples / steps,
        flops_per_step=flops / steps,
        largest_micro_batch=most_tokens,
        world_size=world_size,
        optimizer=optimizer,
    )
