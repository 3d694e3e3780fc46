"""Generate with a trained run: conditions in, texts and latents out, on the encoder's own scale.

Shape letters: n conditions, B samples, M latent tokens of a sample, C latent channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from mmldlm.diffusion.candidates import TextRequest, generate_candidates
from mmldlm.diffusion.noise import MODES, Mode, RandomSource, SampleStreams, draw_normal
from mmldlm.diffusion.sampling import (
    GUIDANCE_NEEDS,
    Generation,
    SamplingConfig,
    draw_lengths,
)
from mmldlm.errors import DataError, UsageError
from mmldlm.evaluation.changes import interpolation_sampling
from mmldlm.loading.load import LoadedRun
from mmldlm.settings.successors import notice
from mmldlm.utils.slerp import slerp


def sample(
    run: LoadedRun,
    mode: Mode,
    config: SamplingConfig,
    seed: int,
    raw_latents: np.ndarray | None = None,
    texts: list[str] | None = None,
    count: int = 1,
    length: int | Sequence[int] | None = None,
    slots: Tensor | None = None,
    template: Sequence[int] | None = None,
    prefixes: Sequence[str] | None = None,
) -> tuple[Generation, list[str]]:
    """Generate `count` samples for each condition: `raw_latents` [n, M, C] in l2t, `texts` in t2l, none in joint.

    Given and returned latents are on the encoder's scale. The best text of a latent comes first.

    Args:
        length: Tokens of each text, or a number for each condition. By default, the length head decides: lengths around
            its median in l2t, a draw in joint.
        slots: int64 [n], or [B] outside of l2t: keys of the random streams of the conditions or samples. By default,
            all use one stream.
        template: In l2t and joint, the tokens of a text. Only its [MASK] tokens are generated.
        prefixes: Texts that the generated ones follow (see `prepare --prefix-field`): one for all, or one for each
            condition. In joint, each prefix is a condition.

    Raises:
        UsageError: Guidance is not available for the mode or the run, there are not as many lengths or prefixes as
            conditions, or the run's data had no prefixes.
        DataError: A text has no tokens, or more than any text of the run.
    """
    check_guidance(run, mode, config)
    manifest = run.store.manifest
    shape = (manifest.latent.tokens, manifest.latent.channels)
    generator: RandomSource = torch.Generator().manual_seed(seed)
    if slots is not None:
        generator = SampleStreams(seed, MODES.index(mode), slots)
    prefixes = prefixes or [""]
    given = raw_latents if mode == "l2t" else texts if mode == "t2l" else prefixes
    assert given is not None
    heads = prefix_tokens(run, prefixes, len(given))
    if texts is not None and mode == "t2l":
        whole = [[*head, *ids] for head, ids in zip(heads, tokenize_texts(run, texts), strict=True)]
        start = [each for each in whole for _ in range(count)]
        return generate_and_decode(run, mode, config, generator, torch.zeros(len(start), *shape), start)
    if mode == "joint":
        # Only the length head sees this noise, at t_latent = 1. `generate` draws its own.
        latents = draw_normal(generator, (count * len(heads), *shape))
    else:
        latents = torch.from_numpy(run.store.standardize(np.asarray(raw_latents)))
    length = (length if template is None else len(template)) or ()  # 0 is none
    lengths = [length] * len(latents) if isinstance(length, int) else list(length)
    if lengths and len(lengths) != len(latents):
        raise UsageError(f"lengths: expected one, or one for each condition, found {len(lengths)}")
    if mode == "joint":
        drawn = lengths or draw_lengths(run.model, manifest.mask_id, latents.to(run.device), generator)
        each = [head for head in heads for _ in range(count)]
        start = [[*head, *(template or [manifest.mask_id] * number)] for head, number in zip(each, drawn, strict=True)]
        return generate_and_decode(run, mode, config, generator, latents, start)
    request = TextRequest(latents.to(run.device), manifest.max_length, count, lengths or None, template, heads)
    candidates, fit = generate_candidates(run.sampler(config), generator, request), run.fit(config)
    best = candidates.best(fit)
    if count == 1 and not lengths and (rounds := run.search_rounds(config)):
        best = candidates.edited(best, fit, rounds)
    return decoded(run, best)


def interpolate(
    run: LoadedRun,
    config: SamplingConfig,
    seed: int,
    raw_latents: np.ndarray,
    points: int,
    length: int | None = None,
) -> tuple[Generation, list[str]]:
    """Generate a text for each of `points` latents between the two `raw_latents` [2, M, C], both included, as `sample`.

    All texts use the same random numbers, so neighbors differ only in their latents.
    """
    start, end = run.store.standardize(raw_latents)
    latents = run.store.restore(slerp(start, end, points))
    one_stream = torch.zeros(points, dtype=torch.int64)
    return sample(run, "l2t", interpolation_sampling(config), seed, latents, length=length, slots=one_stream)


def generate_and_decode(
    run: LoadedRun,
    mode: Mode,
    config: SamplingConfig,
    generator: RandomSource,
    latents: Tensor,
    start: Sequence[Sequence[int]],
) -> tuple[Generation, list[str]]:
    """Call `generate` with standardized `latents` [B, M, C] on the host, and decode the result like `sample`."""
    return decoded(run, run.sampler(config).generate(mode, generator, latents.to(run.device), start))


def decoded(run: LoadedRun, made: Generation) -> tuple[Generation, list[str]]:
    """Decode a generation's texts, and return them with the generation's latents on the encoder's scale."""
    restored = torch.from_numpy(run.store.restore(made.latents.numpy()))
    return replace(made, latents=restored), run.tokenizer.decode_batch(made.split())


def tokenize_texts(run: LoadedRun, texts: Sequence[str]) -> list[list[int]]:
    """Tokenize `texts`. Raises `DataError` if one has no tokens, or more than any text of the run."""
    ids, max_length = run.tokenizer.encode_batch(texts), run.store.manifest.max_length
    lengths = [len(text_ids) for text_ids in ids]
    if min(lengths) < 1 or max(lengths) > max_length:
        raise DataError(f"--text: expected 1 to {max_length} tokens, found {min(lengths)} to {max(lengths)}")
    return ids


def prefix_tokens(run: LoadedRun, prefixes: Sequence[str], count: int) -> list[list[int]]:
    """Tokenize one prefix for all `count` conditions, or one for each, with its end token. "" becomes []."""
    if any(prefixes) and not run.store.manifest.has_prefixes:
        raise UsageError(f"prefix: expected a run on data with prefixes (`prepare --prefix-field`), found {run.folder}")
    if run.store.manifest.has_prefixes and not all(prefixes):
        notice(str(run.folder), f"{run.folder}: its texts follow a prefix, but none was given")
    if len(prefixes) not in (1, count):
        raise UsageError(f"prefix: expected one, or one for each of {count} conditions, found {len(prefixes)}")
    tokens = run.tokenizer.encode_prefixes(prefixes)
    return tokens if len(tokens) == count else tokens * count


def check_guidance(run: LoadedRun, mode: Mode, config: SamplingConfig) -> None:
    """Raise `UsageError` if `config` requests guidance that the mode or the run does not support."""
    if config.guidance != 1 and (mode == "joint" or "joint" not in run.config.trained_modes):
        raise UsageError(
            f"sampling.guidance: mode {mode}, trained {run.config.mode}: expected l2t or t2l, and {GUIDANCE_NEEDS}"
        )
