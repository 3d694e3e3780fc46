"""Typed, strict settings: dataclasses from nested mappings and `key.sub=value`, and back.

A setting is declared once, with `setting(default, doc, ...)`, in the dataclass next to the code that reads it. Unknown
keys, wrong types and values out of bounds are collected and reported together.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import types
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from mmldlm.errors import ConfigError
from mmldlm.settings.yaml import parse_yaml
from mmldlm.utils.short_repr import display_name, short_repr, truncate

T = TypeVar("T")

MAX_PROBLEMS = 8  # reported for one config
MAX_MESSAGE_CHARS = 1600
MAX_TEXT_BYTES, MAX_NAME_BYTES = 2048, 255  # of a text setting, and of its parts between slashes
MAX_ENTRIES = 1000  # of a list or map

# Keys of other trainers; the error message suggests ours.
SYNONYMS = {
    "learning_rate": "optim.lr",
    "lr": "optim.lr",
    "epochs": "train.steps",
    "num_epochs": "train.steps",
    "max_steps": "train.steps",
    "steps": "train.steps",
    "output_dir": "run.dir",
    "batch_size": "train.global_batch_size",
    "bs": "train.global_batch_size",
    "gradient_accumulation_steps": "train.micro_batch_size",
    "seed": "run.seed",
    "num_layers": "model.depth",
    "hidden_size": "model.width",
    "n_heads": "model.num_heads",
    "heads": "model.num_heads",
    "timeout": "distributed.timeout_s",
    "max_grad_norm": "optim.clip_norm",
    "mixed_precision": "precision",
}


_type_hints = functools.cache(get_type_hints)


def setting(
    default: Any = dataclasses.MISSING,
    doc: str = "",
    *,
    factory: Any = dataclasses.MISSING,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    """Return a dataclass field for a setting.

    Args:
        default: Default value; a setting without default and factory is required.
        doc: One line for `docs/settings.md`.
        factory: Function that returns the default, for mutable values.
        at_least: Inclusive lower bound of a number.
        at_most: Inclusive upper bound.
        above: Exclusive lower bound.
        below: Exclusive upper bound.
    """
    bounds = {"at_least": at_least, "at_most": at_most, "above": above, "below": below}
    metadata = {"doc": doc, **{name: bound for name, bound in bounds.items() if bound is not None}}
    if factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def set_dotted(tree: dict[Any, Any], assignment: str) -> None:
    """Apply one `key.sub=value` override to `tree`; the value is YAML, and a key of digits is an integer as in YAML."""
    key, equals, value = assignment.partition("=")
    if not equals or not key or len(key) > MAX_TEXT_BYTES:
        raise ConfigError(f"expected key=value, found {short_repr(assignment)}")
    *parents, leaf = (int(part) if part.isdecimal() and len(part) < 20 else part for part in key.strip().split("."))
    for parent in parents:
        group = tree.get(parent, {})
        if not isinstance(group, dict):
            raise ConfigError(f"{display_name(key)}: {display_name(parent)} is a value, expected a group of keys")
        tree[parent] = dict(group)  # copied, as a YAML alias may share the mapping with another key
        tree = tree[parent]
    tree[leaf] = parse_yaml(value, key)


# --- mapping -> dataclass ---------------------------------------------------------------------------------


def build(cls: type[T], tree: Mapping[str, Any]) -> T:
    """Build the dataclass `cls` from nested mappings.

    Raises:
        ConfigError: one line with up to `MAX_PROBLEMS` unknown keys (and the nearest valid ones), wrong types and
            values out of bounds.
    """
    value: T = _build(cls, tree, partial=False)
    return value


def check_partial(cls: type, tree: Mapping[str, Any]) -> None:
    """Check some of the settings of `cls` without building it or running the checks across settings.

    Raises:
        ConfigError: as in `build`.
    """
    _build(cls, tree, partial=True)


def _build(cls: type, tree: Mapping[str, Any], partial: bool) -> Any:
    problems: list[str] = []
    known = {key for key, _ in leaves(cls)}
    value = _build_dataclass(cls, tree, "", known, problems, partial)
    if problems:
        raise ConfigError(truncate("; ".join(problems), MAX_MESSAGE_CHARS))
    return value


def leaves(cls: type, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """Yield (dotted key, field) of every setting of `cls` and its nested dataclasses, in order of declaration."""
    hints = _type_hints(cls)
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from leaves(hints[field.name], f"{prefix}{key_of(field)}.")
        else:
            yield f"{prefix}{key_of(field)}", field


def key_of(field: dataclasses.Field[Any]) -> str:
    """Return the key of a field. A Python keyword such as `async` has a trailing underscore as a field name."""
    return field.name.rstrip("_")


def nearest_key(key: str, known: set[str]) -> str:
    """Return advice for an unknown key: the nearest known key, if there is one."""
    key = truncate(key)  # a long key resembles none, and is slow to compare
    leaf = key.rsplit(".", 1)[-1]
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    same_leaf = [candidate for candidate in sorted(known) if candidate.rsplit(".", 1)[-1] == leaf]
    close_leaf = [c for c in sorted(known) if difflib.SequenceMatcher(None, c.rsplit(".", 1)[-1], leaf).ratio() > 0.75]
    for candidate in [*same_leaf, SYNONYMS.get(leaf), *close, *close_leaf]:
        if candidate in known:
            return f"did you mean {candidate!r}?"
    return "see docs/settings.md for the keys"


def _build_dataclass(cls: type, tree: Any, path: str, known: set[str], problems: list[str], partial: bool) -> Any:
    """Build `cls` from the mapping at key `path`, appending to `problems`; None if there are any, or if `partial`."""
    if not isinstance(tree, Mapping):
        problems.append(f"{path or 'config'}: expected keys below it, found {short_repr(tree)}")
        return None
    hints = _type_hints(cls)
    fields = {key_of(field): field for field in dataclasses.fields(cls)}
    problems_before = len(problems)
    values: dict[str, Any] = {}
    for key, raw in tree.items():
        if len(problems) == MAX_PROBLEMS:
            break
        dotted = f"{path}.{display_name(key)}" if path else display_name(key)
        if key not in fields:
            problems.append(f"unknown key {short_repr(dotted)}: {nearest_key(dotted, known)}")
            continue
        name = fields[key].name
        if dataclasses.is_dataclass(hints[name]):
            values[name] = _build_dataclass(hints[name], raw, dotted, known, problems, partial)
        else:
            try:
                values[name] = _convert(raw, hints[name])
                _check_bounds(values[name], fields[key].metadata)
            except ValueError as error:
                problems.append(_at_key(dotted, error))
    if len(problems) > problems_before or partial:
        return None
    try:
        return cls(**values)
    except ValueError as error:  # from checks in __post_init__
        problems.append(f"{path + '.' if path else ''}{error}")
        return None


def _check_bounds(value: Any, metadata: Mapping[str, Any]) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    if "at_least" in metadata and not value >= metadata["at_least"]:
        raise ValueError(f"must be at least {metadata['at_least']}, found {value}")
    if "at_most" in metadata and not value <= metadata["at_most"]:
        raise ValueError(f"must be at most {metadata['at_most']}, found {value}")
    if "above" in metadata and not value > metadata["above"]:
        raise ValueError(f"must be above {metadata['above']}, found {value}")
    if "below" in metadata and not value < metadata["below"]:
        raise ValueError(f"must be below {metadata['below']}, found {value}")


def type_name(hint: Any) -> str:
    """Return the name of a type for documentation and error messages."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " | ".join(map(str, args))
    if origin in (Union, types.UnionType):
        return " | ".join(type_name(arg) for arg in args)
    if origin in (list, tuple):
        return f"list of {type_name(args[0])}"
    if origin is dict:
        return f"map of {type_name(args[0])} to {type_name(args[1])}"
    return {int: "whole number", float: "number", bool: "true | false", str: "text", type(None): "null"}.get(
        hint, str(hint)
    )


def _at_key(key: str, error: ValueError) -> str:
    """Return the message of an error at `key`; an error that begins with a dot occurred at a key below it."""
    return f"{key}{error}" if str(error).startswith(".") else f"{key}: {error}"


def _convert(raw: Any, hint: Any) -> Any:
    """Convert `raw` to the type `hint`.

    Raises:
        ValueError: `raw` has another type; for an entry of a map the message begins with `.key: `.
    """
    origin, args = get_origin(hint), get_args(hint)
    type_error = ValueError(f"expected {type_name(hint)}, found {short_repr(raw)}")
    if isinstance(raw, (list, tuple, Mapping)) and len(raw) > MAX_ENTRIES:
        raise ValueError(f"expected at most {MAX_ENTRIES} entries, found {len(raw)}")
    if origin is Literal:
        if raw is False and "off" in args:  # YAML reads a bare `off` as False
            return "off"
        if raw not in args or isinstance(raw, bool):
            word = raw if isinstance(raw, str) else ""
            close = difflib.get_close_matches(word, [str(arg) for arg in args], n=1)
            raise ValueError(f"{type_error}{f' (did you mean {close[0]!r}?)' if close else ''}")
        return raw
    if origin in (Union, types.UnionType):
        for arg in args:
            try:
                return _convert(raw, arg)
            except ValueError as error:
                if isinstance(raw, Mapping) and get_origin(arg) is dict:
                    raise error  # the type is right, so the error inside the map says more
        raise type_error
    if origin is list:
        if not isinstance(raw, (list, tuple)):
            raise type_error
        return [_convert(item, args[0]) for item in raw]
    if origin is tuple:
        if not isinstance(raw, (list, tuple)) or len(raw) != len(args):
            raise ValueError(f"expected {len(args)} values, found {short_repr(raw)}")
        return tuple(_convert(item, arg) for item, arg in zip(raw, args, strict=True))
    if origin is dict:
        if not isinstance(raw, Mapping):
            raise type_error
        values = {}
        for key, value in raw.items():
            try:
                values[_convert(key, args[0])] = _convert(value, args[1])
            except ValueError as error:
                raise ValueError(f".{_at_key(display_name(key), error)}") from None
        return values
    if hint is type(None):
        if raw is not None:
            raise type_error
        return None
    if not isinstance(raw, (int, float) if hint is float else hint) or (isinstance(raw, bool) and hint is not bool):
        raise type_error
    if isinstance(raw, int) and raw.bit_length() > 63:
        raise ValueError(f"expected {type_name(hint)} of at most 63 bits, found {short_repr(raw)}")
    if isinstance(raw, float) and not math.isfinite(raw):
        raise type_error
    if isinstance(raw, str):
        _check_text(raw)
    return float(raw) if hint is float else raw


def _check_text(text: str) -> None:
    """Raise ValueError unless `text` can be a name, an address or a path: one line, within the path limits of Linux."""
    if any(unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") for char in text):
        raise ValueError(f"expected text without control characters, found {short_repr(text)}")
    if len(text.encode()) > MAX_TEXT_BYTES or any(len(part.encode()) > MAX_NAME_BYTES for part in text.split("/")):
        limits = f"{MAX_TEXT_BYTES} bytes, {MAX_NAME_BYTES} between slashes"
        raise ValueError(f"expected at most {limits}, found {short_repr(text)}")


def is_setting_text(text: str) -> bool:
    """Return whether `text` is valid as a text setting."""
    try:
        _check_text(text)
    except ValueError:
        return False
    return True


def dump(value: Any) -> Any:
    """Return a settings dataclass as nested dicts and lists in order of declaration; `build` reads it back."""
    if dataclasses.is_dataclass(value):
        return {key_of(field): dump(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: dump(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [dump(item) for item in value]
    return value


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as a single dict with dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        flat |= flatten(value, key + ".") if isinstance(value, Mapping) and value else {key: value}
    return flat


def to_yaml(value: Any) -> str:
    """Return a settings dataclass as YAML."""
    return yaml.safe_dump(dump(value), sort_keys=False, allow_unicode=True, default_flow_style=False)
