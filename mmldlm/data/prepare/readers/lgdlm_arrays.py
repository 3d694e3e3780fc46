"""The predecessor's layouts of many samples a file: `.npy` batches with their `_meta.json`, and bare `.dat` files.

Shape letters: n samples of a file, L tokens with padding, M latent tokens of a sample, C latent channels.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from mmldlm.data.prepare.documents import Document, Part, Problem
from mmldlm.data.prepare.readers.lgdlm_samples import Fault, as_latents, even_parts, load_array, sample, true_tokens
from mmldlm.errors import DataError, UsageError

_ROWS = 256  # read at a time


# --- batches [n, 2, L] ----------------------------------------------------------------------------


def token_batches(folder: Path) -> list[Path]:
    return sorted({*folder.glob("tokens*.npy"), *(folder / "tokens").glob("*.npy")})


def batches_parts(folder: Path, target_bytes: int) -> list[Part]:
    """Stretches of every file of tokens. DataError where its meta is missing, of another count, or repeats a latent."""
    for cache in (_latent_rows, _latent_files, _stacked_latents, _stack):
        cache.cache_clear()
    parts, owners = [], dict[tuple[Path | None, int], tuple[Path, int]]()
    for path in token_batches(folder):
        array = _mapped(path)
        if array.ndim != 3 or array.shape[1] != 2 or array.dtype.kind not in "iu":
            raise DataError(f"{path}: {array.dtype} {list(array.shape)}, expected integers [n, 2, L], ids and mask")
        rows = _latent_rows(path)
        if len(rows) != len(array):
            raise DataError(
                f"{_meta_path(path)}: {len(rows)} latent_idx, expected {len(array)}, the rows of {path.name}"
            )
        stacked = _stacked_latents(path)
        for row, index in enumerate(rows):
            other, at = owners.setdefault((stacked, index), (path, row))
            if (other, at) != (path, row):
                raise DataError(
                    f"row {row} of {path}: latent_idx {index}, which is that of row {at} of {other} already; expected "
                    "each once"
                )
        parts += even_parts(path, len(array), array.nbytes / max(1, len(array)), target_bytes)
    return parts


def read_batches(part: Part, field: str) -> Iterator[Document | Problem]:
    """These rows of a file of tokens, each with the latent that its meta names."""
    del field
    path = Path(part.path)
    array, indices = _mapped(path), _latent_rows(path)
    for row in range(part.start, part.stop):
        index = indices[row]
        tokens = true_tokens(np.array(array[row, 0]), np.array(array[row, 1]))
        yield sample(str(path), row + 1, f"latent_idx {index}", tokens, as_latents(_latent(path, index)))


def _mapped(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: not a readable array ({error})") from None


def _meta_path(path: Path) -> Path:
    return path.with_name(f"{path.stem}_meta.json")


@lru_cache(maxsize=4)
def _latent_rows(path: Path) -> list[int]:
    """`latent_idx` of every row: a list of objects that have it, such a list under a key, or a list of the numbers."""
    meta = _meta_path(path)
    if not meta.is_file():
        raise DataError(
            f"{meta}: missing: row i of tokens is not row i of latents, as short texts were dropped in no order; "
            "expected latent_idx of every row"
        )
    try:
        found = json.loads(meta.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            found = next(found[key] for key in ("latent_idx", "samples", "meta", "items") if key in found)
        rows = [row["latent_idx"] if isinstance(row, dict) else row for row in found]
    except (OSError, ValueError, KeyError, TypeError, StopIteration):
        rows = [None]
    if not all(isinstance(row, int) and not isinstance(row, bool) and row >= 0 for row in rows):
        raise DataError(
            f"{meta}: not readable as JSON with a latent_idx, a number from 0, for every row of {path.name}"
        )
    return rows


def _folder(path: Path) -> Path:
    """The folder that holds `latents/`, of a file of tokens in it or in its `tokens/`."""
    return path.parent.parent if path.parent.name == "tokens" else path.parent


@lru_cache(maxsize=4)
def _latent_files(folder: Path) -> dict[int, Path]:
    """Files of latents by the last number in their names, -1 for none. DataError where there are none."""
    found: dict[int, Path] = {}
    for path in sorted((folder / "latents").glob("*.npy")):
        number = int((re.findall(r"\d+", path.stem) or ["-1"])[-1])
        if number in found:
            raise DataError(f"{path} and {found[number]}: both have the number {number}, expected each once")
        found[number] = path
    if not found:
        raise DataError(f"{folder / 'latents'}: no .npy files; expected the latents of the tokens beside it")
    return found


@lru_cache(maxsize=64)
def _stacked_latents(path: Path) -> Path | None:
    """The one file whose rows `latent_idx` counts: the only one, or K of `tokens_latentK_batchB.npy` if it has rows.

    None where there is a file a sample, numbered by `latent_idx`.
    """
    files = _latent_files(_folder(path))
    if len(files) == 1:
        (only,) = files.values()
        return only if _mapped(only).ndim > 1 else None
    named = re.search(r"latents?_?(\d+)", path.stem)
    file = files.get(int(named[1])) if named else None
    return file if file is not None and _mapped(file).ndim > 1 and len(_mapped(file)) > 1 else None


@lru_cache(maxsize=2)
def _stack(path: Path) -> np.ndarray:
    return _mapped(path)


def _latent(path: Path, index: int) -> np.ndarray | Fault:
    stacked = _stacked_latents(path)
    if stacked is None:
        file = _latent_files(_folder(path)).get(index)
        return load_array(file) if file else ("mismatch", f"no file of that number in {_folder(path) / 'latents'}")
    rows = _stack(stacked)
    return np.array(rows[index]) if index < len(rows) else ("mismatch", f"{stacked} has {len(rows)} rows")


# --- .dat files -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class DatShapes:
    """What `.dat` files do not say: samples of each, type and shape of one sample's tokens and latents, what pads.

    As the options have them: "1000,998", "int32:512" or "int32:2x512" (ids and mask), "float32:1024" or "float32:8x64".
    """

    samples: str | None = None
    tokens: str | None = None
    latents: str | None = None
    pad_id: int | None = None

    def counts(self, files: list[Path]) -> list[int]:
        """Samples of each file. UsageError where there are not as many counts as files."""
        names = ", ".join(path.name for path in files)
        counts = (self.samples or "").split(",")
        if len(counts) != len(files) or not all(count.strip().isdecimal() for count in counts):
            raise UsageError(
                f"--dat-samples {self.samples}: expected the number of samples of each of {names}, with commas; the "
                "files are longer than what was written into them"
            )
        return [int(count) for count in counts]

    def rows(self, kind: str) -> tuple[np.dtype, tuple[int, ...]]:
        """Type and shape of one sample's `tokens` or `latents`. UsageError where the option is missing or unclear."""
        text = getattr(self, kind) or ""
        what, kinds = ("int32:512 or int32:2x512", "iu") if kind == "tokens" else ("float32:1024", "f")
        match = re.fullmatch(r"(u?int\d+|float\d+):(\d+)(?:x(\d+))?", text)
        try:
            dtype = np.dtype(match[1]) if match else None
        except TypeError:
            dtype = None
        shape = tuple(int(size) for size in match.groups()[1:] if size) if match else ()
        if (
            dtype is None
            or dtype.kind not in kinds
            or 0 in shape
            or (kind == "tokens" and shape[:-1] not in ((), (2,)))
        ):
            raise UsageError(
                f"--dat-{kind} {text or 'is missing'}: expected type and shape of a sample, such as {what}"
            )
        if kind == "tokens" and len(shape) == 1 and self.pad_id is None:
            raise UsageError(
                f"--dat-tokens {text}: holds no masks, so --dat-pad-id is needed: the id that fills the rows"
            )
        return dtype, shape


NO_SHAPES = DatShapes()


def dat_parts(folder: Path, target_bytes: int, shapes: DatShapes) -> list[Part]:
    """Stretches of the samples that each file of tokens holds. DataError where sizes or rows contradict the options."""
    files = sorted(folder.glob("*_tokens.dat"), key=lambda path: (*map(int, re.findall(r"\d+", path.name)), path.name))
    if not files:
        raise DataError(f"{folder}: no *_tokens.dat")
    parts = []
    for path, count in zip(files, shapes.counts(files), strict=True):
        allocated = {}
        for kind, file in (("tokens", path), ("latents", _dat_latents(path))):
            dtype, shape = shapes.rows(kind)
            size = dtype.itemsize * int(np.prod(shape))
            if not file.is_file():
                raise DataError(f"{file}: missing, expected beside {path.name}")
            if file.stat().st_size % size:
                raise DataError(
                    f"{file}: {file.stat().st_size} bytes, expected rows of {size}: --dat-{kind} is not right"
                )
            allocated[kind] = file.stat().st_size // size
            if allocated[kind] < count:
                raise DataError(f"{file}: room for {allocated[kind]} samples, expected {count} by --dat-samples")
            if allocated[kind] > count and _dat_rows(file, dtype, shape, count, 1).any():
                raise DataError(
                    f"{file}: row {count}, behind the last sample, is not empty: --dat-samples is not right"
                )
        if allocated["tokens"] != allocated["latents"]:
            raise DataError(
                f"{path}: room for {allocated['tokens']} samples, but for {allocated['latents']} in "
                f"{_dat_latents(path).name}; expected as many: --dat-tokens or --dat-latents is not right"
            )
        parts += even_parts(path, count, path.stat().st_size / max(1, allocated["tokens"]), target_bytes)
    return parts


def read_dat(part: Part, field: str, shapes: DatShapes) -> Iterator[Document | Problem]:
    """These rows of a `.dat` file of tokens and of the latents beside it."""
    del field
    path = Path(part.path)
    for first in range(part.start, part.stop, _ROWS):
        count = min(_ROWS, part.stop - first)
        ids = _dat_rows(path, *shapes.rows("tokens"), first, count)
        latents = _dat_rows(_dat_latents(path), *shapes.rows("latents"), first, count)
        for row in range(count):
            tokens = true_tokens(*ids[row]) if ids.ndim == 3 else _unpadded(ids[row], shapes.pad_id)
            yield sample(str(path), first + row + 1, f"row {first + row}", tokens, as_latents(latents[row]))


def _dat_latents(path: Path) -> Path:
    return path.with_name(path.name.replace("_tokens.dat", "_latents.dat"))


def _dat_rows(path: Path, dtype: np.dtype, shape: tuple[int, ...], first: int, count: int) -> np.ndarray:
    """[count, *shape] of the file from row `first`."""
    size = int(np.prod(shape))
    try:
        found = np.fromfile(path, dtype, count * size, offset=first * size * dtype.itemsize)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    if len(found) != count * size:
        raise DataError(f"{path}: ends before row {first + count}")
    return found.reshape(count, *shape)


def _unpadded(ids: np.ndarray, pad_id: int | None) -> np.ndarray | Fault:
    used = np.flatnonzero(ids != pad_id)
    return ids[: used[-1] + 1].astype(np.int64) if len(used) else ("empty", f"no tokens: all are the pad id {pad_id}")
