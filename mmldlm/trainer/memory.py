"""Memory and FLOPs of an optimizer step, by formulas: no network is built and nothing is run.

`estimate` reads the sizes of a run's largest micro-batches from its data, `activation_bytes` is the formula for one
micro-batch, and `rank_memory` adds what each engine keeps on a rank; docs/engines.md has its table. None of them knows
workspaces of kernels, NCCL's buffers, fragmentation, or the copies that CUDA graphs keep. `USABLE_SHARE` leaves room
for these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import prod
from typing import NamedTuple

import torch

from mmldlm.config import RunConfig, resolve_precision
from mmldlm.data.batch_schedule import BatchSize
from mmldlm.data.loader import Loader
from mmldlm.data.manifest import Manifest
from mmldlm.data.store import Store
from mmldlm.diffusion.noise import mode_stages
from mmldlm.diffusion.objective import NoisedBatch
from mmldlm.distributed.capabilities import OFFLOAD_ENGINES, WEIGHT_SHARDING_ENGINES, ZERO_ENGINES
from mmldlm.distributed.launch import DDP, FSDP2, SINGLE
from mmldlm.distributed.optimizers import build_optimizer, describe_optimizer
from mmldlm.model.attention import AttentionConfig
from mmldlm.model.flops import ModelFlops
from mmldlm.model.heads import CHUNK_ROWS, GPU_CHUNK_ROWS, GPU_VOCAB_MULTIPLE, MAX_WHOLE_LOGITS
from mmldlm.model.layers import FeedForward
from mmldlm.model.mmdit import DTYPES, MMDiT, MMDiTBlock, count_parameters
from mmldlm.optim.param_groups import muon_matrices
from mmldlm.run.factory import build_corruption, build_meta_model, build_objective

MIB = 2**20
USABLE_SHARE = 0.9  # of a device's memory, that an estimate may fill
FLOAT32 = 4  # bytes
LOGITS_AT_ONCE = 3  # float32 copies of a chunk of logits that the text head has at the same time
ZERO_BUCKET = 100_000_000  # gradients that the shipped files of ZeRO reduce together
ZERO3_GATHERED = 550_000_000  # parameters that zero3 keeps gathered and fetches ahead
MAX_SEARCHED_STEPS = 4096  # of a stage that are searched for the largest micro-batch


# --- the activations of a micro-batch -------------------------------------------------------------------------


def activation_bytes(config: RunConfig, model: MMDiT, batch: NoisedBatch, device_type: str) -> int:
    """Return the most bytes that the forward and backward pass of a micro-batch keep beside weights and gradients.

    These are what the autograd functions of `mmldlm.model.ops` save, of all blocks, and the most that is there beside
    it: at the end of the forward pass, in the last block's backward, or where a block is computed again.
    """
    shape, sizes, on_gpu = model.shape, model.config, device_type != "cpu"
    item = DTYPES[model.precision].itemsize  # bytes of a number in matrix products
    width, latent_width = sizes.width, sizes.resolve_latent_width(shape.latent_channels)
    layout, predicted = batch.layout.without_filler(), len(batch.positions)
    tokens, latents = layout.num_tokens, layout.num_samples * shape.latent_tokens
    blocks: list[MMDiTBlock] = [*model.blocks]
    text_mlp, latent_mlp = blocks[0].text.mlp, blocks[0].latent.mlp

    def row(stream_width: int, mlp: FeedForward) -> tuple[int, int, int]:
        """Return the bytes that a block saves for a row: before the attention, of the attention, and after it."""
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
        else:  # the inputs alone; what is computed again meets what the blocks before it keep
            kept += FLOAT32 * (tokens * width + latents * latent_width) + modulation * on_gpu
            backward = tokens * (2 * FLOAT32 * width + 2 * item * text_mlp.up.out_features)
            recomputed = kept + whole + backward
    # After the last block's attention only predicted tokens continue.
    last = tokens * sum(text[:2]) + predicted * (text[2] + (FLOAT32 + item) * width)
    last += latents * sum(latent) + modulation
    # Autocast keeps a copy of each matrix. The text head has its logits, and inputs and outputs of its two layers.
    copies = item * sum(weight.numel() for weight in model.parameters() if weight.ndim == 2) * (item < FLOAT32)
    head = predicted * (3 * FLOAT32 + 2 * item) * width + _logit_bytes(shape.vocab_size, predicted, item, on_gpu)
    head += 2 * FLOAT32 * shape.vocab_size * width * (predicted > 0)  # gradients of its matrix
    # The last block's backward: gradients of its input, and of q, k and v before and after their norm.
    backward = tokens * (sum(text[:2]) + (FLOAT32 + 6 * item) * width) + predicted * FLOAT32 * width
    return max(kept + last + head + copies, kept + backward + copies, recomputed)


def _logit_bytes(vocab_size: int, rows: int, item: int, on_gpu: bool) -> int:
    """Return the bytes of the text head's logits; see `mmldlm.model.heads`."""
    columns = vocab_size + on_gpu * (-vocab_size % GPU_VOCAB_MULTIPLE)
    kept = item * rows * columns * (on_gpu and rows * columns <= MAX_WHOLE_LOGITS)
    return kept + LOGITS_AT_ONCE * FLOAT32 * columns * min(rows, GPU_CHUNK_ROWS if on_gpu else CHUNK_ROWS)


# --- a rank under each engine ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepMemory:
    """What a step takes in one process that has all of the state, and the sizes by which engines divide it."""

    parameters: int
    trained_shapes: Sequence[tuple[int, ...]]
    largest_block: int = 0  # parameters, as is the next
    outside_blocks: int = 0
    activations: int = 0  # bytes of the largest micro-batch, and of the inputs of all micro-batches of its step
    update: int = 0  # bytes of the optimizer's temporaries
    has_gradients: bool = False  # those of other micro-batches, or of graphs, are there during a forward pass
    one_moment: int = 0  # trained parameters with one moment instead of two (Muon's)
    ema: bool = False

    @classmethod
    def of(cls, config: RunConfig, model: MMDiT, activations: int, has_gradients: bool, device_type: str) -> StepMemory:
        """Return the memory of a step of this network, with an optimizer that is not created for it."""
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
        """Bytes of one process that has all of the state, by purpose, at the time when their sum is largest."""
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
    replicas: int = 1  # groups of ranks under fsdp2, each of which holds all shards

    @property
    def shards(self) -> int:
        return 1 if self.engine in (SINGLE, DDP) else self.world_size // self.replicas

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight that is gathered, and of ZeRO's weights beside their masters."""
        return FLOAT32 if self.precision == "fp32" else 2


class RankMemory(NamedTuple):
    """MiB of a rank."""

    state: float  # weights, EMA, gradients, master weights and moments on the device
    peak: float  # all that is on the device at the same time
    host: float  # state on the host


def rank_memory(step: StepMemory, sharding: Sharding) -> RankMemory:
    """Return the memory of a rank of an engine for the step."""
    device, host = _state(step, sharding)
    return RankMemory(device / MIB, (device + _beside_state(step, sharding)) / MIB, host / MIB)


def _state(step: StepMemory, sharding: Sharding) -> tuple[float, float]:
    """Return the bytes of weights, EMA, gradients, master weights and moments on (the device, the host)."""
    engine, low, share = sharding.engine, sharding.weight_bytes, 1 / sharding.shards
    # Bytes for each trained parameter. 4: gradients in float32; 12: ZeRO's masters and two moments; 16: both, or the
    # weights, gradients and moments of the other engines.
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
    ema = FLOAT32 * share * step.ema  # divided as the master weights are
    device, host = (device, host + ema) if engine in OFFLOAD_ENGINES else (device + ema, host)
    # FSDP2 cuts each parameter by rows, and all ranks hold as many as the one with the most. What ZeRO pads, flattened
    # parameters, is negligible.
    shards = sharding.shards if engine == FSDP2 else 1
    trained = sum(-(-rows // shards) * shards * prod(columns) for rows, *columns in step.trained_shapes)
    weights_share = share if engine in WEIGHT_SHARDING_ENGINES else 1.0
    frozen = (step.parameters - step.trained) * (low if engine in ZERO_ENGINES else FLOAT32) * weights_share
    frozen_on_host = frozen if engine == "zero3_offload" else 0.0
    missing_moments = step.one_moment * FLOAT32 * weights_share  # under no engine that offloads
    return trained * device - missing_moments + frozen - frozen_on_host, trained * host + frozen_on_host


def _beside_state(step: StepMemory, sharding: Sharding) -> float:
    """Return the most bytes that are on the device beside the state, with activations or at the end of backward."""
    engine, share, low = sharding.engine, 1 / sharding.shards, sharding.weight_bytes
    gradients = FLOAT32 * step.trained
    bucket = min(gradients, FLOAT32 * ZERO_BUCKET)
    # Without earlier micro-batches, activations are largest when there are no gradients yet, which are in the state.
    absent = 0 if step.has_gradients else gradients
    if engine == SINGLE:
        return max(step.activations - absent, step.update)
    if engine == DDP:  # buckets have all gradients; those of earlier micro-batches are beside them
        return step.activations + gradients - absent
    if engine == "zero1":  # keeps whole gradients
        return max(step.activations - absent, bucket)
    if engine.startswith("zero2"):
        return max(step.activations - share * absent, bucket)
    if engine == FSDP2:
        # The block that computes, the next one, and the buffer of a gather that is copied out of.
        gathered = low * (step.outside_blocks + 3 * step.largest_block)
        # Gradients of earlier micro-batches are whole.
        earlier = (1 - share) * gradients if step.has_gradients else -share * gradients
        # Gradients of a block as backward computes them, and in float32 to be reduced.
        return gathered + max(step.activations + earlier, (low + FLOAT32) * 2 * step.largest_block)
    gathered = min(step.parameters, ZERO3_GATHERED) if sharding.world_size > 1 else 0
    # A block's gradients, and copies of a bucket in the type and in the order in which it is exchanged.
    buffers = low * (gathered + step.largest_block) + 2 * bucket
    # As gradients appear, the gathered weights of their blocks are released. Reduce-scatter returns a part of a bucket.
    appearing = share * absent if engine == "zero3" else 0
    return buffers + max(step.activations - appearing, bucket * share)


# --- a run ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """Costs of an optimizer step."""

    parameters: dict[str, int]  # by part of the network
    step: StepMemory
    tokens_per_step: float  # mean over the run
    flops_per_step: float  # of matrix products, forward and backward, over all ranks; mean over the run
    batches: dict[int, BatchSize]  # by the first step with this size
    largest_micro_batch: int  # text and latent tokens
    world_size: int
    optimizer: str  # the implementation

    @property
    def checkpoint_mib(self) -> float:
        """Host memory for copies of this process's share of weights, EMA and moments, from the first checkpoint on."""
        # Numbers: weights of all parameters; two moments, and with an EMA a third number, of the trained ones.
        step = self.step
        numbers = step.parameters + (3 if step.ema else 2) * step.trained - step.one_moment
        return numbers * FLOAT32 / self.world_size / MIB


def estimate(config: RunConfig, store: Store, world_size: int, device: str | None = None) -> Estimate:
    """Estimate the costs of one optimizer step, or raise `ConfigError` if a global batch cannot be divided evenly.

    A stage is a range of steps with the same modes and batch sizes. The largest micro-batch of each is read, since its
    lengths and masks determine what it costs. The `device` is by default that of this machine.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    config = resolve_precision(config)
    config.train.check_batches(world_size)
    batch_at = partial(config.train.batch_at, world_size=world_size)
    loader = Loader(
        store, "train", replace(config.data, num_workers=0), config.run.seed, batch_at, world_size=world_size
    )
    model = build_sized_model(config, store.manifest)
    corruption = build_corruption(config, build_objective(config, store.manifest))
    model_flops, split = ModelFlops.from_model(model), store.split("train")
    steps, batches = config.train.steps, config.train.batch_stages(world_size)
    starts = {*mode_stages(config.mode, config.mode_schedule), *batches}
    flops, samples, most_tokens, activations = 0.0, 0, 0, 0
    # Graphs add to gradients that stay in memory.
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
        # Masked tokens and pairs for each token as in these micro-batches, tokens by the mean length of all samples.
        layouts, count = [batch.layout for batch in noised], size.global_batch_size
        mean_tokens = split.mean_length * count
        factor = mean_tokens / sum(layout.num_tokens for layout in layouts)
        masked = factor * sum(len(batch.positions) for batch in noised)
        pairs = factor * sum(layout.num_pairs for layout in layouts)
        flops += model_flops.step_flops(mean_tokens, masked, count, model.shape.latent_tokens, pairs) * (stop - start)
        samples += count * (stop - start)  # the place of the next stage in the order of samples
    optimizer = "deepspeed.DeepSpeedCPUAdam if the engine offloads it, else deepspeed.FusedAdam"
    if config.optim.name != "deepspeed_adam":  # which compiles its kernel when it is created
        optimizer = describe_optimizer(build_optimizer(model, config.optim))
    return Estimate(
        parameters=count_parameters(model),
        step=StepMemory.of(config, model, activations, has_gradients, device),
        tokens_per_step=split.mean_length * samples / steps,
        flops_per_step=flops / steps,
        batches=batches,
        largest_micro_batch=most_tokens,
        world_size=world_size,
        optimizer=optimizer,
    )


def build_sized_model(config: RunConfig, manifest: Manifest) -> MMDiT:
    """Return the network without memory, for its sizes; the configured attention may not run on this machine."""
    return build_meta_model(replace(config, attention=AttentionConfig("sdpa")), manifest, "cpu")
