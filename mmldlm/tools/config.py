"""`mmldlm config`: a run config as it will be used, with the origin of each value, or what differs between two."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from mmldlm.config import CONFIG_NAME, RunConfig, load_config, load_with_origins, split_arguments, with_absolute_paths
from mmldlm.errors import ConfigError, ExitCode, UsageError
from mmldlm.settings.fields import dump
from mmldlm.settings.layers import Provenance, values
from mmldlm.utils.short_repr import named

_WIDEST = 64  # columns of settings before their origins are no longer put below each other


def flow(value: Any) -> str:
    """A value on one line, as one writes it in YAML."""
    return _one_line([value])[1:-1]


def _one_line(value: Any) -> str:
    written = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, sort_keys=False, width=10**9)
    return written.rstrip("\n")


def annotated(settings: Mapping[str, Any], origins: Mapping[str, str]) -> list[str]:
    """Lines of YAML, one a setting, that read back as `settings` (by dotted key), each with its origin behind it."""
    lines: list[tuple[str, str]] = []
    above: list[str] = []
    for key, value in settings.items():
        *groups, name = key.split(".")
        for depth, group in enumerate(groups):
            if above[: depth + 1] != groups[: depth + 1]:
                lines.append(("  " * depth + f"{group}:", ""))
        above = groups
        lines.append(("  " * len(groups) + _one_line({name: value})[1:-1], origins.get(key, Provenance.DEFAULT)))
    width = max((len(line) for line, origin in lines if origin and len(line) <= _WIDEST), default=0)
    return [f"{line:<{width}}  # {origin}" if origin else line for line, origin in lines]


def differing(first: RunConfig, second: RunConfig) -> dict[str, tuple[Any, Any]]:
    """By key, both values of each setting that is not the same; paths are compared as absolute ones."""
    ours, theirs = (dict(values(dump(with_absolute_paths(config)), RunConfig)) for config in (first, second))
    return {key: (value, theirs[key]) for key, value in ours.items() if value != theirs[key]}


def config_file(path: str) -> Path:
    """The config that `path` names: a file, or the folder of a run."""
    place = Path(path)
    if not place.is_dir():
        return place
    if not (place / CONFIG_NAME).is_file():
        raise ConfigError(
            f"{named(path)}: expected a config file or a run folder, found a folder with no {CONFIG_NAME}"
        )
    return place / CONFIG_NAME


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mmldlm config",
        usage="%(prog)s [--changed] [--json] CONFIG [key.sub=value ...] | %(prog)s --diff [--json] CONFIG CONFIG",
        description="Show a run config as it will be used, with the origin of each value. "
        "CONFIG is a config file or the folder of a run.",
    )
    parser.add_argument("arguments", nargs="*", metavar="CONFIG | key.sub=value")
    parser.add_argument("--diff", action="store_true", help="show the keys in which two configs differ")
    parser.add_argument("--changed", action="store_true", help="leave out values that are the default")
    parser.add_argument("--json", action="store_true", help="by key, value and origin as JSON; of --diff, both values")
    options = parser.parse_intermixed_args(argv)
    options.files, options.overrides = split_arguments(options.arguments)
    wanted = 2 if options.diff else 1
    if len(options.files) != wanted:
        found = f"found {len(options.files)}: {' '.join(options.files) or 'none'}"
        raise UsageError(f"expected {'two configs' if options.diff else 'one config'} (file or run folder), {found}")
    if options.diff and (options.overrides or options.changed):
        raise UsageError(f"--diff: expected two configs alone, found {(options.overrides or ['--changed'])[0]}")
    return options


def print_difference(paths: Sequence[str], as_json: bool) -> None:
    first, second = (load_config(config_file(path)) for path in paths)
    found = differing(first, second)
    if as_json:
        print(json.dumps(found, indent=1))
        return
    for key, (ours, theirs) in found.items():
        print(f"{key}: {flow(ours)} -> {flow(theirs)}")


def print_config(path: str, overrides: Sequence[str], changed_only: bool, as_json: bool) -> None:
    config, known = load_with_origins(config_file(path), overrides)
    settings, origins = dict(values(dump(config), RunConfig)), known.of_keys()
    if changed_only:
        defaults = dict(values(dump(RunConfig()), RunConfig))
        settings = {key: value for key, value in settings.items() if value != defaults[key]}
    if as_json:
        told = {
            key: {"value": value, "origin": origins.get(key, Provenance.DEFAULT)} for key, value in settings.items()
        }
        print(json.dumps(told, indent=1))
    else:
        print("\n".join(annotated(settings, origins)))


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if options.diff:
        print_difference(options.files, options.json)
    else:
        print_config(options.files[0], options.overrides, options.changed, options.json)
    return ExitCode.DONE
