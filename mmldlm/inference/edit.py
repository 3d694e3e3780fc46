"""`--edit "text with [a span] to rewrite"`: write a part of a text anew, given the rest and a latent.

Shape letters: n latents, M latent tokens of a sample, C latent channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mmldlm.diffusion.sampling import Generation, SamplingConfig
from mmldlm.errors import DataError, UsageError
from mmldlm.inference.generate import Watch, check_guidance, produce
from mmldlm.run.load import LoadedRun

_ESCAPED = "[]\\"


@dataclass(frozen=True)
class Marked:
    """A text, and the characters [start, stop) of it that are to be written anew."""

    text: str
    start: int
    stop: int

    @classmethod
    def read(cls, marked: str) -> Marked:
        r"""Of a text with one [span] in brackets; `\[`, `\]` and `\\` are the characters themselves.

        Any other backslash is one too. `UsageError` where there is not exactly one span.
        """
        text, marks = "", []
        letters = iter(marked)
        for letter in letters:
            if letter == "\\":
                following = next(letters, "")
                text += following if following and following in _ESCAPED else letter + following
            elif letter in "[]":
                marks.append((letter, len(text)))
            else:
                text += letter
        if [mark for mark, _ in marks] != ["[", "]"]:
            found = " ".join(mark for mark, _ in marks) or "no brackets"
            raise UsageError(
                f"--edit: expected one [span] to rewrite, found {found}; brackets of the text are \\[ and \\]"
            )
        return cls(text, marks[0][1], marks[1][1])


def blanked(run: LoadedRun, marked: Marked, span_length: int | None) -> list[int]:
    """Tokens of the text, of which all that the span touches are replaced by `span_length` [MASK], or as many.

    Whole tokens: a tokenizer that writes a space with the word behind it lets go of that space too. `UsageError` where
    the span is empty and `span_length` does not say how much to write there, `DataError` where the run has seen no text
    as long.
    """
    ids, places = run.tokenizer.encode_with_places(marked.text)
    touched = [index for index, (a, b) in enumerate(places) if a < marked.stop and b > marked.start]
    if touched:
        first, behind = touched[0], touched[-1] + 1
    else:  # behind every token that has begun before, with more than white space
        first = sum(bool(marked.text[a : min(b, marked.start)].strip()) for a, b in places)
        behind = first
    length = span_length or behind - first
    if not length:
        raise UsageError("--edit: the [span] is empty, expected --span-length tokens to write there")
    row, longest = [*ids[:first], *[run.tokenizer.mask_id] * length, *ids[behind:]], run.store.manifest.max_length
    if len(row) > longest:
        raise DataError(f"--edit: expected at most {longest} tokens with the span, found {len(row)}")
    return row


def edit(
    run: LoadedRun,
    config: SamplingConfig,
    seed: int,
    row: list[int],
    raw_latents: np.ndarray,
    count: int = 1,
    watch: Watch | None = None,
) -> tuple[Generation, list[str]]:
    """`count` versions of `row`, tokens and [MASK] in their places, for each latent [n, M, C] on the encoder's scale.

    The tokens are the same in every step and in the result.
    """
    check_guidance(run, "l2t", config)
    latents = torch.from_numpy(run.store.standardize(raw_latents)).repeat_interleave(count, 0)
    lengths, kept = (len(row),) * len(latents), torch.tensor(row * len(latents))
    generator = torch.Generator().manual_seed(seed)
    return produce(run, "l2t", config, generator, latents, lengths, kept=kept, watch=watch)
