"""Small synthetic corpora for the tests of this folder."""

from __future__ import annotations

import random
from pathlib import Path

from mmldlm.data.prepare import PrepareConfig

TOPICS = {
    "garden": "rose tulip soil water seed bloom leaf root prune harvest".split(),  # noqa: SIM905
    "ocean": "wave tide salt reef whale coral current shore depth sail".split(),  # noqa: SIM905
    "kitchen": "flour oven knife butter simmer roast spoon recipe salt taste".split(),  # noqa: SIM905
    "music": "chord tempo violin drum melody rhythm choir tune bass note".split(),  # noqa: SIM905
}


def write_corpus(path: Path, documents: int = 600, seed: int = 0) -> Path:
    """One document a line, of unequal length, each about one topic."""
    draw = random.Random(seed)
    lines = []
    for _ in range(documents):
        words = TOPICS[draw.choice(sorted(TOPICS))]
        length = draw.choice([4, 6, 9, 15, 25])
        lines.append("The " + " ".join(draw.choice([*words, "the", "of", "and"]) for _ in range(length)) + ".")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def small_config(out: Path, *inputs: Path, **options: object) -> PrepareConfig:
    values: dict = {"vocab_size": 300, "channels": 8, "validation_fraction": 0.1, "test_fraction": 0.1, **options}
    return PrepareConfig(str(out), tuple(map(str, inputs)), **values)
