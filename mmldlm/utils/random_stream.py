"""Random streams by number: a draw does not depend on any other draw, or on where it happens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np


def random_stream(seed: int, purpose: int, step: int, slot: int = 0) -> np.random.Generator:
    """Return an independent stream for each (seed, purpose, step, slot).

    The streams come from a counter-based generator (Philox, SC 2011, "Parallel random numbers: as easy as 1, 2, 3").

    Args:
        purpose: 0 for a step's noise times, 1 for the noise of its samples, 2 for generation, 3 for initial weights.
        step: Below 2**63, like `slot`. Each purpose defines its own meaning of step and slot.
    """
    # Draws count up from the first word of the counter and never reach the words that hold slot and step.
    return np.random.Generator(np.random.Philox(key=[seed, purpose], counter=[0, 0, slot, step]))


def random_streams(seed: int, purpose: int, step: int, slots: Iterable[int]) -> Iterator[np.random.Generator]:
    """Yield the stream of each slot, one at a time: always the same generator, set to the start of the stream.

    This is ten times as fast as `random_stream`, which reads the operating system's entropy for every generator.
    """
    generator = random_stream(seed, purpose, step)
    start = generator.bit_generator.state
    for slot in slots:
        start["state"]["counter"][2] = slot
        generator.bit_generator.state = start
        yield generator
