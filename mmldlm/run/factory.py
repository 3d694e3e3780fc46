"""The network, the objective and the corruption of a step, as functions of a run's config and data."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import attention as flash

from mmldlm.batch import Batch, PackedLayout
from mmldlm.config import RunConfig
from mmldlm.data.manifest import Manifest
from mmldlm.diffusion.gaussian import GaussianDiffusion
from mmldlm.diffusion.masked import MaskedDiffusion
from mmldlm.diffusion.noise import draw_noise, mode_weights_at
from mmldlm.diffusion.objective import ON_HOST, NoisedBatch, Objective
from mmldlm.model.attention import AMPERE, Backend, resolve_backend
from mmldlm.model.mmdit import DTYPES, MMDiT, Precision
from mmldlm.model.parts import freeze_parts
from mmldlm.run.compatibility import data_shape
from mmldlm.utils.packed_tensors import PackedTensors

log = logging.getLogger(__name__)

IGNORED = -100  # a target that `F.cross_entropy` ignores
OF_MASKED = ("positions", "targets", "token_weight", "trained_token_weight", "token_bin")  # have a row each


def set_matmul_precision(config: RunConfig) -> None:
    """Set how float32 matrix products of this process round their inputs; the backends have no setting per network."""
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")


def build_meta_model(config: RunConfig, manifest: Manifest, device_type: str) -> MMDiT:
    """Return the network for `device_type`, its parameters on the meta device; parts in `freeze` are frozen."""
    precision, backend = _precision(config), attention_backend(config, device_type)
    uncertainty = config.loss.latent_weighting == "uncertainty"
    with torch.device("meta"):
        model = MMDiT(
            config.model,
            data_shape(manifest),
            backend,
            config.memory,
            precision,
            text_terms=config.loss.needs_text_terms,
            initial_loss_weights=(1.0, config.loss.latent_weight) if uncertainty else None,
            latent_skip=config.latent.has_skip,
        )
    freeze_parts(model, config.freeze)
    return model


def attention_backend(config: RunConfig, device_type: str) -> Backend:
    """Return the kernel of the joint attention on this type of device; one that does not run is a `ConfigError`."""
    head_width, precision = config.model.head_width, _precision(config)
    has_gpu = device_type == "cuda" and torch.cuda.is_available()
    capability = torch.cuda.get_device_capability() if has_gpu else None
    backend = resolve_backend(config.attention.backend, device_type, precision, head_width, capability)
    if (config.attention.backend, backend) == ("auto", "varlen") and (capability or AMPERE)[0] in (9, 10):
        take_flash_attention_4(head_width, DTYPES[precision], device_type)
    return backend


@cache
def take_flash_attention_4(head_width: int, dtype: torch.dtype, device: str) -> None:
    """Have varlen run FlashAttention 4 from here on where it is installed, unless its first call each way fails."""
    from torch.nn.attention.varlen import varlen_attn  # absent from CPU-only builds of older releases

    if not hasattr(flash, "restore_flash_attention_impl"):  # a release of PyTorch without a choice
        return
    try:  # not all of its versions fit PyTorch's calls
        flash.activate_flash_attention_impl("FA4")
        qkv = torch.ones(1, 1, head_width, dtype=dtype, device=device, requires_grad=True)
        offsets = torch.arange(2, dtype=torch.int32, device=device)
        varlen_attn(qkv, qkv, qkv, offsets, offsets, 1, 1).sum().backward()  # type: ignore[union-attr]
    except Exception as error:  # of many types
        flash.restore_flash_attention_impl(_raise_warn=False)
        if not str(getattr(error, "name", "")).startswith("flash_attn"):  # which is not installed
            log.warning("FlashAttention 4 does not run here, so attention takes PyTorch's own: %s", error)


def describe_attention(backend: object) -> str:
    """Return the kernel of the joint attention, for the user."""
    current = getattr(flash, "current_flash_attention_impl", lambda: None)  # newer than the oldest PyTorch
    is_newer = backend == "varlen" and current() == "FA4"
    return f"{backend} (FlashAttention 4)" if is_newer else str(backend)


def _precision(config: RunConfig) -> Precision:
    return "fp32" if config.precision == "auto" else config.precision  # auto: no launcher has resolved it


def build_objective(config: RunConfig, manifest: Manifest) -> Objective:
    """Return the training objective of a run."""
    latent = config.latent.resolve(manifest.latent.tokens * manifest.latent.channels)
    return Objective(
        config.loss,
        MaskedDiffusion(manifest.mask_id, config.loss.text, config.text.masks, manifest.pad_id),
        GaussianDiffusion(latent, config.loss.latent, manifest.latent.max_norm, config.loss.huber_delta),
        config.log.noise_levels,
        accuracy=True,
    )


@dataclass(frozen=True)
class CorruptedBatch(Batch):
    """A micro-batch that the loader has corrupted already, for `step`."""

    step: int
    noised: NoisedBatch

    def pin_memory(self) -> CorruptedBatch:
        """Return the micro-batch with its corrupted form, which goes to the device, in pinned memory."""
        return replace(self, noised=self.noised.pin_memory())

    def __reduce__(self) -> Any:
        # One buffer, since each tensor that a worker sends takes a file descriptor; the device's part comes first.
        own = {f"batch.{name}": getattr(self, name) for name in ("tokens", "latents", "slots")}
        on_host = {name: getattr(self.noised, name) for name in ON_HOST}
        packed = PackedTensors.pack({**self.noised.tensors(), **on_host, **own})
        return _received, (packed, self.lengths, self.noised.layout.lengths, self.step)


def _received(packed: PackedTensors, lengths: tuple[int, ...], filled: tuple[int, ...], step: int) -> CorruptedBatch:
    """Return the micro-batch that a worker has sent."""
    *_, counts, sample_ids, tokens, latents, slots = packed.tensors().values()
    for_device = PackedTensors(packed.buffer[: packed.places["counts"].start], dict([*packed.places.items()][:-5]))
    layout = PackedLayout(filled, latents.shape[1], num_filler=len(filled) - len(lengths))
    noised = NoisedBatch.from_packed(for_device, layout, counts, sample_ids)
    return CorruptedBatch(tokens, latents, lengths, sample_ids, slots, step, noised)


@dataclass(frozen=True)
class StaticSizes:
    """Sizes up to which the micro-batches of a step are filled, few, of samples of at most `max_length` tokens.

    Tokens and masked tokens are rounded up to multiples of 1/32 of the token budget, such as 1,024 of 32,768. Samples
    are those of the step's largest micro-batch, and as many more as its filler may need.
    """

    max_length: int

    def fill(self, noised: Sequence[NoisedBatch], micro_batch_tokens: int) -> list[NoisedBatch]:
        """Return a step's micro-batches, filled up with what no loss counts; the token budget is 0 for none."""
        multiple = max(128, round(micro_batch_tokens / 32 / 128) * 128) if micro_batch_tokens else 1024
        num_samples = max(len(batch.sample_ids) for batch in noised) - (1 - multiple) // self.max_length
        return [batch if batch.layout.num_filler else self._filled(batch, multiple, num_samples) for batch in noised]

    def _filled(self, batch: NoisedBatch, multiple: int, num_samples: int) -> NoisedBatch:
        layout, longest = batch.layout, self.max_length
        tokens, masked = -layout.num_tokens % multiple, -len(batch.positions) % multiple
        samples = num_samples - layout.num_samples
        # All tokens belong to samples, since kernels write no row behind the last one. The other samples have none.
        lengths = (min(longest, max(0, tokens - first)) for first in range(0, samples * longest, longest))
        layout = PackedLayout((*layout.lengths, *lengths), layout.latent_tokens, num_filler=samples)
        rows = {**dict.fromkeys(OF_MASKED, masked), **dict.fromkeys(ON_HOST, 0), "noised_tokens": tokens}
        values = {"positions": layout.num_tokens - 1, "t_text": 0.5, "t_latent": 0.5, "length_target": IGNORED}
        filled = {
            name: torch.cat([x, x.new_full((rows.get(name, samples), *x.shape[1:]), values.get(name, 0))])
            for name, x in vars(batch).items()
            if isinstance(x, Tensor)
        }
        return replace(batch, layout=layout, **filled)


def corrupt_step(
    config: RunConfig,
    objective: Objective,
    step: int,
    global_batch_size: int,
    micro_batches: Sequence[Batch],
    sizes: StaticSizes | None = None,
) -> list[NoisedBatch]:
    """Noise the micro-batches of an optimizer step, on the host; the noise is a function of (seed, step, slot).

    What the loader has corrupted for this step is taken as it is. With `sizes` micro-batches are filled up to them.
    """
    weights = mode_weights_at(step, config.mode, config.mode_schedule)
    samplers = config.text.sampler, objective.latent.sampler
    noised = [
        batch.noised
        if isinstance(batch, CorruptedBatch) and batch.step == step
        else objective.corrupt(batch, draw_noise(batch, config.run.seed, step, global_batch_size, weights, *samplers))
        for batch in micro_batches
    ]
    return noised if sizes is None else sizes.fill(noised, config.train.batch_at(step, 1).micro_batch_tokens)


def corrupt_in_loader(
    config: RunConfig,
    objective: Objective,
    sizes: StaticSizes | None,
    step: int,
    global_batch_size: int,
    micro_batches: Sequence[Batch],
) -> list[Batch]:
    """Return the micro-batches of an optimizer step with their corrupted forms, see `Loader`."""
    noised = corrupt_step(config, objective, step, global_batch_size, micro_batches, sizes)
    return [
        CorruptedBatch(batch.tokens, batch.latents, batch.lengths, batch.sample_ids, batch.slots, step, each)
        for batch, each in zip(micro_batches, noised, strict=True)
    ]
