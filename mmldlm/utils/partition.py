"""Work shared out by size, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

Item = TypeVar("Item", bound=Any)


def partition_by_size(sizes: Mapping[Item, int], parts: int) -> list[list[Item]]:
    """The items in `parts` of nearly equal size: the largest first, each to whoever has least.

    Items of one size go in their own order, so the result does not depend on that of `sizes`.
    """
    found: list[list[Item]] = [[] for _ in range(parts)]
    load = [0] * parts
    for item in sorted(sizes, key=lambda item: (-sizes[item], item)):
        least = load.index(min(load))
        found[least].append(item)
        load[least] += sizes[item]
    return found
