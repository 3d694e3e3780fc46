"""The network, the objective and the corruption of a run, as functions of its config and data."""

from __future__ import annotations

import logging
from functools import cache, partial

import torch
from torch.nn import attention as flash

from mmldlm.config import RunConfig
from mmldlm.data.manifest import Manifest
from mmldlm.diffusion.corruption import Corruption, StaticSizes
from mmldlm.diffusion.gaussian import GaussianDiffusion
from mmldlm.diffusion.masked import MaskedDiffusion
from mmldlm.diffusion.objective import Objective
from mmldlm.loading.compatibility import data_shape
from mmldlm.model.attention import AMPERE, Backend, resolve_backend
from mmldlm.model.mmdit import DTYPES, MMDiT, Precision
from mmldlm.model.parts import freeze_parts

log = logging.getLogger(__name__)


def set_matmul_precision(config: RunConfig) -> None:
    """Set how float32 matrix products round their inputs, for the whole process: no setting per network exists."""
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")


def build_meta_model(config: RunConfig, manifest: Manifest, device_type: str) -> MMDiT:
    """Return the network for `device_type`, with parameters on the meta device and the parts in `freeze` frozen."""
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
    """Return the joint attention kernel for this type of device. A kernel that cannot run is a `ConfigError`."""
    head_width, precision = config.model.head_width, _precision(config)
    has_gpu = device_type == "cuda" and torch.cuda.is_available()
    capability = torch.cuda.get_device_capability() if has_gpu else None
    backend = resolve_backend(config.attention.backend, device_type, precision, head_width, capability)
    if (config.attention.backend, backend) == ("auto", "varlen") and (capability or AMPERE)[0] in (9, 10):
        take_flash_attention_4(head_width, DTYPES[precision], device_type)
    return backend


@cache
def take_flash_attention_4(head_width: int, dtype: torch.dtype, device: str) -> None:
    """Let varlen use FlashAttention 4 from now on if it is installed and a trial forward and backward pass succeed."""
    from torch.nn.attention.varlen import varlen_attn  # missing in CPU-only builds of older releases

    if not hasattr(flash, "restore_flash_attention_impl"):  # this PyTorch has only one kernel
        return
    try:  # not every version of FlashAttention 4 fits PyTorch's calls
        flash.activate_flash_attention_impl("FA4")
        qkv = torch.ones(1, 1, head_width, dtype=dtype, device=device, requires_grad=True)
        offsets = torch.arange(2, dtype=torch.int32, device=device)
        varlen_attn(qkv, qkv, qkv, offsets, offsets, 1, 1).sum().backward()  # type: ignore[union-attr]
    except Exception as error:  # can be of many types
        flash.restore_flash_attention_impl(_raise_warn=False)
        if not str(getattr(error, "name", "")).startswith("flash_attn"):  # not because it is not installed
            log.warning("FlashAttention 4 does not run here, so attention uses PyTorch's own kernel: %s", error)


def describe_attention(backend: object) -> str:
    """Return the name of the joint attention kernel for users."""
    current = getattr(flash, "current_flash_attention_impl", lambda: None)  # the oldest supported PyTorch lacks it
    is_newer = backend == "varlen" and current() == "FA4"
    return f"{backend} (FlashAttention 4)" if is_newer else str(backend)


def _precision(config: RunConfig) -> Precision:
    return "fp32" if config.precision == "auto" else config.precision  # auto: no launcher has chosen one


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


def build_corruption(config: RunConfig, objective: Objective, sizes: StaticSizes | None = None) -> Corruption:
    """Return the object that noises the micro-batches of a run and, with `sizes`, fills them up."""
    batch_at = partial(config.train.batch_at, world_size=1)  # the ranks change neither size that is used
    mode, schedule = config.mode, config.mode_schedule
    return Corruption(objective, config.run.seed, mode, schedule, config.text.sampler, batch_at, sizes)
