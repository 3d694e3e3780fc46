"""docs/images/results.svg, the README's figure: how many held-out texts come back word for word, by their length.

`python -m benchmarks pages` draws it from the committed results of the learning benchmark.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from benchmarks.common.report import ROOT

PATH = ROOT / "docs" / "images" / "results.svg"
ROWS = {  # corpus and latents of the learning benchmark: label and color
    "simple-docs": ("short sentences, learned latents (the quickstart)", "#1f77b4"),
    "python-docs": ("longer sentences, learned latents", "#7fb2d9"),
    "simple-docs-lsa": ("short sentences, LSA latents", "#ff7f0e"),
    "simple-docs-sentence": ("short sentences, latents of a sentence encoder", "#8c8c8c"),
}
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, BAR = 860, 300, 60, 84, 250, 26


def _y(share: float) -> float:
    return BOTTOM - share * (BOTTOM - TOP)


def _bars(corpora: Mapping[str, Any]) -> Iterator[str]:
    """Yield a group of bars for each range of lengths: the median of the seeds, and a dot for each seed."""
    by_range: dict[tuple[int, int], dict[str, list[float]]] = {}
    for name in ROWS:
        for seed in corpora[name]["seeds"]:
            for part in seed["metrics"]["l2t"]["exact_match_by_length"]:
                lengths = part["tokens_from"], part["tokens_to"]
                by_range.setdefault(lengths, {}).setdefault(name, []).append(part["exact_match"])
    group = (WIDTH - LEFT) / len(by_range)
    for index, ((first, last), shares) in enumerate(sorted(by_range.items())):
        x = LEFT + index * group + (group - BAR * len(shares)) / 2
        yield f'<text x="{LEFT + (index + 0.5) * group:g}" y="{BOTTOM + 22}">{first} to {last} tokens</text>'
        for place, (name, values) in enumerate(shares.items()):
            left, top = x + place * BAR, _y(median(values))
            color = ROWS[name][1]
            yield (
                f'<rect x="{left:g}" y="{top:.1f}" width="{BAR - 4}" height="{BOTTOM - top:.1f}" fill="{color}"/>'
                f'<text x="{left + BAR / 2 - 2:g}" y="{top - 6:.1f}" font-size="12">{median(values):.2f}</text>'
            )
            for value in values:
                yield f'<circle cx="{left + BAR / 2 - 2:g}" cy="{_y(value):.1f}" r="2.5" fill="#222222"/>'


def draw(learning: Mapping[str, Any]) -> str:
    """Return the figure as SVG, from the result of the learning benchmark."""
    legend = [
        f'<rect x="{LEFT + 400 * (i % 2)}" y="{34 + 20 * (i // 2)}" width="12" height="12" fill="{color}"/>'
        f'<text x="{LEFT + 400 * (i % 2) + 18}" y="{45 + 20 * (i // 2)}" text-anchor="start">{label}</text>'
        for i, (label, color) in enumerate(ROWS.values())
    ]
    ticks = [f'<text x="{LEFT - 8}" y="{_y(tick) + 5:.1f}" text-anchor="end">{tick:g}</text>' for tick in (0, 0.5, 1)]
    title = "Share of held-out sentences that come back from their latents word for word (dots: three seeds)"
    parts = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="14">',
        f'<title>{title}</title><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="15">{title}</text>',
        *legend,
        f'<line x1="{LEFT}" y1="{BOTTOM}" x2="{WIDTH}" y2="{BOTTOM}" stroke="#222222"/>',
        *ticks,
        '<g text-anchor="middle">',
        *_bars(learning["corpora"]),
        "</g>",
        "</svg>",
    )
    return "\n".join(parts) + "\n"
