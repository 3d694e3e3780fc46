"""Strict YAML for settings: unique keys, numbers such as 1e-4, and the lines of keys."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from mmldlm.errors import ConfigError
from mmldlm.utils.files import read_regular
from mmldlm.utils.short_repr import display_name, short_repr, truncate


class _Loader(yaml.SafeLoader):
    """`yaml.SafeLoader` with the numbers of YAML 1.2. It rejects duplicate keys, NUL, and types unknown to JSON."""

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        if isinstance(node.value, str) and "\0" in node.value:  # no path can contain NUL
            raise ConfigError(
                f"line {node.start_mark.line + 1}: expected text without NUL, found {short_repr(node.value)}"
            )
        return super().construct_scalar(node)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = self.construct_scalar(node).replace("_", "")
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[Any] = set()
        for key_node, _ in node.value:  # before merge keys insert others, which the mapping's own keys override
            is_merge = key_node.tag == "tag:yaml.org,2002:merge"
            key = "<<" if is_merge else self.construct_object(key_node, deep=True)
            if key in seen:
                raise ConfigError(f"line {key_node.start_mark.line + 1}: key {short_repr(key)} occurs twice")
            seen.add(key)
        return node


class Dumper(yaml.SafeDumper):
    """`yaml.SafeDumper` that quotes text that would be a number in YAML 1.1 (PyYAML's own version) or in YAML 1.2."""


# PyYAML follows YAML 1.1: there 1:30 is 90, 010 is 8, 1e-4 without a dot is text, and dates have a type.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in pairs if not tag.endswith((":int", ":float", ":timestamp"))]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_NUMBERS = {  # YAML 1.2, section 10.3.2, and numbers such as 1_000
    "int": r"[-+]?\d[\d_]*|0o[0-7]+|0x[\da-fA-F]+",
    "float": r"[-+]?(\.\d+|\d[\d_]*(\.\d*)?)([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}
for name, pattern in _NUMBERS.items():
    for cls in (_Loader, Dumper):
        cls.add_implicit_resolver(f"tag:yaml.org,2002:{name}", re.compile(f"^({pattern})$"), list("-+.0123456789"))
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
for name in ("binary", "timestamp", "omap", "pairs", "set"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{name}", _Loader.construct_undefined)  # type: ignore[type-var]


def parse_yaml(text: str, source: str) -> Any:
    """Parse `text`. If it is malformed, raise a `ConfigError` with `source` and the line."""
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a subclass of SafeLoader
    except ConfigError as error:
        raise ConfigError(f"{display_name(source)}: {error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # Python raises ValueError for malformed numbers
        mark = getattr(error, "problem_mark", None)
        where = f"{display_name(source)}, line {mark.line + 1}" if mark else display_name(source)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{where}: not valid YAML: {truncate(problem)}") from None


def find_key_lines(text: str, keys: Iterable[str]) -> dict[str, int]:
    """Return the line, counted from 1, of each dotted key in `keys` that `text` contains.

    If a merge key inserts a key, this is the line where the inserted key stands. `text` must be a mapping that
    `parse_yaml` accepts.
    """
    loader = _Loader(text)
    root = loader.get_single_node()
    loader.construct_document(root)  # inserts the pairs of merge keys into the nodes
    lines: dict[str, int] = {}
    for key in keys:
        node: yaml.Node | None = root
        line = 0
        for part in key.split("."):
            pairs = node.value if isinstance(node, yaml.MappingNode) else []
            matches = [(name.start_mark.line + 1, value) for name, value in pairs if name.value == part]
            # PyYAML inserts the pairs of merge keys before the mapping's own, so the last match wins.
            line, node = matches[-1] if matches else (0, None)
        if line:
            lines[key] = line
    return lines


def read_yaml(path: Path, folder: Path | None = None) -> dict[str, Any]:
    """Return the mapping in a YAML file. Raise `ConfigError` if it is missing, unreadable or not a mapping."""
    return parse_mapping(read_yaml_text(path, folder), str(path))


def read_yaml_text(path: Path, folder: Path | None = None) -> str:
    """Return the text of a config file. Raise `ConfigError` if it is missing or unreadable.

    With `folder`, the file belongs to that run folder, which may come from a stranger. Otherwise it may be a pipe.
    """
    name = display_name(str(path))
    try:
        return (path.read_bytes() if folder is None else read_regular(path, folder)).decode()
    except FileNotFoundError:
        raise ConfigError(f"config file {name} does not exist") from None
    except (OSError, ValueError) as error:  # also content that is not UTF-8
        raise ConfigError(f"config file {name} cannot be read: {error}") from None


def parse_mapping(text: str, source: str) -> dict[str, Any]:
    """Parse a YAML text. Raise `ConfigError` if it is no mapping, e.g. an empty file that a full disk has left."""
    content = parse_yaml(text, source)
    if not isinstance(content, dict):
        found = "nothing (for the defaults alone, write {})" if content is None else type(content).__name__
        raise ConfigError(f"{display_name(source)}: expected settings (key: value), found {found}")
    return content
