"""What all processes of a run must agree on, as flat text, and where they do not."""

from __future__ import annotations

import json
import platform
import re
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import mmldlm
from mmldlm.config import RunConfig
from mmldlm.data.store import Store
from mmldlm.settings.fields import dump, leaves

PACKAGES = ("torch", "accelerate", "deepspeed", "numpy")
ABSENT = "absent"
PLACES = ("data.path", "data.mixture")


def fingerprint(config: RunConfig, store: Store) -> dict[str, str]:
    """All that decides the curve: `config.*`, `data.*`, `version.*` and `git`. Takes milliseconds."""
    return {**config_fingerprint(config), **data_fingerprint(store), **version_fingerprint()}


def config_fingerprint(config: RunConfig) -> dict[str, str]:
    """Every leaf of the config as `config.KEY`, but for places: a store may lie elsewhere on each node."""
    tree = dump(config)
    return {f"config.{key}": _text(_at(tree, key)) for key, _ in leaves(RunConfig) if key not in PLACES}


def data_fingerprint(store: Store) -> dict[str, str]:
    """SHA-256 of the manifests, which hold that of every other file, with their shares; and of the tokenizer."""
    return {"data.manifest": store.identity, "data.tokenizer": str(store.manifest.tokenizer["sha256"])}


def version_fingerprint() -> dict[str, str]:
    """Installed versions, without importing the packages, and the revision of the code."""
    found = {"version.python": platform.python_version(), "version.mmldlm": mmldlm.__version__}
    return {**found, **{f"version.{name}": _version(name) for name in PACKAGES}, "git": revision()}


def revision(package: Path = Path(mmldlm.__file__).parent) -> str:
    """Short revision of the package's checkout, with "+changes" if files differ from it; "" where there is none."""
    if not (package.parent / ".git").exists():  # an installed package may lie inside another project's checkout
        return ""
    command = ["git", "--no-optional-locks", "describe", "--always", "--exclude=*", "--dirty=+changes"]
    try:
        found = subprocess.run(command, cwd=package, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""


def disagreements(fingerprints: Sequence[Mapping[str, str]], who: str = "rank") -> list[str]:
    """A line for each key that is not the same in all: who deviates, by what, and the value of the others.

    The others are the majority, or whoever agrees with the first where there is no majority.
    """
    lines = []
    for key in dict.fromkeys(key for found in fingerprints for key in found):
        values = [found.get(key, ABSENT) for found in fingerprints]
        holders = Counter(values)
        if len(holders) == 1:
            continue
        most = max(holders.values())
        usual = values[0] if holders[values[0]] == most else next(v for v in values if holders[v] == most)
        deviating = [
            f"{_named(who, [i for i, v in enumerate(values) if v == value])}: {key} is {_short(value)}"
            for value in holders
            if value != usual
        ]
        others = _named(who, [i for i, v in enumerate(values) if v == usual])
        lines.append(f"{', '.join(deviating)}, {_short(usual)} on {others}")
    return lines


def _at(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree[part]
    return tree


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ABSENT


def _short(value: str) -> str:
    """The value as a line shows it: hashes by their first 12 digits."""
    return value[:12] if re.fullmatch("[0-9a-f]{64}", value) else value or "empty"


def _named(who: str, numbers: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 2-7`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return f"{who}{'s' if len(numbers) > 1 else ''} " + ", ".join("-".join(map(str, part)) for part in parts)
