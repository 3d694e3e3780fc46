"""Config files that extend others with `extends:`: reading and merging them, and the origin of each value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmldlm.errors import ConfigError
from mmldlm.settings.declaration import leaves, setting
from mmldlm.settings.fields import build, check_partial
from mmldlm.settings.successors import RENAMED, current
from mmldlm.settings.yaml import find_key_lines, parse_mapping, read_yaml_text
from mmldlm.utils.nested import flatten
from mmldlm.utils.short_repr import display_name, truncate

EXTENDS = "extends"
_MAX_CHAIN_CHARS = 1200  # limit for the file names in a message


@dataclass(frozen=True)
class ExtendsConfig:
    """The key `extends`, which names other config files. A resolved config does not have it."""

    extends: str | list[str] = setting(
        factory=list, doc="config files, by paths relative to this one, whose settings hold where this file has none"
    )


@dataclass(frozen=True)
class ConfigLayer:
    """One config file: its path, text and parsed content."""

    path: Path
    text: str
    tree: dict[str, Any]

    @classmethod
    def read(cls, path: Path, folder: Path | None = None) -> ConfigLayer:
        """Read and parse the file, and rename old keys. Raise `ConfigError` if that fails. See `read_yaml_text`."""
        text = read_yaml_text(path, folder)
        # Only a run folder or a checkpoint has one of these files.
        records = path.with_name("startup.json"), path.with_name("manifest.json")
        is_record = path.name == "config.yaml" and any(map(Path.is_file, records))
        return cls(path, text, current(parse_mapping(text, str(path)), str(path), is_record))


def read_layers(path: Path) -> list[ConfigLayer]:
    """Read `path` and all files that it extends, directly or through others. Raise `ConfigError` if they form a cycle.

    Later layers win: each file comes after the files that it extends, and the files of one list keep the order of the
    list. A file that is reached twice is included once, at its first position, so that a preset shared by two others
    overrides neither of them. The key `extends` is removed.
    """
    layers: dict[Path, ConfigLayer] = {}
    _read([path], layers)
    return list(layers.values())


def _read(chain: Sequence[Path], layers: dict[Path, ConfigLayer]) -> None:
    """Add the last file of `chain` to `layers`, by absolute path, after the files that it extends."""
    *parents, path = chain
    where = f"{display_name(str(parents[-1]))}: {EXTENDS}: " if parents else ""
    if parents and not path.is_file():  # reading a pipe would block
        raise ConfigError(f"{where}expected a file, found none at {display_name(str(path))}")
    if path.resolve() in layers:  # only complete files are in `layers`, so a file that extends itself goes on
        return
    if any(parent.resolve() == path.resolve() for parent in parents):
        names = truncate(" -> ".join(display_name(str(file)) for file in chain), _MAX_CHAIN_CHARS)
        raise ConfigError(f"{where}a file must not extend itself, found {names}")
    try:
        layer = ConfigLayer.read(path)
    except ConfigError as error:
        raise ConfigError(f"{where}{error}") from None
    try:
        extended = build(ExtendsConfig, {EXTENDS: layer.tree.pop(EXTENDS, [])}).extends
    except ConfigError as error:
        raise ConfigError(f"{display_name(str(path))}: {error}") from None
    for name in [extended] if isinstance(extended, str) else extended:
        _read([*chain, path.parent / name], layers)
    layers[path.resolve()] = layer


def merge_layers(cls: type, layers: Sequence[ConfigLayer], alternatives: Sequence[str] = ()) -> dict[str, Any]:
    """Merge `layers` into one tree of settings of `cls`. Later layers win.

    Groups of settings are merged key by key. Values, including maps and lists, are replaced. A config sets only one of
    `alternatives`, see `drop_alternatives`.

    Raises:
        ConfigError: One of several files has an unknown key or a wrong value, even if a later file overrides it. The
            message names the file.
    """
    # `build` checks a single file together with the overrides.
    if len(layers) > 1:
        for layer in layers:
            try:
                check_partial(cls, layer.tree)
            except ConfigError as error:
                raise ConfigError(f"{display_name(str(layer.path))}: {error}") from None
    groups = {key[:index] for key, _ in leaves(cls) for index, char in enumerate(key) if char == "."}
    tree: dict[str, Any] = {}
    for layer in layers:
        tree = _merge(drop_alternatives(tree, layer.tree, alternatives), layer.tree, groups, "")
    return tree


def drop_alternatives(tree: dict[str, Any], newer: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Return `tree` without the `keys`, each of the form `group.name`, if `newer` sets one of them."""
    paths = [key.split(".") for key in keys]
    groups = {group: newer[group] for group, _ in paths if isinstance(newer.get(group), Mapping)}
    if any(groups.get(group, {}).get(name) for group, name in paths):
        for group, name in paths:
            if isinstance(tree.get(group), Mapping):
                tree = {**tree, group: {key: value for key, value in tree[group].items() if key != name}}
    return tree


def _merge(base: Mapping[str, Any], override: Mapping[str, Any], groups: set[str], prefix: str) -> dict[str, Any]:
    tree = dict(base)
    for key, value in override.items():
        # A key that is not text names no group, and `build` reports it.
        dotted = f"{prefix}{key}" if isinstance(key, str) else ""
        both_groups = dotted in groups and isinstance(tree.get(key), Mapping) and isinstance(value, Mapping)
        tree[key] = _merge(tree[key], value, groups, f"{dotted}.") if both_groups else value
    return tree


def origins(
    cls: type, layers: Sequence[ConfigLayer], overrides: Sequence[str], tree: Mapping[str, Any]
) -> dict[str, str]:
    """Return the origin of each setting in the merged `tree`: `FILE:LINE`, `command line` or `default`."""
    keys = [key for key, _ in leaves(cls)]
    by_key: dict[str, str] = {}
    names = {key: key for key in keys} | {old: new for old, (new, _) in RENAMED.items()}
    for layer in layers:
        by_key |= {names[key]: f"{layer.path}:{line}" for key, line in find_key_lines(layer.text, names).items()}
    for assignment in overrides:
        assigned = assignment.partition("=")[0].strip()
        # An override may set a whole group (model={...}) or one entry of a map (mode.l2t=1).
        affected = [key for key in keys if f"{key}.".startswith(f"{assigned}.") or assigned.startswith(f"{key}.")]
        by_key |= dict.fromkeys(affected, "command line")
    # An override of a whole group removes the keys that it does not contain.
    given = [f"{key}." for key in flatten(tree)]
    is_given = {key: any(longer.startswith(f"{key}.") for longer in given) for key in keys}
    return {key: by_key[key] if key in by_key and is_given[key] else "default" for key in keys}
