"""How well generated texts fit their latents, by the encoder of a run."""

from __future__ import annotations

import torch
from torch import Tensor

from mmldlm.diffusion.candidates import Fit
from mmldlm.errors import UsageError
from mmldlm.run.load import LoadedRun


def fit_of(run: LoadedRun, search: int | None) -> Fit:
    """Return a function that compares texts with latents: the cosine of the text's latent by the run's encoder.

    The function loads the encoder when it is first called. If the encoder cannot be loaded, all fits are NaN.

    Args:
        search: `SamplingConfig.search`.

    Raises:
        UsageError: `search` is set, but the encoder cannot be loaded.
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
