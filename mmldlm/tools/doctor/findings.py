"""`Finding`: the result of one check, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mmldlm.errors import ExitCode


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        name: Name of the check.
        status: Its outcome.
        found: What was found.
        remedy: What to do about it; "" if the status is "ok".
        exit_code: Exit code of the command if this is its only failure.
    """

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    remedy: str = ""
    exit_code: int = ExitCode.DONE


def ok(name: str, found: str) -> Finding:
    """Return a finding with status "ok"."""
    return Finding(name, "ok", found)


def warn(name: str, found: str, remedy: str) -> Finding:
    """Return a finding with status "warn"."""
    return Finding(name, "warn", found, remedy)


def fail(name: str, found: str, remedy: str, exit_code: int = ExitCode.CONFIG) -> Finding:
    """Return a finding with status "fail"."""
    return Finding(name, "fail", found, remedy, int(exit_code))


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 0 if nothing failed, 65 if only the data failed, otherwise 64."""
    codes = {finding.exit_code for finding in findings if finding.status == "fail"}
    return max(codes) if len(codes) == 1 else int(ExitCode.CONFIG if codes else ExitCode.DONE)


def format_report(findings: Sequence[Finding]) -> str:
    """Return one line per finding, each followed by its remedy, and a summary line."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        status = "FAIL" if finding.status == "fail" else finding.status
        lines.append(f"  {status:<4}  {finding.name:<{width}}  {finding.found}")
        if finding.remedy:
            lines.append(f"{'':8}{'':<{width}}  -> {finding.remedy}")
    num_failed, num_warned = (sum(finding.status == status for finding in findings) for status in ("fail", "warn"))
    warnings = f"{num_warned} warning{'s' * (num_warned != 1)}"
    if num_failed:
        lines.append(f"not ready: {num_failed} failed, {warnings}")
    else:
        lines.append(f"ready, {warnings}" if num_warned else "ready")
    return "\n".join(lines)
