"""What figures and histograms show of a few held-out samples, as numbers: the same on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mmldlm.batch import Batch
from mmldlm.config import RunConfig
from mmldlm.data.loader import fixed_batches
from mmldlm.data.neighbours import directions
from mmldlm.data.shards import Store
from mmldlm.data.split import Split
from mmldlm.diffusion.noise import Mode, trained_modes
from mmldlm.diffusion.objective import Objective
from mmldlm.diffusion.sampling import generate
from mmldlm.evaluation.statistics import ranks_of_own
from mmldlm.validation import SEED, validation_ids

if TYPE_CHECKING:
    from mmldlm.runtime.engine import Runtime

AT_ONCE, TOKENS_AT_ONCE = 16, 2048  # samples and tokens of a forward pass: its logits are all there at once
MADE = 8  # latents from noise: with each of them a text is written, which is dear


@dataclass(frozen=True)
class Pictures:
    """Of n held-out samples, and of what the run makes of them in the modes that it trains.

    Latents are standardised, D = M x C numbers each.
    """

    tokens: list[np.ndarray]  # n of int64 [L]
    truth: np.ndarray  # float32 [n, D]: their latents
    found: np.ndarray | None  # float32 [n, D]: t2l, the latents found for the texts
    made: np.ndarray | None  # float32 [m, D]: joint, latents out of noise
    similarity: np.ndarray | None  # [n, n]: cosine of each found latent to each true one, on the encoder's scale
    likely_lengths: np.ndarray | None  # int64 [n]: l2t, the likeliest length given the latent
    hits: np.ndarray | None  # [2, longest]: l2t, by position the tokens guessed right from the latent alone, and all

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(tokens) for tokens in self.tokens])

    @property
    def quality(self) -> dict[str, float]:
        """Of these few samples; `validation.quality_every` measures what is generated from more, under other names."""
        values: dict[str, float] = {}
        if self.hits is not None:
            values["quality/figures_l2t_first_guess_accuracy"] = float(self.hits[0].sum() / self.hits[1].sum())
        if self.similarity is not None:
            own = self.similarity.diagonal()
            rank = ranks_of_own(self.similarity)
            values["quality/figures_t2l_cosine"] = float(own.mean())
            values["quality/figures_t2l_recall_at_1"] = float((rank <= 1).mean())
        return values


def pictures_due(step: int, config: RunConfig) -> bool:
    """Whether the validation after optimizer step `step` comes with pictures: a function of the step alone."""
    every = config.log.figures_every
    if not config.log.tensorboard or not every:
        return False
    before = (step - 1) // config.validation.every * config.validation.every  # the validation before this one
    return step == config.train.steps or step // every > before // every


def take_pictures(objective: Objective, store: Store, config: RunConfig, runtime: Runtime) -> Pictures:
    """Collective. Ranks share the samples out; each few have a seed of their own, so the result depends on no rank."""
    split = store.split("validation")
    ids = validation_ids(split, config.log.figure_samples)
    tokens, lengths, raw = split.gather(np.asarray(ids, np.int64))
    trained = trained_modes(config.mode, config.mode_schedule)
    taker = _Taker(objective, config, runtime, split)
    likely, hits = taker.guesses(ids, int(lengths.max())) if "l2t" in trained else (None, None)
    found = taker.latents("t2l", ids) if "t2l" in trained else None
    made = taker.latents("joint", ids[:MADE]) if "joint" in trained else None
    return Pictures(
        tokens=np.split(tokens, np.cumsum(lengths)[:-1]),
        truth=_flat(store.standardise(raw)),
        found=None if found is None else _flat(found),
        made=None if made is None else _flat(made),
        similarity=None if found is None else directions(store.restore(found)) @ directions(raw).T,
        likely_lengths=likely,
        hits=hits,
    )


class _Taker:
    """What a run makes of held-out samples."""

    def __init__(self, objective: Objective, config: RunConfig, runtime: Runtime, split: Split):
        self.objective, self.config, self.runtime, self.split = objective, config, runtime, split

    def guesses(self, ids: Sequence[int], longest: int) -> tuple[np.ndarray, np.ndarray]:
        """Collective: from latents alone, in one pass, the likeliest length of each sample [n] and, by position, how
        many of the likeliest tokens are the true ones, of how many [2, longest]."""
        numbers = torch.zeros(len(ids) + 2 * longest, dtype=torch.float64)
        likely, right, of = numbers.split([len(ids), longest, longest])
        for _, batch, counted in self.runtime.dealt(_few(self.split, ids)):
            lengths, hits = self._guess(batch)
            if counted:
                likely[batch.slots] = lengths.double()
                right.index_add_(0, batch.layout.position, hits.double())
                of.index_add_(0, batch.layout.position, torch.ones_like(hits, dtype=torch.float64))
        numbers = self.runtime.sum(numbers, "lengths and tokens of the figures")
        return numbers[: len(ids)].long().numpy(), numbers[len(ids) :].view(2, longest).numpy()

    def _guess(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The likeliest length [B], and whether the likeliest token is the true one [N]; on the host."""
        layout, device = batch.layout, self.runtime.device
        masked = torch.full((layout.num_tokens,), self.objective.text.mask_id, device=device)
        t_text = torch.ones(layout.num_samples, device=device)
        positions = torch.arange(layout.num_tokens, device=device)
        logits, _, lengths, *_ = self.runtime.forward_bare(
            masked, batch.latents.to(device), t_text, torch.zeros_like(t_text), layout.to(device), positions, None
        )
        return lengths.argmax(-1).cpu() + 1, logits.argmax(-1).cpu() == batch.tokens

    def latents(self, mode: Mode, ids: Sequence[int]) -> np.ndarray:
        """Collective: float32 [n, M, C], standardised, in the order of `ids`."""
        latent, sampling = self.split.manifest.latent, self.config.sampling
        found = torch.zeros(len(ids), latent.tokens, latent.channels, dtype=torch.float64)
        for number, batch, counted in self.runtime.dealt(_few(self.split, ids)):
            made = generate(
                self.runtime.forward_bare,
                self.objective.text,
                self.objective.latent,
                mode,
                sampling if mode == "t2l" else replace(sampling, guidance=1.0),
                torch.Generator().manual_seed(SEED + number),
                batch.latents.to(self.runtime.device),
                batch.lengths,
                batch.tokens,
            )
            if counted:
                found[batch.slots] = made.latents.double()
        return self.runtime.sum(found, "latents of the figures").float().numpy()


def _few(split: Split, ids: Sequence[int]) -> list[Batch]:
    """The samples in micro-batches whose sizes follow from the samples alone."""
    longest = int(split.lengths[np.asarray(ids, np.int64)].max())
    return list(fixed_batches(split, ids, max(1, min(AT_ONCE, TOKENS_AT_ONCE // longest))))


def _flat(latents: np.ndarray) -> np.ndarray:
    return latents.reshape(len(latents), -1)
