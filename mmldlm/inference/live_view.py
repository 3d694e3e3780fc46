"""`--watch`: the texts as they are generated, redrawn in place in a terminal and line by line elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TextIO

from mmldlm.data.tokenizer import MASK, Tokenizer
from mmldlm.utils.printable import printable


class LiveView:
    """A `StepCallback` that draws on `stream`. `close` clears the drawing in a terminal; lines elsewhere stay."""

    def __init__(self, tokenizer: Tokenizer, stream: TextIO | None = None, pause_s: float = 0.06):
        from rich.console import Console  # here, as sampling from a bundle does without
        from rich.live import Live

        self._tokenizer, self._stream, self._pause_s = tokenizer, stream or sys.stdout, pause_s
        console = Console(file=self._stream)
        self._live = None
        if self._stream.isatty() and console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(
                console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
            )
            self._live.start()
        self._block = "░" if (self._stream.encoding or "").lower().startswith("utf") else "_"

    def __call__(self, t: float, samples: Sequence[Sequence[int]]) -> None:
        from rich.console import Group
        from rich.padding import Padding
        from rich.text import Text

        texts = [self.text(ids) for ids in samples]
        if self._live is None:
            for index, text in enumerate(texts):
                number = f"[{index + 1}] " if len(texts) > 1 else ""
                print(f"t {t:.3f}  {number}{text}", file=self._stream, flush=True)
            return
        indented = (Padding(Text(text, overflow="fold"), (0, 0, 0, 2)) for text in texts)
        self._live.update(Group(Text(f"t {t:.3f}"), *indented), refresh=True)
        time.sleep(self._pause_s)  # a small model is too fast to read along

    def text(self, ids: Sequence[int]) -> str:
        """Return tokens as one line, with a block for each [MASK]; characters that are not printable are escaped."""
        (text,) = self._tokenizer.decode_batch([ids], keep_special=True)
        if self._tokenizer.mask_id in ids:  # otherwise [MASK] is part of the text
            text = text.replace(MASK, self._block)
        return printable(text)

    def close(self) -> None:
        """Clear the last drawing from a terminal."""
        if self._live is not None:
            self._live.update("")  # `stop` draws the last frame in full, even where the screen has no room for it
            self._live.stop()
