"""Partition of work by size: at any number of parts the greedy assignment, at a cost that hardly grows with it."""

from __future__ import annotations

import random

import pytest

from mmldlm.utils.partition import partition_by_size


@pytest.mark.parametrize("parts", [1, 2, 7, 100])
def test_each_item_goes_to_the_first_of_the_least_loaded_parts(parts: int) -> None:
    draw = random.Random(parts)
    for _ in range(50):
        sizes = {f"tensor {number}": draw.choice([0, 1, 5, 7, 100]) for number in range(draw.randrange(60))}
        expected: list[list[str]] = [[] for _ in range(parts)]
        for item in sorted(sizes, key=lambda item: (-sizes[item], item)):
            min(expected, key=lambda part: sum(sizes[member] for member in part)).append(item)
        assert partition_by_size(sizes, parts) == expected


def test_the_cost_of_an_item_does_not_grow_with_the_parts() -> None:
    class Size(int):
        """A size that counts how often it, or a sum with it, is compared."""

        comparisons = 0

        def __add__(self, other: int) -> Size:
            return Size(int(self) + other)

        __radd__ = __add__

        def __neg__(self) -> int:
            return -int(self)

        def __lt__(self, other: int) -> bool:
            Size.comparisons += 1
            return int(self) < int(other)

        __gt__ = __lt__

        def __eq__(self, other: object) -> bool:
            Size.comparisons += 1
            return int(self) == other

        def __hash__(self) -> int:
            return int(self)

    items = 606  # tensors of a large network
    partition_by_size({number: Size(1 + number) for number in range(items)}, 1024)
    assert Size.comparisons < 50 * items  # a search through all parts would be 1,024 for each
