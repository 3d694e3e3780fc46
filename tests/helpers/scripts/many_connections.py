"""A rank that may have few open files; rank 0, which hosts the store, also opens the connections of many ranks."""

import os
import resource
from pathlib import Path

import torch.distributed as dist

from mmldlm.distributed.config import DistributedConfig
from mmldlm.distributed.launch import read_launcher_env
from mmldlm.distributed.process_group import process_group
from mmldlm.errors import exit_process

launch, count = read_launcher_env(os.environ), 40
limit = len(list(Path("/proc/self/fd").iterdir())) + 50  # leaves room for what joining opens
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
with process_group(DistributedConfig(timeout_s=60), launch) as processes:
    host, _, port = launch.master.rpartition(":")
    ranks = range(count) if processes.is_main else range(0)
    # Two descriptors each, since both ends are in this process.
    stores = [dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False) for _ in ranks]
    for rank, store in zip(ranks, stores, strict=True):
        store.set(f"here/{rank}", "yes")
        assert store.get(f"here/{rank}") == b"yes"
exit_process(0)
