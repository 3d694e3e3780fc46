"""Generation with the parts of a run: conditions in, texts and latents out, on the encoder's own scale.

Shape letters: n conditions, B samples, M latent tokens of a sample, C latent channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from mmldlm.diffusion.noise import Mode, trained_modes
from mmldlm.diffusion.sampling import GUIDANCE_NEEDS, Generation, SamplingConfig, draw_lengths, generate
from mmldlm.errors import DataError, UsageError
from mmldlm.run.load import LoadedRun

# Sees the noise time, from 1 to 0, and the tokens of each sample as they are then.
Watch = Callable[[float, list[list[int]]], None]


def sample(
    run: LoadedRun,
    mode: Mode,
    config: SamplingConfig,
    seed: int,
    raw_latents: np.ndarray | None = None,
    texts: list[str] | None = None,
    count: int = 1,
    length: int | None = None,
    watch: Watch | None = None,
) -> tuple[Generation, list[str]]:
    """`count` generations for each condition; their texts decoded, their latents in the encoder's scale.

    l2t takes `raw_latents` [n, M, C]; t2l takes `texts`; joint takes neither. Lengths are drawn from the
    length head unless `length` fixes them.
    """
    check_guidance(run, mode, config)
    shape = (run.store.manifest.latent.tokens, run.store.manifest.latent.channels)
    generator = torch.Generator().manual_seed(seed)
    if mode == "t2l":
        assert texts is not None
        ids = [row for row in tokens_of(run, texts) for _ in range(count)]
        tokens = torch.tensor([token for row in ids for token in row])
        empty = torch.zeros(len(ids), *shape)
        return produce(run, mode, config, generator, empty, tuple(map(len, ids)), tokens=tokens)
    if mode == "l2t":
        assert raw_latents is not None
        latents = torch.from_numpy(run.store.standardize(raw_latents)).repeat_interleave(count, 0)
    else:
        latents = torch.randn(count, *shape, generator=generator)
    if length:
        lengths = (length,) * len(latents)
    else:
        lengths = lengths_for(run, latents, generator, t_latent=0.0 if mode == "l2t" else 1.0)
    return produce(run, mode, config, generator, latents, lengths, watch=watch)


def produce(
    run: LoadedRun,
    mode: Mode,
    config: SamplingConfig,
    generator: torch.Generator,
    latents: Tensor,
    lengths: tuple[int, ...],
    tokens: Tensor | None = None,
    kept: Tensor | None = None,
    watch: Watch | None = None,
) -> tuple[Generation, list[str]]:
    """`generate`, from standardized `latents` [B, M, C] on the host; its latents on the encoder's scale, its texts."""

    def on_step(t: float, now: Tensor) -> None:
        assert watch is not None
        watch(t, [part.tolist() for part in now.cpu().split(lengths)])

    if watch is not None:
        on_step(1.0, torch.full((sum(lengths),), run.store.manifest.mask_id) if kept is None else kept)
    made = generate(
        run.model,
        run.objective.text,
        run.objective.latent,
        mode,
        config,
        generator,
        latents.to(run.device),
        lengths,
        tokens,
        on_step=None if watch is None else on_step,
        kept=kept,
    )
    restored = torch.from_numpy(run.store.restore(made.latents.numpy()))
    return replace(made, latents=restored), run.tokenizer.decode_batch(made.split())


def lengths_for(run: LoadedRun, latents: Tensor, generator: torch.Generator, t_latent: float = 0.0) -> tuple[int, ...]:
    """A length for each of the standardized `latents` [B, M, C], drawn from the length head."""
    return draw_lengths(run.model, run.store.manifest.mask_id, latents.to(run.device), t_latent, generator)


def tokens_of(run: LoadedRun, texts: Sequence[str]) -> list[list[int]]:
    """Tokens of texts to find latents of; `DataError` where one has none, or more than the run has seen."""
    ids, longest = run.tokenizer.encode_batch(texts), run.store.manifest.max_length
    found = [len(row) for row in ids]
    if min(found) < 1 or max(found) > longest:
        raise DataError(f"--text: expected 1 to {longest} tokens, found {min(found)} to {max(found)}")
    return ids


def can_guide(run: LoadedRun) -> bool:
    """Whether the run has seen what guidance leads away from."""
    return "joint" in trained_modes(run.config.mode, run.config.mode_schedule)


def check_guidance(run: LoadedRun, mode: Mode, config: SamplingConfig) -> None:
    """`UsageError` where guidance is asked for that the mode or the run does not have."""
    if config.guidance != 1 and (mode == "joint" or not can_guide(run)):
        raise UsageError(
            f"--guidance: mode {mode}, trained {run.config.mode}: expected l2t or t2l, and {GUIDANCE_NEEDS}"
        )
