"""What a check found, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mmldlm.errors import ExitCode


@dataclass(frozen=True)
class Finding:
    """One check: how it went, what was found, and, unless all is well, what to do about it."""

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    remedy: str = ""
    exit_code: int = ExitCode.DONE


def ok(name: str, found: str) -> Finding:
    return Finding(name, "ok", found)


def warn(name: str, found: str, remedy: str) -> Finding:
    return Finding(name, "warn", found, remedy)


def fail(name: str, found: str, remedy: str, exit_code: int = ExitCode.CONFIG) -> Finding:
    return Finding(name, "fail", found, remedy, int(exit_code))


def exit_code(findings: Sequence[Finding]) -> int:
    """0 where nothing failed; 65 where all that failed is the data; otherwise 64."""
    codes = {finding.exit_code for finding in findings if finding.status == "fail"}
    return max(codes) if len(codes) == 1 else int(ExitCode.CONFIG if codes else ExitCode.DONE)


def report(findings: Sequence[Finding]) -> str:
    """A line for each finding, what to do below it, and the verdict."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        status = "FAIL" if finding.status == "fail" else finding.status
        lines.append(f"  {status:<4}  {finding.name:<{width}}  {finding.found}")
        if finding.remedy:
            lines.append(f"{'':8}{'':<{width}}  -> {finding.remedy}")
    failed, warned = (sum(finding.status == status for finding in findings) for status in ("fail", "warn"))
    noted = f"{warned} warning{'s' * (warned != 1)}"
    verdict = f"not ready: {failed} failed, {noted}" if failed else f"ready, {noted}" if warned else "ready"
    return "\n".join([*lines, verdict])
