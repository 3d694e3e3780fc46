"""Runs of `scripts/faulty_steps.py`: the planted faults, and the facts that its ranks record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mmldlm.trainer.step_guard import SKIPS_FILE
from tests.helpers.forked_runs import ForkedRuns

# The first step of all is among those that go wrong in the second micro-batch, when the engine holds gradients of the
# first.
FAULTS = [
    {"step": 0, "kind": "nan", "rank": 1, "micro_batch": 1},
    {"step": 2, "kind": "inf", "rank": 0, "micro_batch": 0},
    {"step": 3, "kind": "-inf", "rank": 1, "micro_batch": 1},
    {"step": 5, "kind": "bad_gradient", "rank": 1, "micro_batch": 0},
    {"step": 7, "kind": "bad_gradient", "rank": 0, "micro_batch": 1},
    {"step": 9, "kind": "nan", "rank": 1, "micro_batch": 0},
    {"step": 11, "kind": "loss", "rank": 0, "micro_batch": 1},
    {"step": 30, "kind": "huge", "rank": 1, "micro_batch": 0},
]


def run_with_faults(
    forked: ForkedRuns, engine: str, folder: Path, faults: list[Any], *arguments: object, **variables: str
) -> list[dict[str, Any]]:
    """Run `faulty_steps.py` to its end and return the facts of each rank."""
    folder.mkdir()
    count = 1 if engine == "single" else 2
    faults = [{**fault, "rank": fault["rank"] % count} for fault in faults]
    variables |= {"FAULTS": json.dumps(faults), "FACTS": str(folder)}
    arguments = (*arguments, "guard.verify_updates_every=0")  # a check repeats a step, and so would the faults
    forked.succeed(engine, folder, count, *arguments, script="faulty_steps.py", **variables)
    return [json.loads((folder / f"facts.rank{rank}.json").read_text()) for rank in range(count)]


def skipped_steps(folder: Path) -> dict[int, dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"not JSON: {constant}")

    lines = (folder / SKIPS_FILE).read_text().splitlines()
    return {line["step"]: line for line in (json.loads(text, parse_constant=refuse) for text in lines)}
