"""What a preparation tells its user: progress, and every document that it could not use."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from tqdm import tqdm

from mmldlm.data.corpora import Problem
from mmldlm.data.options import PrepareConfig
from mmldlm.errors import DataError

_SHOWN_PER_KIND = 10
_T = TypeVar("_T")


@dataclass
class Problems:
    """Tells of every problem on stderr (of each kind the first few) and stops at what the options do not allow."""

    config: PrepareConfig
    found: list[Problem] = field(default_factory=list)
    serious: list[Problem] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, problem: Problem) -> None:
        self.found.append(problem)
        self.counts[problem.kind] += 1
        if self.counts[problem.kind] <= _SHOWN_PER_KIND:
            say(f"{problem} ({problem.kind})")
        elif self.counts[problem.kind] == _SHOWN_PER_KIND + 1:
            say(f"more of kind {problem.kind}: shown in problems.jsonl of the store")
        if not problem.harmless:
            self.serious.append(problem)
        if len(self.serious) > self.config.max_problems:
            raise DataError(f"{problem}: more than --max-problems {self.config.max_problems} documents cannot be used")

    def settle(self) -> None:
        """At the end of a stage: DataError where there were problems and `--on-problem` is `error`."""
        if self.serious and self.config.on_problem == "error":
            more = f" and {len(self.serious) - 1} more" if len(self.serious) > 1 else ""
            raise DataError(f"{self.serious[0]}{more}; mend the input, or pass --on-problem skip to leave them out")

    def to_jsonl(self) -> str:
        return "".join(json.dumps(asdict(problem), ensure_ascii=False) + "\n" for problem in self.found)


@dataclass(frozen=True)
class Progress:
    """A bar where stderr is a terminal, else a line when each stage begins."""

    shown: bool

    def __call__(self, items: Iterable[_T], stage: str) -> Iterable[_T]:
        if self.shown and sys.stderr.isatty():
            return tqdm(items, stage, unit="", leave=False)
        if self.shown:
            say(f"{stage} ...")
        return items


def say(text: str) -> None:
    tqdm.write(text, file=sys.stderr)
