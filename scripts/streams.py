"""Write docs/images/streams.svg, the README's figure: the two streams of the network, and what it is asked.

    python scripts/streams.py

Needs nothing but Python.
"""

from __future__ import annotations

from pathlib import Path

TEXT, LATENT, BOTH, INK = "#dbe9f6", "#fde3cf", "#e9e9e9", "#222222"
WIDTH, HEIGHT = 860, 330


def box(x: int, y: int, width: int, height: int, fill: str, *lines: str) -> str:
    rows = [
        f'<text x="{x + width / 2:g}" y="{y + height / 2 + 5 + 18 * (i - (len(lines) - 1) / 2):g}">{line}</text>'
        for i, line in enumerate(lines)
    ]
    shape = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{fill}" stroke="{INK}"/>'
    return "\n".join((shape, *rows))


def arrow(x: int, y: int, to_x: int, to_y: int) -> str:
    return f'<line x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" stroke="{INK}" marker-end="url(#head)"/>'


def label(x: int, y: int, line: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="start" fill="#555555">{line}</text>'


def figure() -> str:
    parts = [
        box(10, 20, 190, 70, TEXT, "the [MASK] sat [MASK] .", "tokens at time t_text"),
        box(10, 150, 190, 70, LATENT, "z = α x + σ ε", "latents at time t_latent"),
        box(240, 20, 120, 70, TEXT, "embedding"),
        box(240, 150, 120, 70, LATENT, "projection"),
        box(
            400,
            10,
            200,
            220,
            BOTH,
            "N blocks",
            "one joint attention,",
            "own weights for each",
            "stream, times by adaLN",
        ),
        box(640, 20, 210, 70, TEXT, "text head", "the cat sat down ."),
        box(640, 150, 210, 70, LATENT, "latent head", "x, ε or v"),
        arrow(200, 55, 238, 55),
        arrow(200, 185, 238, 185),
        arrow(360, 55, 398, 55),
        arrow(360, 185, 398, 185),
        arrow(600, 55, 638, 55),
        arrow(600, 185, 638, 185),
        label(10, 265, "l2t: t_latent = 0, tokens from 1 to 0 — the text of a latent"),
        label(10, 289, "t2l: t_text = 0, latents from 1 to 0 — the latent of a text"),
        label(10, 313, "joint: both from 1 to 0 — a text and its latent"),
        label(430, 265, "a length head reads the latents: no padding is in data or loss"),
        label(430, 289, "tokens of a micro-batch are one row, attention stays within a sample"),
    ]
    head = '<marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            'font-family="sans-serif" font-size="14">',
            f"<title>Two streams, one network</title><rect width='{WIDTH}' height='{HEIGHT}' fill='white'/>",
            f'<defs>{head}<path d="M0,0 L8,4 L0,8 z" fill="{INK}"/></marker></defs>',
            f'<g text-anchor="middle" fill="{INK}">',
            *parts,
            "</g>",
            "</svg>",
            "",
        )
    )


if __name__ == "__main__":
    path = Path(__file__).resolve().parent.parent / "docs" / "images" / "streams.svg"
    path.write_text(figure(), encoding="utf-8")
