"""The files of a run config: what `extends:` names, in the order in which they win, and where each value comes from."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmldlm.errors import ConfigError
from mmldlm.settings.fields import build, check_part, leaves, setting
from mmldlm.settings.yaml import MAX_BYTES, lines_of_keys, parse_mapping, read_text
from mmldlm.utils.short_repr import cut, named

EXTENDS = "extends"
MOST_FILES, DEEPEST = 16, 8  # of one config: files in all, and each extending the next
_LONGEST_CHAIN = 1200  # characters of file names in a message


@dataclass(frozen=True)
class _Extending:
    extends: str | list[str] = setting(factory=list, doc="files whose settings hold where this file has none")


@dataclass(frozen=True)
class ConfigLayer:
    """One file."""

    path: Path
    text: str
    tree: dict[str, Any]

    @classmethod
    def read(cls, path: Path, most: int = MAX_BYTES) -> ConfigLayer:
        text = read_text(path, most)
        return cls(path, text, parse_mapping(text, str(path)))


def read_layers(path: Path) -> list[ConfigLayer]:
    """`path`, which comes last, and all files that it extends, without their `extends`.

    Each comes behind those that it extends itself, and files of one list in the order of the list. A file that is
    reached twice comes once, at its first place, so that what two presets have in common undoes neither of them.
    ConfigError naming the files where they go round in a circle, or are too many or too large to be meant.
    """
    layers: dict[str, ConfigLayer] = {}
    _read(path, [], layers, {})
    return list(layers.values())


def _read(path: Path, above: Sequence[Path], layers: dict[str, ConfigLayer], begun: dict[str, int]) -> None:
    """Add `path` to `layers`, behind what it extends; `above` leads to it, `begun` has the size of each file."""
    chain = [*above, path]
    place = str(path) if "\0" in str(path) else os.path.realpath(path)  # such a name is refused by whoever opens it
    if place in layers:
        return
    where = f"{named(str(above[-1] if above else path))}: {EXTENDS}: "
    if place in begun:
        raise ConfigError(f"{where}expected no file that extends itself, found {_arrows(chain)}")
    if len(above) > DEEPEST:
        raise ConfigError(f"{where}expected at most {DEEPEST} files that extend each other, found {_arrows(chain)}")
    if len(begun) == MOST_FILES:
        raise ConfigError(f"{where}expected at most {MOST_FILES} files in all, found one more: {_arrows(chain)}")
    if above and not path.is_file():  # a pipe would be waited for
        raise ConfigError(f"{where}expected a file, found none at {named(str(path))}")
    left = MAX_BYTES - sum(begun.values())
    try:
        layer = ConfigLayer.read(path, left)
    except ConfigError as error:
        raise ConfigError(f"{where}{error}" if above else str(error)) from None
    begun[place] = len(layer.text.encode())
    for name in _extended(layer):
        _read(path.parent / name, chain, layers, begun)
    layers[place] = ConfigLayer(path, layer.text, {key: value for key, value in layer.tree.items() if key != EXTENDS})


def _extended(layer: ConfigLayer) -> list[str]:
    if EXTENDS not in layer.tree:
        return []
    try:
        found = build(_Extending, {EXTENDS: layer.tree[EXTENDS]}).extends
    except ConfigError as error:
        raise ConfigError(f"{named(str(layer.path))}: {error}") from None
    return [found] if isinstance(found, str) else found


def _arrows(chain: Sequence[Path]) -> str:
    return cut(" -> ".join(named(str(path)) for path in chain), _LONGEST_CHAIN)


# --- one tree of several ------------------------------------------------------------------------------------


def merged(cls: type, layers: Sequence[ConfigLayer]) -> dict[str, Any]:
    """One tree of settings of `cls`, in which later layers win: groups key by key, values as a whole, maps too.

    ConfigError naming the file where one of several has an unknown key or a wrong value, even if another wins.
    """
    if len(layers) > 1:
        for layer in layers:
            try:
                check_part(cls, layer.tree)
            except ConfigError as error:
                raise ConfigError(f"{named(str(layer.path))}: {error}") from None
    groups = _groups(cls)
    tree: dict[str, Any] = {}
    for layer in layers:
        tree = _merge(tree, layer.tree, groups, "")
    return tree


def _merge(below: Mapping[str, Any], above: Mapping[str, Any], groups: set[str], prefix: str) -> dict[str, Any]:
    tree = dict(below)
    for key, value in above.items():
        dotted = f"{prefix}{key}" if isinstance(key, str) else ""
        both = dotted in groups and isinstance(tree.get(key), Mapping) and isinstance(value, Mapping)
        tree[key] = _merge(tree[key], value, groups, f"{dotted}.") if both else value
    return tree


def _groups(cls: type) -> set[str]:
    """Dotted names of all groups of settings: what stands before the dots of keys."""
    return {key[:at] for key, _ in leaves(cls) for at, letter in enumerate(key) if letter == "."}


class Provenance:
    """Where each value comes from: `FILE:LINE` or `command line`; a key that is not in here has its default."""

    DEFAULT, COMMAND_LINE = "default", "command line"

    def __init__(self, cls: type, layers: Sequence[ConfigLayer], overrides: Sequence[str], tree: Mapping[str, Any]):
        """`tree` is what the layers, and then the overrides, have come to."""
        self._cls, self._layers, self._tree = cls, layers, tree
        self._assigned = [assignment.partition("=")[0].strip() for assignment in overrides]

    def of_keys(self) -> dict[str, str]:
        """The origin of every key that is set."""
        keys = [key for key, _ in leaves(self._cls)]
        origins: dict[str, str] = {}
        for layer in self._layers:
            found = lines_of_keys(layer.text, keys)
            origins |= {key: f"{layer.path}:{line}" for key, line in found.items()}
        for assigned in self._assigned:
            # Of a group as a whole (model={...}), or of one entry of a map (mode.l2t=1).
            touched = [key for key in keys if f"{key}.".startswith(f"{assigned}.") or assigned.startswith(f"{key}.")]
            origins |= dict.fromkeys(touched, self.COMMAND_LINE)
        return {key: origins[key] for key in keys if key in origins and _holds(self._tree, key)}


def _holds(tree: Any, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return False
        tree = tree[part]
    return True


def values(tree: Mapping[str, Any], cls: type) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every setting of a complete tree, in order of declaration."""
    for key, _ in leaves(cls):
        value: Any = tree
        for part in key.split("."):
            value = value[part]
        yield key, value
