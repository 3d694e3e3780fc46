"""Partition of work by size, identical on every rank."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any, TypeVar

Item = TypeVar("Item", bound=Any)


def partition_by_size(sizes: Mapping[Item, int], parts: int) -> list[list[Item]]:
    """Split items into `parts` lists of nearly equal total size, by assigning the largest items first.

    Items of equal size are sorted, so the result does not depend on the order of `sizes`.
    """
    partition: list[list[Item]] = [[] for _ in range(parts)]
    loads = [(0, part) for part in range(parts)]  # a heap, in which the first of equally loaded parts comes next
    for item in sorted(sizes, key=lambda item: (-sizes[item], item)):
        load, smallest = loads[0]
        partition[smallest].append(item)
        heapq.heapreplace(loads, (load + sizes[item], smallest))
    return partition
