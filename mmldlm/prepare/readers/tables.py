"""Read tables: Parquet, Arrow files, and folders that Hugging Face `datasets` saves. This needs the extra `tables`.

Each format is a pair of functions: `*_parts` cuts an input into parts of whole row groups or record batches, and
`read_*` reads one part.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.errors import DataError
from mmldlm.prepare.documents import Columns, Document, DocumentStream, Part, Problem, to_weight
from mmldlm.prepare.readers.files import is_url, open_input, pyarrow

_BATCH_ROWS = 1024  # decoded to Python values at a time
_MASK = "attention_mask"  # a column beside the tokens, 0 where these are padding


def parquet_parts(path: str, target_bytes: int) -> list[Part]:
    """Cut a Parquet file into parts of whole row groups, of about `target_bytes` uncompressed."""
    with _pyarrow_reading(path) as library, library.parquet.ParquetFile(_source(path)) as file:
        groups = [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]
    return _join(path, [(group.num_rows, group.total_byte_size) for group in groups], target_bytes)


def read_parquet(part: Part, field: str | None, columns: Columns) -> DocumentStream:
    """Yield the documents and problems of a part of a Parquet file. Their `line` is the row, from 1."""
    with _pyarrow_reading(part.path) as library, library.parquet.ParquetFile(_source(part.path)) as file:
        names = _column_names(part.path, file.schema_arrow, field, columns)
        groups, tops = [*range(part.start, part.stop)], [_top(name, file.schema_arrow) for name in names]
        batches = file.iter_batches(batch_size=_BATCH_ROWS, row_groups=groups, columns=tops)
        yield from _documents(part, batches, field, columns)


def arrow_parts(path: str, target_bytes: int) -> list[Part]:
    """Cut an Arrow file into parts of whole record batches, of about `target_bytes`."""
    with _pyarrow_reading(path):
        return _join(path, ((batch.num_rows, batch.nbytes) for batch in _record_batches(path)), target_bytes)


def read_arrow(part: Part, field: str, columns: Columns) -> DocumentStream:
    """Yield the documents and problems of a part of an Arrow file (stream or file). Their `line` is the row, from 1."""
    with _pyarrow_reading(part.path):
        yield from _documents(part, islice(_record_batches(part.path), part.start, part.stop), field, columns)


def is_datasets_folder(path: Path) -> bool:
    """Return whether a folder was written by `save_to_disk` of a Dataset or a DatasetDict."""
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def datasets_parts(path: str, target_bytes: int) -> list[Part]:
    """Cut the shards of a folder of `save_to_disk` into parts. The splits of a DatasetDict come one after the other."""
    return [part for shard in _shards(Path(path)) for part in arrow_parts(str(shard), target_bytes)]


def read_latent_table(path: Path) -> tuple[list[str], np.ndarray]:
    """Return the ids and the latents [n, M, C] of a Parquet file with the columns `id` and `latents`.

    It is a `DataError` if the file cannot be read, or has latents of different shapes.
    """
    ids, latents = list[str](), list[np.ndarray]()
    for part in parquet_parts(str(path), sys.maxsize):
        for item in read_parquet(part, None, Columns(latents="latents", key="id")):
            if isinstance(item, Problem):
                raise DataError(str(item))
            array = item.latents
            assert array is not None, "a document without latents"
            if latents and array.shape != latents[0].shape:
                raise DataError(
                    f"{path}: id {item.key!r}: latents {list(array.shape)}, expected {list(latents[0].shape)}"
                )
            ids.append(item.key)
            latents.append(array)
    return ids, np.stack(latents) if latents else np.empty((0, 0), np.float32)


def _shards(folder: Path) -> list[Path]:
    """Return the Arrow files of a folder of `save_to_disk` in order."""
    if not is_datasets_folder(folder):
        raise DataError(f"{folder}: no dataset_dict.json and no state.json; expected a folder of save_to_disk")
    is_dict = (folder / "dataset_dict.json").is_file()
    path = folder / ("dataset_dict.json" if is_dict else "state.json")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        names = (
            [str(name) for name in content["splits"]] if is_dict else [e["filename"] for e in content["_data_files"]]
        )
        is_selection = bool(content.get("_indices_data_files"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: {type(error).__name__} {error}; expected what save_to_disk writes") from None
    if not names or not all(isinstance(name, str) and name == Path(name).name for name in names):
        raise DataError(f"{path}: names {names[:4]}, expected those of files or folders in this one")
    if is_dict:
        return [shard for name in names for shard in _shards(folder / name)]
    if is_selection:
        # The rows of the dataset are a reordered selection of the rows in the shards.
        raise DataError(
            f"{path}: the dataset was saved with an indices mapping; expected none: save it again with "
            "flatten_indices() or a newer `datasets`"
        )
    return [folder / name for name in names]


@contextmanager
def _pyarrow_reading(path: Path | str) -> Iterator[Any]:
    """Yield pyarrow, and convert its errors within the block to a `DataError` that names the file."""
    library = pyarrow()
    try:
        yield library
    except (library.ArrowException, OSError, EOFError) as error:
        raise DataError(f"{path}: not a readable table ({' '.join(str(error).split())[:200]})") from None


def _source(path: str) -> Any:
    """Return the path of a file, or an open file for a URL. pyarrow reads both."""
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
    row, size = 1, 0
    for index, (rows, num_bytes) in enumerate(groups):
        if not parts or size + num_bytes > target_bytes:
            parts.append(Part(path, index, index, row))
            size = 0
        parts[-1] = replace(parts[-1], stop=index + 1)
        row, size = row + rows, size + num_bytes
    return parts if row > 1 else []


def _column_names(path: str, schema: Any, field: str | None, columns: Columns) -> list[str]:
    """Check the columns and return their names. The text column may be missing if there are tokens."""
    # Columns that nobody asked for share the key None, which is skipped below.
    expected_kinds = {
        field: ("text", {"text"}),
        columns.tokens: ("lists of integers", {"list of integer"}),
        columns.latents: ("lists of floats", {"list of float", "list of list of float"}),
        columns.key: ("text or integers", {"text", "integer"}),
        columns.prefix: ("text", {"text"}),
        columns.group: ("text or integers", {"text", "integer"}),
        columns.weight: ("numbers", {"float", "integer"}),
        _MASK if columns.tokens else None: ("lists of integers", {"list of integer"}),
    }
    names = []
    for name, (expected, kinds) in expected_kinds.items():
        if name is None:
            continue
        count, library = schema.names.count(_top(name, schema)), pyarrow()
        column_type = schema.field(_top(name, schema)).type if count == 1 else None
        leaf = None if column_type is None else _leaf(library.nulls(0, _storage(column_type)), name, schema)
        if leaf is None and name in (field, _MASK) and columns.tokens:
            continue
        if leaf is None:
            found = f"{count} columns" if count > 1 else "no column"
            raise DataError(f"{path}: {found} {name!r}, found {', '.join(map(repr, _names(schema)[:12])) or 'none'}")
        if _kind(leaf.type) not in kinds:
            raise DataError(f"{path}: column {name!r} is {leaf.type}, expected {expected}")
        names.append(name)
    return names


def _top(name: str, schema: Any) -> str:
    """Return the column of a name, which is a column, or else a path into one, such as `translation.en`."""
    return name if name in schema.names else name.partition(".")[0]


def _names(schema: Any) -> list[str]:
    """Return the names of all columns, and those of structs' fields as paths."""
    is_struct = pyarrow().types.is_struct
    nested = [
        [f"{item.name}.{part.name}" for part in item.type] if is_struct(item.type) else [item.name] for item in schema
    ]
    return [name for names in nested for name in names]


def _leaf(column: Any, name: str, schema: Any) -> Any:
    """Return the values at the end of a name's path into its column, or None if the types have no such path."""
    library = pyarrow()
    compute, types = library.compute, library.types
    for part in name.removeprefix(_top(name, schema)).split(".")[1:]:
        column = getattr(column, "storage", column)
        if types.is_fixed_size_list(column.type):
            column = column.cast(library.list_(column.type.value_type))
        if types.is_struct(column.type) and column.type.get_field_index(part) >= 0:
            column = compute.struct_field(column, part)
        elif _kind(column.type).startswith("list") and re.fullmatch(r"-?\d+", part):
            place, lengths = int(part), compute.list_value_length(column)
            is_there = compute.greater(lengths, place) if place >= 0 else compute.greater_equal(lengths, -place)
            rows = compute.add(column.offsets[:-1] if place >= 0 else column.offsets[1:], place)
            column = column.values.take(compute.if_else(is_there, rows, library.scalar(None, rows.type)))
        else:
            return None
    return column


def _storage(column_type: Any) -> Any:
    """Return the type that an extension type, for example of `datasets`, stores, or the type itself."""
    return getattr(column_type, "storage_type", column_type)


def _kind(column_type: Any) -> str:
    """Return the kind of a column: text, integer, float, a list of one of these, or other."""
    types, column_type = pyarrow().types, _storage(column_type)
    if types.is_list(column_type) or types.is_large_list(column_type) or types.is_fixed_size_list(column_type):
        return f"list of {_kind(column_type.value_type)}"
    if types.is_integer(column_type) or types.is_floating(column_type):
        return "integer" if types.is_integer(column_type) else "float"
    text_type = column_type.value_type if types.is_dictionary(column_type) else column_type
    is_text = types.is_string(text_type) or types.is_large_string(text_type) or types.is_string_view(text_type)
    return "text" if is_text else "other"


def _documents(part: Part, batches: Iterable[Any], field: str | None, columns: Columns) -> DocumentStream:
    """Yield the documents and problems of the record batches of a part."""
    row = part.first_line
    for record_batch in batches:
        names = _column_names(part.path, record_batch.schema, field, columns)
        for offset in range(0, record_batch.num_rows, _BATCH_ROWS):
            batch = record_batch.slice(offset, _BATCH_ROWS)
            tops = [batch.column(batch.schema.get_field_index(_top(name, batch.schema))) for name in names]
            leaves = [_leaf(top, name, batch.schema) for top, name in zip(tops, names, strict=True)]
            values_by_column = [_values(leaf) for leaf in leaves]
            for values in zip(*values_by_column, strict=True):
                yield _document(part.path, row, dict(zip(names, values, strict=True)), field, columns)
                row += 1


def _values(column: Any) -> Any:
    """Return Python values of a column, except lists (Arrow scalars) and text that is not UTF-8 (the exception)."""
    column = getattr(column, "storage", column)
    if _kind(column.type).startswith("list"):
        return column
    with suppress(UnicodeDecodeError):
        return column.to_pylist()
    values: list[Any] = []
    for scalar in column:
        try:
            values.append(scalar.as_py())
        except UnicodeDecodeError as error:
            values.append(error)
    return values


def _document(path: str, line: int, values: dict[str, Any], field: str | None, columns: Columns) -> Document | Problem:
    """Return the document of a row, or its first problem. `values` has the row by column."""
    problem = partial(Problem, path, line)
    text = values.get(field) if field else None
    tokens = latents = None
    prefix = (values[columns.prefix] if columns.prefix else "") or ""
    for name, value in ((field, text), (columns.prefix, prefix)):
        if isinstance(value, UnicodeDecodeError):
            return problem("unreadable", f"column {name!r} is not UTF-8")
    if field and columns.tokens is None and not (text or "").strip():
        return problem("empty", "empty document")
    if columns.tokens is not None:
        tokens = _to_array(values[columns.tokens])
        if tokens is None or tokens.ndim != 1 or (len(tokens) and tokens.dtype.kind not in "iu"):
            return problem("invalid", f"column {columns.tokens!r} holds nothing, expected a list of integers")
        mask = _to_array(values[_MASK]) if _MASK in values else np.ones(len(tokens))
        if mask is None or len(mask) != len(tokens) or np.any(np.diff(np.flatnonzero(mask)) != 1):
            return problem("invalid", f"column {_MASK!r} does not mark one stretch of the {len(tokens)} tokens")
        tokens = tokens.astype(np.int64)[np.flatnonzero(mask)]
        if not len(tokens):
            return problem("empty", f"no tokens in column {columns.tokens!r}")
    if columns.latents is not None:
        latents = _to_array(values[columns.latents])
        if latents is None or latents.ndim not in (1, 2) or not latents.size:
            return problem("no_latent", f"column {columns.latents!r} holds no latent, expected floats [C] or [M, C]")
        latents = np.atleast_2d(latents)
    for name in filter(None, (columns.key, columns.group)):
        if values[name] is None or isinstance(values[name], UnicodeDecodeError):
            return problem("invalid", f"column {name!r} holds no id")
    key, group = (str(values[name]) if name else "" for name in (columns.key, columns.group))
    given = values[columns.weight] if columns.weight else 1.0
    if (weight := to_weight(given)) is None:
        return problem("invalid", f"column {columns.weight!r} is {given}, expected a weight of at least 0")
    return Document(text or "", path, line, tokens, latents, key, prefix.strip(), group, weight)


def _to_array(value: Any) -> np.ndarray | None:
    """Return a list scalar as an array [n] or [n, m], or None if it is null or its lists have different lengths."""
    items = value.values
    if items is None:
        return None
    items = getattr(items, "storage", items)
    if not _kind(items.type).startswith("list"):
        return items.to_numpy(zero_copy_only=False)
    rows = [_to_array(item) for item in items]
    lengths = {None if row is None else len(row) for row in rows}
    return np.stack(rows) if len(lengths) == 1 and None not in lengths else None  # type: ignore[arg-type]
