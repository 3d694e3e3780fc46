"""Numbers as people read them."""

from __future__ import annotations


def human_duration(seconds: float) -> str:
    """`42s`, `3m 05s`, `2h 07m`, `4d 03h`: the two units that matter."""
    whole = round(seconds)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if not minutes:
        return f"{whole}s"
    if not hours:
        return f"{minutes}m {whole % 60:02}s"
    if not days:
        return f"{hours}h {minutes % 60:02}m"
    return f"{days}d {hours % 24:02}h"


def human_count(number: float) -> str:
    """`950`, `12.3k`, `4.56M`: three digits."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit * 0.9995:
            return f"{number / limit:#.3g}{unit}".replace(".k", "k").replace(".M", "M").replace(".G", "G")
    return f"{number:.0f}"
