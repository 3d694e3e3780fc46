"""Groups of documents that must be in the same split: equal texts, or texts that differ in a word or its place."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

_MIN_WORDS = 4
# Identifiers and numbers: words with a digit or underscore, dotted names, camel case, and calls.
_NAME = re.compile(r"\S*(?:[0-9_]|\w\.\w|[a-z][A-Z]|\(\))\S*")
_WORD = re.compile(r"#|\w+")


def exact_groups(texts: Sequence[str]) -> list[str]:
    """Return a key for each text; texts that differ only in case and white space have the same key."""
    return [_digest(" ".join(text.casefold().split())) for text in texts]


def near_duplicate_groups(texts: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Group near-duplicates.

    Two texts are near-duplicates if their words are equal, or, with at least 4 words each, become equal once up to one
    word is removed from each: one is inserted, replaced or moved. Case and punctuation are ignored, and all numbers and
    identifiers count as the same word. Groups are the transitive closure.

    Returns:
        A key for each text, equal within a group, and statistics of the groups. A key is a function of the texts of
        its group, so it depends neither on the order of the texts nor on the other groups.
    """
    words = [_WORD.findall(_NAME.sub("#", text).casefold()) for text in texts]
    signatures, owners = _signatures(words)
    parents = np.arange(len(texts))

    def root(index: int) -> int:  # union-find with path halving
        while parents[index] != index:
            parents[index] = parents[parents[index]]
            index = int(parents[index])
        return index

    # Neighbors in sorted order with equal signatures are near-duplicates: no pair is compared by its words.
    order = np.argsort(signatures, kind="stable")
    same = np.flatnonzero(signatures[order][1:] == signatures[order][:-1])
    for first, second in zip(owners[order][same].tolist(), owners[order][same + 1].tolist(), strict=True):
        root_1, root_2 = root(first), root(second)
        parents[max(root_1, root_2)] = min(root_1, root_2)
    roots = [root(index) for index in range(len(texts))]
    keys: dict[int, str] = {}
    for index, key in zip(roots, exact_groups(texts), strict=True):
        # The smallest exact key names the group, which makes it independent of the order of the texts.
        keys[index] = min(keys.get(index, key), key)
    sizes = np.bincount(np.array(roots, np.int64), minlength=1)
    largest = int(sizes.argmax())
    statistics = {
        "method": "one-deletion",
        "documents": len(texts),
        "groups": int((sizes > 0).sum()),
        "largest_group": int(sizes[largest]),
        "largest_group_example": min((texts[i] for i, r in enumerate(roots) if r == largest), default=""),
    }
    return [keys[index] for index in roots], statistics


def _signatures(words: Sequence[Sequence[str]]) -> tuple[np.ndarray, np.ndarray]:
    """Return 64-bit signatures uint64 [n] of texts and of texts without one word, and their texts' indices int64 [n].

    The signature of a text is the sum over its words of (random number of the word) x (random odd number of the
    position), modulo 2^64. Without a word it is the sum of the words before it at their positions, and of those after
    it one position earlier. A chance collision among 10^6 signatures has probability 1e-7.
    """
    lengths = np.array([len(text) for text in words], np.int64)
    vocabulary: dict[str, int] = {}
    ids = np.array([vocabulary.setdefault(word, len(vocabulary)) for text in words for word in text], np.int64)
    random = np.random.Generator(np.random.PCG64(0))
    word_values = random.integers(0, 1 << 64, len(vocabulary), np.uint64)
    position_values = random.integers(0, 1 << 64, int(lengths.max(initial=0)) + 1, np.uint64) | np.uint64(1)
    owners = np.repeat(np.arange(len(words)), lengths)
    # The place of each word within its text, [all words].
    positions = np.arange(len(ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    # Sums up to each word over all texts. They wrap, so that differences of them are right modulo 2^64.
    sums, shifted_sums = (
        np.concatenate([[np.uint64(0)], np.cumsum(word_values[ids] * position_values[places], dtype=np.uint64)])
        for places in (positions, positions - 1)
    )
    stops = np.cumsum(lengths)
    starts, place = stops - lengths, np.arange(len(ids))
    full = sums[stops] - sums[starts]
    without_word = (sums[place] - sums[starts[owners]]) + (shifted_sums[stops[owners]] - shifted_sums[place + 1])
    # A short text equals others only as a whole.
    is_short = lengths < _MIN_WORDS
    full ^= np.where(is_short, position_values[-1], np.uint64(0))
    is_long = ~is_short[owners]
    return np.concatenate([full, without_word[is_long]]), np.concatenate([np.arange(len(words)), owners[is_long]])


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()
