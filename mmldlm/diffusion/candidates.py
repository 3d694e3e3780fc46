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
    judged_by: Tensor | None = None  # the latents [n, M, C] that the texts should fit, by default `latents`


def generate_best(
    sampler: Sampler, generator: RandomSource, request: TextRequest, fit: Fit | None = None, rounds: int = 0
) -> Generation:
    """Generate the texts of a request. The texts of a latent are in order, best first, and differ if possible.

    We generate `config.tried_lengths` candidates for each text. If no temperature is set, a single text takes the most
    likely tokens, and several texts are drawn at random. A search then improves the text of a latent that has one text
    of no given length. A text that the search has changed has a `log_p` of NaN.

    Args:
        fit: Ranks the candidates. Without it, and for a latent with no candidate that it can judge, the likelihood of
            the tokens ranks them.
        rounds: Rounds of the search, which needs `fit`.
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
    scores = made.log_p
    if fit is not None and per_latent > 1:
        judges = latents if request.judged_by is None else request.judged_by
        fitted = fit(made.split(), judges[owners.to(latents.device)])
        known = fitted.isfinite()
        judged = owners[known].bincount(minlength=len(latents)) > 0
        scores = torch.where(judged[owners], fitted.masked_fill(~known, -torch.inf), scores)
    made = _best(made, owners, scores.masked_fill(unlikely[rows], -torch.inf), count)  # also back in order
    if fit is None or rounds == 0 or count > 1 or lengths is not None:
        return made
    judge, passes = fit, made.passes

    def score(texts: list[list[int]], numbers: Sequence[int]) -> Tensor:
        return judge(texts, latents[list(numbers)])

    def propose(templates: list[list[int]], numbers: Sequence[int]) -> list[list[int]]:
        nonlocal passes
        passes += len(templates)
        whole = [[*prefixes[number], *each] for number, each in zip(numbers, templates, strict=True)]
        return sampler.likely_tokens(latents[list(numbers)], whole, PROPOSED)

    before = made.split()
    found = search(before, rounds, score, propose, mask_id, max_length, sampler.every_step)
    changed = torch.tensor([one != other for one, other in zip(before, found, strict=True)])
    log_p = made.log_p.masked_fill(changed, torch.nan)
    tokens = torch.tensor([token for each in found for token in each])
    return Generation(tokens, tuple(map(len, found)), made.latents, log_p, passes)


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
