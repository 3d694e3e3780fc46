"""`mmldlm train CONFIG --dry-run`: the needs of a run. `--gpus 8` prints the needs on 8 GPUs."""

from __future__ import annotations

import os

import torch

from mmldlm.config import RunConfig, resolve_precision
from mmldlm.data.mixture import open_data
from mmldlm.data.verify import drop_bad_samples
from mmldlm.distributed.capabilities import supports
from mmldlm.distributed.launch import ENGINES, FSDP2, read_launcher_sizes
from mmldlm.loading.factory import attention_backend, describe_attention
from mmldlm.optim.lr_schedule import describe_lr
from mmldlm.settings.fields import to_yaml
from mmldlm.telemetry.resources import MIB
from mmldlm.trainer.memory import Sharding, estimate, rank_memory
from mmldlm.trainer.setup import requested_features
from mmldlm.trainer.startup_report import data_notices


def print_estimate(config: RunConfig, accelerate_file: str | None = None, gpus: int | None = None) -> None:
    """Print the resolved config and the estimate to stdout.

    The estimate is for `gpus` GPUs, which need not be in this machine. By default it is for as many processes as the
    launcher started, on this machine's kind of device.
    """
    variables = {**os.environ, **({"WORLD_SIZE": str(gpus)} if gpus else {})}
    world_size, replicas, mixed_precision = read_launcher_sizes(variables, accelerate_file)
    config = resolve_precision(config, mixed_precision)
    store = drop_bad_samples(open_data(config.data.location), "train", config.data.max_bad_samples)
    device_type = "cuda" if gpus or torch.cuda.is_available() else "cpu"
    costs = estimate(config, store, world_size, device_type)
    print(to_yaml(config))
    print("parameters           " + ", ".join(f"{name} {count:,}" for name, count in costs.parameters.items()))
    print(f"total parameters     {costs.step.parameters:,}, {costs.step.trained:,} trained")
    batches = config.train.batch_stages(world_size)
    for step, size in batches.items():
        print(f"{f'  from step {step}' if step else 'global batch':<20} {size.describe(world_size)}")
    print(f"  a micro-batch      {costs.largest_micro_batch:,} text and latent tokens at most")
    for notice in data_notices(config, store, world_size, device_type):
        print(f"  notice             {notice}")
    print(f"tokens per step      {costs.tokens_per_step:,.0f} on average, no padding")
    print(f"FLOPs per step       {costs.flops_per_step / 1e9:,.1f} G (matrix products of forward and backward)")
    attention = describe_attention(attention_backend(config, device_type))
    print(f"attention            {attention} on {device_type} in {config.precision}")
    print(f"optimizer            {costs.optimizer}")
    rate = describe_lr(config.train.steps, config.optim, config.schedule, batches[0].global_batch_size)
    print(f"learning rate        {rate}, of {config.train.steps} steps")
    if world_size == 1:
        mib = {purpose: size / MIB for purpose, size in costs.step.parts.items()}
        parts = " + ".join(f"{size:,.0f} {purpose}" for purpose, size in mib.items() if size >= 0.5)
        print(f"memory per process   {sum(mib.values()):,.0f} MiB = {parts}")
    else:
        state = f"weights, {'EMA, ' if costs.step.ema else ''}gradients and moments"
        print(f"memory per process   {'MiB at peak':>12} {'state':>12} {'on the host':>12}  (state: {state})")
        if replicas > 1:
            print(f"  {FSDP2} with {replicas} replicas x {world_size // replicas} shards")
        for engine in ENGINES:
            if all(supports(setting, engine) for setting in requested_features(config)):
                sharding = Sharding(engine, config.precision, world_size, replicas if engine == FSDP2 else 1)
                memory = rank_memory(costs.step, sharding)
                print(f"  {engine:<18} {memory.peak:>12,.0f} {memory.state:>12,.0f} {memory.host:>12,.0f}")
    print(f"  on the host        {costs.checkpoint_mib:,.0f} MiB more from the first checkpoint on, for staging copies")
