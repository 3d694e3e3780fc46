"""docs/settings.md from the settings themselves: `python -m mmldlm.settings_doc > docs/settings.md`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, get_type_hints

from mmldlm.config import RunConfig
from mmldlm.schema import key_of, leaves, type_name

HEAD = """\
# Settings

Made from the code by `python -m mmldlm.settings_doc > docs/settings.md`; do not edit by hand.

A run config is a YAML file. A setting is written under its group, or on the command line as `group.key=value`,
which wins over the file:

    mmldlm train configs/quickstart.yaml train.steps=2000 optim.lr=1e-3

Whatever is not given has the default below. `mmldlm train --dry-run CONFIG.yaml` prints all settings as they will
be used, and the run folder keeps them in `config.yaml`. An unknown key, a wrong type or a value out of bounds ends
the command with exit code 64, before anything is created, and the message names the nearest valid key.
`data.path` and `run.dir` must be set. A map given for `mode` replaces the default shares; modes it does not name have
share 0.
"""

_BOUNDS = {"at_least": "at least", "above": "above", "at_most": "at most", "below": "below"}


def settings_markdown() -> str:
    """The whole page: a section per group, a row per setting, in order of declaration."""
    groups: dict[str, list[str]] = {"": []}
    for key, field in leaves(RunConfig):
        group = key.rpartition(".")[0]
        groups.setdefault(group, []).append(_row(key, field))
    parts = [HEAD, _section("Without a group", "These stand at the left margin of the YAML file.", groups.pop(""))]
    parts += [_section(f"`{group}`", f"{_sentence(_about(group))}.", rows) for group, rows in groups.items()]
    return "\n".join(parts)


def _about(group: str) -> str:
    """The doc of a group, which may lie in another group."""
    parent, _, name = group.rpartition(".")
    return {key_of(field): field for field in dataclasses.fields(_hint(parent))}[name].metadata["doc"]


def _section(title: str, about: str, rows: list[str]) -> str:
    table = ["| key | type | default | meaning |", "|---|---|---|---|", *rows]
    return "\n".join([f"## {title}", "", about, "", *table, ""])


def _row(key: str, field: dataclasses.Field[Any]) -> str:
    bounds = [f"{words} {field.metadata[name]}" for name, words in _BOUNDS.items() if name in field.metadata]
    kind = ", ".join([type_name(_hint(key)), *bounds])
    made = field.default_factory
    default = field.default if made is dataclasses.MISSING else made()
    cells = [f"`{key}`", kind, f"`{_literal(default)}`", field.metadata["doc"]]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _hint(key: str) -> Any:
    """The type of the setting or group `key`, which its field holds only as text; "" is the whole config."""
    hint: Any = RunConfig
    for part in filter(None, key.split(".")):
        field = next(field for field in dataclasses.fields(hint) if key_of(field) == part)
        hint = get_type_hints(hint)[field.name]
    return hint


def _literal(value: Any) -> str:
    """A default as one writes it in YAML."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return str(value) or '""'


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


if __name__ == "__main__":
    print(settings_markdown(), end="")
