"""Typed, strict settings: dataclasses from YAML and `key.sub=value`, and back.

A setting is declared once, with `setting(default, doc, ...)`, in the dataclass beside the code that
reads it. Unknown keys, wrong types and values out of bounds are all collected and refused together.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from mmldlm.errors import ConfigError

T = TypeVar("T")

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


# --- YAML -------------------------------------------------------------------------------------------------


class _StrictLoader(yaml.SafeLoader):
    """`yaml.SafeLoader` that refuses duplicate keys and reads 1e-4 as a number."""


def _mapping(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    loader.flatten_mapping(node)
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, (str, int, float, bool)):
            raise ConfigError(f"line {key_node.start_mark.line + 1}: a key must be a word, found {key!r}")
        if key in seen:
            raise ConfigError(f"line {key_node.start_mark.line + 1}: key {key!r} is there twice")
        seen.add(key)
    return {loader.construct_object(k, deep=True): loader.construct_object(v, deep=True) for k, v in node.value}


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)


def parse_yaml(text: str, source: str) -> Any:
    """YAML by the strict loader; anything malformed is a `ConfigError` that names `source` and the line."""
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}, line {mark.line + 1}" if mark else source
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{where}: not valid YAML: {problem}") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; missing, unreadable or not a mapping: `ConfigError`."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from None
    content = parse_yaml(text, str(path))
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected settings (key: value), found {type(content).__name__}")
    return content


def set_dotted(tree: dict[Any, Any], assignment: str) -> None:
    """Apply one `key.sub=value`; the value is read as YAML, and a key of digits is a number, as it is there."""
    key, equals, value = assignment.partition("=")
    if not equals or not key:
        raise ConfigError(f"expected key=value, found {assignment!r}")
    *parents, leaf = (int(part) if part.isdecimal() else part for part in key.strip().split("."))
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{key}: {parent} is a value, it has no keys of its own")
    tree[leaf] = parse_yaml(value, key)


# --- mapping -> dataclass ---------------------------------------------------------------------------------


def build(cls: type[T], tree: Mapping[str, Any]) -> T:
    """The dataclass `cls` from nested mappings.

    Raises `ConfigError` with every unknown key (and the nearest valid one), wrong type and value out
    of bounds in one line.
    """
    problems: list[str] = []
    known = {key for key, _ in leaves(cls)}
    value = _build_dataclass(cls, tree, "", known, problems)
    if problems:
        raise ConfigError("; ".join(problems))
    return value


def leaves(cls: type, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """Every (dotted key, field) of the settings below `cls`, in order of declaration."""
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from leaves(hints[field.name], f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", field


def nearest_key(key: str, known: set[str]) -> str:
    """The advice behind an unknown key."""
    leaf = key.rsplit(".", 1)[-1]
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    same_leaf = [candidate for candidate in sorted(known) if candidate.rsplit(".", 1)[-1] == leaf]
    close_leaf = [c for c in sorted(known) if difflib.SequenceMatcher(None, c.rsplit(".", 1)[-1], leaf).ratio() > 0.75]
    for candidate in [*same_leaf, SYNONYMS.get(leaf), *close, *close_leaf]:
        if candidate in known:
            return f"did you mean {candidate!r}?"
    return "see docs/settings.md for the keys"


def _build_dataclass(cls: type, tree: Any, path: str, known: set[str], problems: list[str]) -> Any:
    if not isinstance(tree, Mapping):
        problems.append(f"{path or 'config'}: expected keys below it, found {tree!r}")
        return None
    hints = get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    before = len(problems)
    values: dict[str, Any] = {}
    for key, raw in tree.items():
        dotted = f"{path}.{key}" if path else str(key)
        if key not in fields:
            problems.append(f"unknown key {dotted!r}: {nearest_key(dotted, known)}")
        elif dataclasses.is_dataclass(hints[key]):
            values[key] = _build_dataclass(hints[key], raw, dotted, known, problems)
        else:
            try:
                values[key] = _convert(raw, hints[key])
                _check_bounds(values[key], fields[key].metadata)
            except ValueError as error:
                problems.append(_under(dotted, error))
    if len(problems) > before:
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
    refusal = ValueError(f"expected {type_name(hint)}, found {raw!r}")
    if origin is Literal:
        if raw is False and "off" in args:  # YAML reads a bare `off` as False
            return "off"
        if raw not in args or isinstance(raw, bool):
            close = difflib.get_close_matches(str(raw), [str(arg) for arg in args], n=1)
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
            raise ValueError(f"expected {len(args)} values, found {raw!r}")
        return tuple(_convert(item, arg) for item, arg in zip(raw, args, strict=True))
    if origin is dict:
        if not isinstance(raw, Mapping):
            raise refusal
        values = {}
        for key, value in raw.items():
            try:
                values[_convert(key, args[0])] = _convert(value, args[1])
            except ValueError as error:
                raise ValueError(f".{_under(str(key), error)}") from None
        return values
    if hint is type(None):
        if raw is not None:
            raise refusal
        return None
    if hint is float and isinstance(raw, int) and not isinstance(raw, bool):
        return float(raw)
    if isinstance(raw, hint) and (hint is bool or not isinstance(raw, bool)):
        if hint is float and raw != raw:
            raise ValueError("expected number, found nan")
        return raw
    raise refusal


def dump(value: Any) -> Any:
    """A settings dataclass as nested plain mappings, in order of declaration; `build` reads it back."""
    if dataclasses.is_dataclass(value):
        return {field.name: dump(getattr(value, field.name)) for field in dataclasses.fields(value)}
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
