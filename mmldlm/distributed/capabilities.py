"""Capabilities of the engines: one table of the settings that some engines cannot run.

`check_supported` refuses what the table excludes, and `capability_table` prints it for docs/engines.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmldlm.distributed.launcher import DDP, ENGINES, FSDP2, SINGLE
from mmldlm.errors import ConfigError

ALL_ENGINES = (SINGLE, *ENGINES)
ZERO_ENGINES = tuple(engine for engine in ENGINES if engine.startswith("zero"))
WEIGHT_SHARDING_ENGINES = (FSDP2, *(engine for engine in ZERO_ENGINES if engine.startswith("zero3")))
OFFLOAD_ENGINES = tuple(engine for engine in ZERO_ENGINES if engine.endswith("_offload"))


@dataclass(frozen=True)
class Capability:
    """Engines that run a setting, and why the others do not."""

    engines: tuple[str, ...]
    reason: str = ""


def _all_but(*engines: str) -> tuple[str, ...]:
    return tuple(engine for engine in ALL_ENGINES if engine not in engines)


# The reasons complete the message of `check_supported`: "found V under engine E, where ...".
CAPABILITIES = {  # by "key: value"
    "optim.name: adamw": Capability(ALL_ENGINES),
    "optim.name: muon": Capability(
        _all_but(*ZERO_ENGINES), "Muon needs whole matrices, and ZeRO partitions the parameters as flat buffers"
    ),
    "optim.name: deepspeed_adam": Capability(ZERO_ENGINES, "DeepSpeed has no partitions for it to update"),
    "precision: fp32": Capability(ALL_ENGINES),
    "precision: bf16": Capability(ALL_ENGINES),
    "precision: fp16": Capability(
        _all_but(*ZERO_ENGINES), "DeepSpeed scales the loss by rules of its own, from which no other engine can resume"
    ),
    "compile.scope: regional": Capability(
        _all_but("zero3", "zero3_offload"), "ZeRO-3 gathers weights by hooks within the compiled regions"
    ),
}


def supports(setting: str, engine: str) -> bool:
    """Return whether `engine` runs `setting`, an entry of `CAPABILITIES`."""
    return engine in CAPABILITIES[setting].engines


def check_supported(setting: str, engine: str) -> None:
    """Raise `ConfigError` unless `engine` runs `setting`, an entry of `CAPABILITIES`."""
    if supports(setting, engine):
        return
    capability, (key, value) = CAPABILITIES[setting], setting.split(": ")
    raise ConfigError(
        f"{key}: found {value} under engine {engine}, where {capability.reason}; expected an engine of "
        f"{', '.join(capability.engines)}"
    )


def check_comm_hook(engine: str, hook: str, device_type: str) -> None:
    """Raise `ConfigError` if the DDP communication hook cannot exchange the gradients."""
    if engine == DDP and hook == "bf16" and device_type != "cuda":
        raise ConfigError("distributed.ddp.comm_hook: expected none or fp16 over gloo, found bf16 (needs NCCL)")


def capability_table() -> str:
    """Return the table in Markdown: a row per setting, a column per engine."""
    rows = [["setting", *ALL_ENGINES], ["---", *[":-:"] * len(ALL_ENGINES)]]
    rows += [
        [f"`{setting}`", *("yes" if supports(setting, engine) else "no" for engine in ALL_ENGINES)]
        for setting in CAPABILITIES
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
