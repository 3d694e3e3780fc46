"""A large synthetic corpus."""

from __future__ import annotations

from pathlib import Path

import numpy as np

WORDS = 50_000
_CONSONANTS, _VOWELS = "bcdfghklmnprstvz", "aeiou"
_AT_ONCE = 10_000  # documents of one random state


def vocabulary(size: int = WORDS) -> np.ndarray:
    """Return `size` different words, the most frequent and shortest first."""
    syllables = [first + vowel for first in _CONSONANTS for vowel in _VOWELS]
    words = []
    for number in range(size):
        word, left = "", number
        while True:
            left, syllable = divmod(left, len(syllables))
            word += syllables[syllable]
            if not left:
                break
        words.append(word)
    return np.array(words, object)


def write_synthetic_corpus(path: Path, documents: int, words: tuple[int, int] = (52, 112), seed: int = 0) -> Path:
    """Write one document per line, of `range(*words)` words; a larger corpus begins with a smaller one."""
    spelled = vocabulary()
    share = np.cumsum(1 / np.arange(1, len(spelled) + 1))
    share /= share[-1]
    with path.open("w", encoding="ascii") as file:
        for start in range(0, documents, _AT_ONCE):
            draw = np.random.default_rng([seed, start])
            lengths = draw.integers(*words, _AT_ONCE)
            drawn = spelled[np.searchsorted(share, draw.random(int(lengths.sum())))].tolist()
            ends = np.cumsum(lengths).tolist()
            for begin, end in list(zip([0, *ends], ends, strict=False))[: documents - start]:
                file.write(" ".join(drawn[begin:end]) + "\n")
    return path
