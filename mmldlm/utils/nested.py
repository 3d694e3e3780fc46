"""Nested mappings and lists of plain values, as JSON and YAML have them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as a single dict with dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        # An empty mapping is a value: otherwise its key would disappear.
        flat |= flatten(value, key + ".") if isinstance(value, Mapping) and value else {key: value}
    return flat


def replace_nonfinite(value: Any) -> Any:
    """Return `value` with None for non-finite numbers, which JSON cannot represent."""
    if isinstance(value, dict):
        return {key: replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [replace_nonfinite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
