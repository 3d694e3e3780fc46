"""Texts of latents by a run: generated, and chosen by the run's encoder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mmldlm.data.encoders import LatentEncoder
from mmldlm.diffusion.candidates import generate_best
from mmldlm.diffusion.noise import RandomSource
from mmldlm.diffusion.sampling import Generation, SamplingConfig
from mmldlm.errors import MmldlmError
from mmldlm.run.load import LoadedRun
from mmldlm.utils.printable import printable


def encoder_to_choose(run: LoadedRun) -> LatentEncoder | None:
    """Return the run's encoder; None, with a notice on stderr, if it cannot be loaded here."""
    try:
        return run.encoder
    except MmldlmError as error:
        print(printable(f"texts are chosen by their likelihood, without the encoder: {error}"), file=sys.stderr)
        return None


def generate_texts(
    run: LoadedRun,
    config: SamplingConfig,
    generator: RandomSource,
    latents: Tensor,
    encoder: LatentEncoder | None,
    count: int = 1,
    lengths: Sequence[int] | None = None,
    on_step: Callable[[Tensor, tuple[int, ...], float], None] | None = None,
    template: Tensor | None = None,
    every_step: bool = False,
) -> Generation:
    """Generate `count` texts of each of the standardized `latents` [n, M, C] on the host, see `generate_best`.

    Candidates are chosen by the cosine of their latent by the `encoder`, on its own scale, to the given one.
    """
    given = torch.from_numpy(run.store.restore(latents.numpy()))

    def fit(tokens: list[list[int]], repeated: Tensor) -> Tensor:
        assert encoder is not None
        encoded = torch.from_numpy(encoder.encode(run.tokenizer.decode_batch(tokens)))
        expected = given.repeat_interleave(len(repeated) // len(given), 0)
        return torch.cosine_similarity(encoded.double(), expected.double(), dim=-1).mean(-1)

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
        None if encoder is None else fit,
        run.words,
        on_step,
        template,
        every_step,
    )
