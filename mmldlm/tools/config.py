"""`mmldlm config`: show a resolved run config with the origin of each value, compare two, or print the JSON schema."""

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

_MAX_ALIGNED_COLUMNS = 64  # a wider setting does not move the column of origins


def to_flow_yaml(value: Any) -> str:
    """Return `value` as YAML on one line."""
    # Dump it inside a list, because YAML would end a bare scalar with a line "...".
    text = yaml.safe_dump([value], default_flow_style=True, allow_unicode=True, sort_keys=False, width=10**9)
    return text.rstrip("\n")[1:-1]


def annotate(settings: Mapping[str, Any], origins: Mapping[str, str]) -> list[str]:
    """Format settings, given by dotted key, as lines of YAML, each with its origin as a comment."""
    lines: list[tuple[str, str]] = []
    open_groups: list[str] = []
    for key, value in settings.items():
        *groups, name = key.split(".")
        for depth, group in enumerate(groups):
            # Add a heading for each group that the previous setting did not belong to.
            if open_groups[: depth + 1] != groups[: depth + 1]:
                lines.append(("  " * depth + f"{group}:", ""))
        open_groups = groups
        lines.append(("  " * len(groups) + to_flow_yaml({name: value})[1:-1], origins[key]))
    width = max((len(line) for line, origin in lines if origin and len(line) <= _MAX_ALIGNED_COLUMNS), default=0)
    return [f"{line:<{width}}  # {origin}" if origin else line for line, origin in lines]


def config_diff(first: RunConfig, second: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return both values of each setting that differs, by dotted key. Paths are compared as absolute paths."""
    first_values, second_values = (flat_settings(with_absolute_paths(config)) for config in (first, second))
    return {key: (value, second_values[key]) for key, value in first_values.items() if value != second_values[key]}


def config_file(path: str) -> Path:
    """Return the config file for `path`, a file or a run folder. Raises `ConfigError` for a folder without a config."""
    target = Path(path)
    if not target.is_dir():
        return target
    if not (target / CONFIG_NAME).is_file():
        raise ConfigError(
            f"{display_name(path)}: expected a config file or a run folder, found a folder with no {CONFIG_NAME}"
        )
    return target / CONFIG_NAME


def config_schema() -> dict[str, Any]:
    """Return the JSON schema of config files: the settings of a run, and `extends`."""
    schema = json_schema(RunConfig)
    schema["properties"] = {**json_schema(ExtendsConfig)["properties"], **schema["properties"]}
    return schema


def main(argv: Sequence[str] | None = None) -> int:
    """Run `mmldlm config`. Raises `UsageError` if the number of configs does not fit the options."""
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
    files, overrides = split_arguments(options.arguments)
    unused = [*overrides, *(["--changed"] if options.changed else [])]
    if options.schema:
        if others := [*files, *unused, *(["--diff"] if options.diff else [])]:
            raise UsageError(f"--schema: expected no other argument, found {' '.join(others)}")
        print(json.dumps(config_schema(), indent=1))
        return ExitCode.DONE
    if len(files) != 1 + options.diff:
        expected = f"expected {'two configs' if options.diff else 'one config'} (file or run folder)"
        raise UsageError(f"{expected}, found {len(files)}: {' '.join(files) or 'none'}")
    paths = [config_file(file) for file in files]
    if options.diff:
        if unused:
            raise UsageError(f"--diff: expected two configs alone, found {unused[0]}")
        differences = config_diff(load_config(paths[0]), load_config(paths[1]))
        lines = [f"{key}: {' -> '.join(map(to_flow_yaml, values))}" for key, values in differences.items()]
        printed: Mapping[str, Any] = differences
    else:
        config, origins = load_with_provenance(paths[0], overrides)
        settings = flat_settings(config)
        if options.changed:
            defaults = flat_settings(RunConfig())
            settings = {key: value for key, value in settings.items() if value != defaults[key]}
        lines = annotate(settings, origins)
        printed = {key: {"value": value, "origin": origins[key]} for key, value in settings.items()}
    if options.json:
        print(json.dumps(printed, indent=1))
    elif lines:
        print("\n".join(map(printable, lines)))
    return ExitCode.DONE
