"""Numbers of a report, computed a second time from the files of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy import stats

from tests.helpers.engine_runs import record_list


def values(run: Path, until: float = math.inf) -> dict[str, float]:
    train = [record for record in record_list(run, "train") if record["step"] <= until]
    measured = [record["validation/total"] for record in record_list(run, "validation") if record["step"] <= until]
    last = train[-1]["step"]
    return {
        "loss/total": float(np.mean([record["loss/total"] for record in train if record["step"] > 0.9 * last])),
        "validation/total": measured[-1],
        "validation/total/best": min(measured),
        "speed/tokens_per_s": float(np.median([record["speed/tokens_per_s"] for record in train])),
        "memory/resident_mib": max(record["memory/resident_mib"] for record in train),
    }


def fieller(x: Sequence[float], y: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of mean(x) / mean(y), as it is usually printed: by g, below 1. Degrees of freedom by scipy."""
    a, b = np.mean(x), np.mean(y)
    u, v = np.var(x, ddof=1) / len(x), np.var(y, ddof=1) / len(y)
    t = stats.t.ppf(0.975, stats.ttest_ind(x, np.asarray(y) * a / b, equal_var=False).df)
    g = t**2 * v / b**2
    if g >= 1:
        return None
    half = t / abs(b) * math.sqrt(u + (a / b) ** 2 * v - g * u)
    return float((a / b - half) / (1 - g)), float((a / b + half) / (1 - g))
