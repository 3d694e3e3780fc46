"""Documents on disk between the stages of a preparation, cached by chunk, each with its split and its group.

A group holds documents that must be in the same split: equal texts, texts that differ in one word or its place, or
documents with the same value of `--group-field`.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.data.manifest import SPLITS
from mmldlm.prepare.documents import Document
from mmldlm.prepare.options import PrepareConfig

TRAIN = SPLITS.index("train")
EXCLUDED = 255  # the split of documents that do not go into the store
# Which latents of a file the documents use: int64 [k, 2], the row of the latents, and the index of the document in the
# cache, or -1 if the document is a problem.
USES_FILE = "uses.npy"
SPLITS_FOLDER = "splits"  # in the folder of the fit, for splits that depend on more than one chunk
_DOCUMENTS, _OFFSETS = "documents", "offsets.npy"
# For each document of a chunk: uint8 [n], the index of its split, and uint64 [n], the hash of its group
_SPLITS, _GROUPS = "splits.npy", "groups.npy"
_MAX_SHOWN = 60  # characters of a text
_MIN_WORDS = 4  # of a text that may have near-duplicates
# Identifiers and numbers: words with a digit or underscore, dotted names, camel case, and calls.
_NAME = re.compile(r"\S*(?:[0-9_]|\w\.\w|[a-z][A-Z]|\(\))\S*")
_WORD = re.compile(r"#|\w+")
# Punctuation, symbols and separators.
_SIGNS = "".join(sign for sign in map(chr, range(0x10000)) if unicodedata.category(sign)[0] in "PSZ")


class DocumentCacheWriter:
    """Context manager that writes documents to `folder`, with their splits and groups.

    A document is a line of JSON. If it has tokens or latents, they follow in NumPy's format.
    """

    def __init__(self, folder: Path, config: PrepareConfig):
        self.folder, self._config = folder, config
        self._file = (folder / _DOCUMENTS).open("wb")
        self._offsets, self._splits, self._groups = array("q"), bytearray(), array("Q")

    def __enter__(self) -> DocumentCacheWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
        np.save(self.folder / _OFFSETS, np.array(self._offsets, np.int64), allow_pickle=False)
        np.save(self.folder / _SPLITS, np.array(self._splits, np.uint8), allow_pickle=False)
        np.save(self.folder / _GROUPS, np.array(self._groups, np.uint64), allow_pickle=False)

    def __len__(self) -> int:
        return len(self._offsets)

    def add(self, document: Document) -> None:
        """Append a document."""
        # Group by the text without its prefix, because documents with the same text have the same latent.
        group = exact_group(document.group or document.text)
        self._splits.append(assign_split(group, self._config))
        self._groups.append(hash64(group))
        arrays = (document.tokens, document.latents)
        own = document.text, document.source, document.line, document.key, document.prefix, document.weight
        line = [*own, *(each is not None for each in arrays)]
        self._offsets.append(self._file.tell())
        self._file.write(json.dumps(line, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
        for each in arrays:
            if each is not None:
                np.save(self._file, each, allow_pickle=False)


def cached_documents(folder: Path, indices: Iterable[int] | None = None) -> Iterator[Document]:
    """Yield the documents that a `DocumentCacheWriter` wrote to `folder`, all of them or only the `indices`."""
    offsets = np.load(folder / _OFFSETS, mmap_mode="r", allow_pickle=False)
    with (folder / _DOCUMENTS).open("rb") as file:
        for index in range(len(offsets)) if indices is None else indices:
            if indices is not None:
                file.seek(offsets[index])
            values = json.loads(file.readline().decode("utf-8", "surrogatepass"))
            text, source, line, key, prefix, weight, *has_array = values
            # The arrays follow their line, so reading all documents in order needs no seek.
            tokens, latents = (np.load(file, allow_pickle=False) if has else None for has in has_array)
            yield Document(text, source, line, tokens, latents, key, prefix, weight=weight)


def exact_group(text: str, punctuation: bool = False) -> str:
    """Return the key of a text's group, which ignores case, white space and the composition of accents (NFC or NFD).

    Unless `punctuation` counts, it also ignores signs at the start and end: "(Yes.)" and "yes" have the same key.
    """
    normal = " ".join(unicodedata.normalize("NFC", text.casefold()).split())
    if not punctuation and (words := normal.strip(_SIGNS)):  # else the text has only signs, and is its own key
        normal = f"{words}."  # most sentences end in a period, and so keep the splits that version 0.1.0 gave them
    return hashlib.blake2b(normal.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()


def near_duplicate_groups(texts: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Return a key for each text, equal for near-duplicates, and statistics of the groups.

    Two texts are near-duplicates if their words are equal. If both have at least 4 words, they are also near-duplicates
    if their words become equal once we remove up to one word from each: one word was inserted, replaced or moved. Case
    and punctuation are ignored, and all numbers and identifiers count as the same word. Groups are the transitive
    closure. A key is a function of the texts of its group, so it depends neither on the order of the texts nor on the
    other groups.
    """
    composed = (unicodedata.normalize("NFC", text) for text in texts)
    signatures, owners = _signatures([_WORD.findall(_NAME.sub("#", text).casefold()) for text in composed])
    parents = np.arange(len(texts))

    def root(index: int) -> int:  # union-find with path halving
        while parents[index] != index:
            parents[index] = parents[parents[index]]
            index = int(parents[index])
        return index

    # Neighbors in sorted order with equal signatures are near-duplicates. We never compare two texts word by word.
    order = np.argsort(signatures, kind="stable")
    same = np.flatnonzero(signatures[order][1:] == signatures[order][:-1])
    for first, second in zip(owners[order][same].tolist(), owners[order][same + 1].tolist(), strict=True):
        root_1, root_2 = root(first), root(second)
        parents[max(root_1, root_2)] = min(root_1, root_2)
    roots = [root(index) for index in range(len(texts))]
    keys: dict[int, str] = {}
    for index, key in zip(roots, (exact_group(text, punctuation=True) for text in texts), strict=True):
        # The smallest exact key names the group, so the name does not depend on the order of the texts.
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
    """Return signatures uint64 [n] of all texts and of all texts without one word, and the index of the text of each.

    The signature of a text is the sum over its words of (random number of the word) x (random odd number of the
    position), modulo 2^64. If one word is left out, the words before it keep their positions and the words after it
    move one position toward the start. A chance collision among 10^6 signatures has probability 1e-7.
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
    # Sums up to each word over all texts. They wrap, so their differences are right modulo 2^64.
    sums, shifted_sums = (
        np.concatenate([[np.uint64(0)], np.cumsum(word_values[ids] * position_values[places], dtype=np.uint64)])
        for places in (positions, positions - 1)
    )
    stops = np.cumsum(lengths)
    starts, place = stops - lengths, np.arange(len(ids))
    full = sums[stops] - sums[starts]
    without_word = (sums[place] - sums[starts[owners]]) + (shifted_sums[stops[owners]] - shifted_sums[place + 1])
    # A short text only equals others as a whole.
    is_short = lengths < _MIN_WORDS
    full ^= np.where(is_short, position_values[-1], np.uint64(0))
    is_long = ~is_short[owners]
    return np.concatenate([full, without_word[is_long]]), np.concatenate([np.arange(len(words)), owners[is_long]])


def assign_split(group: str, config: PrepareConfig) -> int:
    """Return the split of a group of documents, as an index in `SPLITS`.

    It is a function of the hash of seed and group, so the split of a document does not depend on other documents.
    """
    fraction = hash64(f"{config.seed}:{group}") / 2**64
    if fraction < config.test_fraction:
        return SPLITS.index("test")
    return SPLITS.index("validation") if fraction < config.test_fraction + config.validation_fraction else TRAIN


def hash64(text: str) -> int:
    """Hash a text to an integer below 2^64."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


class Corpus:
    """The cached chunks of a preparation. One chunk at a time is in memory, unless a method says otherwise.

    `splits_folder` has the splits that changed since the chunks in `folders` were written: because groups depend on
    other chunks, or because documents were excluded later.
    """

    def __init__(self, folders: Sequence[Path], splits_folder: Path):
        self._folders, self._splits_folder = folders, splits_folder
        self._chunks = range(len(folders))

    def splits(self, chunk: int) -> np.ndarray:
        """Return the split of each document of a chunk: uint8 [n], an index in `SPLITS` or `EXCLUDED`."""
        path = self._splits_folder / f"{chunk:05d}.npy"
        return np.load(path if path.exists() else self._folders[chunk] / _SPLITS, allow_pickle=False)

    def _save_splits(self, chunk: int, splits: np.ndarray) -> None:
        np.save(self._splits_folder / f"{chunk:05d}.npy", splits, allow_pickle=False)

    def exclude(self, chunk: int, indices: Sequence[int]) -> None:
        """Exclude the documents of a chunk at `indices` from the store."""
        splits = self.splits(chunk)
        splits[list(indices)] = EXCLUDED
        self._save_splits(chunk, splits)

    def num_documents(self, chunk: int) -> int:
        """Return the number of documents of a chunk that are not excluded."""
        return int((self.splits(chunk) != EXCLUDED).sum())

    def _groups(self, chunk: int) -> np.ndarray:
        return np.load(self._folders[chunk] / _GROUPS, allow_pickle=False)

    def documents(self, chunk: int) -> Iterator[tuple[int, Document]]:
        """Yield (split, document) for each document of a chunk that is not excluded."""
        documents = cached_documents(self._folders[chunk])
        for split, document in zip(self.splits(chunk).tolist(), documents, strict=True):
            if split != EXCLUDED:
                yield split, document

    def split_sizes(self) -> dict[str, int]:
        """Return the number of documents in each split."""
        sizes = np.zeros(EXCLUDED + 1, np.int64)
        for chunk in self._chunks:
            sizes += np.bincount(self.splits(chunk), minlength=len(sizes))
        return dict(zip(SPLITS, sizes[: len(SPLITS)].tolist(), strict=True))

    def group_statistics(self) -> dict[str, Any]:
        """Return statistics of the groups of equal texts or group fields, with only the groups' hashes in memory."""
        used = [np.where(self.splits(chunk) == EXCLUDED, 0, self._groups(chunk)) for chunk in self._chunks]
        hashes, sizes = np.unique(np.concatenate([groups[groups != 0] for groups in used]), return_counts=True)
        largest = int(sizes.argmax())
        chunk = next(chunk for chunk in self._chunks if hashes[largest] in used[chunk])
        (document,) = cached_documents(self._folders[chunk], [int((used[chunk] == hashes[largest]).argmax())])
        size, total = int(sizes[largest]), int(sizes.sum())
        frequent = {"text": document.text[:_MAX_SHOWN], "share": size / total}
        statistics = {"method": "exact", "documents": total, "groups": len(sizes), "largest_group": size}
        return statistics | {"most_frequent": frequent}

    def split_near_duplicates(self, config: PrepareConfig) -> dict[str, Any]:
        """Assign documents to splits again, near-duplicates to one split, and return statistics. All are in memory."""
        keys, statistics = near_duplicate_groups(
            [document.text for chunk in self._chunks for _, document in self.documents(chunk)]
        )
        new_splits = iter([assign_split(key, config) for key in keys])
        for chunk in self._chunks:
            splits = self.splits(chunk)
            # The same order as above: all documents that are not excluded.
            for index in np.flatnonzero(splits != EXCLUDED).tolist():
                splits[index] = next(new_splits)
            self._save_splits(chunk, splits)
        return statistics

    def training_sample(self, max_documents: int) -> Iterator[Document]:
        """Yield the training documents in order, or a sample of at most `max_documents` of them.

        The sample consists of the groups with the lowest hashes. So it does not depend on how the input is cut into
        chunks, and contains either all copies of a text or none.
        """
        is_train = [self.splits(chunk) == TRAIN for chunk in self._chunks]
        hashes = np.concatenate([self._groups(chunk)[used] for chunk, used in zip(self._chunks, is_train, strict=True)])
        limit = np.partition(hashes, max_documents)[max_documents] if len(hashes) > max_documents else None
        for chunk, used in zip(self._chunks, is_train, strict=True):
            is_sampled = used if limit is None else used & (self._groups(chunk) < limit)
            yield from cached_documents(self._folders[chunk], np.flatnonzero(is_sampled).tolist())
