"""Typed, strict settings: dataclasses from nested mappings and `key.sub=value`, and back.

pydantic checks a config against the dataclasses whose fields `declaration.setting` declares. It reports unknown keys,
wrong types and values out of bounds together.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from pydantic_core import ErrorDetails

from mmldlm.errors import ConfigError
from mmldlm.settings.declaration import dump, leaves
from mmldlm.settings.yaml import Dumper, parse_yaml
from mmldlm.utils.short_repr import display_name, short_repr, truncate

T = TypeVar("T")

MAX_PROBLEMS = 8  # a message reports at most this many problems of a config
MAX_MESSAGE_CHARS = 1600
MAX_SUGGESTIONS = 3  # for one unknown key
_MIN_LIKENESS = 0.75  # a message suggests keys that are at least this similar


def set_dotted(tree: dict[Any, Any], assignment: str) -> None:
    """Apply one `key.sub=value` override to `tree`. The value is YAML, and a key of digits is an integer as in YAML."""
    key, equals, value = assignment.partition("=")
    if not equals or not key:
        raise ConfigError(f"expected key=value, found {short_repr(assignment)}")
    *parents, leaf = (int(part) if part.isdecimal() and len(part) < 20 else part for part in key.strip().split("."))
    for parent in parents:
        group = tree.get(parent, {})
        if not isinstance(group, dict):
            raise ConfigError(f"{display_name(key)}: {display_name(parent)} is a value, expected a group of keys")
        tree[parent] = dict(group)  # copied, as a YAML alias may share the mapping with another key
        tree = tree[parent]
    tree[leaf] = parse_yaml(value, key)


def build(cls: type[T], tree: Mapping[str, Any]) -> T:
    """Build the dataclass `cls` from nested mappings.

    Raises:
        ConfigError: Keys are unknown, or values have wrong types or are out of bounds. One line names up to
            `MAX_PROBLEMS` of them, and the nearest valid keys.
    """
    return _validate(cls, tree)


def check_partial(cls: type, tree: Mapping[str, Any]) -> None:
    """Check some of the settings of `cls`, but not the checks across settings, which other files may satisfy."""
    _validate(cls, tree, is_partial=True)


def _validate(cls: type, tree: Mapping[str, Any], is_partial: bool = False) -> Any:
    """As `build`. With `is_partial`, return None if only checks across settings fail."""
    try:
        # We pass JSON, since pydantic's strict mode then takes lists for tuples and maps for dataclasses.
        text = json.dumps(tree, default=str)
    except (TypeError, ValueError, RecursionError) as error:  # keys that are no text, or a map that contains itself
        raise ConfigError(f"expected settings that JSON can express: {truncate(str(error))}") from None
    try:
        return type_adapter(cls).validate_json(text)
    except ValidationError as error:
        problems = [one for one in error.errors() if not (is_partial and one["type"] == "value_error")]
        if problems:
            raise ConfigError(_summary(cls, json.loads(text), problems)) from None


@functools.cache
def type_adapter(cls: type) -> TypeAdapter[Any]:
    """Return pydantic's view of the dataclass `cls`, with the keys of `key_of`. Numbers must be finite."""
    config = ConfigDict(extra="forbid", alias_generator=lambda name: name.rstrip("_"), strict=True, allow_inf_nan=False)
    return TypeAdapter(with_config(config)(cls))


# The expected value by pydantic's type of the error, with names of the error's context.
_EXPECTED = {
    "bool_type": "true or false",
    "int_type": "whole number",
    "int_parsing": "whole number",
    "float_type": "number",
    "finite_number": "finite number",
    "string_type": "text",
    "list_type": "list",
    "tuple_type": "list",
    "dict_type": "map",
    "dataclass_type": "keys below it",
    "literal_error": "{expected}",
    "missing": "a value",
    "too_long": "at most {max_length} values",
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
}


def _summary(cls: type, tree: Any, errors: Sequence[ErrorDetails]) -> str:
    """Return pydantic's errors as one line, with one problem per key."""
    by_key: dict[str, list[ErrorDetails]] = {}
    for error in errors:
        by_key.setdefault(_key(error, tree), []).append(error)
    # If a union has a map among its types and an entry of the map is wrong, we report only the key of the entry.
    keys = [key for key in by_key if not any(other.startswith(f"{key}.") for other in by_key)]
    known = {key for key, _ in leaves(cls)}
    problems = [_problem(key, by_key[key], known) for key in keys[:MAX_PROBLEMS]]
    return truncate("; ".join(problems), MAX_MESSAGE_CHARS)


def _key(error: ErrorDetails, tree: Any) -> str:
    """Return the dotted key of an error. Drop pydantic's names for the members of a union and for keys of maps."""
    parts = []
    for part in error["loc"]:
        is_in_tree = part in tree if isinstance(tree, dict) else isinstance(part, int)
        if is_in_tree or error["type"] == "missing":
            parts.append(display_name(str(part)))
            tree = tree[part] if error["type"] != "missing" else tree
    return ".".join(parts)


def _problem(key: str, errors: Sequence[ErrorDetails], known: set[str]) -> str:
    """Return one message for the errors at `key`. A union has several errors."""
    kind, value = errors[0]["type"], errors[0]["input"]
    if kind == "unexpected_keyword_argument" and key in known:  # such as `train.steps` at the top of a file
        nested = f"{key.replace('.', ': {')}: {short_repr(value)}{'}' * key.count('.')}"
        return f"unknown key {short_repr(key)}: in a file, write {nested}"
    if kind == "unexpected_keyword_argument":
        return f"unknown key {short_repr(key)}: {nearest_key(key, known)}"
    if kind == "value_error":  # raised by __post_init__, with a message that begins with the name of the setting
        return f"{key}.{errors[0]['ctx']['error']}".lstrip(".")
    expected = " or ".join(dict.fromkeys(_expected(error) for error in errors))
    if not expected.startswith("must be"):  # a bound
        expected = f"expected {expected}"
    names = re.findall("'(.*?)'", expected)
    close = difflib.get_close_matches(value, names, n=1) if isinstance(value, str) else []
    advice = f" (did you mean {close[0]!r}?)" if close else ""
    return f"{key or 'config'}: {expected}, found {short_repr(value)}{advice}"


def _expected(error: ErrorDetails) -> str:
    context = {
        name: f"{limit:g}" if isinstance(limit, float) else limit for name, limit in error.get("ctx", {}).items()
    }
    return _EXPECTED[error["type"]].format(**context) if error["type"] in _EXPECTED else error["msg"]


def nearest_key(key: str, known: set[str]) -> str:
    """Return advice for an unknown key: known keys with the same last part or a similar spelling."""
    key = truncate(key)  # a long key resembles no known key, and is slow to compare
    alike = [other for other in sorted(known) if other.rpartition(".")[2] == key.rpartition(".")[2]]
    if len(alike) != 1:
        alike = difflib.get_close_matches(key, sorted(known), n=1, cutoff=_MIN_LIKENESS) or alike[:MAX_SUGGESTIONS]
    return f"did you mean {' or '.join(map(repr, alike))}?" if alike else "see docs/settings.md for the keys"


def to_yaml(value: Any) -> str:
    """Return a settings dataclass as YAML."""
    return yaml.dump(dump(value), Dumper=Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False)
