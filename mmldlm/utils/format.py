"""Human-readable durations, counts and numbers."""

from __future__ import annotations


def human_duration(seconds: float) -> str:
    """Format a duration in its two largest units: `42s`, `3m 05s`, `2h 07m`, `4d 03h`."""
    total = round(seconds)
    minutes, hours, days = total // 60, total // 3600, total // 86400
    if not minutes:
        return f"{total}s"
    if not hours:
        return f"{minutes}m {total % 60:02}s"
    if not days:
        return f"{hours}h {minutes % 60:02}m"
    return f"{days}d {hours % 24:02}h"


def human_count(number: float) -> str:
    """Format a number with three digits and a unit: `950`, `12.3k`, `4.56M`."""
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= factor * 0.9995:  # 999.5 and above would round to four digits
            # `#` keeps trailing zeros (4.50M), but also a dot after three digits (950.k).
            return f"{number / factor:#.3g}{unit}".replace(".k", "k").replace(".M", "M").replace(".G", "G")
    return f"{number:.0f}"


def format_number(value: float | None, decimals: int | None = None) -> str:
    """Format a number with four significant digits, or with `decimals` decimals below 1,000. None becomes "–"."""
    if value is None:
        return "–"
    if abs(value) >= 10_000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if decimals is None or abs(value) >= 1000 else f"{value:.{decimals}f}"
