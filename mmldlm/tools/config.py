"""`mmldlm config`: show a resolved run config with the origin of each value, how two differ, or the JSON schema."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from mmldlm.config import (
    CONFIG_NAME,
    RunConfig,
    load_config,
    load_with_provenance,
    split_arguments,
    with_absolute_paths,
)
from mmldlm.errors import ConfigError, ExitCode, UsageError
from mmldlm.settings.declaration import flat_settings
from mmldlm.settings.json_schema import json_schema
from mmldlm.settings.layers import ExtendsConfig
from mmldlm.utils.printable import printable
from mmldlm.utils.short_repr import display_name

_MAX_ALIGNED_COLUMNS = 64  # origins are aligned unless the setting is wider


def to_flow_yaml(value: Any) -> str:
    """Return `value` as YAML on one line."""
    # As the element of a list: YAML would end a bare scalar with a line "...".
    return _one_line([value])[1:-1]


def _one_line(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, sort_keys=False, width=10**9)
    return text.rstrip("\n")


def annotate(settings: Mapping[str, Any], origins: Mapping[str, str]) -> list[str]:
    """Return settings, by dotted key, as lines of YAML, each with its origin as a comment."""
    lines: list[tuple[str, str]] = []
    open_groups: list[str] = []
    for key, value in settings.items():
        *groups, name = key.split(".")
        for depth, group in enumerate(groups):
            # A heading for each group that the previous setting was not in.
            if open_groups[: depth + 1] != groups[: depth + 1]:
                lines.append(("  " * depth + f"{group}:", ""))
        open_groups = groups
        lines.append(("  " * len(groups) + _one_line({name: value})[1:-1], origins[key]))
    width = max((len(line) for line, origin in lines if origin and len(line) <= _MAX_ALIGNED_COLUMNS), default=0)
    return [f"{line:<{width}}  # {origin}" if origin else line for line, origin in lines]


def config_diff(first: RunConfig, second: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return both values of each setting that differs, by dotted key; paths are compared as absolute paths."""
    first_values, second_values = (flat_settings(with_absolute_paths(config)) for config in (first, second))
    return {key: (value, second_values[key]) for key, value in first_values.items() if value != second_values[key]}


def config_file(path: str) -> Path:
    """Return the config file at `path`, a file or a run folder; a folder without a config is a `ConfigError`."""
    target = Path(path)
    if not target.is_dir():
        return target
    if not (target / CONFIG_NAME).is_file():
        raise ConfigError(
            f"{display_name(path)}: expected a config file or a run folder, found a folder with no {CONFIG_NAME}"
        )
    return target / CONFIG_NAME


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; a number of configs that does not fit the options is a `UsageError`."""
    parser = argparse.ArgumentParser(
        prog="mmldlm config",
        usage="%(prog)s [--changed] [--json] CONFIG [key.sub=value ...] | %(prog)s --diff [--json] CONFIG CONFIG | "
        "%(prog)s --schema",
        description="Show a resolved run config with the origin of each value. CONFIG is a file or a run folder.",
    )
    parser.add_argument("arguments", nargs="*", metavar="CONFIG | key.sub=value")
    parser.add_argument("--diff", action="store_true", help="show the settings in which two configs differ")
    parser.add_argument("--changed", action="store_true", help="omit values that are the default")
    parser.add_argument(
        "--json", action="store_true", help="print JSON: value and origin by key; with --diff, both values"
    )
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of config files, for editors")
    options = parser.parse_intermixed_args(argv)
    options.files, options.overrides = split_arguments(options.arguments)
    if options.schema:
        flags = [f"--{name}" for name in ("diff", "changed", "json") if getattr(options, name)]
        if others := [*options.arguments, *flags]:
            raise UsageError(f"--schema: expected no other argument, found {' '.join(others)}")
        return options
    expected = 2 if options.diff else 1
    if len(options.files) != expected:
        result = f"found {len(options.files)}: {' '.join(options.files) or 'none'}"
        raise UsageError(f"expected {'two configs' if options.diff else 'one config'} (file or run folder), {result}")
    if options.diff and (options.overrides or options.changed):
        raise UsageError(f"--diff: expected two configs alone, found {(options.overrides or ['--changed'])[0]}")
    return options


def config_schema() -> dict[str, Any]:
    """Return the JSON schema of config files: the settings of a run, and `extends`."""
    schema = json_schema(RunConfig)
    schema["properties"] = {**json_schema(ExtendsConfig)["properties"], **schema["properties"]}
    return schema


def print_difference(paths: Sequence[str], as_json: bool) -> None:
    """Print the settings in which the two configs at `paths` differ."""
    first, second = (load_config(config_file(path)) for path in paths)
    differences = config_diff(first, second)
    if as_json:
        print(json.dumps(differences, indent=1))
        return
    for key, (first_value, second_value) in differences.items():
        print(printable(f"{key}: {to_flow_yaml(first_value)} -> {to_flow_yaml(second_value)}"))


def print_config(path: str, overrides: Sequence[str], changed_only: bool, as_json: bool) -> None:
    """Print the config at `path` with the origin of each value."""
    config, origins = load_with_provenance(config_file(path), overrides)
    settings = flat_settings(config)
    if changed_only:
        defaults = flat_settings(RunConfig())
        settings = {key: value for key, value in settings.items() if value != defaults[key]}
    if as_json:
        entries = {key: {"value": value, "origin": origins[key]} for key, value in settings.items()}
        print(json.dumps(entries, indent=1))
    else:
        print("\n".join(map(printable, annotate(settings, origins))))


def main(argv: list[str] | None = None) -> int:
    """Run `mmldlm config`; an `MmldlmError` propagates."""
    options = parse_options(argv)
    if options.schema:
        print(json.dumps(config_schema(), indent=1))
    elif options.diff:
        print_difference(options.files, options.json)
    else:
        print_config(options.files[0], options.overrides, options.changed, options.json)
    return ExitCode.DONE
