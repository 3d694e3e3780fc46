"""Texts of latents by a run: generated, and chosen by the run's encoder."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmldlm.diffusion.candidates import generate_best
from mmldlm.diffusion.noise import RandomSource
from mmldlm.diffusion.sampling import Generation, SamplingConfig
from mmldlm.errors import UsageError
from mmldlm.run.load import LoadedRun


def generate_texts(
    run: LoadedRun,
    config: SamplingConfig,
    generator: RandomSource,
    latents: Tensor,
    by_encoder: bool,
    count: int = 1,
    lengths: Sequence[int] | None = None,
    template: Sequence[int] | None = None,
    every_step: bool = False,
    prefixes: Sequence[Sequence[int]] | None = None,
) -> Generation:
    """Generate `count` texts of each of the standardized `latents` [n, M, C] on the host, see `generate_best`.

    With `by_encoder`, candidates are chosen by the cosine of their latent by the run's encoder, on its own scale, to
    the given one. It is loaded only where there is a choice, and a run whose encoder cannot be does without.
    """
    if config.search and by_encoder and run.chooser is None:
        raise UsageError(f"sampling.search: expected a run whose encoder can be loaded, found {config.search}")

    def fit(tokens: list[list[int]], repeated: Tensor) -> Tensor:
        encoder = run.chooser
        if encoder is None:
            return torch.full((len(tokens),), torch.nan)
        encoded = torch.from_numpy(encoder.encode(run.tokenizer.decode_batch(tokens)))
        given = torch.from_numpy(run.store.restore(repeated.cpu().numpy()))
        return torch.cosine_similarity(encoded.double(), given.double(), dim=-1).mean(-1)

    return generate_best(
        run.model,
        run.objective.text,
        run.objective.latent,
        config,
        generator,
        latents.to(run.device),
        run.store.manifest.max_length,
        count,
        lengths,
        fit if by_encoder else None,
        run.words,
        template,
        every_step,
        prefixes,
    )
