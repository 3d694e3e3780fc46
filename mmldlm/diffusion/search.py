"""Search for the text of a latent: mask the tokens that fit the latent worst, and generate them again.

The network proposes texts, and we keep the text that fits best. A text that is nearly right has a few wrong tokens, or
one too many or too few. If the text fits better without a token, that token is probably wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from mmldlm.diffusion.noise import RandomSource, SampleStreams, draw_uniform

# A round generates one text for each entry: the share of tokens to mask, and how many tokens to add or leave out.
PROPOSALS = ((0.2, 0), (0.35, 1), (0.35, -1), (0.5, 0))
PERFECT = 1 - 1e-6  # the search leaves a text alone if its fit is at least this

# Returns float64 [k], at most 1: how well texts, given as tokens, fit the latents with the given numbers.
Fit = Callable[[list[list[int]], Sequence[int]], Tensor]
# Returns k texts with their [MASK] tokens filled in, for the latents with the given numbers.
FillIn = Callable[[list[list[int]], Sequence[int], RandomSource], list[list[int]]]


def search(
    texts: Sequence[list[int]],
    budget: int,
    fit: Fit,
    fill_in: FillIn,
    mask_id: int,
    max_length: int,
    generator: RandomSource,
    every_round: bool = False,
) -> list[list[int]]:
    """Return a text for each of n latents that fits at least as well as the given text.

    Args:
        texts: n texts, as tokens.
        budget: How many texts to generate for each latent.
        max_length: Tokens of the longest text.
        every_round: Generate also for latents that have a perfect text.
    """
    best, count = list(texts), len(PROPOSALS)
    scores = fit(best, range(len(best))).nan_to_num(-1.0).tolist()
    streams = generator.repeat(count) if isinstance(generator, SampleStreams) else generator
    for done in range(0, budget, count):
        numbers = [number for number, score in enumerate(scores) if score < PERFECT or every_round]
        if not numbers:
            break
        width = min(count, budget - done)
        owners = [number for number in numbers for _ in range(width)]
        source = streams
        if isinstance(streams, SampleStreams):
            source = streams.take([number * count + child for number in numbers for child in range(width)])
        uniforms = draw_uniform(source, 1, [max_length] * len(owners)).view(len(numbers), -1, max_length)
        gains = _gains([best[number] for number in numbers], numbers, fit)
        templates = [
            _template(best[number], gain, uniform, *proposal, mask_id, max_length)
            for number, gain, drawn in zip(numbers, gains, uniforms, strict=True)
            for uniform, proposal in zip(drawn, PROPOSALS[:width], strict=True)
        ]
        made = fill_in(templates, owners, source)
        for number, text, score in zip(owners, made, fit(made, owners).tolist(), strict=True):
            if score > scores[number]:
                best[number], scores[number] = text, score
    return best


def _gains(texts: Sequence[list[int]], numbers: Sequence[int], fit: Fit) -> list[Tensor]:
    """Return, for each token of each text, how much better the text fits without the token."""
    shorter = [[*text[:place], *text[place + 1 :]] for text in texts for place in range(len(text))]
    owners = [number for number, text in zip(numbers, texts, strict=True) for _ in text]
    return list(fit(shorter, owners).nan_to_num(-1.0).split([len(text) for text in texts]))


def _template(
    text: list[int], gain: Tensor, uniform: Tensor, share: float, change: int, mask_id: int, max_length: int
) -> list[int]:
    """Return the text with a share of its tokens masked.

    The masked tokens are drawn without replacement. A token with a larger gain is drawn more often (Gumbel-top-k trick,
    arXiv 1903.06059, section 3). `change` is 1 to add a mask after one of them, and -1 to leave one of them out.
    """
    scale = gain.std(correction=0).clamp_min(1e-9)
    keys = (gain - gain.mean()) / scale - (-uniform[: len(text)].clamp(1e-12, 1 - 1e-12).log()).log()
    masked = keys.argsort(descending=True)[: max(1 + (change < 0), round(share * len(text)))].tolist()
    template = list(text)
    for place in masked:
        template[place] = mask_id
    if change > 0 and len(text) < max_length:
        template.insert(masked[0] + 1, mask_id)
    elif change < 0 and len(masked) > 1:
        del template[masked[0]]
    return template
