"""Search for the text of a latent: the tokens that fit it worst are masked and generated again.

The network proposes texts, and how well they fit decides. A text that is nearly right has a few wrong tokens, or one
too many or too few; those are likely the tokens without which the text fits best.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from mmldlm.diffusion.noise import RandomSource, SampleStreams, draw_uniform

# Of each text that a round generates: the share of tokens that is masked, and how many are added or left out.
PROPOSALS = ((0.2, 0), (0.35, 1), (0.35, -1), (0.5, 0))
PERFECT = 1 - 1e-6  # a text that fits so well is not changed

# Returns float64 [k], how well texts, given as tokens, fit the latents with the given numbers: at most 1.
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
    """Return a text of each of n latents that fits at least as well as the given one.

    Args:
        texts: n texts, as tokens.
        budget: How many texts are generated for each latent.
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
    """Return for each token of each text how much better the text fits without it."""
    shorter = [[*text[:place], *text[place + 1 :]] for text in texts for place in range(len(text))]
    owners = [number for number, text in zip(numbers, texts, strict=True) for _ in text]
    return list(fit(shorter, owners).nan_to_num(-1.0).split([len(text) for text in texts]))


def _template(
    text: list[int], gain: Tensor, uniform: Tensor, share: float, change: int, mask_id: int, max_length: int
) -> list[int]:
    """Return the text with a share of its tokens masked, drawn without replacement by their gain.

    A token is drawn the more often the more it gains, by the Gumbel-top-k trick (arXiv 1903.06059, section 3). `change`
    is 1 to add a mask after one of them, -1 to leave one out.
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
