"""`parallelism_config` of Accelerate, in its config file or in variables: of all it offers, hybrid sharding."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmldlm.errors import ConfigError
from mmldlm.utils.short_repr import short_repr

SWITCH, PREFIX = "ACCELERATE_USE_PARALLELISM_CONFIG", "PARALLELISM_CONFIG_"
# The only supported size of these, and what to use instead.
_UNSUPPORTED_SIZES = {
    "TP_SIZE": "no tensor parallelism here; use FSDP2 or ZeRO-3 to share out the weights",
    "CP_SIZE": "no context parallelism here; use memory.activation_checkpointing or smaller micro-batches",
    "SP_SIZE": "no sequence parallelism here; use memory.activation_checkpointing or smaller micro-batches",
}
# What Accelerate writes for the options of the above; they mean nothing at a size of 1.
_DEFAULTS = {
    "CP_BACKEND": "torch",
    "CP_COMM_STRATEGY": "allgather",
    "SP_BACKEND": "deepspeed",
    "SP_SEQ_LENGTH": "None",
    "SP_SEQ_LENGTH_IS_VARIABLE": "True",
    "SP_ATTN_IMPLEMENTATION": "sdpa",
}


def check_parallelism_section(section: Mapping[Any, Any], path: Path) -> None:
    """Raise `ConfigError` if an accelerate file has a key of `parallelism_config` that Accelerate ignores."""
    for key in section:
        if not str(key).upper().startswith(PREFIX):
            raise ConfigError(f"{path}: parallelism_config.{key}: expected the name {PREFIX.lower()}{key}")


def read_replicas(environment: Mapping[str, str], fsdp: bool, world_size: int) -> int:
    """Return over how many replicas of the model the processes are distributed; 1 without hybrid sharding.

    Anything else than replicas x shards of FSDP2 is a `ConfigError`.
    """
    options = {name[len(PREFIX) :]: value for name, value in environment.items() if name.startswith(PREFIX)}
    sizes = {name: _read_size(name, options.pop(name, "1")) for name in ("DP_REPLICATE_SIZE", "DP_SHARD_SIZE")}
    for name, value in options.items():
        key = f"{PREFIX}{name}".lower()
        if name in _UNSUPPORTED_SIZES:
            if _read_size(name, value) != 1:
                raise ConfigError(f"{key}: expected 1, found {value}: {_UNSUPPORTED_SIZES[name]}")
        elif name not in _DEFAULTS:
            raise ConfigError(f"{key}: unknown; expected dp_replicate_size and dp_shard_size at most")
        elif value.lower() != _DEFAULTS[name].lower():
            raise ConfigError(f"{key}: expected {_DEFAULTS[name]} or nothing, found {short_repr(value)}")
    replicas, shards = sizes.values()
    found = f"parallelism_config: found dp_replicate_size {replicas} x dp_shard_size {shards}"
    if environment.get(SWITCH, "false").lower() != "true":
        if (replicas, shards) != (1, 1):
            raise ConfigError(f"{found}, which Accelerate ignores without {SWITCH}=true; set it, or remove the sizes")
        return 1
    if not fsdp:
        if (replicas, shards) != (1, 1):
            raise ConfigError(
                f"{found} without FSDP2; expected distributed_type: FSDP with fsdp_version: 2, or no section "
                "(DDP replicates and ZeRO-3 shards over all processes; zero_hpz_partition_size keeps some of ZeRO-3's "
                "gathers within a node)"
            )
        return 1
    if replicas * shards != world_size:
        raise ConfigError(f"{found}; expected a product of {world_size}, the number of processes")
    if shards == 1 and world_size > 1:
        raise ConfigError(f"{found}, so that nothing is sharded; use distributed_type: MULTI_GPU (DDP)")
    return replicas


def read_secondary_partition(deepspeed: Mapping[str, Any], path: str, world_size: int, local_world_size: int) -> int:
    """Return the number of processes that share a second copy of ZeRO-3's weights (hpZ, arXiv 2306.10209); 1 for none.

    In the content of the DeepSpeed file, "auto" stands for the processes of this node. It is a `ConfigError` if the
    size does not divide the processes, or the stage is not 3.
    """
    section = deepspeed["zero_optimization"]
    size = section.get("zero_hpz_partition_size", 1)
    if size == "auto":
        size = local_world_size
    key = f"{path}: zero_optimization.zero_hpz_partition_size"
    if isinstance(size, bool) or not isinstance(size, int) or size < 1 or world_size % size:
        raise ConfigError(
            f'{key}: expected "auto" or a number that divides the {world_size} processes, found {short_repr(size)}'
        )
    if size > 1 and section["stage"] != 3:
        raise ConfigError(f"{key}: expected ZeRO stage 3, found stage {section['stage']}; remove the key")
    return int(size)


def _read_size(name: str, value: str) -> int:
    if not value.isdecimal() or len(value) > 9 or int(value) < 1:
        raise ConfigError(f"{PREFIX.lower()}{name.lower()}: expected a whole number from 1, found {short_repr(value)}")
    return int(value)
