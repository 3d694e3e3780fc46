"""Decoding of texts: which tokens a reverse step unmasks, and how a token is drawn from the network's logits.

For ancestral decoding the host computes all steps in advance, since they depend on lengths and random numbers alone.
Decoding by confidence reads after each step which tokens are still masked, and waits for the device.

Shape letters: F tokens to generate (a row is an index into them), P tokens that a step predicts, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from mmldlm.batch import PackedLayout
from mmldlm.diffusion.masked import MaskedDiffusion

TextDecoding = Literal["ancestral", "confidence"]
EXCLUDED_LOGIT = -1e9  # gives a token probability zero, as in the text head
CHUNK_ROWS = 256  # rows of probabilities in memory at a time


class AncestralDecoder:
    """Unmasks each masked token with the probability of the reverse process, and masks others again (ReMDM).

    Args:
        times: Noise times from 1 to 0, with one step between each two.
        uniforms: float64 [steps, F] in [0, 1), on the host.
        remask: Fraction of the maximal remasking rate.
    """

    def __init__(
        self, text: MaskedDiffusion, times: Sequence[float], uniforms: Tensor, remask: float, device: torch.device
    ):
        self._mask_id = text.mask_id
        is_masked = torch.ones(uniforms.shape[1], dtype=torch.bool)
        unmasked, remasked, remainders = [], [], []
        for uniform, (t, s) in zip(uniforms, pairwise(times), strict=True):
            p_unmask, p_remask = text.unmask_probability(t, s, remask)
            # One number serves both rules, since a token is either masked or not. At s = 0 no token stays masked.
            unmask, mask_again = is_masked & (uniform < p_unmask), ~is_masked & (uniform < p_remask)
            is_masked = is_masked ^ unmask ^ mask_again
            unmasked.append(unmask.nonzero().squeeze(1))
            remasked.append(mask_again.nonzero().squeeze(1))
            # Given that a number is below the probability p of unmasking, number / p is again uniform in [0, 1).
            remainders.append(uniform[unmask] / p_unmask)
        self._unmasked, self._remasked = _copy_to(device, unmasked), _copy_to(device, remasked)
        self._uniforms = _copy_to(device, remainders)

    def rows(self, step: int, tokens: Tensor) -> Tensor:
        """Return the rows of the tokens [F] that the network predicts in `step`, int64 [P], ascending."""
        return self._unmasked[step]

    def uniforms(self, step: int, rows: Tensor) -> Tensor:
        """Return the numbers from which the tokens of `rows` are drawn, float64 [P]."""
        return self._uniforms[step]

    def update(self, step: int, tokens: Tensor, rows: Tensor, drawn: Tensor, confidence: Tensor) -> Tensor:
        """Return the tokens [F] after `step`, given the tokens `drawn` [P] for `rows` and their log probabilities."""
        return tokens.index_copy(0, rows, drawn).index_fill(0, self._remasked[step], self._mask_id)


class ConfidenceDecoder:
    """Predicts all masked tokens and unmasks the most confident ones (MaskGIT, arXiv 2202.04200, section 3.2).

    After the step to time s, at most round(s L) tokens of a sample of length L are masked. With `commit`, a step also
    unmasks all tokens with a larger probability than `commit` (the threshold of Fast-dLLM, arXiv 2505.22618, section
    3.3), and in any case one token of each sample.

    Args:
        times, uniforms: See `AncestralDecoder`, whose methods it has.
        layout: Samples of the F tokens, on the device of the tokens.
        commit: A probability, or None to unmask no more tokens than the times ask for.
    """

    def __init__(
        self,
        text: MaskedDiffusion,
        times: Sequence[float],
        uniforms: Tensor,
        layout: PackedLayout,
        commit: float | None,
    ):
        self._mask_id, self._times, self._layout, self._commit = text.mask_id, times, layout, commit
        self._uniforms, self._lengths = uniforms.to(layout.device), torch.tensor(layout.lengths, device=layout.device)

    def rows(self, step: int, tokens: Tensor) -> Tensor:
        return (tokens == self._mask_id).nonzero().squeeze(1)

    def uniforms(self, step: int, rows: Tensor) -> Tensor:
        return self._uniforms[step, rows]

    def update(self, step: int, tokens: Tensor, rows: Tensor, drawn: Tensor, confidence: Tensor) -> Tensor:
        sample = self._layout.sample_of_token[rows]
        masked = sample.bincount(minlength=len(self._lengths))
        surplus = masked - (self._times[step + 1] * self._lengths.double()).round().long()
        chosen = torch.zeros_like(sample, dtype=torch.bool)
        if self._commit is not None:
            surplus, chosen = surplus.clamp_min(1), confidence > math.log(self._commit)
        # Magnitudes of float32 are in the order of their bits, and log probabilities are never positive.
        bits = confidence.float().abs().view(torch.int32)
        order = ((sample << 32) | bits).argsort(stable=True)  # by sample, the most confident tokens first
        rank = torch.arange(len(rows), device=rows.device) - (masked.cumsum(0) - masked)[sample]
        chosen[order] |= rank < surplus[sample]
        return tokens.index_copy(0, rows[chosen], drawn[chosen])


def _copy_to(device: torch.device, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Copy `parts` to the device in one piece, without waiting for a GPU."""
    joined = torch.cat(list(parts))
    if device.type == "cuda":
        joined = joined.pin_memory()
    return joined.to(device, non_blocking=True).split([len(part) for part in parts])


def token_probabilities(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    """Return the probabilities, float64 [P, V], at a temperature, of the smallest set of tokens with mass `top_p`.

    The truncation is nucleus sampling (arXiv 1904.09751). At temperature 0 `draw_tokens` takes the most likely token,
    and confidence-based decoding needs its probability at temperature 1, so this function returns that.
    """
    scaled = logits.double() if temperature in (0, 1) else logits.double() / temperature
    p = scaled.softmax(-1)
    if top_p >= 1:
        return p
    sorted_p, index = p.sort(-1, descending=True)
    # Mass before a token, not including it: the first token always stays.
    removed = sorted_p.cumsum(-1) - sorted_p >= top_p
    p = p.masked_fill(torch.zeros_like(removed).scatter(-1, index, removed), 0.0)
    return p / p.sum(-1, keepdim=True)


def without_neighbors(logits: Tensor, tokens: Tensor, positions: Tensor, layout: PackedLayout, words: Tensor) -> Tensor:
    """Forbid, at each position, the words already standing next to it. Returns logits [P, V].

    A network that predicts each position by itself tends to write a word twice: it expects the word at both places.

    Args:
        tokens: The current tokens [N].
        positions: Places of the rows in `tokens`, int64 [P].
        words: bool [V], True for tokens that are words.
    """
    for offset in (-1, 1):
        beside = (positions + offset).clamp(0, len(tokens) - 1)
        found = tokens[beside]
        same_text = layout.sample_of_token[beside] == layout.sample_of_token[positions]
        excluded = (words[found] & same_text & (beside != positions)).unsqueeze(1)
        column = found.unsqueeze(1)
        logits = logits.scatter(1, column, logits.gather(1, column).masked_fill(excluded, EXCLUDED_LOGIT))
    return logits


def has_doubled_word(text: Sequence[int], words: Set[int]) -> bool:
    """Return whether one of these tokens stands next to itself in the text."""
    return any(a == b and a in words for a, b in pairwise(text))


def hold_back_doubles(
    confidence: Tensor, drawn: Tensor, positions: Tensor, layout: PackedLayout, words: Tensor
) -> Tensor:
    """If one step draws the same word twice side by side, postpone the less likely one. Returns `confidence` [P].

    Neither of the two draws saw the other. The postponed position stays masked until a later step, which sees its
    neighbor, unless this step unmasks all tokens. `drawn` are the tokens drawn at `positions`, int64 [P].
    """
    equal = (positions.diff() == 1) & (layout.sample_of_token[positions].diff() == 0)
    equal &= (drawn.diff() == 0) & words[drawn[1:]]
    second = confidence.diff() <= 0
    none = equal.new_zeros(1)
    less_likely = torch.cat([none, equal & second]) | torch.cat([equal & ~second, none])
    return confidence.masked_fill(less_likely, -torch.inf)


def draw_tokens(logits: Tensor, uniforms: Tensor, temperature: float, top_p: float) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting the cumulated probabilities, or take the most likely one at temperature 0.

    We compute in float64, since lower precision truncates the tails, which lowers the effective temperature (arXiv
    2409.02908). For equal logits [P, V] a number gives the same token on every device, unless it is within rounding
    (about 1e-15) of the boundary between two tokens.

    `uniforms` are numbers in [0, 1), float64 [P]. Return token ids [P] and their log probabilities, float64 [P].
    """
    chunks = zip(logits.split(CHUNK_ROWS), uniforms.split(CHUNK_ROWS), strict=True)
    drawn, log_p = zip(*(_draw(*chunk, temperature, top_p) for chunk in chunks), strict=True)
    return torch.cat(drawn), torch.cat(log_p)


def _draw(logits: Tensor, uniforms: Tensor, temperature: float, top_p: float) -> tuple[Tensor, Tensor]:
    if temperature == 0 and top_p >= 1:  # no number is drawn, so float32 is enough
        best, drawn = logits.float().max(-1)
        return drawn, (best - logits.float().logsumexp(-1)).clamp_max(0.0).double()
    p = token_probabilities(logits, temperature, top_p)
    if temperature == 0:
        drawn = logits.argmax(-1)
    else:
        mass = p.cumsum(-1)
        # right=True passes over tokens with probability 0. A row of NaN has no mass, so its index needs a bound.
        drawn = torch.searchsorted(mass, uniforms[:, None] * mass[:, -1:], right=True).squeeze(1)
        drawn = drawn.clamp_max(p.shape[-1] - 1)
    return drawn, p.gather(1, drawn[:, None]).squeeze(1).log()
