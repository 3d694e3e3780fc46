"""What a preparation tells its user: progress, and every document that it could not use."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from mmldlm.data.manifest import Manifest
from mmldlm.data.prepare.documents import Problem
from mmldlm.data.prepare.options import PrepareConfig
from mmldlm.errors import DataError
from mmldlm.utils.progress import Progress, say

FILE = "problems.jsonl"
_SHOWN_PER_KIND = 10


class Problems:
    """Those of a lot, in `folder`. The first of each kind are told on stderr, as `told`, of all lots, counts them.

    Stops at once beyond `--max-problems`; what else the options do not allow is for `settle`.
    """

    def __init__(self, config: PrepareConfig, folder: Path, told: Counter[str]):
        self.counts: Counter[str] = Counter()
        self.serious, self.first = 0, ""
        self._config, self._told = config, told
        self._file = (folder / FILE).open("w", encoding="utf-8")

    def __enter__(self) -> Problems:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, problem: Problem) -> None:
        self._file.write(json.dumps(asdict(problem), ensure_ascii=False) + "\n")
        self.counts[problem.kind] += 1
        self._told[problem.kind] += 1
        if self._told[problem.kind] <= _SHOWN_PER_KIND:
            say(f"{problem} ({problem.kind})")
        elif self._told[problem.kind] == _SHOWN_PER_KIND + 1:
            say(f"more of kind {problem.kind}: shown in problems.jsonl of the store")
        if not problem.harmless:
            self.serious += 1
            self.first = self.first or str(problem)
        if self.serious > self._config.max_problems:
            raise DataError(_too_many(problem, self._config))

    def result(self) -> dict[str, Any]:
        return {"problems": self.counts, "serious": self.serious, "first": self.first}


def settle(config: PrepareConfig, results: Sequence[dict[str, Any]]) -> None:
    """At the end of a stage, with the results of all lots: DataError for more problems than are allowed."""
    serious = sum(result["serious"] for result in results)
    if not serious:
        return
    first = next(result["first"] for result in results if result["serious"])
    if config.on_problem == "error":
        more = f" and {serious - 1} more" if serious > 1 else ""
        raise DataError(f"{first}{more}; mend the input, or pass --on-problem skip to leave them out")
    if serious > config.max_problems:
        raise DataError(_too_many(first, config))


def _too_many(problem: Problem | str, config: PrepareConfig) -> str:
    return f"{problem}: more than --max-problems {config.max_problems} documents cannot be used"


class StageProgress(Progress):
    """The stages of a preparation, and the time spent on each. Of several processes, the first one tells how far it is;
    the others, when they begin a stage."""

    def __init__(self, shown: bool, rank: int, world_size: int, interval: float):
        several = world_size > 1
        super().__init__(shown, None if rank else interval, f"rank {rank}: " if several else "", plain=several)
        self._seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Adds the time within to what this process has spent on `what`."""
        began = time.perf_counter()
        yield
        self._seconds[what] = self._seconds.get(what, 0.0) + time.perf_counter() - began

    def times(self) -> None:
        self.line(", ".join(f"{what} {seconds:.2f} s" for what, seconds in self._seconds.items()))


def summary(manifest: Manifest) -> str:
    """The table printed at the end."""
    rows = [f"{'split':<12}{'samples':>10}{'tokens':>12}{'characters':>12}{'char/token':>12}{'mean length':>13}"]
    for name, split in manifest.splits.items():
        rows.append(
            f"{name:<12}{split.samples:>10,}{split.tokens:>12,}{split.characters:>12,}"
            f"{split.characters / split.tokens:>12.2f}{split.tokens / split.samples:>13.1f}"
        )
    problems = ", ".join(f"{count} {kind}" for kind, count in manifest.problems.items() if count) or "none"
    rows.append(
        f"longest sample {manifest.max_length} tokens; vocabulary {manifest.vocab_size}; latents "
        f"{manifest.latent.tokens} x {manifest.latent.channels} of {manifest.encoder['name']}; problems: {problems}"
    )
    return "\n".join(rows)
