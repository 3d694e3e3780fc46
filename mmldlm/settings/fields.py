"""Typed, strict settings: dataclasses from nested mappings and `key.sub=value`, and back.

A setting is declared once, with `setting(default, doc, ...)`, in the dataclass beside the code that
reads it. Unknown keys, wrong types and values out of bounds are collected and refused together.
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
from mmldlm.utils.short_repr import cut, named, shown

T = TypeVar("T")

MOST_TOLD = 8  # problems of one config
LONGEST_MESSAGE = 1600
LONGEST_TEXT, LONGEST_NAME = 2048, 255  # bytes of a setting, and of its parts between slashes
MOST_ENTRIES = 1000  # of a list or map

# What users of other trainers type; the answer names our key.
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


_hints_of = functools.cache(get_type_hints)


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
    """A dataclass field with its one-line doc and, for numbers, its bounds."""
    bounds = {"at_least": at_least, "at_most": at_most, "above": above, "below": below}
    metadata = {"doc": doc, **{name: bound for name, bound in bounds.items() if bound is not None}}
    if factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def set_dotted(tree: dict[Any, Any], assignment: str) -> None:
    """Apply one `key.sub=value`; the value is read as YAML, and a key of digits is a number, as it is there."""
    key, equals, value = assignment.partition("=")
    if not equals or not key or len(key) > LONGEST_TEXT:
        raise ConfigError(f"expected key=value, found {shown(assignment)}")
    *parents, leaf = (int(part) if part.isdecimal() and len(part) < 20 else part for part in key.strip().split("."))
    for parent in parents:
        below = tree.get(parent, {})
        if not isinstance(below, dict):
            raise ConfigError(f"{named(key)}: {named(parent)} is a value, it has no keys of its own")
        tree[parent] = dict(below)  # which another key may share, by an alias
        tree = tree[parent]
    tree[leaf] = parse_yaml(value, key)


# --- mapping -> dataclass ---------------------------------------------------------------------------------


def build(cls: type[T], tree: Mapping[str, Any]) -> T:
    """The dataclass `cls` from nested mappings.

    Raises `ConfigError` with the first unknown keys (and the nearest valid ones), wrong types and values out of
    bounds in one line.
    """
    value: T = _build(cls, tree, whole=True)
    return value


def check_part(cls: type, tree: Mapping[str, Any]) -> None:
    """`ConfigError` as in `build` for what is wrong with a part of the settings, whatever the rest will be."""
    _build(cls, tree, whole=False)


def _build(cls: type, tree: Mapping[str, Any], whole: bool) -> Any:
    problems: list[str] = []
    known = {key for key, _ in leaves(cls)}
    value = _build_dataclass(cls, tree, "", known, problems, whole)
    if problems:
        raise ConfigError(cut("; ".join(problems), LONGEST_MESSAGE))
    return value


def leaves(cls: type, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """Every (dotted key, field) of the settings below `cls`, in order of declaration."""
    hints = _hints_of(cls)
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from leaves(hints[field.name], f"{prefix}{key_of(field)}.")
        else:
            yield f"{prefix}{key_of(field)}", field


def key_of(field: dataclasses.Field[Any]) -> str:
    """A field's key; one that is a word of Python, as `async` is, has an underscore behind it in the dataclass."""
    return field.name.rstrip("_")


def nearest_key(key: str, known: set[str]) -> str:
    """The advice behind an unknown key."""
    key = cut(key)  # a long one is near to none, and takes long to compare
    leaf = key.rsplit(".", 1)[-1]
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    same_leaf = [candidate for candidate in sorted(known) if candidate.rsplit(".", 1)[-1] == leaf]
    close_leaf = [c for c in sorted(known) if difflib.SequenceMatcher(None, c.rsplit(".", 1)[-1], leaf).ratio() > 0.75]
    for candidate in [*same_leaf, SYNONYMS.get(leaf), *close, *close_leaf]:
        if candidate in known:
            return f"did you mean {candidate!r}?"
    return "see docs/settings.md for the keys"


def _build_dataclass(cls: type, tree: Any, path: str, known: set[str], problems: list[str], whole: bool) -> Any:
    if not isinstance(tree, Mapping):
        problems.append(f"{path or 'config'}: expected keys below it, found {shown(tree)}")
        return None
    hints = _hints_of(cls)
    fields = {key_of(field): field for field in dataclasses.fields(cls)}
    before = len(problems)
    values: dict[str, Any] = {}
    for key, raw in tree.items():
        if len(problems) == MOST_TOLD:
            break
        dotted = f"{path}.{named(key)}" if path else named(key)
        if key not in fields:
            problems.append(f"unknown key {shown(dotted)}: {nearest_key(dotted, known)}")
            continue
        name = fields[key].name
        if dataclasses.is_dataclass(hints[name]):
            values[name] = _build_dataclass(hints[name], raw, dotted, known, problems, whole)
        else:
            try:
                values[name] = _convert(raw, hints[name])
                _check_bounds(values[name], fields[key].metadata)
            except ValueError as error:
                problems.append(_under(dotted, error))
    if len(problems) > before or not whole:
        return None
    try:
        return cls(**values)
    except ValueError as error:  # the owner's own check in __post_init__
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
    """A type as the documentation and the errors write it."""
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


def _under(key: str, error: ValueError) -> str:
    """The message of an error at `key`; one that begins with a dot happened at a key further down."""
    return f"{key}{error}" if str(error).startswith(".") else f"{key}: {error}"


def _convert(raw: Any, hint: Any) -> Any:
    """`raw` as a value of type `hint`, or ValueError with what was expected; in a map it begins `.key: `."""
    origin, args = get_origin(hint), get_args(hint)
    refusal = ValueError(f"expected {type_name(hint)}, found {shown(raw)}")
    if isinstance(raw, (list, tuple, Mapping)) and len(raw) > MOST_ENTRIES:
        raise ValueError(f"expected at most {MOST_ENTRIES} entries, found {len(raw)}")
    if origin is Literal:
        if raw is False and "off" in args:  # YAML reads a bare `off` as False
            return "off"
        if raw not in args or isinstance(raw, bool):
            word = raw if isinstance(raw, str) else ""
            close = difflib.get_close_matches(word, [str(arg) for arg in args], n=1)
            raise ValueError(f"{refusal}{f' (did you mean {close[0]!r}?)' if close else ''}")
        return raw
    if origin in (Union, types.UnionType):
        for arg in args:
            try:
                return _convert(raw, arg)
            except ValueError as error:
                if isinstance(raw, Mapping) and get_origin(arg) is dict:
                    raise error  # the shape fits: its own complaint says more
        raise refusal
    if origin is list:
        if not isinstance(raw, (list, tuple)):
            raise refusal
        return [_convert(item, args[0]) for item in raw]
    if origin is tuple:
        if not isinstance(raw, (list, tuple)) or len(raw) != len(args):
            raise ValueError(f"expected {len(args)} values, found {shown(raw)}")
        return tuple(_convert(item, arg) for item, arg in zip(raw, args, strict=True))
    if origin is dict:
        if not isinstance(raw, Mapping):
            raise refusal
        values = {}
        for key, value in raw.items():
            try:
                values[_convert(key, args[0])] = _convert(value, args[1])
            except ValueError as error:
                raise ValueError(f".{_under(named(key), error)}") from None
        return values
    if hint is type(None):
        if raw is not None:
            raise refusal
        return None
    if not isinstance(raw, (int, float) if hint is float else hint) or (isinstance(raw, bool) and hint is not bool):
        raise refusal
    if isinstance(raw, int) and raw.bit_length() > 63:
        raise ValueError(f"expected {type_name(hint)} of at most 63 bits, found {shown(raw)}")
    if isinstance(raw, float) and not math.isfinite(raw):
        raise refusal
    if isinstance(raw, str):
        _check_text(raw)
    return float(raw) if hint is float else raw


def _check_text(text: str) -> None:
    """A text setting is a name, an address or a path: one line that Linux takes as the path of a folder of ours."""
    if any(unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") for letter in text):
        raise ValueError(f"expected text without control characters, found {shown(text)}")
    if len(text.encode()) > LONGEST_TEXT or any(len(part.encode()) > LONGEST_NAME for part in text.split("/")):
        raise ValueError(f"expected at most {LONGEST_TEXT} bytes, {LONGEST_NAME} between slashes, found {shown(text)}")


def is_setting_text(text: str) -> bool:
    """Whether a text setting may be `text`."""
    try:
        _check_text(text)
    except ValueError:
        return False
    return True


def dump(value: Any) -> Any:
    """A settings dataclass as nested plain mappings, in order of declaration; `build` reads it back."""
    if dataclasses.is_dataclass(value):
        return {key_of(field): dump(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: dump(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [dump(item) for item in value]
    return value


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        flat |= flatten(value, key + ".") if isinstance(value, Mapping) and value else {key: value}
    return flat


def to_yaml(value: Any) -> str:
    return yaml.safe_dump(dump(value), sort_keys=False, allow_unicode=True, default_flow_style=False)
