"""How well texts fit the latents that they are generated from, by the encoder of a run."""

from __future__ import annotations

import torch
from torch import Tensor

from mmldlm.diffusion.candidates import Fit
from mmldlm.errors import UsageError
from mmldlm.run.load import LoadedRun


def fit_of(run: LoadedRun, search: int | None) -> Fit:
    """Return how well texts fit latents: the cosine of their latent by the run's encoder, on its own scale.

    The encoder is loaded only where there is a choice, and a run whose encoder cannot be loaded does without, unless
    its texts are improved by a `search` of so many passes (`SamplingConfig.search`): that is a `UsageError`.
    """
    if search and run.chooser is None:
        raise UsageError(f"sampling.search: expected a run whose encoder can be loaded, found {search}")

    def fit(tokens: list[list[int]], latents: Tensor) -> Tensor:
        encoder = run.chooser
        if encoder is None:
            return torch.full((len(tokens),), torch.nan)
        encoded = torch.from_numpy(encoder.encode(run.tokenizer.decode_batch(tokens)))
        given = torch.from_numpy(run.store.restore(latents.cpu().numpy()))
        return torch.cosine_similarity(encoded.double(), given.double(), dim=-1).mean(-1)

    return fit
