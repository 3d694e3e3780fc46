"""YAML as settings need it: plain values, unique keys, and a bound on what a small text can grow to."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from mmldlm.errors import ConfigError
from mmldlm.utils.short_repr import cut, named, shown

MAX_BYTES = 64 * 2**10  # PyYAML takes up to a second for as much
_MOST_PAIRS = 100_000  # keys of all mappings, those that merge keys (`<<`) bring in included
_DEEPEST = 50  # brackets; PyYAML's time grows with the square


class _Loader(yaml.SafeLoader):
    """`yaml.SafeLoader` that reads 1e-4 as a number, and refuses tags, duplicate keys and bombs of merge keys."""

    _pairs = 0

    def fetch_flow_collection_start(self, token_class: Any) -> None:
        if self.flow_level == _DEEPEST:
            raise ConfigError(f"line {self.line + 1}: expected at most {_DEEPEST} brackets in each other, found more")
        super().fetch_flow_collection_start(token_class)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if getattr(event, "tag", None) is not None:
            raise ConfigError(f"line {event.start_mark.line + 1}: expected no tag, found {shown(event.tag)}")
        return super().compose_node(parent, index)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[Any] = set()
        for key_node, _ in node.value:  # before merge keys add others, which the mapping's own override
            where = f"line {key_node.start_mark.line + 1}"
            merges = key_node.tag == "tag:yaml.org,2002:merge"
            key = "<<" if merges else self.construct_object(key_node, deep=True)
            if not isinstance(key, (str, int, float, bool)):
                raise ConfigError(f"{where}: a key must be a word, found {shown(key)}")
            if key in seen:
                raise ConfigError(f"{where}: key {shown(key)} is there twice")
            seen.add(key)
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        self._pairs += len(node.value)
        if self._pairs > _MOST_PAIRS:
            raise ConfigError(f"line {node.start_mark.line + 1}: merge keys (<<) make more than {_MOST_PAIRS} keys")


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)


def parse_yaml(text: str, source: str) -> Any:
    """The content of `text`; anything malformed is a `ConfigError` that names `source` and the line."""
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{named(source)}: expected at most {MAX_BYTES} characters, found more")
    try:
        return yaml.load(text, Loader=_Loader)
    except ConfigError as error:
        raise ConfigError(f"{named(source)}: {error}") from None
    # PyYAML leaves to Python what a number or a date cannot be.
    except (yaml.YAMLError, ValueError, ArithmeticError, LookupError, TypeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{named(source)}, line {mark.line + 1}" if mark else named(source)
        problem = getattr(error, "problem", None) or (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{where}: not valid YAML: {cut(problem)}") from None


def lines_of_keys(text: str, keys: Iterable[str]) -> dict[str, int]:
    """The line, counted from 1, of each dotted key in `keys` that `text` has; of one that is merged in, its own.

    `text` is a mapping that `parse_yaml` has let pass.
    """
    loader = _Loader(text)
    root = loader.get_single_node()
    if root is None:
        return {}
    loader.construct_document(root)  # which puts what merge keys bring in into the nodes
    lines: dict[str, int] = {}
    for key in keys:
        node: yaml.Node | None = root
        line = 0
        for part in key.split("."):
            pairs = node.value if isinstance(node, yaml.MappingNode) else []
            found = [(at.start_mark.line + 1, below) for at, below in pairs if at.value == part]
            line, node = found[-1] if found else (0, None)
        if line:
            lines[key] = line
    return lines


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; missing, unreadable, too large or not a mapping: `ConfigError`."""
    return parse_mapping(read_text(path), str(path))


def read_text(path: Path, most: int = MAX_BYTES) -> str:
    """The text of a file of at most `most` bytes; missing, unreadable or too large: `ConfigError`."""
    name = named(str(path))
    try:
        with path.open("rb") as file:
            raw = file.read(most + 1)
        text = raw.decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"config file {name} does not exist") from None
    except OSError as error:
        raise ConfigError(f"config file {name} cannot be read: {error.strerror}") from None
    except ValueError as error:  # of the name or of the text
        raise ConfigError(f"config file {name} cannot be read: {error}") from None
    if len(raw) > most:
        raise ConfigError(f"config file {name}: expected at most {most} bytes, found more")
    return text


def parse_mapping(text: str, source: str) -> dict[str, Any]:
    """`parse_yaml` of a text that must hold a mapping, or nothing."""
    content = parse_yaml(text, source)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{named(source)}: expected settings (key: value), found {type(content).__name__}")
    return content
