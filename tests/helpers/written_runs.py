"""Run folders whose records are written, not trained: what reads them cannot tell."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def write_lines(folder: Path, records: Sequence[Mapping[str, Any]]) -> Path:
    """Write records into a run folder, a second after one another unless they have a time."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"time": 1e9 + second, **record}) for second, record in enumerate(records)]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return folder


def write_run(
    folder: Path, seed: int, shift: float = 0.0, lr: float = 1e-3, steps: int = 20, total_steps: int = 20
) -> Path:
    """Write a run whose losses fall, with the noise of its seed and a shift, and which validates every 10 steps."""
    noise = np.random.default_rng(seed).normal(size=(steps, 3))
    records: list[dict[str, Any]] = [{"kind": "start", "step": 0, "total_steps": total_steps, "engine": "single"}]
    for step, (loss, speed, held_out) in enumerate(noise.tolist(), start=1):
        values = {"loss/total": 5 - step / 10 + shift + loss / 10, "loss/text_l2t": 4.0 + loss}
        values |= {"accuracy/masked_tokens": 0.1 + shift / 100, "speed/tokens_per_s": 1000 + 10 * speed}
        records.append({"kind": "train", "step": step, **values, "memory/resident_mib": 100.0 + step, "optim/lr": lr})
        if step % 10 == 0:
            records.append({"kind": "validation", "step": step, "validation/total": 5 + shift + held_out / 10})
            records.append({"kind": "checkpoint", "step": step, "path": f"checkpoints/step-{step:08}"})
    if steps == total_steps:
        records.append({"kind": "end", "step": steps})
    write_lines(folder, records)
    config = f"run: {{dir: {folder}, seed: {seed}}}\ndata: {{path: data}}\noptim: {{lr: {lr}}}\n"
    (folder / "config.yaml").write_text(config, encoding="utf-8")
    return folder
