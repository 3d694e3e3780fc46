"""docs/settings.md from the settings themselves: `python -m mmldlm.tools.settings_doc > docs/settings.md`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, get_type_hints

from mmldlm.config import RunConfig
from mmldlm.settings.fields import key_of, leaves, type_name
from mmldlm.tools.settings_advice import ADVICE

HEAD = """\
# Settings

Made from the code by `python -m mmldlm.tools.settings_doc > docs/settings.md`; do not edit by hand.

A run config is a YAML file. A setting is written under its group, or on the command line as `group.key=value`,
which wins over the file:

    mmldlm train configs/quickstart.yaml train.steps=2000 optim.lr=1e-3

Whatever is not given has the default below. An unknown key, a wrong type or a value out of bounds ends the command with
exit code 64, before anything is created, and the message names the nearest valid key. `data.path` (or `data.mixture`)
and `run.dir` must be set; relative paths are relative to where the command is run. A map given for `mode` replaces the
default shares; modes it does not name have share 0.

## Configs that extend others

    extends: [base.yaml, l2t.yaml, stable.yaml]
    run: {dir: runs/mine}
    data: {path: data/mine}
    optim: {lr: 2e-4}

- `extends` names a file, or several, by paths relative to the file that it stands in. Later files win over earlier
  ones, the file itself wins over what it extends, and the command line over all.
- Groups are merged key by key. A value is replaced as a whole, also where it is a list or a map (`mode`,
  `mode_schedule`, `freeze`, `distributed.nccl`, ...).
- A file that is reached twice counts once, at its first place: what two presets have in common undoes neither of them.
- Each file's keys, types and bounds are checked, also those that another file replaces, and the message names the file.
  Files that extend each other in a circle, chains of more than 8 and more than 16 files or 64 KiB in all are refused.
- The presets in `configs/` are of three kinds, made to be put together, one of each: a size (`tiny`, `small`, `base`,
  `large`), a mode (`l2t`, `t2l`, `joint`, `mixed`), a manner (`stable`, `fast`). Their comments say when to take which.

## Where a value comes from

    mmldlm config configs/mine.yaml optim.lr=1e-4      # all settings, each with `# FILE:LINE`, command line or default
    mmldlm config --changed configs/mine.yaml          # without those that are the default
    mmldlm config --diff runs/a runs/b                 # the keys that differ; each may be a config or a run folder
    mmldlm config --json configs/mine.yaml             # by key, value and origin; of --diff, both values

What is printed is itself a config. `mmldlm train --dry-run` prints all settings, too, and what they cost.

The run folder keeps all settings in `config.yaml`, without `extends` and with absolute paths. So a run can be made
again from its folder alone: `mmldlm train runs/a/config.yaml run.dir=runs/again` gives the same curve, bit for bit on
the same machine and number of processes, from any working folder. Where the store has moved, add `data.path=PLACE`
(for a mixture `data.mixture={PLACE: WEIGHT, ...}` with all places).
Without another `run.dir` it goes on in the folder that the run was started with.
"""

_BOUNDS = {"at_least": "at least", "above": "above", "at_most": "at most", "below": "below"}


def settings_markdown() -> str:
    """The whole page: a section per group, a row per setting, in order of declaration; advice is in italics."""
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
    meaning = field.metadata["doc"] + (f". *{ADVICE[key]}*" if key in ADVICE else "")
    cells = [f"`{key}`", kind, f"`{_literal(default)}`", meaning]
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
