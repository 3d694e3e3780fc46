"""Files of precomputed latents, which are matched with documents by id or by position.

Shape letters: n latents, M latent tokens of a sample, C latent channels.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from mmldlm.errors import DataError, UsageError
from mmldlm.prepare.documents import Document, DocumentStream, Problem, ProblemKind
from mmldlm.prepare.readers.tables import read_latent_table
from mmldlm.utils.files import sha256

POSITION = "position"  # instead of a file of ids, if row i belongs to the i-th document
_FLOATS = ("F16", "F32", "F64")


class LatentFile:
    """Latents by id: `.npy` or `.safetensors` [n, C] or [n, M, C] with a file of ids, or a `.parquet` with both.

    Rows are read on demand, but a `.parquet` file is held in memory. `rows` maps each id to its row, in order. `shape`
    is the shape [M, C] of a sample's latents. If ids are `POSITION`, row i belongs to the i-th document.
    """

    def __init__(self, path: Path | str, ids: str | None = None):
        """Open the file and read the ids.

        Raises:
            DataError: A file cannot be read, the numbers of ids and rows differ, or an id occurs twice.
            UsageError: The file has another suffix, or needs other `ids`.
        """
        self.path, self.by_position = Path(path), ids == POSITION
        self._ids = None if ids is None or self.by_position else Path(ids)
        suffix = self.path.suffix
        # A table has its ids in a column. Other files need them from elsewhere.
        if (suffix == ".parquet") == (ids is not None):
            raise UsageError(
                f"--latent-ids {ids}: {self.path} contains its ids, in the column 'id'"
                if ids
                else f"--encoder precomputed:{self.path} needs --latent-ids FILE, or --latent-ids position where row i "
                "belongs to the i-th document"
            )
        if suffix not in (".npy", ".safetensors", ".parquet"):
            raise UsageError(f"--encoder precomputed:{self.path}: expected .npy, .safetensors or .parquet")
        self._rows: Any  # [n, C] or [n, M, C]
        if suffix == ".safetensors":
            self._rows, shape = _open_tensor(self.path)
        else:
            names, self._rows = read_latent_table(self.path) if suffix == ".parquet" else ([], map_array(self.path))
            shape = self._rows.shape
        if len(shape) not in (2, 3) or 0 in shape:
            raise DataError(f"{self.path}: shape {list(shape)}, expected [n, C] or [n, M, C]")
        self.shape: tuple[int, int] = (shape[1], shape[2]) if len(shape) == 3 else (1, shape[1])
        if suffix != ".parquet":
            names = _read_ids(self._ids) if self._ids else [str(row) for row in range(shape[0])]
        if len(names) != shape[0]:
            raise DataError(f"{ids}: {len(names)} ids, expected {shape[0]}, the rows of {self.path}")
        self.rows: dict[str, int] = {}
        for row, name in enumerate(names):
            if (first := self.rows.setdefault(name, row)) != row:
                raise DataError(
                    f"{self.path}: id {name!r} of row {row} is already used by row {first}; expected each once"
                )

    @property
    def revision(self) -> str:
        """SHA-256 over the contents of the files."""
        parts = [sha256(path) for path in (self.path, self._ids) if path]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()

    def attach(
        self, documents: DocumentStream, first_position: int = 0
    ) -> Iterator[tuple[Document | Problem, int | None]]:
        """Add latents to documents, by `key` or by position in the input, and yield each document with its row.

        `first_position` is the position of the first document or problem. A problem only has a row if the latents in
        that row are the problem. `fit.py` checks over all chunks that no row is used twice.
        """
        for position, item in enumerate(documents, first_position):
            if isinstance(item, Problem):
                yield item, None
                continue
            key = str(position) if self.by_position else item.key
            row = self.rows.get(key)
            if row is None:
                reason = (
                    f"id {key!r} has no latent in {self.path}"
                    if key
                    else "no id; expected one in the field --key-field"
                )
                yield item.problem("no_latent", reason), None
                continue
            # A slice of one row, as safetensors reads slices only.
            latents = as_latents(np.asarray(self._rows[row : row + 1])[0])
            if isinstance(latents, tuple):
                kind, reason = latents
                yield item.problem(kind, f"{self.path}: row {row}: {reason}"), row
            else:
                yield replace(item, latents=latents), row


def as_latents(array: np.ndarray) -> np.ndarray | tuple[ProblemKind, str]:
    """Return a float array [C] or [M, C] as latents [M, C], or the kind and reason of a problem."""
    if array.dtype.kind != "f" or array.ndim not in (1, 2) or not array.size:
        return "mismatch", f"the latent is {array.dtype} {list(array.shape)}, expected float [C], [1, C] or [M, C]"
    if not np.isfinite(array).all():
        return "no_latent", "the latent is not finite"
    if not array.any():
        return "no_latent", "the latent is all zeros"  # other trainers write zeros for a text that they cannot encode
    return np.atleast_2d(array)


def map_array(path: Path) -> np.ndarray:
    """Memory-map a `.npy` file, so that a header that promises more than the file holds allocates nothing.

    It is a `DataError` if the file is not an array, or an array of pickled objects.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # NumPy and the system raise many types
        raise DataError(f"{path}: not a readable array ({' '.join(str(error).split())})") from None
    if not isinstance(array, np.ndarray):
        raise DataError(f"{path}: an archive of arrays, expected one array")
    return array


def _open_tensor(path: Path) -> tuple[Any, tuple[int, ...]]:
    """Open the tensor `latents`, or the only tensor, of a safetensors file, and return it with its shape.

    Its slices are read on demand.
    """
    try:
        file = safe_open(str(path), framework="numpy")
        names = list(file.keys())
        if "latents" not in names and len(names) != 1:
            raise DataError(f"{path}: tensors {', '.join(sorted(names)[:8]) or 'none'}, expected 'latents'")
        rows = file.get_slice("latents" if "latents" in names else names[0])
        if rows.get_dtype() not in _FLOATS:  # numpy has no other floats
            raise DataError(f"{path}: the latents are {rows.get_dtype()}, expected {' or '.join(_FLOATS)}")
        return rows, tuple(rows.get_shape())
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path}: not readable as safetensors ({error})") from None


def _read_ids(path: Path) -> list[str]:
    """Read the ids in the order of the rows from a JSON list, lines of text, or an array of integers or text."""
    try:
        if path.suffix == ".npy":
            array = np.load(path, allow_pickle=False)
            ids = array.tolist() if array.ndim == 1 and array.dtype.kind in "iuU" else None
        elif path.suffix == ".json":
            ids = json.loads(path.read_text(encoding="utf-8"))
        else:
            ids = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"--latent-ids {path}: cannot be read ({error})") from None
    if not isinstance(ids, list) or not all(isinstance(name, (str, int)) and name != "" for name in ids):
        raise DataError(f"--latent-ids {path}: expected ids, text or integers, one for each latent and none empty")
    return [str(name) for name in ids]
