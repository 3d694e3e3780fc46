"""The table of the search for texts: `mmldlm evaluate RUN` with the settings of each row, timed on one thread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.common.report import markdown


def search_blocks(result: Mapping[str, Any]) -> dict[str, str]:
    """Return Markdown by name: a row for each way to spend passes."""
    rows = []
    for name, arm in result["arms"].items():
        low, high = arm["exact_match_ci95"]
        row = {f"{arm['texts']} held-out texts": name, "passes a text": f"{arm['passes_per_text']:.0f}"}
        row |= {"CPU ms": f"{arm['cpu_ms_per_text']:.0f}"}
        row |= {"exact matches": f"{arm['exact_match']:.3f} ({low:.3f} to {high:.3f})", "BLEU": f"{arm['bleu']:.1f}"}
        cosine = arm["reencoded_cosine"]  # null if the encoder has no latent for any of the texts
        rows.append(row | {"cosine to the latent": "-" if cosine is None else f"{cosine:.3f}"})
    return {"search": markdown(rows)}
