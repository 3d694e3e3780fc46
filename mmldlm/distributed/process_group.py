"""Join the process group that a launcher describes, with or without an engine on top of it."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from itertools import count

import psutil
import torch
import torch.distributed as dist

from mmldlm.distributed.collectives import Collectives
from mmldlm.distributed.config import SUPERSEDED, DistributedConfig
from mmldlm.distributed.launch import SINGLE, LauncherEnv
from mmldlm.distributed.watchdog import Watchdog
from mmldlm.errors import ConfigError, PeerLostError, exit_code_and_cause

RENDEZVOUS_TIMEOUT_S = 30.0, 300.0  # bounds of the wait for other processes to connect
NCCL_MARGIN_S = 30.0
FLIGHT_RECORDER_ENTRIES = 2000
# PyTorch's default, "SkipCleanUp", ends the process without `ncclCommAbort`, which may hang.
ASYNC_ERROR_HANDLING = "3"
_BY_TORCHRUN = "TORCH_NCCL_ASYNC_ERROR_HANDLING"  # torchrun sets it to 1 if the user has not set it
_exported: dict[str, str] = {}  # set by this process, perhaps for an earlier run
_groups = count()  # counts the groups that this process joins, one after another


def settings_to_export(config: DistributedConfig) -> dict[str, str]:
    """Return the variables that PyTorch and NCCL read when the process group starts."""
    return {
        # PyTorch's defaults. If they were off, no timeout of NCCL would end the process.
        "TORCH_NCCL_ENABLE_MONITORING": "1",
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "1",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(config.heartbeat_timeout_s),
        "TORCH_NCCL_BLOCKING_WAIT": str(int(config.blocking_wait)),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": ASYNC_ERROR_HANDLING if config.async_error_handling else "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": str(int(config.flight_recorder)),
        "TORCH_FR_BUFFER_SIZE": str(FLIGHT_RECORDER_ENTRIES if config.flight_recorder else 0),
        **{name: str(value) for name, value in config.nccl.items()},
    }


def export_settings(config: DistributedConfig) -> None:
    """Set the variables of `settings_to_export`, unless the user has. A timeout above a day is a `ConfigError`."""
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get(_BY_TORCHRUN) == "1":
        _exported.setdefault(_BY_TORCHRUN, "1")
    for name, value in settings_to_export(config).items():
        try:
            config.check_timeout(name, os.environ.get(name, value))
        except ValueError as error:
            raise ConfigError(f"environment: {error}") from None
        if os.environ.get(name) in (None, _exported.get(name)):
            os.environ[name] = _exported[name] = value


def kept_variables(config: DistributedConfig) -> list[str]:
    """Return a line for each variable that overrides a setting with the user's value, or has no effect."""
    ours = settings_to_export(config)
    kept = {name: os.environ[name] for name, value in ours.items() if os.environ.get(name, value) != value}
    return [
        *(f"{name}: no effect; use distributed.{SUPERSEDED[name]}" for name in SUPERSEDED if name in os.environ),
        *(
            f"{name}: the value {value} from the environment is used, not {ours[name]} from the settings in distributed"
            for name, value in kept.items()
        ),
    ]


def use_interface_for(address: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Make gloo and NCCL use the interface that reaches `address`, unless the user has set another one.

    By default, gloo uses the interface that the host's own name resolves to, often loopback, and NCCL guesses. If
    `address` belongs to this machine, we take the interface that has it, because the other nodes come in there.
    """
    try:
        target = str(socket.getaddrinfo(address, None, type=socket.SOCK_DGRAM)[0][4][0])
        with socket.socket(socket.AF_INET6 if ":" in target else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))  # on a datagram socket, this only chooses the source address
            source = probe.getsockname()[0]
    except OSError:  # the name does not resolve, or there is no route
        return
    for interface, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == source for entry in addresses):
            environment.setdefault("GLOO_SOCKET_IFNAME", interface)
            environment.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # `=`: an exact name, not a prefix
            return


def join_process_group(config: DistributedConfig, launch: LauncherEnv) -> Watchdog:
    """Start the default process group and a watchdog on its store (collective).

    We do this before any library starts a group, whose timeout would not be `config.timeout_s`. If this node has fewer
    GPUs than processes, or another program uses the port, this is a `ConfigError`. If the rendezvous fails or times
    out, it is a `PeerLostError`.
    """
    # With 1,024 ranks, gloo and rank 0's store need more than the usual limit of 1,024 open files.
    _, maximum = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # some systems do not allow the maximum that they report
        resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, maximum))
    device = None
    if torch.cuda.is_available():
        if launch.local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"launcher: {launch.local_world_size} processes on this node, but {torch.cuda.device_count()} GPUs"
            )
        device = torch.device("cuda", launch.local_rank)
        torch.cuda.set_device(device)
    if launch.nodes > 1:
        use_interface_for(launch.master.rsplit(":", 1)[0])
    shortest, longest = RENDEZVOUS_TIMEOUT_S
    rendezvous_timeout = timedelta(seconds=min(longest, max(shortest, config.timeout_s)))
    timeout = timedelta(seconds=config.timeout_s)
    try:
        store, rank, world_size = _rendezvous(launch.master, rendezvous_timeout)
        store.set_timeout(timeout)
        # torchrun's static rendezvous keeps its store across restarts. We must not read keys of an earlier attempt, or
        # of an earlier group of these processes.
        attempt = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}.{next(_groups)}"
        store = dist.PrefixStore(f"attempt{attempt}", store)
        dist.init_process_group(
            "gloo" if device is None else "cpu:gloo,cuda:nccl",
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=world_size,
            timeout=_group_timeout(config.timeout_s),
            device_id=device,  # NCCL starts here, and subgroups split its communicator
        )
    except (dist.DistError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        if "EADDRINUSE" in reason:
            host, _, port = launch.master.rpartition(":")
            raise ConfigError(
                f"launcher: port {port} of {host} is in use; expected a free one, by --main_process_port (accelerate "
                "launch), --master_port (torchrun, deepspeed) or MASTER_PORT"
            ) from error
        raise PeerLostError(
            f"rendezvous of {launch.world_size} processes at {launch.master} failed: {reason}"
        ) from error
    watchdog = Watchdog(store, rank, world_size, config.timeout_s)
    watchdog.start()
    return watchdog


@cache
def _rendezvous(master: str, timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Return the launch's store, rank and world size. Rank 0 may host the store, which then lasts as long as rank 0."""
    return next(iter(dist.rendezvous("env://", timeout=timeout)))


def set_group_timeouts(timeout_s: float) -> None:
    """Give all process groups the timeout of the default one. Groups of libraries would have PyTorch's 30 minutes."""
    # PyTorch before 2.14 has no public function.
    set_timeout = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)
    for group in dist.distributed_c10d._world.pg_map:
        set_timeout(_group_timeout(timeout_s), group)


def _group_timeout(timeout_s: float) -> timedelta:
    # At a timeout of NCCL, PyTorch raises SIGABRT. Our watchdog exits cleanly and must be faster.
    return timedelta(seconds=timeout_s + NCCL_MARGIN_S if torch.cuda.is_available() else timeout_s)


@contextmanager
def process_group(config: DistributedConfig, launch: LauncherEnv) -> Iterator[Collectives]:
    """Yield the collectives of the launched processes. Each process holds a full model, whatever the engine.

    An error in the body on one rank ends the body on all. A lost rank is a `PeerLostError`.
    """
    if launch.engine == SINGLE:
        yield Collectives()
        return
    export_settings(config)
    watchdog = join_process_group(config, launch)
    processes = Collectives(launch.rank, launch.world_size, watchdog)
    try:
        with published_failures(processes):
            yield processes
    finally:
        processes.close()


@contextmanager
def published_failures(processes: Collectives) -> Iterator[None]:
    """Tell the other ranks about an error in the body. If a lost peer caused it, raise PeerLostError instead."""
    try:
        yield
    except Exception as error:
        lost = processes.diagnose(error)
        if processes.watchdog is not None:
            processes.watchdog.fail(*exit_code_and_cause(lost or error))
        if lost is not None:
            raise lost from error
        raise
