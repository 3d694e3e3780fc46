"""Readers of tables: Parquet, Arrow files, and the folders that Hugging Face `datasets` saves. Need the extra `tables`.

Each format is a pair of functions: `*_parts` cuts an input into parts of whole row groups or record batches, and
`read_*` reads one part.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.data.prepare.documents import Document, Part, Problem, ProblemKind
from mmldlm.data.prepare.readers.files import is_url, open_input, pyarrow
from mmldlm.errors import DataError

_BATCH_ROWS = 1024  # decoded to Python values at a time


@dataclass(frozen=True)
class Columns:
    """Names of the columns other than the text; None if a table has no such column."""

    tokens: str | None = None
    latents: str | None = None
    key: str | None = None


NO_COLUMNS = Columns()


def parquet_parts(path: str, target_bytes: int) -> list[Part]:
    """Cut a Parquet file into parts of whole row groups, of about `target_bytes` uncompressed."""
    with _pyarrow_reading(path) as library, library.parquet.ParquetFile(_source(path)) as file:
        groups = [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]
    return _join(path, [(group.num_rows, group.total_byte_size) for group in groups], target_bytes)


def read_parquet(part: Part, field: str, columns: Columns = NO_COLUMNS) -> Iterator[Document | Problem]:
    """Yield the documents and problems of a part of a Parquet file; their `line` is the row, from 1."""
    with _pyarrow_reading(part.path) as library, library.parquet.ParquetFile(_source(part.path)) as file:
        names = _column_names(part.path, file.schema_arrow, field, columns)
        # Only the row groups that overlap with the part are decoded; `first_row` is where the first of them begins.
        groups, first_row, row = list[int](), part.start, 0
        for index in range(file.metadata.num_row_groups):
            num_rows = file.metadata.row_group(index).num_rows
            if row < part.stop and row + num_rows > part.start:
                first_row = row if not groups else first_row
                groups.append(index)
            row += num_rows
        batches = file.iter_batches(batch_size=_BATCH_ROWS, row_groups=groups, columns=names)
        yield from _documents(part, first_row, batches, field, columns)


def arrow_parts(path: str, target_bytes: int) -> list[Part]:
    """Cut an Arrow file into parts of whole record batches, of about `target_bytes`."""
    with _pyarrow_reading(path):
        return _join(path, ((batch.num_rows, batch.nbytes) for batch in _record_batches(path)), target_bytes)


def read_arrow(part: Part, field: str, columns: Columns = NO_COLUMNS) -> Iterator[Document | Problem]:
    """Yield the documents and problems of a part of an Arrow file (stream or file format); their `line` is the row."""
    with _pyarrow_reading(part.path):
        yield from _documents(part, 0, _record_batches(part.path), field, columns)


def is_datasets_folder(path: Path) -> bool:
    """Return whether a folder was written by `save_to_disk` of a Dataset or a DatasetDict."""
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def datasets_parts(path: str, target_bytes: int) -> list[Part]:
    """Cut the shards of a folder of `save_to_disk` into parts; the splits of a DatasetDict follow each other."""
    return [part for shard in _shards(Path(path)) for part in arrow_parts(str(shard), target_bytes)]


def read_latent_table(path: Path) -> tuple[list[str], np.ndarray]:
    """Return the ids and the latents [n, C] or [n, M, C] of a Parquet file with the columns `id` and `latents`.

    A file that cannot be read, or that has latents of different shapes, is a `DataError`.
    """
    columns = Columns(latents="latents", key="id")
    with _pyarrow_reading(path) as library, library.parquet.ParquetFile(path) as file:
        names = _column_names(str(path), file.schema_arrow, None, columns)
        ids, latents = list[str](), list[np.ndarray]()
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=names):
            ids += map(str, _values(batch.column(batch.schema.get_field_index("id"))))
            for value in _values(batch.column(batch.schema.get_field_index("latents"))):
                array = _to_array(value)
                if array is None or (latents and array.shape != latents[0].shape):
                    shape = "none" if array is None else list(array.shape)
                    expected = list(latents[0].shape) if latents else "[C] or [M, C]"
                    raise DataError(f"{path}: id {ids[len(latents)]!r}: latents {shape}, expected {expected}")
                latents.append(array)
    return ids, np.stack(latents) if latents else np.empty((0, 0), np.float32)


def _shards(folder: Path) -> list[Path]:
    """Return the Arrow files of a folder of `save_to_disk` in order."""
    if (folder / "dataset_dict.json").is_file():
        splits = _json_list(folder / "dataset_dict.json", "splits")
        return [shard for split in splits for shard in _shards(folder / str(split))]
    state = folder / "state.json"
    if not state.is_file():
        raise DataError(f"{folder}: no dataset_dict.json and no state.json; expected a folder of save_to_disk")
    if _json_list(state, "_indices_data_files", []):
        # The rows of the dataset are a reordered selection of the rows in the shards.
        raise DataError(
            f"{state}: the dataset was saved with an indices mapping; expected none: save it again with "
            "flatten_indices() or a newer `datasets`"
        )
    entries = _json_list(state, "_data_files")
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries]
    if not names or not all(isinstance(name, str) and name == Path(name).name for name in names):
        raise DataError(f"{state}: _data_files are {names[:4]}, expected names of Arrow files in this folder")
    for name in names:
        if not (folder / str(name)).is_file():
            raise DataError(f"{folder / str(name)}: missing, expected as a shard of this dataset by state.json")
    return [folder / str(name) for name in names]


def _json_list(path: Path, key: str, default: list[Any] | None = None) -> list[Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        values = content[key] if default is None else content.get(key) or default
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        values = None
    if not isinstance(values, list):
        raise DataError(f"{path}: not readable as JSON with a list {key!r}; expected what save_to_disk writes")
    return values


@contextmanager
def _pyarrow_reading(path: Path | str) -> Iterator[Any]:
    """Return pyarrow, and convert its errors within the block to a `DataError` that names the file."""
    library = pyarrow()
    try:
        yield library
    except (library.ArrowException, OSError, EOFError) as error:
        raise DataError(f"{path}: not a readable table ({' '.join(str(error).split())[:200]})") from None


def _source(path: str) -> Any:
    """Return what pyarrow opens: the path of a file, or a URL as an open file."""
    return open_input(path) if is_url(path) else path


def _record_batches(path: str) -> Iterator[Any]:
    """Yield the record batches of a URL or a memory-mapped file, whose other columns are not read."""
    library = pyarrow()
    with library.PythonFile(open_input(path)) if is_url(path) else library.memory_map(path) as source:
        # The file format begins with this magic number, the stream format does not.
        if source.read(6) == b"ARROW1":
            file = library.ipc.open_file(source)
            yield from (file.get_batch(index) for index in range(file.num_record_batches))
        else:
            source.seek(0)
            yield from library.ipc.open_stream(source)


def _join(path: str, groups: Iterable[tuple[int, int]], target_bytes: int) -> list[Part]:
    """Join neighboring groups of rows, given as (rows, bytes), into parts of at most `target_bytes` if possible."""
    parts: list[Part] = []
    start = stop = size = 0
    for rows, bytes_ in groups:
        if stop > start and size + bytes_ > target_bytes:
            parts.append(Part(path, start, stop))
            start, size = stop, 0
        stop, size = stop + rows, size + bytes_
    return [*parts, Part(path, start, stop)] if stop > start else parts


def _column_names(path: str, schema: Any, field: str | None, columns: Columns) -> list[str]:
    """Return the names of the columns to read. The text column may be missing if there are tokens."""
    types = pyarrow().types
    # Columns that are not asked for share the key None, which is skipped below.
    kinds = {
        field: ("text", lambda kind: _is_text(types, kind)),
        columns.tokens: ("lists of integers", lambda kind: _is_list(types, kind, types.is_integer, 1)),
        columns.latents: ("lists of floats", lambda kind: _is_list(types, kind, types.is_floating, 2)),
        columns.key: ("text or integers", lambda kind: _is_text(types, kind) or types.is_integer(kind)),
    }
    names = []
    for name, (expected, is_expected) in kinds.items():
        if name is None or (name == field and columns.tokens and field not in schema.names):
            continue
        if name not in schema.names:
            raise DataError(f"{path}: no column {name!r}, found {', '.join(map(repr, schema.names[:12])) or 'none'}")
        kind = _storage_type(schema.field(name).type)
        if not is_expected(kind):
            raise DataError(f"{path}: column {name!r} is {kind}, expected {expected}")
        names.append(name)
    return names


def _storage_type(kind: Any) -> Any:
    """Return the type that is stored under an extension type, such as those of `datasets`."""
    return getattr(kind, "storage_type", kind)


def _is_text(types: Any, kind: Any) -> bool:
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return any(is_kind(kind) for is_kind in (types.is_string, types.is_large_string, types.is_string_view))


def _item_type(types: Any, kind: Any) -> Any | None:
    """Return the type of the items of a list type, None for other types."""
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return _storage_type(kind.value_type) if is_list else None


def _is_list(types: Any, kind: Any, is_item: Callable[[Any], bool], depth: int) -> bool:
    """Return whether `kind` is a type of lists, nested at most `depth` deep, of items that fulfill `is_item`."""
    items = _item_type(types, kind)
    return items is not None and (is_item(items) or (depth > 1 and _is_list(types, items, is_item, depth - 1)))


def _documents(
    part: Part, row: int, batches: Iterable[Any], field: str, columns: Columns
) -> Iterator[Document | Problem]:
    """Yield the documents and problems of `part` from record batches, the first of which begins at `row`."""
    for record_batch in batches:
        start, stop = max(part.start - row, 0), min(part.stop - row, record_batch.num_rows)
        for offset in range(start, stop, _BATCH_ROWS):
            batch = record_batch.slice(offset, min(_BATCH_ROWS, stop - offset))
            names = _column_names(part.path, batch.schema, field, columns)
            values_by_column = {name: _values(batch.column(batch.schema.get_field_index(name))) for name in names}
            for index in range(batch.num_rows):
                values = {name: column[index] for name, column in values_by_column.items()}
                yield _document(part.path, row + offset + index + 1, values, field, columns)
        row += record_batch.num_rows
        if row >= part.stop:
            return


def _values(column: Any) -> Any:
    """Return Python values of a column, except lists (Arrow scalars) and text that is not UTF-8 (the exception)."""
    column = getattr(column, "storage", column)
    if _item_type(pyarrow().types, column.type) is not None:
        return column
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return [_text_or_error(value) for value in column]


def _text_or_error(value: Any) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError as error:
        return error


def _document(path: str, line: int, values: dict[str, Any], field: str, columns: Columns) -> Document | Problem:
    """Return the document of a row, or its first problem; `values` is by column."""
    text = values.get(field)
    tokens = latents = None
    key = ""
    problem: tuple[ProblemKind, str] | None = None
    if isinstance(text, UnicodeDecodeError):
        problem = "unreadable", f"column {field!r} is not UTF-8"
    elif columns.tokens is None and not (text or "").strip():
        problem = "empty", "empty document"
    if columns.tokens is not None:
        tokens = _to_array(values[columns.tokens])
        if tokens is None or tokens.ndim != 1 or (len(tokens) and tokens.dtype.kind not in "iu"):
            problem = problem or ("invalid", f"column {columns.tokens!r} holds nothing, expected a list of integers")
        elif not len(tokens):
            problem = problem or ("empty", f"no tokens in column {columns.tokens!r}")
        else:
            tokens = tokens.astype(np.int64)
    if columns.latents is not None:
        latents = _to_array(values[columns.latents])
        if latents is None or latents.ndim not in (1, 2) or not latents.size:
            reason = f"column {columns.latents!r} holds no latent, expected floats [C] or [M, C]"
            problem = problem or ("no_latent", reason)
        else:
            latents = np.atleast_2d(latents)
    if columns.key is not None:
        if values[columns.key] is None or isinstance(values[columns.key], UnicodeDecodeError):
            problem = problem or ("invalid", f"column {columns.key!r} holds no id")
        key = str(values[columns.key])
    return Problem(path, line, *problem) if problem else Document(text or "", path, line, tokens, latents, key)


def _to_array(value: Any) -> np.ndarray | None:
    """Convert a list scalar to an array [n] or [n, m]; None if it is null or its lists have different lengths."""
    items = value.values
    if items is None:
        return None
    items = getattr(items, "storage", items)
    if _item_type(pyarrow().types, items.type) is None:
        return items.to_numpy(zero_copy_only=False)
    rows = [_to_array(item) for item in items]
    lengths = {None if row is None else len(row) for row in rows}
    return np.stack(rows) if len(lengths) == 1 and None not in lengths else None  # type: ignore[arg-type]
