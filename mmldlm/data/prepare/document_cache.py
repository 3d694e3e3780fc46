"""Documents on disk between two stages of a preparation: written in order, read in order or by number.

Each is a line of JSON, followed by the bytes of its tokens and latents where it has them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from mmldlm.data.prepare.documents import Document

_DOCUMENTS, _OFFSETS = "documents", "offsets.npy"


class DocumentCacheWriter:
    """Use as a context manager. Nothing of it is durable before its folder is."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._file = (folder / _DOCUMENTS).open("wb")
        self._offsets: list[int] = []

    def __enter__(self) -> DocumentCacheWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        np.save(self.folder / _OFFSETS, np.array(self._offsets, np.int64), allow_pickle=False)

    def __len__(self) -> int:
        return len(self._offsets)

    def add(self, document: Document) -> None:
        """All of it but the group, of which the split is made before."""
        arrays = [None if each is None else np.ascontiguousarray(each) for each in (document.tokens, document.latents)]
        described = [None if each is None else [each.dtype.str, each.shape] for each in arrays]
        line = [document.text, document.source, document.line, document.key, *described]
        self._offsets.append(self._file.tell())
        self._file.write(json.dumps(line, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
        for each in arrays:
            if each is not None:
                self._file.write(each.tobytes())


class DocumentCache:
    """What a `DocumentCacheWriter` left in `folder`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._offsets = np.load(folder / _OFFSETS, mmap_mode="r", allow_pickle=False)

    def __len__(self) -> int:
        return len(self._offsets)

    def documents(self, numbers: Iterable[int] | None = None) -> Iterator[Document]:
        """All, or those of these numbers."""
        with (self.folder / _DOCUMENTS).open("rb") as file:
            for number in range(len(self)) if numbers is None else numbers:
                if numbers is not None:
                    file.seek(self._offsets[number])
                line = file.readline().decode("utf-8", "surrogatepass")
                text, source, place, key, *described = json.loads(line)
                tokens, latents = (_array(file, each) for each in described)
                yield Document(text, source, place, tokens=tokens, latents=latents, key=key)


def _array(file: Any, described: list[Any] | None) -> np.ndarray | None:
    if described is None:
        return None
    dtype, shape = np.dtype(described[0]), tuple(described[1])
    content = file.read(dtype.itemsize * int(np.prod(shape, dtype=np.int64)))
    return np.frombuffer(content, dtype).reshape(shape)
