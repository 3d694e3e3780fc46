"""Settings, commands and options that are gone since 0.1.0, and their successors.

A record is a config that a version of mmldlm wrote itself, in a run folder, checkpoint or bundle. Users cannot be asked
to change it, so all later versions read its old keys. This module needs the standard library only, as bundles do.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Sequence
from typing import Any

from mmldlm import __version__
from mmldlm.errors import ConfigError, UsageError
from mmldlm.utils.printable import printable
from mmldlm.utils.short_repr import display_name, short_repr

# Entries stay for good, since records need them. For the old key of a setting or group, oldest first: the new key, and
# the last released version that has the old key.
RENAMED: dict[str, tuple[str, str]] = {
    "sampling.lengths": ("sampling.tried_lengths", "0.1.0"),
    "latent.process": ("latent.noise_schedule", "0.1.0"),
}
# For a removed key: the value with which earlier versions did the same as this version, and advice.
REMOVED: dict[str, tuple[Any, str]] = {}
# For a setting added after 0.1.0: the value that repeats earlier versions, if the default does not.
ADDED: dict[str, Any] = {"validation.first": 0}
# For a removed command, subcommand or option: advice.
REMOVED_WORDS = {
    "train --nodes": "use `mmldlm train CONFIG --dry-run --gpus N`, with the GPUs of all nodes",
    "plan": "use `mmldlm train CONFIG --dry-run --gpus N`, which has the memory of each engine",
    "track": "use `log.trackers=[NAME]`, which sends the scalars while the run trains",
    **dict.fromkeys(("compare --until", "compare --seeds"), "use `mmldlm race A.yaml B.yaml`, which trains both"),
    "report": "use `mmldlm compare RUN...`: --json has what was in final_metrics.json, --figures draws the curves",
    "align": "map the new vectors to the run's latents yourself, and give those to a bundle of `mmldlm export`",
    "sample --watch": "read the finished texts",
    "doctor": "use `mmldlm train CONFIG --check`, and `mmldlm train --check` for the machine alone",
    "demo": "use `python examples/demo.py RUN` of the checkout",
    **dict.fromkeys(("prepare --cluster", "prepare --cluster-option"), "use --processes, or prepare on one machine"),
    "prepare --no-normalise": "use --no-normalize",
    "data sample --neighbours": "use --neighbors",
    "checkpoints verify": "use `mmldlm verify FOLDER`, of a run or a checkpoint",
    "evaluate --perplexity-model": "use a language model of your own on texts of `mmldlm sample RUN --mode joint`",
    "evaluate --follow": "evaluate each of RUN/checkpoints/step-* with --checkpoint and an --out of its own",
    "evaluate --steps": "use sampling.steps=N, in t2l sampling.t2l_steps=N",
    "sample --steps": "use sampling.steps=N, in t2l sampling.t2l_steps=N",
    **{
        f"sample --{name.replace('_', '-')}": f"use sampling.{name}=VALUE"
        for name in ("temperature", "top_p", "guidance", "decoding", "remask", "latent_sampler", "joint_order")
    },
}
_MINORS_WITH_NOTICE = 2  # an old key works for this many minor versions after the last one that has it
_OF_NETWORK = ("model.", "latent.")  # with other values of these settings, a checkpoint is another network
_noticed: set[str] = set()


def current(tree: Any, source: str, is_record: bool = False) -> Any:
    """Return the nested settings in `tree` with the keys of this version. Messages name `source`.

    Raises:
        ConfigError: A user's config has a removed key, or the old and the new name of a key. Or a record has a removed
            setting of the network, and its value is not the one that this version implements.
    """
    tree = copy.deepcopy(tree)
    for key, value in ADDED.items() if is_record else ():
        if group := _group(tree, key):  # a record has all settings of its version
            group.setdefault(key.rpartition(".")[2], value)
    for old in (*RENAMED, *REMOVED):
        group, name = _group(tree, old), old.rpartition(".")[2]
        if name in group:
            value = group.pop(name)
            if not group and (parent := old.rpartition(".")[0]):  # the group may be gone as well
                _group(tree, parent).pop(parent.rpartition(".")[2])
            if new := _successor(old, source, is_record, value):
                group, name = _group(tree, new, make=True), new.rpartition(".")[2]
                _check_alone(old, new, name in group, source)
                group[name] = value
    return tree


def current_overrides(overrides: Sequence[str]) -> list[str]:
    """Return `key.sub=value` overrides of the command line with the keys of this version. Raises like `current`."""
    pairs = [(key.strip(), equals + value) for key, equals, value in (text.partition("=") for text in overrides)]
    for old in (*RENAMED, *REMOVED):
        for index, (key, value) in enumerate(pairs):
            if f"{key}.".startswith(f"{old}."):
                new = _successor(old, "command line") + key[len(old) :]
                _check_alone(key, new, new in dict(pairs), "command line")
                pairs[index] = new, value
    return [key + value for key, value in pairs]


def refuse_removed(command: str, arguments: Sequence[str]) -> None:
    """Raise `UsageError` if a command, its subcommand, or an option of either is gone."""
    options = [f" {argument.partition('=')[0]}" for argument in arguments if argument.startswith("-")]
    for words in (command, " ".join((command, *arguments[:1]))):
        for name in (words, *(words + option for option in options)):
            if name in REMOVED_WORDS:
                raise UsageError(f"mmldlm {name} is gone, {REMOVED_WORDS[name]}")


def _successor(key: str, source: str, is_record: bool = False, value: Any = None) -> str:
    """Return the new key of a renamed setting, with a notice, or "" for a removed key that has no effect.

    Raises:
        ConfigError: This version refuses the key.
    """
    if key in REMOVED:
        now, advice = REMOVED[key]
        if not is_record or (value != now and key.startswith(_OF_NETWORK)):
            raise ConfigError(f"{display_name(source)}: {key} is gone, {advice}")
        if value != now:
            notice(key, f"{key} is gone, and {short_repr(value)} in {display_name(source)} has no effect: {advice}")
        return ""
    new, last = RENAMED[key]
    major, minor = _version(last)
    if is_record:
        notice(key, f"{key} in {display_name(source)} is now {new} (renamed after {last})")
    elif _version(__version__) > (major, minor + _MINORS_WITH_NOTICE):
        raise ConfigError(f"{display_name(source)}: {key} is gone, use {new} (renamed after {last})")
    else:
        until = f"{major}.{minor + _MINORS_WITH_NOTICE + 1}.0"
        notice(key, f"{key} is now {new} (renamed after {last}); the old name will be refused from {until}")
    return new


def _check_alone(old: str, new: str, has_both: bool, source: str) -> None:
    if has_both:
        raise ConfigError(f"{display_name(source)}: found {new} and its old name {old}, expected {new} alone")


def _group(tree: Any, key: str, make: bool = False) -> dict[str, Any]:
    """Return the mapping in `tree` that holds the last name of the dotted `key`, or an empty mapping."""
    for name in key.split(".")[:-1]:
        if make and isinstance(tree, dict):
            tree.setdefault(name, {})
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree if isinstance(tree, dict) else {}


def notice(key: str, text: str) -> None:
    """Print a notice on stderr on the first rank, once for each key."""
    if key not in _noticed and os.environ.get("RANK", "0") == "0":
        print(printable(f"notice: {text}"), file=sys.stderr, flush=True)
    _noticed.add(key)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])
