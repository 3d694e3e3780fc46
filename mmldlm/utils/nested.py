"""Nested mappings and lists of plain values, as in JSON and YAML."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings into one dict with dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        # Keep an empty mapping as a value. Otherwise its key would disappear.
        flat |= flatten(value, key + ".") if isinstance(value, Mapping) and value else {key: value}
    return flat


def replace_nonfinite(value: Any) -> Any:
    """Replace non-finite numbers by None, because JSON cannot represent them."""
    if isinstance(value, dict):
        return {key: replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [replace_nonfinite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
