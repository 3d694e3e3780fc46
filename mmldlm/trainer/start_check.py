"""`mmldlm train --check`: start as a run does, compare the ranks, measure an all-reduce, and end."""

from __future__ import annotations

import os
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from mmldlm.config import RunConfig, resolve_precision
from mmldlm.distributed.comm_benchmark import all_reduce_speed, backend_of
from mmldlm.distributed.init import start_engine
from mmldlm.distributed.launch import LauncherEnv
from mmldlm.distributed.process_group import published_failures
from mmldlm.trainer.consistency import check_run_folder, compare_ranks, writable_run_folder
from mmldlm.trainer.setup import build_components, check_settings, step_plan
from mmldlm.utils.printable import printable


def check_start(config: RunConfig, launch: LauncherEnv) -> None:
    """Start the engine and compare config, data, versions and run folder of the ranks; print what was seen.

    Nothing is left behind. What would end a run's start is raised as it is there.
    """
    config, run_dir = resolve_precision(config, launch.mixed_precision), Path(config.run.dir)
    check_settings(config, launch, "cuda" if torch.cuda.is_available() else "cpu")
    engine = start_engine(config.distributed, launch, step_plan(config, launch.world_size))
    try:
        with published_failures(engine):
            device = engine.device
            facts = {
                "host": socket.gethostname(),
                "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
                "interface": os.environ.get("GLOO_SOCKET_IFNAME", "default"),
                "clock": time.time(),  # read on all ranks at nearly the same moment: the engine has just started
            }
            ranks = engine.gather(facts)
            with engine.raise_on_all_ranks("opening of the data"):
                store = build_components(config, engine).store
            compare_ranks(engine, config, store)
            with ExitStack() as stack:
                with engine.raise_on_all_ranks("opening of the run folder"):
                    if engine.is_main:
                        stack.enter_context(writable_run_folder(run_dir))
                check_run_folder(engine, run_dir)
            lines = [f"started {engine.name} (ranks: {launch.world_size}, nodes: {launch.nodes})"]
            for rank in range(0, launch.world_size, launch.local_world_size):
                lines.append("  rank {}: {host}, {device}, network interface {interface}".format(rank, **ranks[rank]))
            clocks = [rank["clock"] for rank in ranks]
            lines.append(f"  clocks at most {max(clocks) - min(clocks):.1f} s apart")
            lines.append(f"  equal on all ranks: config, data, versions; one run folder: {run_dir.resolve()}")
            if launch.world_size > 1:
                latency_us, speed = all_reduce_speed(engine, device)
                backend = backend_of(device.type)
                lines.append(f"  all-reduce, {backend}: {latency_us:,.0f} us for 4 bytes, {speed:.2f} GB/s")
            if engine.is_main:
                print(*map(printable, lines), "ready", sep="\n", flush=True)
    finally:
        engine.close()
