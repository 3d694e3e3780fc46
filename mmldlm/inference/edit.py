"""`--edit "text with [a span] to rewrite"`: build the template that `generate.sample` fills in."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mmldlm.errors import DataError, UsageError
from mmldlm.loading.load import LoadedRun


@dataclass(frozen=True)
class SpanEdit:
    """A text, and the range of characters [start, stop) to regenerate."""

    text: str
    start: int
    stop: int

    @classmethod
    def parse(cls, marked: str) -> SpanEdit:
        r"""Parse a text with one [span] in brackets. `\[`, `\]` and `\\` are literal, like any other backslash.

        Raises:
            UsageError: There is not exactly one span.
        """
        text, marks = "", []
        for piece in re.findall(r"\\[][\\]|.", marked, re.DOTALL):  # an escaped character, or any other
            if piece in "[]":
                marks.append((piece, len(text)))
            else:
                text += piece[-1]
        if [mark for mark, _ in marks] != ["[", "]"]:
            brackets = " ".join(mark for mark, _ in marks) or "no brackets"
            raise UsageError(
                f"--edit: expected one [span] to rewrite, found {brackets}; brackets of the text are \\[ and \\]"
            )
        return cls(text, marks[0][1], marks[1][1])


def mask_span(run: LoadedRun, span_edit: SpanEdit, span_length: int | None) -> list[int]:
    """Tokenize the text and replace the tokens that the span touches by `span_length`, or equally many, [MASK] tokens.

    Whole tokens are replaced. If the tokenizer joins a space to the following word, that space is replaced, too.

    Raises:
        UsageError: The span is empty and has no length.
        DataError: The result is longer than any text of the run.
    """
    text, start, stop = span_edit.text, span_edit.start, span_edit.stop
    ids, offsets = run.tokenizer.encode_with_offsets(text)
    # An empty span inside a token also touches that token.
    touched = [index for index, (a, b) in enumerate(offsets) if a < stop and b > start]
    if touched:
        first, end = touched[0], touched[-1] + 1
    else:  # an empty span between tokens: insert after each token with visible text before it
        first = sum(bool(text[a : min(b, start)].strip()) for a, b in offsets)
        end = first
    length = span_length or end - first
    if not length:
        raise UsageError("--edit: the [span] is empty, expected --span-length tokens to generate there")
    template = [*ids[:first], *[run.tokenizer.mask_id] * length, *ids[end:]]
    max_length = run.store.manifest.max_length
    if len(template) > max_length:
        raise DataError(f"--edit: expected at most {max_length} tokens with the span, found {len(template)}")
    return template
