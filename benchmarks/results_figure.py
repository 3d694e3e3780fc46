"""The figures of docs/images, which `python -m benchmarks pages` draws from the committed results.

`results.svg`, the README's: how many held-out texts come back word for word, by their length. `crossover.svg`: the bits
of the decoder and of our network over the reads of the corpus.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from statistics import median
from typing import Any

from benchmarks.common.report import ROOT

IMAGES = ROOT / "docs" / "images"
ROWS = {  # corpus and latents of the learning benchmark: label and color
    "simple-docs": ("short sentences, learned latents (the quickstart)", "#1f77b4"),
    "python-docs": ("longer sentences, learned latents", "#7fb2d9"),
    "simple-docs-lsa": ("short sentences, LSA latents", "#ff7f0e"),
    "simple-docs-sentence": ("short sentences, latents of a sentence encoder", "#8c8c8c"),
}
COLORS = ("#ff7f0e", "#1f77b4", "#7fb2d9")  # the decoder, ours, our bound
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
    return _svg(title, [*legend, *ticks, '<g text-anchor="middle">', *_bars(learning["corpora"]), "</g>"])


def _svg(title: str, parts: Iterable[str]) -> str:
    """Return a figure with its title, the line at its bottom, and these parts."""
    lines = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="14">',
        f'<title>{title}</title><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="15">{title}</text>',
        f'<line x1="{LEFT}" y1="{BOTTOM}" x2="{WIDTH}" y2="{BOTTOM}" stroke="#222222"/>',
        *parts,
        "</svg>",
    )
    return "\n".join(lines) + "\n"


def draw_crossover(by_label: Mapping[str, Mapping[float, list[float]]]) -> str:
    """Return the bits per token of each network by reads of the corpus as SVG, on logarithmic axes."""
    points = [(reads, value) for curve in by_label.values() for reads, values in curve.items() for value in values]
    (first, last), (least, most) = ((min(axis), max(axis)) for axis in zip(*points, strict=True))
    ticks = [tick for tick in (0.25, 0.5, 1, 2, 4, 8) if least / 1.2 <= tick <= most * 1.2]

    def place(reads: float, value: float) -> tuple[float, float]:
        across = math.log(reads / first) / math.log(last / first)
        up = math.log(value / least * 1.1) / math.log(most / least * 1.21)
        return LEFT + 40 + across * (WIDTH - LEFT - 80), BOTTOM - up * (BOTTOM - TOP + 20)

    parts = [
        f'<text x="{LEFT - 8}" y="{place(first, tick)[1] + 5:.1f}" text-anchor="end">{tick:g}</text>' for tick in ticks
    ]
    for reads in sorted({reads for reads, _ in points}):
        parts.append(f'<text x="{place(reads, most)[0]:.1f}" y="{BOTTOM + 22}" text-anchor="middle">{reads:.0f}</text>')
    for index, (label, curve) in enumerate(by_label.items()):
        color, x = COLORS[index], LEFT + 250 * index
        line = " ".join("{:.1f},{:.1f}".format(*place(reads, median(curve[reads]))) for reads in sorted(curve))
        parts.append(
            f'<rect x="{x}" y="34" width="12" height="12" fill="{color}"/><text x="{x + 18}" y="45">{label}</text>'
        )
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        for reads, values in curve.items():
            for value in values:
                cx, cy = place(reads, value)
                parts.append(f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="3" fill="{color}"/>')
    title = "Bits per token of held-out sentences, by how often each training sentence was read (dots: seeds)"
    return _svg(title, parts)
