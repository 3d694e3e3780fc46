"""Settings that some engines cannot run. A start refuses them by this table, which docs/engines.md prints."""

from __future__ import annotations

from mmldlm.distributed.launch import DDP, ENGINES, FSDP2, SINGLE
from mmldlm.errors import ConfigError

ALL_ENGINES = (SINGLE, *ENGINES)
ZERO_ENGINES = tuple(engine for engine in ENGINES if engine.startswith("zero"))
WEIGHT_SHARDING_ENGINES = (FSDP2, *(engine for engine in ZERO_ENGINES if engine.startswith("zero3")))
OFFLOAD_ENGINES = tuple(engine for engine in ZERO_ENGINES if engine.endswith("_offload"))

# For each "key: value", the engines that do not run it, and the reason, which completes an error message.
EXCLUDED = {
    "optim.name: muon": (
        ZERO_ENGINES,
        "Muon needs whole matrices, and ZeRO partitions the parameters as flat buffers",
    ),
    "optim.name: deepspeed_adam": ((SINGLE, DDP, FSDP2), "DeepSpeed has no partitions for it to update"),
    "precision: fp16": (
        ZERO_ENGINES,
        "DeepSpeed scales the loss by rules of its own, from which no other engine can resume",
    ),
    "compile.scope: regional": (
        ("zero3", "zero3_offload"),
        "ZeRO-3 gathers weights by hooks within the compiled regions",
    ),
    "compile.graphs: true": (
        (FSDP2, *ZERO_ENGINES),
        "recorded passes cannot contain its collectives",
    ),
    "train.auto_micro_batch: true": (
        WEIGHT_SHARDING_ENGINES,
        "no rank can try a micro-batch alone (`mmldlm train CONFIG --dry-run --gpus N` estimates its memory)",
    ),
}


def supports(setting: str, engine: str) -> bool:
    """Return whether `engine` runs `setting`, "key: value"."""
    return setting not in EXCLUDED or engine not in EXCLUDED[setting][0]


def check_supported(setting: str, engine: str) -> None:
    """Raise `ConfigError` unless `engine` runs `setting`, "key: value"."""
    if not supports(setting, engine):
        key, value = setting.split(": ")
        others = " or ".join(other for other in ALL_ENGINES if supports(setting, other))
        raise ConfigError(
            f"{key}: found {value}, which engine {engine} cannot run, because {EXCLUDED[setting][1]}; expected engine "
            f"{others}"
        )


def capability_table() -> str:
    """Return the table in Markdown, with a row per setting and a column per engine."""
    rows = [["setting", *ALL_ENGINES], ["---", *[":-:"] * len(ALL_ENGINES)]]
    rows += [
        [f"`{setting}`", *("yes" if supports(setting, engine) else "no" for engine in ALL_ENGINES)]
        for setting in EXCLUDED
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
