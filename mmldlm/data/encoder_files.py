"""What latent encoders share: rows of unit norm, and the JSON that says which encoder a folder holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np


def unit_rows(vectors: np.ndarray) -> np.ndarray:
    """Rows over their norms; NaN where that is zero or not finite."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    norms[~((norms > 1e-9) & np.isfinite(norms))] = np.nan
    return (vectors / norms).astype(np.float32)


def write_description(folder: Path, description: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "encoder.json").write_text(json.dumps(description, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
