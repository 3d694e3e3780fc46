"""Data folders of the LGDLM trainer, read as samples.

| layout | files | pairing |
|---|---|---|
| pairs | `tokens/train/X_tokens.npz` of `input_ids` and `attention_mask`, `latents/train/X.npy` | by name |
| batches | `tokens/train/*.npy` [n, 2, L] of ids and mask, `latents/train/*.npy` | by the rows of `*_meta.json` |
| dat | `*_tokens.dat`, `*_latents.dat` | by row (`dat`) |
| texts | `train_data.json` (or `_with_tokens`), `texts/train/*.txt`, `latents/train/*.npy` | by the paths in the JSON |

`train/` may be absent or have another name. Nothing is unpickled.
Shape letters: n samples of a file, L tokens with padding, M latent tokens of a sample, C latent channels.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.contrib.lgdlm.dat import read_dat
from mmldlm.contrib.lgdlm.samples import Sample, SourceSample, check_latents, read_token_archive, remove_padding
from mmldlm.errors import DataError
from mmldlm.prepare.readers.latents import map_array

LAYOUTS = ("pairs", "batches", "dat", "texts")
_JSON_NAMES = ("train_data.json", "validation_data.json", "val_data.json", "test_data.json")
_JSON_WITH_TOKENS = "train_data_with_tokens.json"  # the samples of train_data.json
_map_cached = lru_cache(maxsize=16)(map_array)  # for files with latents of many samples


def find_layout(source: Path) -> str:
    """Return the layout of a folder's tokens, which the trainer read, or "texts" if there are none.

    It is a `DataError` if the folder has no layout that we know, or tokens in several layouts.
    """
    is_present = {
        "pairs": any(_token_archives(source)),
        "batches": bool(_token_batches(source)),
        "dat": any(source.glob("*_tokens.dat")),
    }
    names = [name for name, present in is_present.items() if present]
    if len(names) > 1:
        raise DataError(f"{source}: holds the layouts {' and '.join(names)}; expected one: choose it with --layout")
    if not names and not _json_files(source):
        raise DataError(
            f"{source}: no data of LGDLM: expected tokens/train/*_tokens.npz, tokens/train/*.npy, *_tokens.dat, "
            f"train_data.json or {_JSON_WITH_TOKENS}"
        )
    return names[0] if names else "texts"


def read_samples(source: Path, layout: str, notes: list[str]) -> Iterator[SourceSample]:
    """Yield the samples of a folder in a fixed order, and add a line to `notes` if files belong to no sample.

    It is a `DataError` if files contradict each other.
    """
    if layout == "pairs":
        return _read_pairs(source, notes)
    return {"batches": _read_batches, "dat": read_dat, "texts": _read_texts}[layout](source)


def _files(folder: Path, suffix: str, prefix: str = "") -> Iterator[str]:
    """Yield the files below `folder` that end in `suffix`, as relative paths, without holding a list of them."""
    if not folder.is_dir():
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _files(Path(entry.path), suffix, f"{prefix}{entry.name}/")
            elif entry.name.endswith(suffix):
                yield prefix + entry.name


# --- pairs: a file of tokens and a file of latents for each sample ---


def _token_archives(source: Path) -> Iterator[str]:
    yield from (f"tokens/{name}" for name in _files(source / "tokens", ".npz"))
    yield from (path.name for path in source.glob("*_tokens.npz"))


def _read_pairs(source: Path, notes: list[str]) -> Iterator[SourceSample]:
    """Yield the samples in the order of their names."""
    latents = source / "latents" if (source / "latents").is_dir() else source
    paths: dict[str, str] = {}
    for path in _token_archives(source):
        name = path.removeprefix("tokens/").removesuffix(".npz").removesuffix("_tokens")
        # `X.npz` and `X_tokens.npz` would both be sample X.
        if (other := paths.setdefault(name, path)) != path:
            raise DataError(f"{source / path} and {source / other}: both are the tokens of sample {name}, expected one")
    num_used = 0
    for name in sorted(paths):
        candidates = [latents / f"{name}{ending}.npy" for ending in ("", "_latents", "_latent")]
        files = [path for path in candidates if path.is_file()]
        num_used += len(files)
        yield SourceSample(str(source / paths[name]), partial(_read_pair, name, source / paths[name], files))
    if unused := sum(1 for _ in _files(latents, ".npy")) - num_used:
        notes.append(f"{unused} files of latents have no tokens")


def _read_pair(name: str, tokens: Path, latents: list[Path]) -> Sample:
    if len(latents) != 1:
        raise DataError(f"sample {name} has {' and '.join(map(str, latents)) or 'no latents'}, expected one file")
    return Sample(name, check_latents(map_array(latents[0])), read_token_archive(tokens))


# --- batches: files with the tokens of many samples ---


def _token_batches(source: Path) -> list[Path]:
    return sorted(
        [*source.glob("tokens*.npy"), *(source / "tokens" / name for name in _files(source / "tokens", ".npy"))]
    )


def _read_batches(source: Path) -> Iterator[SourceSample]:
    used: dict[str, set[int]] = {}  # indices by file or folder of latents
    for path in _token_batches(source):
        array = map_array(path)
        if array.ndim != 3 or array.shape[1] != 2 or array.dtype.kind not in "iu":
            raise DataError(f"{path}: {array.dtype} {list(array.shape)}, expected integers [n, 2, L], ids and mask")
        folder = source / "latents"
        # `tokens/train/` pairs with `latents/train/` if that exists, else with `latents/`.
        if path.is_relative_to(source / "tokens") and (folder / path.parent.relative_to(source / "tokens")).is_dir():
            folder /= path.parent.relative_to(source / "tokens")
        for row, (name, index) in enumerate(_meta_rows(path, len(array))):
            file, is_stack = (_find_file((source, folder), name), True) if name else _numbered(path, folder, index)
            indices = used.setdefault(name or str(file if is_stack else folder), set())
            if index in indices:
                raise DataError(f"{path}: row {row}: an earlier row has latent_idx {index} as well; expected each once")
            indices.add(index)
            read = partial(_read_batch_row, f"{path.stem}-{row}", array[row], file, is_stack, index, name)
            yield SourceSample(f"{path}: row {row}", read)


def _read_batch_row(id: str, tokens: np.ndarray, file: Path | None, is_stack: bool, index: int, name: str) -> Sample:
    """Return the sample of `tokens` [2, L] (ids and mask) with row `index` of `file`, or all of `file` if no stack."""
    if file is None:
        raise DataError(f"latent_idx {index}: no file of latents {name or 'with this number'}")
    latents = _map_cached(file) if is_stack else map_array(file)
    if is_stack:
        latents = np.atleast_2d(latents)
        if index >= len(latents):
            raise DataError(f"latent_idx {index}: {file} has {len(latents)} rows")
        latents = latents[index]
    return Sample(id, check_latents(latents), remove_padding(*tokens))


def _meta_rows(path: Path, count: int) -> list[tuple[str, int]]:
    """Return, for each of the `count` rows of a file of tokens, the file name (or "") and the row of its latents.

    The meta file that LGDLM wrote is a list of objects with `latent_idx`, `latent_path` and `latent_file`. Such a list
    under a key, or a plain list of indices, works as well.
    """
    meta = path.with_name(f"{path.stem}_meta.json")
    if not meta.is_file():
        raise DataError(f"{meta}: missing; expected latent_idx of every row, as tokens and latents differ in order")
    try:
        content = json.loads(meta.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            content = next(content[key] for key in ("latent_idx", "samples", "meta", "items") if key in content)
        entries = [entry if isinstance(entry, dict) else {"latent_idx": entry} for entry in content]
        rows = [(_latents_name(entry), entry["latent_idx"]) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError, StopIteration, RecursionError):
        rows = [("", None)]
    if not all(isinstance(name, str) and type(index) is int and index >= 0 for name, index in rows):
        raise DataError(f"{meta}: not readable as JSON with a latent_idx, from 0, for every row of {path.name}")
    if len(rows) != count:
        raise DataError(f"{meta}: {len(rows)} latent_idx, expected {count}, the rows of {path.name}")
    return rows


def _latents_name(entry: dict[str, Any]) -> str:
    """Return the path or name of the file whose rows `latent_idx` counts, which is `latent_file` if that is given."""
    path, name = entry.get("latent_path") or "", entry.get("latent_file") or ""
    return path if not name or Path(path).name == name else name


def _numbered(tokens: Path, folder: Path, index: int) -> tuple[Path | None, bool]:
    """Find the file of latents if the meta file names none, and return it with whether `index` counts its rows.

    `index` counts the rows of the only file, or of file K for `tokens_latentK_batchB.npy` if that has several rows.
    Otherwise each file has one sample, and `index` is the number in its name.
    """
    files = _numbered_files(folder)
    number = re.search(r"latents?_?(\d+)", tokens.stem)
    file = next(iter(files.values())) if len(files) == 1 else files.get(int(number[1]) if number else -1)
    shape = _map_cached(file).shape if file else ()
    if len(shape) > 1 and (len(files) == 1 or shape[0] > 1):
        return file, True
    return files.get(index), False


@lru_cache(maxsize=4)
def _numbered_files(folder: Path) -> dict[int, Path]:
    """Return the files of latents in a folder by the last number in their names, which has to be unique."""
    files: dict[int, Path] = {}
    for path in sorted(folder.glob("*.npy")):
        number = int((re.findall(r"\d+", path.stem) or ["-1"])[-1])
        if (other := files.setdefault(number, path)) != path:
            raise DataError(f"{path} and {other}: both have the number {number}, expected each once")
    return files


# --- texts: a JSON list of samples ---


def _json_files(source: Path) -> list[Path]:
    has_list = (source / _JSON_NAMES[0]).is_file()
    names = _JSON_NAMES if has_list else (_JSON_WITH_TOKENS, *_JSON_NAMES)
    return [source / name for name in names if (source / name).is_file()]


def _read_texts(source: Path) -> Iterator[SourceSample]:
    for path in _json_files(source):
        try:
            items = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise DataError(f"{path}: not readable as JSON ({error})") from None
        if not isinstance(items, list):
            raise DataError(f"{path}: a JSON {type(items).__name__}, expected a list of samples")
        for number, item in enumerate(items, 1):
            yield SourceSample(f"{path}:{number}", partial(_read_text, source, item))


def _read_text(source: Path, item: Any) -> Sample:
    """Return the sample of an item, with its text from `text` or a file and its latent from a file."""
    if not isinstance(item, dict):
        raise DataError(f"a JSON {type(item).__name__}, expected a sample with 'text' and 'latent_path'")
    latent = _find_file((source, source / "latents"), item.get("latent_path"))
    if latent is None:
        raise DataError(f"its latent {item.get('latent_path')!r} is not in {source / 'latents'}")
    name = next((item[key] for key in ("text_path", "text_file") if key in item), f"{latent.stem}.txt")
    file = _find_file((source, source / "texts"), name)
    text: Any = item.get("text")
    if file is None and not isinstance(text, str):
        raise DataError(f"no 'text', and {name!r} is not in {source / 'texts'}")
    if file is not None:
        text = _read_text_file(file, text.strip().removesuffix("...") if isinstance(text, str) else "")
    if not text.strip():
        raise DataError("empty text")
    return Sample(str(item.get("id", latent.stem)), check_latents(map_array(latent)), text.strip("\r\n"))


def _read_text_file(path: Path, beginning: str) -> str:
    """Return the text of a file. The JSON may hold only its `beginning`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: {error}") from None
    if not text.strip().startswith(beginning):
        raise DataError(f"'text' begins {beginning[:30]!r}, but {path.name} {text[:30]!r}")
    return text


def _find_file(folders: tuple[Path, ...], name: Any) -> Path | None:
    """Find the file `name` below one of `folders`, or return None. Paths of other machines are cut from the left."""
    parts = Path(name).parts if isinstance(name, str) else ()
    # The longest suffix first, so that a bare name matches only if no longer path does.
    for start in range(len(parts)):
        for folder in folders:
            path = folder.joinpath(*parts[start:])
            try:
                # A path from the JSON must not lead outside the folder, not even by `..` or a link.
                if path.is_file() and path.resolve().is_relative_to(folder.resolve()):
                    return path
            except (OSError, ValueError):  # a name that no file can have
                return None
    return None
