"""Settings of the engines and of their communication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mmldlm.settings.declaration import setting

DAY_S = 86_400
# Variables of older scripts, which have no effect because a run sets newer ones, and the settings to use instead.
SUPERSEDED = {
    "NCCL_TIMEOUT": "timeout_s",
    "TORCH_DISTRIBUTED_TIMEOUT": "timeout_s",
    "NCCL_BLOCKING_WAIT": "blocking_wait",
    "NCCL_ASYNC_ERROR_HANDLING": "async_error_handling",
}


@dataclass(frozen=True)
class DDPConfig:
    """Arguments of `torch.nn.parallel.DistributedDataParallel` and of its communication hook, passed on unchanged."""

    find_unused_parameters: bool = setting(
        False, "look for parameters without gradient; false is safe: every mode uses every trainable parameter"
    )
    gradient_as_bucket_view: bool = setting(True, "gradients are views of the buckets, which saves a copy of them")
    broadcast_buffers: bool = setting(False, "broadcast rank 0's buffers before each forward; they are constants")
    static_graph: bool = setting(True, "the graph is the same in every step, which lets DDP overlap more")
    bucket_cap_mb: int = setting(25, "size of a gradient bucket in MiB", at_least=1)
    comm_hook: Literal["none", "fp16", "bf16"] = setting(
        "none",
        "compression of the gradients during their reduction; anything but none changes the loss curve",
        advice="Only if the exchange of gradients is the bottleneck: it changes the curve",
    )


@dataclass(frozen=True)
class DistributedConfig:
    """Timeouts, failure handling and environment of the process group, and the options of DDP."""

    timeout_s: float = setting(
        1800.0,
        "seconds that a collective may take before the run ends",
        above=0,
        advice="Lower it to detect a hang sooner; it must exceed what one rank does alone, such as generating texts "
        "at a validation",
    )
    allow_long_timeout: bool = setting(False, "accept a timeout_s or heartbeat_timeout_s above 24 hours")
    heartbeat_timeout_s: int = setting(
        1800, "seconds that NCCL's watchdog may be silent before PyTorch ends the process", at_least=1
    )
    blocking_wait: bool = setting(
        False,
        "wait for NCCL on the host; true prevents overlap of communication and computation",
        advice="To find which collective hangs, not for training",
    )
    async_error_handling: bool = setting(True, "end the process when an NCCL collective fails or times out")
    flight_recorder: bool = setting(
        True,
        "record the latest collectives, and write them to a file if a rank is lost; without it a hang of NCCL ends "
        "with signal 6 instead of exit code 76",
    )
    nccl: dict[str, str | int] = setting(
        factory=lambda: {"NCCL_SOCKET_NTHREADS": 4, "NCCL_NSOCKS_PERTHREAD": 4},
        doc="environment variables that are set before the process group starts, and win over other settings",
        advice="NCCL_SOCKET_IFNAME if a node has several networks, NCCL_DEBUG: INFO to see what NCCL chose",
    )
    ddp: DDPConfig = setting(DDPConfig(), "the DDP engine")

    def __post_init__(self) -> None:
        for name in ("timeout_s", "heartbeat_timeout_s"):
            self.check_timeout(name, getattr(self, name))
        for name, value in self.nccl.items():
            if name in SUPERSEDED:
                raise ValueError(f"nccl: {name} has no effect; use distributed.{SUPERSEDED[name]}")
            self.check_timeout(f"nccl.{name}", value)
            if not name.startswith(("NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_", "FI_")):
                raise ValueError(f"nccl: expected names such as NCCL_SOCKET_IFNAME, found {name!r}")

    def check_timeout(self, name: str, seconds: float | str) -> None:
        """Raise `ValueError` if `name` is a timeout (a setting or a variable) of more than a day."""
        is_timeout = "timeout" in name.lower() and str(seconds).replace(".", "", 1).isdigit()
        if is_timeout and float(seconds) > DAY_S and not self.allow_long_timeout:
            raise ValueError(
                f"{name}: must be at most {DAY_S} (24 h), found {float(seconds):g}; "
                "a hang would go unnoticed for as long (distributed.allow_long_timeout: true accepts it)"
            )
