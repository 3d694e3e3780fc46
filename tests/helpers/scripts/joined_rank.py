"""A rank that joins the process group, sums ones over the ranks, as each engine does at its start, and leaves."""

import os

import torch

from mmldlm.distributed.config import DistributedConfig
from mmldlm.distributed.launch import read_launcher_env
from mmldlm.distributed.process_group import process_group
from mmldlm.errors import exit_process

launch = read_launcher_env(os.environ)
with process_group(DistributedConfig(timeout_s=120), launch) as processes:
    ones = torch.ones(1)
    assert int(processes.sum(ones, "all-reduce of ones")) == launch.world_size
exit_process(0)
