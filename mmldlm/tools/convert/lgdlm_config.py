"""Run configs of the LGDLM trainer, converted to run configs with a table of what became of each key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mmldlm.config import RunConfig
from mmldlm.errors import ConfigError
from mmldlm.settings.fields import build
from mmldlm.settings.yaml import parse_yaml, read_yaml
from mmldlm.tools.config import to_flow_yaml
from mmldlm.tools.convert.lgdlm_keys import RULES, VARIABLES, Old, Outcome
from mmldlm.utils.printable import printable
from mmldlm.utils.short_repr import display_name, short_repr

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_MAX_REFERENCES = 20  # in one value


@dataclass(frozen=True)
class Row:
    """A key of LGDLM with its value, and what becomes of it."""

    key: str
    value: Any
    outcome: Outcome | None  # None: the key is unknown

    @property
    def kind(self) -> str:
        """Return kept, renamed, prepare (it is an option of `mmldlm prepare`), dropped or unknown."""
        if self.outcome is None:
            return "unknown"
        targets = list(self.outcome.settings)
        if not targets:
            return "kept" if self.outcome.stays_variable else "dropped"
        if targets == [self.key]:
            return "kept"
        return "prepare" if targets[0].startswith("--") else "renamed"


@dataclass(frozen=True)
class ConvertedConfig:
    """A converted run config."""

    settings: dict[str, Any]  # by dotted key
    prepare: dict[str, Any]  # options of `mmldlm prepare`
    data_folder: str  # of LGDLM, empty if the config names none
    rows: list[Row]


def convert_config(path: Path, assignments: Sequence[str] = ()) -> ConvertedConfig:
    """Convert a run config of LGDLM. Files that its `defaults` name are read beside it, as by Hydra.

    Args:
        assignments: `key=value` and `VARIABLE=value` of the command that started the run; later ones win.

    Raises:
        ConfigError: A file cannot be read, a value cannot be converted, or two keys contradict each other.
    """
    name = display_name(str(path))
    old, given_as = _read(path), dict[str, str]()
    if not old:
        raise ConfigError(f"{name}: expected keys of LGDLM, found none")
    for assignment in assignments:
        given, _, text = assignment.partition("=")
        given = given.lstrip("+")  # Hydra's mark of a key that the file does not have
        key = VARIABLES.get(given, given)
        old[key] = parse_yaml(text, given)
        given_as[key] = f"{key} ({given})" if key != given else key
    old = {key: _resolve(value, old) for key, value in old.items()}
    rows, settings, sources = [], dict[str, Any](), dict[str, str]()
    for key, value in old.items():
        try:
            outcome = RULES[key](key, value, old) if key in RULES else None
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
        rows.append(Row(given_as.get(key, key), value, outcome))
        for target, new in ({} if outcome is None else outcome.settings).items():
            if settings.setdefault(target, new) != new:
                raise ConfigError(
                    f"{name}: {target} is {short_repr(settings[target])} by {sources[target]} and {short_repr(new)} by "
                    f"{key}; expected one value: give both keys on the command line"
                )
            sources.setdefault(target, key)
    run_name = str(settings.get("run.dir", f"runs/{path.stem}")).removeprefix("runs/")
    chosen = {target: value for target, value in settings.items() if not target.startswith("--")}
    chosen = {"run.dir": f"runs/{run_name}", "data.path": f"data/{run_name}", **chosen}
    try:
        build(RunConfig, nest(chosen))
    except ConfigError as error:
        raise ConfigError(f"{name}, converted: {error}") from None
    options = {target: value for target, value in settings.items() if target.startswith("--")}
    return ConvertedConfig(chosen, options, _data_folder(old), rows)


def _read(path: Path) -> dict[str, Any]:
    """Return the values of a YAML file and of the files that its `defaults` name, by dotted key."""
    tree = read_yaml(path)
    base: dict[str, Any] = {}
    defaults = tree.get("defaults")
    for entry in defaults if isinstance(defaults, list) else ():
        for group, name in entry.items() if isinstance(entry, dict) else ():
            file = path.parent / str(group) / f"{name}.yaml"
            if file.is_file():
                base |= _flatten({group: read_yaml(file)})
    return base | _flatten(tree)


def _flatten(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _resolve(value: Any, old: Old) -> Any:
    """Return a text with its references such as ${data.data_dir} replaced by the values of these keys."""
    for _ in range(_MAX_REFERENCES if isinstance(value, str) else 0):
        match = _REFERENCE.search(value)
        if match is None or match[1] not in old:
            break
        value = value.replace(match[0], str(old[match[1]]))
    return value


def _data_folder(old: Old) -> str:
    """Return the folder with tokens/ and latents/."""
    for key in ("data.token_dir", "data.latent_data_root", "data.data_dir", "data.preprocessed_dir"):
        if isinstance(old.get(key), str):
            return re.sub(r"/tokens(/\w+)?/?$", "", old[key])
    return ""


def nest(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted key as nested mappings."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *groups, leaf = key.split(".")
        group = tree
        for part in groups:
            group = group.setdefault(part, {})
        group[leaf] = value
    return tree


# --- output ---


def to_config_text(converted: ConvertedConfig, source: Path) -> str:
    """Return the run config as YAML."""
    header = f"# Converted from {source.name} of LGDLM; {source.stem}.md says what became of each key.\n"
    return header + yaml.safe_dump(nest(converted.settings), sort_keys=False, allow_unicode=True)


def to_table(converted: ConvertedConfig, source: Path) -> str:
    """Return a Markdown table of what became of each key."""
    rows = [("key of LGDLM", "value", "", "here", "why"), ("---",) * 5]
    for row in converted.rows:
        settings, why = (row.outcome.settings, row.outcome.why) if row.outcome else ({}, "no key of LGDLM: left out")
        here = ", ".join(f"`{target}: {to_flow_yaml(value)}`" for target, value in settings.items())
        rows.append((f"`{row.key}`", f"`{to_flow_yaml(row.value)}`", row.kind, here, why))
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in rows]
    return "\n".join([f"# Keys of {source.name}", "", *lines, ""])


def summary_lines(converted: ConvertedConfig) -> Iterator[str]:
    """Yield what was converted, what is unknown or missing, and the next commands."""
    kinds = [row.kind for row in converted.rows]
    counts = [f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)]
    yield f"{len(kinds)} keys: {', '.join(counts)}"
    for kind in ("unknown", "dropped"):
        if names := [printable(display_name(row.key)) for row in converted.rows if row.kind == kind]:
            yield f"{kind}, see docs/migration.md: {', '.join(names)}"
    for key, advice in (("train.steps", "epochs x training samples / global batch"), ("mode", "l2t, t2l or joint")):
        if key not in converted.settings:
            yield f"to choose: {key} ({advice}), which is at its default"
    options = "".join(f" {option} {value}" for option, value in converted.prepare.items())
    yield f"Next: mmldlm convert lgdlm {converted.data_folder or 'DATA_FOLDER'} converted"
    yield f"then the `mmldlm prepare` that it prints, with{options} --out {converted.settings['data.path']}"
