"""The folders of the trainer that came before this one: recognized, verified and read as documents.

| layout | what |
|---|---|
| pairs | `tokens/X.npz` (or `X_tokens.npz`) of `input_ids` and `attention_mask` [L], and `latents/X.npy` |
| batches | `tokens*.npy` [n, 2, L] of ids and mask, their `*_meta.json` with `latent_idx`, and `latents/*.npy` |
| dat | `*_rank*_tokens.dat` and `*_rank*_latents.dat`, longer than what was written into them |
| texts | `train_data.json`, a list of samples with `text` or `texts/*.txt`, and `latents/*.npy` |

Masks give the true lengths. A latent is float [C], [1, C] or [M, C]. Nothing is unpickled.
Shape letters: n samples of a file, L tokens with padding, M latent tokens of a sample, C latent channels.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mmldlm.data.prepare.documents import Document, Part, Problem
from mmldlm.data.prepare.readers.lgdlm_arrays import (
    NO_SHAPES,
    DatShapes,
    batches_parts,
    dat_parts,
    read_batches,
    read_dat,
    token_batches,
)
from mmldlm.data.prepare.readers.lgdlm_samples import Fault, as_latents, even_parts, load_array, sample, true_tokens
from mmldlm.errors import DataError

JSON_NAMES = ("train_data.json", "validation_data.json", "val_data.json", "test_data.json")


class _Pair(NamedTuple):
    name: str
    tokens: Path | None
    latents: Path | None


def find_layout(folder: Path) -> str:
    """Which of the layouts a folder has. DataError where it has none, or more than one."""
    found = {
        "pairs": any(True for _ in _token_archives(folder)),
        "batches": bool(token_batches(folder)),
        "dat": any(folder.glob("*_tokens.dat")),
        "texts": any((folder / name).is_file() for name in JSON_NAMES),
    }
    names = [name for name, present in found.items() if present]
    if not names:
        raise DataError(
            f"{folder}: no layout of the predecessor: expected tokens/*.npz, tokens*.npy, *_tokens.dat or "
            "train_data.json"
        )
    if len(names) > 1:
        raise DataError(
            f"{folder}: holds the layouts {' and '.join(names)}; expected one: choose it with "
            f"{' or '.join(f'--format predecessor-{name}' for name in names)}"
        )
    return names[0]


def predecessor_parts(
    folder: Path, target_bytes: int, layout: str | None = None, shapes: DatShapes = NO_SHAPES
) -> list[Part]:
    """Stretches of a folder of this layout, or of the one that it has. DataError where its files contradict it."""
    if not folder.is_dir():
        raise DataError(f"{folder}: expected the folder of a predecessor's layout")
    layout = layout or find_layout(folder)
    if layout == "dat":
        return dat_parts(folder, target_bytes, shapes)
    cut = {"pairs": pairs_parts, "batches": batches_parts, "texts": texts_parts}[layout]
    if parts := cut(folder, target_bytes):
        return parts
    raise DataError(f"{folder}: no samples of the layout {layout}")


def read_predecessor(part: Part, field: str, shapes: DatShapes = NO_SHAPES) -> Iterator[Document | Problem]:
    """The samples of one part, whose layout follows from its path."""
    path = Path(part.path)
    if path.suffix == ".dat":
        return read_dat(part, field, shapes)
    return {".npy": read_batches, ".json": read_texts}.get(path.suffix, read_pairs)(part, field)


# --- a file a sample ------------------------------------------------------------------------------


def _token_archives(folder: Path) -> Iterator[Path]:
    yield from (folder / "tokens").glob("*.npz")
    yield from folder.glob("*_tokens.npz")


@lru_cache(maxsize=4)
def _pairs(folder: Path) -> list[_Pair]:
    """All names that tokens or latents have, in order. DataError where two files of a kind have one name."""
    inside = folder / "latents"
    names: dict[str, dict[str, Path]] = {}
    arrays = inside.glob("*.npy") if inside.is_dir() else folder.glob("*.npy")
    for kind, paths in (("tokens", _token_archives(folder)), ("latents", arrays)):
        for path in paths:
            name = path.stem
            for ending in ("_tokens", "_latents", "_latent"):
                name = name.removesuffix(ending)
            other = names.setdefault(name, {}).setdefault(kind, path)
            if other != path:
                raise DataError(f"{path} and {other}: both are the {kind} of sample {name}, expected one file")
    return [_Pair(name, names[name].get("tokens"), names[name].get("latents")) for name in sorted(names)]


def pairs_parts(folder: Path, target_bytes: int) -> list[Part]:
    """Stretches of samples in order of their names, of about `target_bytes` judged by the first hundred."""
    _pairs.cache_clear()
    pairs = _pairs(folder)
    sizes = [path.stat().st_size for pair in pairs[:100] for path in (pair.tokens, pair.latents) if path]
    return even_parts(folder, len(pairs), sum(sizes) / max(1, min(100, len(pairs))), target_bytes)


def read_pairs(part: Part, field: str) -> Iterator[Document | Problem]:
    """The samples of these places in the order of names; a file without its other half is a problem."""
    del field
    for number, pair in enumerate(_pairs(Path(part.path))[part.start : part.stop], part.start + 1):
        if pair.tokens is None or pair.latents is None:
            there, missing = (pair.latents, "tokens") if pair.tokens is None else (pair.tokens, "latents")
            yield Problem(str(there), number, "mismatch", f"sample {pair.name} has no {missing}")
            continue
        tokens = _archived_tokens(pair.tokens)
        latents = as_latents(load_array(pair.latents))
        yield sample(str(pair.tokens), number, pair.name, tokens, latents)


def _archived_tokens(path: Path) -> np.ndarray | Fault:
    try:
        with np.load(path, allow_pickle=False) as archive:
            ids = next((archive[name] for name in ("input_ids", "tokens", "ids") if name in archive.files), None)
            mask = next((archive[name] for name in ("attention_mask", "mask") if name in archive.files), None)
            names = ", ".join(archive.files)
    except Exception as error:  # zipfile's, numpy's and the system's own kinds
        return "unreadable", f"not a readable archive of arrays ({' '.join(str(error).split())})"
    if ids is None or mask is None:
        return "invalid", f"holds the arrays {names or 'none'}, expected input_ids and attention_mask"
    return true_tokens(ids, mask)


# --- texts and their JSON -------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _items(path: Path) -> list[Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(found, list):
        raise DataError(f"{path}: a JSON {type(found).__name__}, expected a list of samples")
    return found


def texts_parts(folder: Path, target_bytes: int) -> list[Part]:
    """Stretches of the samples of each JSON file in the folder."""
    _items.cache_clear()
    parts = []
    for path in (folder / name for name in JSON_NAMES if (folder / name).is_file()):
        count = len(_items(path))
        parts += even_parts(path, count, path.stat().st_size / max(1, count), target_bytes)
    return parts


def read_texts(part: Part, field: str) -> Iterator[Document | Problem]:
    """These samples of a JSON file: text in `field` or in a file, the latent in a file, the key in `id`."""
    path = Path(part.path)
    for number, item in enumerate(_items(path)[part.start : part.stop], part.start + 1):
        found = _text_sample(path.parent, item, field)
        if not isinstance(found, tuple):
            yield Document(found.text, str(path), number, latents=found.latents, key=found.key)
        else:
            yield Problem(str(path), number, *found)


def _text_sample(folder: Path, item: Any, field: str) -> Document | Fault:
    if not isinstance(item, dict):
        return "invalid", f"a JSON {type(item).__name__}, expected a sample with {field!r} and 'latent_path'"
    key = str(item.get("id", ""))
    latent = _inside(folder, "latents", item.get("latent_path"))
    if latent is None:
        return "mismatch", f"sample {key!r}: its latent {item.get('latent_path')!r} is not in {folder / 'latents'}"
    named = next((item[name] for name in ("text_path", "text_file") if name in item), f"{latent.stem}.txt")
    file = _inside(folder, "texts", named)
    text = item.get(field)
    if file is None and not isinstance(text, str):
        return "mismatch", f"sample {key!r}: no {field!r}, and {named!r} is not in {folder / 'texts'}"
    if file is not None:
        try:
            whole = file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            return "unreadable", f"{file}: {error}"
        # The JSON may hold the beginning only.
        if isinstance(text, str) and not whole.strip().startswith(text.strip().removesuffix("...")):
            return "mismatch", f"sample {key!r}: {field!r} begins {text[:30]!r}, but {file.name} {whole[:30]!r}"
        text = whole
    assert isinstance(text, str)
    if not text.strip():
        return "empty", "empty document"
    latents = as_latents(load_array(latent))
    if isinstance(latents, tuple):
        return latents[0], f"sample {key!r}: {latent.name}: {latents[1]}"
    return Document(text.strip("\r\n"), "", 0, latents=latents, key=key)


def _inside(folder: Path, kind: str, name: Any) -> Path | None:
    """The file of that name below `folder`, or of its last part in `folder/kind`: paths may be of another machine."""
    if not isinstance(name, str) or not name:
        return None
    for path in (folder / name, folder / kind / Path(name).name):
        if path.is_file() and path.resolve().is_relative_to(folder.resolve()):
            return path
    return None
