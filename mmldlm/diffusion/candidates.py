"""Generate candidate texts of several lengths for each latent and keep the best.

The length head decides how long a text is, and a text of the wrong length is wrong: it has a word too many or too few.
So we try all lengths around the head's median.

Shape letters: n latents, B candidates of all latents, M latent tokens of a sample, C latent channels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmldlm.diffusion.noise import RandomSource, SampleStreams
from mmldlm.diffusion.sampling import Generation, Sampler, length_probabilities, median_lengths
from mmldlm.diffusion.search import PROPOSED, search

UNLIKELY = 0.01  # a length below this share of the most likely length's probability is tried only for several texts
# Returns how well each of B texts, given as tokens, fits its latent [B, M, C]: float64 [B], NaN if it cannot tell.
Fit = Callable[[list[list[int]], Tensor], Tensor]


@dataclass(frozen=True)
class TextRequest:
    """Texts to generate from n latents."""

    latents: Tensor  # [n, M, C], on the device
    max_length: int  # tokens of the longest text
    count: int = 1  # texts of each latent
    lengths: Sequence[int] | None = None  # tokens of each latent's texts. None: around the median of the length head
    template: Sequence[int] | None = None  # text to infill: only its [MASK] tokens are generated
    prefixes: Sequence[Sequence[int]] | None = None  # prefix of each latent's texts, see `Sampler.generate`


@dataclass(frozen=True)
class Candidates:
    """Texts generated for a request, several for each latent. The methods choose among them."""

    sampler: Sampler
    request: TextRequest
    made: Generation  # B texts
    owners: Tensor  # int64 [B], the latent of each
    unlikely: Tensor  # bool [B], whether its length is so unlikely that other candidates go first

    def best(self, fit: Fit | None = None, judges: Tensor | None = None) -> Generation:
        """Return the texts of each latent that fit it best, in order, best first. They differ if possible.

        Args:
            fit: Ranks the candidates. Without it, and for a latent with no candidate that it can judge, the likelihood
                of the tokens ranks them.
            judges: Latents [n, M, C] that the texts should fit in place of the request's.
        """
        latents, owners, scores = self.request.latents, self.owners, self.made.log_p
        if fit is not None and len(owners) > len(latents):
            judges = latents if judges is None else judges
            fitted = fit(self.made.split(), judges[owners.to(latents.device)])
            known = fitted.isfinite()
            judged = owners[known].bincount(minlength=len(latents)) > 0
            scores = torch.where(judged[owners], fitted.masked_fill(~known, -torch.inf), scores)
        return _best(self.made, owners, scores.masked_fill(self.unlikely, -torch.inf), self.request.count)

    def edited(self, made: Generation, fit: Fit, rounds: int) -> Generation:
        """Edit each latent's text, of a request without given lengths, by a search.

        A text that the search has changed has a `log_p` of NaN.
        """
        latents, prefixes, sampler, passes = self.request.latents, self.request.prefixes, self.sampler, made.passes
        mask_id = sampler.text.mask_id
        single_words = frozenset[int]()
        if sampler.words is not None and sampler.config.doubled_words == "avoid":
            single_words = frozenset(sampler.words.nonzero().flatten().tolist())

        def fit_of(texts: list[list[int]], numbers: Sequence[int]) -> Tensor:
            return fit(texts, latents[list(numbers)])

        def propose(templates: list[list[int]], numbers: Sequence[int]) -> list[list[int]]:
            nonlocal passes
            passes += len(templates)
            heads = [() if prefixes is None else prefixes[number] for number in numbers]
            whole = [[*head, *template] for head, template in zip(heads, templates, strict=True)]
            return sampler.likely_tokens(latents[list(numbers)], whole, PROPOSED)

        before = made.split()
        max_length, every_step = self.request.max_length, sampler.every_step
        found = search(before, rounds, fit_of, propose, mask_id, max_length, every_step, single_words)
        changed = torch.tensor([one != other for one, other in zip(before, found, strict=True)])
        log_p = made.log_p.masked_fill(changed, torch.nan)
        tokens = torch.tensor([token for each in found for token in each])
        return Generation(tokens, tuple(map(len, found)), made.latents, log_p, passes)


def generate_candidates(sampler: Sampler, generator: RandomSource, request: TextRequest) -> Candidates:
    """Generate `config.tried_lengths` candidates for each text of a request.

    If no temperature is set, the candidates of a single text have the most likely tokens, and those of several texts
    are drawn at random.
    """
    latents, count, lengths, max_length = request.latents, request.count, request.lengths, request.max_length
    mask_id, config = sampler.text.mask_id, sampler.config
    config = replace(config, temperature=config.resolve_temperature("l2t", latents.shape[1], count))
    sampler = replace(sampler, config=config)
    if lengths is None:
        p = length_probabilities(sampler.model, mask_id, latents, 0.0)
        tried = lengths_around(median_lengths(p), config.tried_lengths, max_length)
        unlikely = p.gather(1, tried - 1) < UNLIKELY * p.amax(1, keepdim=True)
        unlikely[:, 0] = False
    else:
        tried = torch.tensor(lengths)[:, None]
        unlikely = torch.zeros_like(tried, dtype=torch.bool)
    draws = count
    if tried.shape[1] < config.tried_lengths and count > 1:
        draws = -(-count * config.tried_lengths // tried.shape[1])  # as many candidates where there are fewer lengths
    per_latent = draws * tried.shape[1]
    unlikely = unlikely.repeat(1, draws).flatten()
    # Several texts of a latent may need the unlikely lengths, to be different.
    rows = (torch.ones_like(unlikely) if count > 1 else ~unlikely).nonzero().squeeze(1)
    each_length = tried.repeat(1, draws).flatten()
    rows = rows[each_length[rows].argsort(stable=True)]  # attention on a CPU takes texts of equal length together
    owners = rows // per_latent
    streams: RandomSource = generator
    if isinstance(generator, SampleStreams):
        streams = generator.repeat(per_latent).take(rows.tolist())
    prefixes = request.prefixes or [()] * len(latents)
    start = [
        [*prefixes[owner], *(request.template or [mask_id] * length)]
        for owner, length in zip(owners.tolist(), each_length[rows].tolist(), strict=True)
    ]
    made = sampler.generate("l2t", streams, latents[owners.to(latents.device)], start)
    return Candidates(sampler, request, made, owners, unlikely[rows])


def _best(made: Generation, owners: Tensor, scores: Tensor, count: int) -> Generation:
    """Return the `count` texts of each latent with the best `scores` [B], different ones first.

    `owners`, int64 [B], has the latent of each text. Each of the n latents has texts.
    """
    tokens, order = made.split(), scores.argsort(descending=True, stable=True)
    kept: list[int] = []
    for part in order[owners[order].argsort(stable=True)].split(owners.bincount().tolist()):
        ranked, different = part.tolist(), dict[tuple[int, ...], int]()
        for index in ranked:
            different.setdefault(tuple(tokens[index]), index)
        best = list(different.values())
        kept += [*best, *(index for index in ranked if index not in best)][:count]
    chosen = [tokens[index] for index in kept]
    best_tokens = torch.tensor([token for text in chosen for token in text])
    return Generation(best_tokens, tuple(map(len, chosen)), made.latents[kept], made.log_p[kept], made.passes)


def lengths_around(medians: Tensor, count: int, max_length: int) -> Tensor:
    """Return the lengths nearest to each of `medians` [n], nearest first, int64 [n, `count`], or fewer."""
    distance = (torch.arange(1, max_length + 1) - medians[:, None]).abs()
    return distance.argsort(dim=1, stable=True)[:, :count] + 1
