"""Settings of the runtime."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mmldlm.schema import setting

DAY_S = 86_400


@dataclass(frozen=True)
class DistributedConfig:
    timeout_s: float = setting(1800.0, "seconds that a collective may take before the run ends", above=0)
    allow_long_timeout: bool = setting(False, "accept a timeout_s above 24 hours")

    def __post_init__(self) -> None:
        if self.timeout_s > DAY_S and not self.allow_long_timeout:
            raise ValueError(
                f"timeout_s: must be at most {DAY_S} (24 h), found {self.timeout_s:g}; "
                "a hang would go unnoticed for as long (distributed.allow_long_timeout: true accepts it)"
            )


@dataclass(frozen=True)
class GuardConfig:
    nonfinite: Literal["skip", "stop"] = setting("skip", "a step whose loss or gradient norm is not finite")
    max_consecutive: int = setting(10, "skipped steps in a row before the run is stopped", at_least=1)
