"""Generation with a trained run: conditions in, texts and latents out, on the encoder's own scale.

Shape letters: n conditions, B samples, M latent tokens of a sample, C latent channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from mmldlm.diffusion.noise import MODES, Mode, RandomSource, SampleStreams, draw_normal
from mmldlm.diffusion.sampling import GUIDANCE_NEEDS, Generation, SamplingConfig, draw_lengths, generate
from mmldlm.errors import DataError, UsageError
from mmldlm.run.load import LoadedRun

# Called with the noise time, from 1 to 0, and the current tokens of each sample.
StepCallback = Callable[[float, list[list[int]]], None]


def sample(
    run: LoadedRun,
    mode: Mode,
    config: SamplingConfig,
    seed: int,
    raw_latents: np.ndarray | None = None,
    texts: list[str] | None = None,
    count: int = 1,
    length: int | Sequence[int] | None = None,
    callback: StepCallback | None = None,
    slots: Tensor | None = None,
) -> tuple[Generation, list[str]]:
    """Generate `count` samples per condition.

    Args:
        raw_latents: The conditions in l2t, [n, M, C] on the encoder's scale.
        texts: The conditions in t2l.
        count: Samples per condition; in joint, which has none, the number of samples.
        length: Tokens of each text, or of the texts of each condition; by default from the length head: its median in
            l2t, a draw in joint.
        callback: Called after each step that generates text.
        slots: int64 [B], keys of the samples' own random streams; by default all are drawn from one.

    Returns:
        The generation, its latents on the encoder's scale, and its texts.

    Raises:
        UsageError: Guidance is not available for the mode or the run, or `length` has another number of conditions.
        DataError: A text has no tokens, or more than any text of the run.
    """
    check_guidance(run, mode, config)
    shape = (run.store.manifest.latent.tokens, run.store.manifest.latent.channels)
    generator: RandomSource = torch.Generator().manual_seed(seed)
    if slots is not None:
        generator = SampleStreams(seed, MODES.index(mode), slots)
    if mode == "t2l":
        assert texts is not None
        ids = [text_ids for text_ids in tokenize_texts(run, texts) for _ in range(count)]
        tokens = torch.tensor([token for text_ids in ids for token in text_ids])
        empty = torch.zeros(len(ids), *shape)
        return generate_and_decode(run, mode, config, generator, empty, tuple(map(len, ids)), tokens=tokens)
    if mode == "l2t":
        assert raw_latents is not None
        latents = torch.from_numpy(run.store.standardize(raw_latents)).repeat_interleave(count, 0)
    else:
        # Noise for the length head at t_latent = 1; `generate` draws its own.
        latents = draw_normal(generator, (count, *shape))
    if length:
        of_condition = [length] if isinstance(length, int) else list(length)
        repeats = len(latents) // len(of_condition)
        if repeats * len(of_condition) != len(latents):
            raise UsageError(f"lengths: expected one, or one for each condition, found {len(of_condition)}")
        lengths = tuple(tokens for tokens in of_condition for _ in range(repeats))
    else:
        lengths = draw_text_lengths(run, latents, generator, t_latent=0.0 if mode == "l2t" else 1.0)
    return generate_and_decode(run, mode, config, generator, latents, lengths, callback=callback)


def generate_and_decode(
    run: LoadedRun,
    mode: Mode,
    config: SamplingConfig,
    generator: RandomSource,
    latents: Tensor,
    lengths: tuple[int, ...],
    tokens: Tensor | None = None,
    template: Tensor | None = None,
    callback: StepCallback | None = None,
) -> tuple[Generation, list[str]]:
    """Call `generate` with standardized `latents` [B, M, C] on the host, and decode the result as `sample` does."""

    def on_step(t: float, current: Tensor) -> None:
        assert callback is not None
        callback(t, [part.tolist() for part in current.cpu().split(lengths)])

    # `generate` reports after each step only; this is the start.
    if callback is not None:
        on_step(1.0, torch.full((sum(lengths),), run.store.manifest.mask_id) if template is None else template)
    generation = generate(
        run.model,
        run.objective.text,
        run.objective.latent,
        mode,
        config,
        generator,
        latents.to(run.device),
        lengths,
        tokens,
        on_step=None if callback is None else on_step,
        template=template,
    )
    restored = torch.from_numpy(run.store.restore(generation.latents.numpy()))
    return replace(generation, latents=restored), run.tokenizer.decode_batch(generation.split())


def draw_text_lengths(
    run: LoadedRun, latents: Tensor, generator: RandomSource, t_latent: float = 0.0
) -> tuple[int, ...]:
    """Return a length for each of the standardized `latents` [B, M, C] from the length head, see `draw_lengths`."""
    return draw_lengths(run.model, run.store.manifest.mask_id, latents.to(run.device), t_latent, generator)


def tokenize_texts(run: LoadedRun, texts: Sequence[str]) -> list[list[int]]:
    """Tokenize `texts`; `DataError` if one has no tokens, or more than any text of the run."""
    ids, max_length = run.tokenizer.encode_batch(texts), run.store.manifest.max_length
    lengths = [len(text_ids) for text_ids in ids]
    if min(lengths) < 1 or max(lengths) > max_length:
        raise DataError(f"--text: expected 1 to {max_length} tokens, found {min(lengths)} to {max(lengths)}")
    return ids


def check_guidance(run: LoadedRun, mode: Mode, config: SamplingConfig) -> None:
    """Raise `UsageError` if `config` requests guidance that the mode or the run does not support."""
    if config.guidance != 1 and (mode == "joint" or "joint" not in run.config.trained_modes):
        raise UsageError(
            f"--guidance: mode {mode}, trained {run.config.mode}: expected l2t or t2l, and {GUIDANCE_NEEDS}"
        )
