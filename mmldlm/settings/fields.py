"""Typed, strict settings: dataclasses from nested mappings and `key.sub=value`, and back.

pydantic checks a config against the dataclasses whose fields `declaration.setting` declares: unknown keys, wrong types
and values out of bounds are reported together.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from pydantic_core import ErrorDetails, SchemaValidator

from mmldlm.errors import ConfigError
from mmldlm.settings.declaration import dump, leaves
from mmldlm.settings.yaml import parse_yaml
from mmldlm.utils.short_repr import display_name, short_repr, truncate

T = TypeVar("T")

MAX_PROBLEMS = 8  # reported for one config
MAX_MESSAGE_CHARS = 1600

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


def set_dotted(tree: dict[Any, Any], assignment: str) -> None:
    """Apply one `key.sub=value` override to `tree`; the value is YAML, and a key of digits is an integer as in YAML."""
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


# --- mapping -> dataclass ---------------------------------------------------------------------------------


def build(cls: type[T], tree: Mapping[str, Any]) -> T:
    """Build the dataclass `cls` from nested mappings.

    Raises:
        ConfigError: One line with up to `MAX_PROBLEMS` unknown keys (and the nearest valid ones), wrong types and
            values out of bounds.
    """
    try:
        value: T = _validator(cls).validate_python(tree)  # type: ignore[arg-type]  # mypy: type[T] is no Hashable
    except ValidationError as error:
        raise ConfigError(_summary(cls, error.errors())) from None
    return value


def check_partial(cls: type, tree: Mapping[str, Any]) -> None:
    """Check some of the settings of `cls` without the checks across settings, which other files may satisfy.

    Raises:
        ConfigError: As in `build`.
    """
    try:
        _validator(cls).validate_python(tree)
    except ValidationError as error:
        problems = [problem for problem in error.errors() if problem["type"] != "value_error"]  # of __post_init__
        if problems:
            raise ConfigError(_summary(cls, problems)) from None


@functools.cache
def type_adapter(cls: type) -> TypeAdapter[Any]:
    """Return pydantic's view of the dataclass `cls`, with the keys of `key_of`."""
    config = ConfigDict(extra="forbid", alias_generator=lambda name: name.rstrip("_"))
    return TypeAdapter(with_config(config)(cls))


@functools.cache
def _validator(cls: type) -> SchemaValidator:
    return SchemaValidator(_strict(type_adapter(cls).core_schema))


# By type in pydantic's core schema: no value is converted to another type, numbers are finite and fit 64 bits, and a
# text, which is often a path, has one line. (pydantic's own strict mode would also refuse lists for tuples.)
_STRICT: dict[str, dict[str, Any]] = {
    "bool": {"strict": True},
    "int": {"strict": True, "ge": -(2**63), "le": 2**63 - 1},
    "float": {"strict": True, "allow_inf_nan": False},
    "str": {"strict": True, "pattern": r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*$"},
    "list": {"strict": True},
    "dict": {"strict": True},
}


def _strict(schema: Any) -> Any:
    """Return a core schema of pydantic with `_STRICT` added to its types, and without names for members of unions."""
    if isinstance(schema, list):
        return [_strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: _strict(part) for key, part in schema.items()}
    # As a member of a union, None is named among the expected values of an error message.
    if schema.get("type") == "nullable":
        schema = {"type": "union", "choices": [schema["schema"], {"type": "none"}]}
    if schema.get("type") == "union":
        return {**schema, "choices": [(choice, "") for choice in schema["choices"]]}
    # The bounds of the setting itself come last and win.
    return {**_STRICT.get(str(schema.get("type")), {}), **schema}


# --- error messages ---------------------------------------------------------------------------------------

# By pydantic's type of the error: what was expected, with names of the error's context.
_EXPECTED = {
    "bool_type": "true or false",
    "int_type": "whole number",
    "float_type": "number",
    "finite_number": "finite number",
    "string_type": "text",
    "string_unicode": "text without control characters",
    "string_pattern_mismatch": "text without control characters",
    "none_required": "null",
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


def _summary(cls: type, errors: Sequence[ErrorDetails]) -> str:
    """Return pydantic's errors as one line, with one problem per key."""
    by_key: dict[str, list[ErrorDetails]] = {}
    for error in errors:  # the members of a union have no name, and "[key]" marks the key of a map
        key = ".".join(display_name(part) for part in map(str, error["loc"]) if part not in ("", "[key]"))
        by_key.setdefault(key, []).append(error)
    # A map that is one of a union's types, but has a wrong entry, is reported by the key of the entry.
    keys = [key for key in by_key if not any(other.startswith(f"{key}.") for other in by_key)]
    known = {key for key, _ in leaves(cls)}
    problems = [_problem(key, by_key[key], known) for key in keys[:MAX_PROBLEMS]]
    return truncate("; ".join(problems), MAX_MESSAGE_CHARS)


def _problem(key: str, errors: Sequence[ErrorDetails], known: set[str]) -> str:
    """Return the message of the errors at `key`, which are several for a union."""
    kind, value = errors[0]["type"], errors[0]["input"]
    if kind in ("unexpected_keyword_argument", "invalid_key"):
        return f"unknown key {short_repr(key)}: {nearest_key(key, known)}"
    if kind == "value_error":  # of __post_init__, whose message begins with the name of the setting
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
    return _EXPECTED[error["type"]].format(**context)


def nearest_key(key: str, known: set[str]) -> str:
    """Return advice for an unknown key: the nearest known key, if there is one."""
    key = truncate(key)  # a long key resembles none, and is slow to compare
    leaf = key.rsplit(".", 1)[-1]
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    same_leaf = [candidate for candidate in sorted(known) if candidate.rsplit(".", 1)[-1] == leaf]
    close_leaf = [c for c in sorted(known) if difflib.SequenceMatcher(None, c.rsplit(".", 1)[-1], leaf).ratio() > 0.75]
    for candidate in [*same_leaf, SYNONYMS.get(leaf), *close, *close_leaf]:
        # False for None, and for a synonym's key that these settings lack.
        if candidate in known:
            return f"did you mean {candidate!r}?"
    return "see docs/settings.md for the keys"


def to_yaml(value: Any) -> str:
    """Return a settings dataclass as YAML."""
    return yaml.safe_dump(dump(value), sort_keys=False, allow_unicode=True, default_flow_style=False)
