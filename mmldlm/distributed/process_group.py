"""Joining the process group that a launcher describes, with or without an engine to come."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from mmldlm.distributed.collectives import Collectives
from mmldlm.distributed.config import DistributedConfig
from mmldlm.distributed.environment import export_settings
from mmldlm.distributed.launcher import SINGLE, LauncherEnv
from mmldlm.distributed.network import use_interface_towards
from mmldlm.distributed.watchdog import Watchdog
from mmldlm.errors import ConfigError, MmldlmError, PeerLostError, outcome

RENDEZVOUS_S = 30.0, 300.0  # shortest and longest wait for the other processes to appear
NCCL_MARGIN_S = 30.0


def join(config: DistributedConfig, launch: LauncherEnv) -> Watchdog:
    """Ours before any library's: the timeout of a group that others start is not the one asked for."""
    use_cuda = torch.cuda.is_available()
    if use_cuda:
        if launch.local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"launcher: {launch.local_world_size} processes on this node, but {torch.cuda.device_count()} GPUs"
            )
        torch.cuda.set_device(launch.local_rank)
    if launch.nodes > 1:
        # gloo would ask the host's name, which often leads to the loopback.
        use_interface_towards(launch.master.rsplit(":", 1)[0])
    patience = timedelta(seconds=min(RENDEZVOUS_S[1], max(RENDEZVOUS_S[0], config.timeout_s)))
    timeout = timedelta(seconds=config.timeout_s)
    try:
        store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=patience)))
        store.set_timeout(timeout)
        # torchrun's static rendezvous keeps its store over restarts, and what was left in it would be believed.
        store = dist.PrefixStore(f"attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if use_cuda else "gloo",
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=world_size,
            # PyTorch's answer to a timeout of NCCL is SIGABRT; our watchdog leaves in order, and comes first.
            timeout=timeout + timedelta(seconds=NCCL_MARGIN_S) if use_cuda else timeout,
        )
    except (dist.DistError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise PeerLostError(f"the {launch.world_size} processes did not meet at {launch.master}: {reason}") from error
    watchdog = Watchdog(store, rank, world_size, config.timeout_s)
    watchdog.start()
    return watchdog


@contextmanager
def together(config: DistributedConfig, launch: LauncherEnv) -> Iterator[Collectives]:
    """The processes that the launcher started, whatever engine it names: each has all of the model for itself.

    What ends the body on one rank ends it on all. `PeerLostError` where a rank is lost.
    """
    if launch.engine == SINGLE:
        yield Collectives()
        return
    export_settings(config)
    watchdog = join(config, launch)
    processes = Collectives(launch.rank, launch.world_size, watchdog)
    try:
        yield processes
    except Exception as error:
        lost = None if isinstance(error, MmldlmError) else watchdog.diagnose(error)
        processes.peer_lost = isinstance(lost or error, PeerLostError)
        watchdog.fail(*outcome(lost or error))
        if lost is not None:
            raise lost from error
        raise
    finally:
        processes.close()
