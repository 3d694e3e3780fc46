"""Which documents must lie on one side of the split: the same text, or the same but for a name."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

_MIN_WORDS = 4
# Words that name things rather than say something: numbers, dotted or underscored or camel-cased
# names, and whatever is quoted or called.
_NAME = re.compile(r"\S*(?:[0-9_]|\w\.\w|[a-z][A-Z]|\(\))\S*")
_WORD = re.compile(r"#|\w+")


def exact_groups(texts: Sequence[str]) -> list[str]:
    """A key per text, equal where texts agree but for case and white space."""
    return [_digest(" ".join(text.casefold().split())) for text in texts]


def near_duplicate_groups(texts: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """A key per text, equal within clusters of near-duplicates, and statistics of the clusters.

    Two texts are near-duplicates when their words, case and punctuation aside and with numbers and
    identifiers alike, agree (from 4 words on) but for one at most; clusters are the transitive closure.
    The key is made of the cluster's texts alone, so it depends neither on their order nor on the rest.
    """
    words = [_WORD.findall(_NAME.sub("#", text).casefold()) for text in texts]
    signatures, owners = _signatures(words)
    parents = np.arange(len(texts))

    def root(index: int) -> int:
        while parents[index] != index:
            parents[index] = parents[parents[index]]
            index = int(parents[index])
        return index

    order = np.argsort(signatures, kind="stable")
    same = np.flatnonzero(signatures[order][1:] == signatures[order][:-1])
    for first, second in zip(owners[order][same].tolist(), owners[order][same + 1].tolist(), strict=True):
        one, other = root(first), root(second)
        parents[max(one, other)] = min(one, other)
    roots = [root(index) for index in range(len(texts))]
    keys: dict[int, str] = {}
    for index, key in zip(roots, exact_groups(texts), strict=True):
        keys[index] = min(keys.get(index, key), key)
    sizes = np.bincount(np.array(roots, np.int64), minlength=1)
    largest = int(sizes.argmax())
    statistics = {
        "method": "one-hole",
        "documents": len(texts),
        "groups": int((sizes > 0).sum()),
        "largest_group": int(sizes[largest]),
        "largest_group_example": min((texts[i] for i, r in enumerate(roots) if r == largest), default=""),
    }
    return [keys[index] for index in roots], statistics


def _signatures(words: Sequence[Sequence[str]]) -> tuple[np.ndarray, np.ndarray]:
    """64-bit signatures of every text whole and with each word left out, and the text each belongs to.

    A text is the sum of (random number of its word) x (random odd number of the position), modulo 2^64,
    so leaving a word out is one subtraction. A chance collision among 10^6 signatures has probability 1e-7.
    """
    lengths = np.array([len(text) for text in words], np.int64)
    vocabulary: dict[str, int] = {}
    ids = np.array([vocabulary.setdefault(word, len(vocabulary)) for text in words for word in text], np.int64)
    random = np.random.Generator(np.random.PCG64(0))
    word_value = random.integers(0, 1 << 64, len(vocabulary), np.uint64)
    place_value = random.integers(0, 1 << 64, int(lengths.max(initial=0)) + 1, np.uint64) | np.uint64(1)
    owners = np.repeat(np.arange(len(words)), lengths)
    places = np.arange(len(ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    terms = word_value[ids] * place_value[places]
    whole = place_value[0] * lengths.astype(np.uint64)
    np.add.at(whole, owners, terms)
    holes = (whole[owners] - terms) ^ place_value[places]
    long = lengths[owners] >= _MIN_WORDS
    return np.concatenate([whole, holes[long]]), np.concatenate([np.arange(len(words)), owners[long]])


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()
