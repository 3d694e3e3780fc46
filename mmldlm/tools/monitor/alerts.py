"""All alerts, the most urgent first."""

from __future__ import annotations

from collections.abc import Callable

from mmldlm.tools.monitor import curve_alerts, health_alerts
from mmldlm.tools.monitor.alert import Alert
from mmldlm.tools.monitor.snapshot import Snapshot

Check = Callable[[Snapshot], Alert | None]

# Of every run that did not end in good order: they tell how it came to that.
ALWAYS: tuple[Check, ...] = (
    health_alerts.ended_badly,
    health_alerts.rank_lost,
    curve_alerts.not_finite,
    curve_alerts.skipped,
    curve_alerts.overflow,
    curve_alerts.rising_loss,
    curve_alerts.gradient_norm,
    health_alerts.memory,
    health_alerts.disk,
)
# Of a run that goes on.
OPEN: tuple[Check, ...] = (
    health_alerts.no_news,
    health_alerts.data_bound,
    health_alerts.busy_cores,
    health_alerts.low_speed,
    health_alerts.unstable_speed,
    curve_alerts.plateau,
)


def alerts(look: Snapshot) -> list[Alert]:
    """What the run needs attention for; nothing if it has finished, or was stopped and saved."""
    if look.state.name in ("finished", "stopped"):
        return []
    checks = ALWAYS + OPEN if look.state.is_open else ALWAYS
    return [alert for check in checks if (alert := check(look)) is not None]
