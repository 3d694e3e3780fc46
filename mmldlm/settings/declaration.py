"""Declaration of settings: dataclasses whose fields carry documentation and bounds.

Each setting is declared once, with `setting(default, doc, ...)`, in the dataclass next to the code that reads it. This
module needs the standard library only, so that you can load a trained network without pydantic and YAML: `restore`
reads the config of a bundle. `fields` builds the dataclasses from configs that people write.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import operator
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from mmldlm.errors import ConfigError
from mmldlm.utils.short_repr import short_repr

T = TypeVar("T")

_BOUNDS = {  # by pydantic's names
    "ge": ("at least", operator.ge),
    "gt": ("above", operator.gt),
    "le": ("at most", operator.le),
    "lt": ("below", operator.lt),
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
    advice: str = "",
    **argument: Any,
) -> Any:
    """Return a dataclass field for a setting.

    `doc` is one line for `docs/settings.md`. The bounds `at_least` and `at_most` are inclusive, `above` and `below` are
    exclusive. `advice` says how to choose the value, if there is something to say.
    `argument` has arguments of argparse, for a setting that is an option of a command.
    """
    bounds = {"ge": at_least, "gt": above, "le": at_most, "lt": below}
    metadata = {
        "doc": doc,
        "advice": advice,
        "argument": argument,
        # From here on the names are pydantic's.
        "description": ". ".join(filter(None, (doc, advice))),
        **{name: bound for name, bound in bounds.items() if bound is not None},
    }
    if factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def require_effect(settings: Any, name: str, under: str, *values: str) -> None:
    """Raise `ValueError` if `name` is set, but has no effect because the setting `under` is none of `values`."""
    default = next(field.default for field in dataclasses.fields(settings) if field.name == name)
    value = getattr(settings, under)
    if value not in values and getattr(settings, name) != default:
        # JSON spells null, true and false as YAML does.
        expected = "its defaults" if dataclasses.is_dataclass(default) else json.dumps(default).strip('"')
        raise ValueError(
            f"{name}: does nothing under {under}: {value}, expected {expected} or {under}: {' or '.join(values)}"
        )


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


def dump(value: Any) -> Any:
    """Return a settings dataclass as nested dicts and lists in order of declaration. `build` reads them back."""
    if dataclasses.is_dataclass(value):
        return {key_of(field): dump(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: dump(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [dump(item) for item in value]
    return value


def flat_settings(settings: Any) -> dict[str, Any]:
    """Return the values of a settings dataclass as `dump` has them, by dotted key in order of declaration."""
    tree = dump(settings)
    return {key: functools.reduce(operator.getitem, key.split("."), tree) for key, _ in leaves(type(settings))}


def restore(cls: type[T], tree: Mapping[str, Any], prefix: str = "") -> T:
    """Build the dataclass `cls` from the JSON values of its `dump`. Missing keys take their defaults.

    Args:
        prefix: Dotted key of `tree` with a trailing dot, for messages.

    Raises:
        ConfigError: A key is unknown, or a value has the wrong type or is out of bounds.
    """
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{prefix.rstrip('.') or 'config'}: expected keys below it, found {short_repr(tree)}")
    fields = {key_of(field): field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    settings: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if key not in fields:
            raise ConfigError(f"unknown key {short_repr(name)}, expected one of {', '.join(fields)}")
        field, hint = fields[key], _type_hints(cls)[fields[key].name]  # type: ignore[arg-type]
        if dataclasses.is_dataclass(hint):
            value = restore(hint, value, f"{name}.")  # type: ignore[arg-type]
        elif isinstance(value, list) and tuple in {get_origin(member) for member in (hint, *get_args(hint))}:
            value = tuple(value)
        elif get_origin(hint) is dict and get_args(hint)[0] is int:
            value = {int(number): item for number, item in value.items()}
        if not _is_of(hint, value):
            expected = f"one of {', '.join(map(str, get_args(hint)))}" if get_origin(hint) is Literal else hint
            raise ConfigError(f"{name}: expected {getattr(expected, '__name__', expected)}, found {short_repr(value)}")
        for bound, (words, holds) in _BOUNDS.items():
            if bound in field.metadata and type(value) in (int, float) and not holds(value, field.metadata[bound]):
                raise ConfigError(f"{name}: must be {words} {field.metadata[bound]:g}, found {short_repr(value)}")
        settings[field.name] = value
    try:
        return cls(**settings)
    except ValueError as error:  # raised by __post_init__, with a message that begins with the name of the setting
        raise ConfigError(f"{prefix}{error}") from None


def _is_of(hint: Any, value: Any) -> bool:
    """Return whether a value has the type of a setting. Infinite numbers and NaN have not."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return value in args
    if origin in (Union, UnionType):
        return any(_is_of(member, value) for member in args)
    if origin is dict:
        return isinstance(value, dict) and all(_is_of(args[0], key) and _is_of(args[1], value[key]) for key in value)
    if origin is tuple:
        return isinstance(value, tuple) and len(value) == len(args) and all(map(_is_of, args, value))
    if origin is list:
        return isinstance(value, list) and all(_is_of(args[0], item) for item in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, hint) and isinstance(value, bool) == (hint is bool)
