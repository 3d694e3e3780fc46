"""One look at a run as a few lines of text for a terminal of any width, or for a file."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from mmldlm.tools.history.run_history import Series
from mmldlm.tools.monitor.alert import Alert
from mmldlm.tools.monitor.snapshot import Snapshot
from mmldlm.utils.format import human_count, human_duration

BARS, PLAIN_BARS = "▁▂▃▄▅▆▇█", "_.-~=+*#"
_SPARK = 32  # columns of a sparkline
_SHOWN = 100  # records of what is no loss: how it is now matters

_LOSSES = (("loss/total", "loss"), ("loss/text", "text"), ("loss/latent", "latent"))
_GIB = 2**30


def sparkline(values: Sequence[float], columns: int = _SPARK, bars: str = BARS) -> str:
    """`values` from left to right in at most so many columns, each the mean of its share; "x" where none is finite."""
    count = min(columns, len(values))
    shares = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    means = [statistics.fmean(found) if (found := list(filter(math.isfinite, share))) else None for share in shares]
    known = [mean for mean in means if mean is not None]
    low, height = min(known, default=0.0), max(known, default=0.0) - min(known, default=0.0)
    top = len(bars) - 1
    return "".join(
        "x" if mean is None else bars[round((mean - low) / height * top) if height else top // 2] for mean in means
    )


@dataclass(frozen=True)
class View:
    """The lines of a run, cut to `width`; with `unicode` off they are ASCII, with `color` on alerts are red."""

    look: Snapshot
    alerts: Sequence[Alert]
    width: int = 100
    unicode: bool = True
    color: bool = False

    def lines(self) -> list[str]:
        plain = [self._head(), *self._losses(), *self._speed(), *self._optimizer(), *self._place()]
        lines = [_printable(line)[: self.width] for line in plain]
        for alert in self.alerts:
            found = _printable(f"{alert.name}: {alert.found}")
            lines += [self._red(line) for line in self._wrapped(found, "  ! ", "    ")]
            lines += self._wrapped(alert.advice, "    -> ", "       ")
        return lines

    def _red(self, text: str) -> str:
        return f"\x1b[31m{text}\x1b[0m" if self.color else text

    def _wrapped(self, text: str, first: str, then: str) -> list[str]:
        return textwrap.wrap(text, max(40, self.width), initial_indent=first, subsequent_indent=then)

    def _head(self) -> str:
        look, history = self.look, self.look.history
        parts = [history.name, look.state.name]
        total = history.total_steps
        if total:
            parts.append(f"step {history.step:,}/{total:,} ({history.step / total:.0%})")
        elif look.state.is_open:
            parts.append("starting")
        if look.eta_s is not None and look.state.name == "running":
            parts.append(f"ETA {human_duration(look.eta_s)}")
        if look.news_age_s is not None:
            parts.append(f"{'news' if look.state.is_open else 'ended'} {human_duration(look.news_age_s)} ago")
        return "  ".join(parts)

    def _losses(self) -> list[str]:
        lines = []
        for tag, name in _LOSSES:
            series = self.look.history.series(tag, "train")
            if series.values:
                lines.append(self._row(name, _number(series.values[-1]), series, ""))
        series = self.look.history.series("validation/total", "validation")
        if series.values:
            best = min(filter(math.isfinite, series.values), default=math.nan)
            note = f"at step {series.steps[-1]:,}, best {_number(best)}"
            lines.append(self._row("validation", _number(series.values[-1]), series, note))
        return lines

    def _speed(self) -> list[str]:
        series = self._recent("speed/tokens_per_s")
        if not series.values:
            return []
        step_s, wait = self.look.history.step_s, self.look.data_wait
        notes = [f"{step_s:.3g} s/step"] if step_s else []
        notes += [f"{wait:.0%} waiting for data"] if wait is not None else []
        speed = series.values[-1]
        return [self._row("tokens/s", human_count(speed) if math.isfinite(speed) else "nan", series, ", ".join(notes))]

    def _optimizer(self) -> list[str]:
        lines = []
        for tag, name in (("optim/lr", "lr"), ("optim/grad_norm", "grad norm")):
            series = self._recent(tag)
            if series.values:
                skipped = len(self.look.history.of("skip"))
                note = f"{skipped} steps skipped" if name == "grad norm" else ""
                lines.append(self._row(name, f"{series.values[-1]:.3g}", series, note))
        return lines

    def _place(self) -> list[str]:
        look = self.look
        parts = [f"{what} {taken / 1024:.1f} of {limit / 1024:.1f} GiB" for what, taken, limit in look.memory]
        lines = [f"  {'memory':<10} {', '.join(parts)}"] if parts else []
        checkpoint = look.history.last("checkpoint")
        saved = "none yet"
        if checkpoint is not None:
            saved = f"step {checkpoint['step']:,}, {human_duration(max(0.0, look.now - checkpoint['time']))} ago"
        lines.append(f"  {'checkpoint':<10} {saved}; {look.disk_free / _GIB:.1f} GiB free")
        return lines

    def _recent(self, tag: str) -> Series:
        steps, values, times = self.look.history.series(tag, "train")
        return Series(steps[-_SHOWN:], values[-_SHOWN:], times[-_SHOWN:])

    def _row(self, name: str, value: str, series: Series, note: str) -> str:
        bars = sparkline(series.values, bars=BARS if self.unicode else PLAIN_BARS)
        return f"  {name:<10} {value:>9}  {bars:<{_SPARK}}  {note}".rstrip()


def _printable(text: str) -> str:
    """What comes out of a run's files is not obeyed by a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:.3g}"
