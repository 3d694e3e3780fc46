"""All alerts, the most urgent first."""

from __future__ import annotations

from collections.abc import Callable

from mmldlm.tools.monitor import curve_alerts, health_alerts
from mmldlm.tools.monitor.alert import Alert
from mmldlm.tools.monitor.snapshot import Snapshot

Check = Callable[[Snapshot], Alert | None]

# Checks of active runs and of runs that ended with an error, where they show the cause.
COMMON_CHECKS: tuple[Check, ...] = (
    health_alerts.ended_with_error,
    health_alerts.rank_lost,
    curve_alerts.nonfinite_loss,
    curve_alerts.skipped_steps,
    curve_alerts.fp16_overflow,
    curve_alerts.rising_loss,
    curve_alerts.gradient_norm,
    health_alerts.memory,
    health_alerts.disk,
)
# Checks of active runs only.
ACTIVE_CHECKS: tuple[Check, ...] = (
    health_alerts.no_news,
    health_alerts.data_bound,
    health_alerts.busy_cores,
    health_alerts.low_speed,
    health_alerts.unstable_speed,
    curve_alerts.plateau,
)


def alerts(snapshot: Snapshot) -> list[Alert]:
    """Return the alerts of a run; none if it has finished, or was stopped and saved."""
    if snapshot.state.name in ("finished", "stopped"):
        return []
    checks = COMMON_CHECKS + ACTIVE_CHECKS if snapshot.state.is_active else COMMON_CHECKS
    return [alert for check in checks if (alert := check(snapshot)) is not None]
