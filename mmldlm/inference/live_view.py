"""`--watch`: the texts as they are generated, redrawn in place in a terminal and line by line elsewhere."""

from __future__ import annotations

import os
import sys
import time
import unicodedata
from collections.abc import Iterator, Sequence
from typing import TextIO

from mmldlm.data.tokenizer import MASK, Tokenizer
from mmldlm.utils.printable import printable

PAUSE_S = 0.06  # minimum time per step in a terminal: a small model is too fast to read along
_UP_AND_CLEAR = "\x1b[{}F\x1b[J"  # move to the start of the line {} lines up, and clear everything below


class LiveView:
    """A `StepCallback` that draws on `stream`. `close` clears the drawing in a terminal; lines elsewhere stay."""

    def __init__(self, tokenizer: Tokenizer, stream: TextIO | None = None, pause_s: float = PAUSE_S):
        self._tokenizer, self._stream, self._pause_s = tokenizer, stream or sys.stdout, pause_s
        self._in_place = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._block = "░" if _can_write("░", self._stream) else "_"
        self._drawn_lines = 0

    def __call__(self, t: float, samples: Sequence[Sequence[int]]) -> None:
        texts = [self.text(ids) for ids in samples]
        if not self._in_place:
            for index, text in enumerate(texts):
                number = f"[{index + 1}] " if len(texts) > 1 else ""
                print(f"t {t:.3f}  {number}{text}", file=self._stream, flush=True)
            return
        columns, rows = self._terminal_size()
        lines = [f"t {t:.3f}"]
        for text in texts:
            # Two columns are the indent; after the last one many terminals wrap.
            lines += _wrap(text, columns - 3)
        if len(lines) > rows - 1:  # lines that scrolled off the top cannot be redrawn
            lines = [*lines[: rows - 2], "..."]
        self.close()
        self._stream.write("".join(f"{line}\n" for line in lines))
        self._stream.flush()
        self._drawn_lines = len(lines)
        time.sleep(self._pause_s)

    def text(self, ids: Sequence[int]) -> str:
        """Return tokens as one line, with a block for each [MASK]; characters that are not printable are escaped."""
        (text,) = self._tokenizer.decode_batch([ids], keep_special=True)
        if self._tokenizer.mask_id in ids:  # otherwise [MASK] is part of the text
            text = text.replace(MASK, self._block)
        return printable(text)

    def close(self) -> None:
        """Clear the last drawing from a terminal."""
        if self._drawn_lines:
            self._stream.write(_UP_AND_CLEAR.format(self._drawn_lines))
            self._stream.flush()
            self._drawn_lines = 0

    def _terminal_size(self) -> tuple[int, int]:
        """Return columns and rows of the terminal."""
        try:
            columns, rows = os.get_terminal_size(self._stream.fileno())
        except OSError:
            columns, rows = 0, 0
        return columns or 80, rows or 24


def _wrap(text: str, columns: int) -> Iterator[str]:
    """Yield lines of at most `columns` columns, indented by two more."""
    line, used = "", 0
    for letter in text:
        width = _columns(letter)
        if line and used + width > max(columns, 1):
            yield f"  {line}"
            line, used = "", 0
        line, used = line + letter, used + width
    yield f"  {line}"


def _columns(letter: str) -> int:
    """Return the number of terminal columns of a character."""
    if unicodedata.combining(letter):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1


def _can_write(text: str, stream: TextIO) -> bool:
    try:
        text.encode(stream.encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return False
    return True
