"""Fingerprints of config, data and versions, by which ranks are checked to be started alike."""

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
PATH_KEYS = ("data.path", "data.mixture")


def fingerprint(config: RunConfig, store: Store) -> dict[str, str]:
    """Return all that determines the curves, as `config.*`, `data.*`, `version.*` and `git`, within milliseconds."""
    return {**config_fingerprint(config), **data_fingerprint(store), **version_fingerprint()}


def config_fingerprint(config: RunConfig) -> dict[str, str]:
    """Return every leaf of the config as `config.KEY`, except for paths of data, which may differ between nodes."""
    tree = dump(config)
    return {f"config.{key}": _text(_lookup(tree, key)) for key, _ in leaves(RunConfig) if key not in PATH_KEYS}


def data_fingerprint(store: Store) -> dict[str, str]:
    """Return SHA-256 of the tokenizer and of the manifests with their shares; manifests hash all other files."""
    return {"data.manifest": store.identity, "data.tokenizer": str(store.manifest.tokenizer["sha256"])}


def version_fingerprint() -> dict[str, str]:
    """Return the installed versions, without importing the packages, and the revision of the code."""
    versions = {"version.python": platform.python_version(), "version.mmldlm": mmldlm.__version__}
    return {**versions, **{f"version.{name}": _version(name) for name in PACKAGES}, "git": revision()}


def revision(package: Path = Path(mmldlm.__file__).parent) -> str:
    """Return the short revision of the package's checkout, with "+changes" if files differ; "" without a checkout."""
    if not (package.parent / ".git").exists():  # an installed package may be inside another project's checkout
        return ""
    command = ["git", "--no-optional-locks", "describe", "--always", "--exclude=*", "--dirty=+changes"]
    try:
        result = subprocess.run(command, cwd=package, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""


def disagreements(fingerprints: Sequence[Mapping[str, str]], who: str = "rank") -> list[str]:
    """Return a line for each key whose values differ: who deviates, the deviating values and the usual value.

    The usual value is the most frequent one; of several equally frequent ones, the first.

    Args:
        fingerprints: Fingerprints by number of rank or node.
        who: Singular of what is numbered.
    """
    lines = []
    for key in dict.fromkeys(key for fingerprint in fingerprints for key in fingerprint):
        values = [fingerprint.get(key, ABSENT) for fingerprint in fingerprints]
        counts = Counter(values)
        if len(counts) == 1:
            continue
        max_count = max(counts.values())
        usual = next(value for value in values if counts[value] == max_count)
        deviating = [
            f"{_format_numbers(who, [i for i, v in enumerate(values) if v == value])}: {key} is {_short(value)}"
            for value in counts
            if value != usual
        ]
        others = _format_numbers(who, [i for i, v in enumerate(values) if v == usual])
        lines.append(f"{', '.join(deviating)}, {_short(usual)} on {others}")
    return lines


def _lookup(tree: Any, key: str) -> Any:
    """Return the value of a dotted key."""
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
    """Return the value for a message: of a hash, its first 12 digits."""
    return value[:12] if re.fullmatch("[0-9a-f]{64}", value) else value or "empty"


def _format_numbers(who: str, numbers: Sequence[int]) -> str:
    """Return `rank 3` or `ranks 0, 2-7`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return f"{who}{'s' if len(numbers) > 1 else ''} " + ", ".join("-".join(map(str, part)) for part in parts)
