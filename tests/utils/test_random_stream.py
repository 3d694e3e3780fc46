"""Streams that share one generator are those of generators of their own."""

from __future__ import annotations

import numpy as np
import pytest

from mmldlm.utils.random_stream import random_stream, random_streams

pytestmark = pytest.mark.quick


def test_streams_in_turn_draw_what_single_ones_do() -> None:
    """Odd counts of float32 leave half of a 64-bit word and part of a block behind, which the next stream must not."""
    slots = [0, 5, 5, 2**40, 3, 1]
    for seed, step in ((0, 0), (2**63, 7), (11, 2**33)):
        for slot, stream in zip(slots, random_streams(seed, 1, step, slots), strict=True):
            alone = random_stream(seed, 1, step, slot)
            for count in (slot % 4 + 1, 7):
                for draw in ("standard_normal", "random"):
                    ours, theirs = (getattr(generator, draw)(count, np.float32) for generator in (stream, alone))
                    assert np.array_equal(ours, theirs)
