"""`mmldlm train CONFIG --dry-run`: the needs of a run. `--gpus 8x80GB` adds the engines and micro-batches that fit."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count, groupby, takewhile
from math import sqrt
from typing import Any, Literal, NamedTuple

import torch

from mmldlm.config import RunConfig, resolve_precision
from mmldlm.data.batch_schedule import TrainConfig
from mmldlm.data.mixture import open_data
from mmldlm.data.store import Store
from mmldlm.data.verify import drop_bad_samples
from mmldlm.distributed.capabilities import supports
from mmldlm.distributed.launch import DDP, ENGINES, FSDP2, SINGLE, read_launcher_sizes
from mmldlm.errors import ConfigError, UsageError
from mmldlm.loading.factory import attention_backend, describe_attention
from mmldlm.optim.lr_schedule import describe_lr
from mmldlm.settings.fields import to_yaml
from mmldlm.telemetry.resources import MIB
from mmldlm.trainer.memory import USABLE_SHARE, Estimate, Sharding, estimate, rank_memory
from mmldlm.trainer.setup import requested_features
from mmldlm.trainer.startup_report import data_notices
from mmldlm.utils.format import format_number, human_duration

HSDP = "fsdp2_hsdp"  # FSDP2 within each node, as `scripts/launch_node.sh` calls it
GPU_ENGINES = (DDP, "zero1", "zero2", FSDP2, HSDP, "zero3")  # for several GPUs, the simplest first
CHECKPOINTING: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
BUSY_TOKENS = 16_384  # with fewer tokens in a micro-batch, a current GPU waits for the host
SAVE_BYTES_S = 1e9  # bytes/s that we assume a process writes
# Hours of a GPU between unexpected interruptions: 419 in 54 days on 16,384 GPUs (Llama 3, arXiv 2407.21783).
GPU_HOURS_BETWEEN_FAILURES = 54 * 24 * 16_384 / 419


def print_estimate(config: RunConfig, accelerate_file: str | None = None) -> None:
    """Print the resolved config and the estimate to stdout, for as many processes as the launcher started."""
    world_size, replicas, mixed_precision = read_launcher_sizes(os.environ, accelerate_file)
    config = resolve_precision(config, mixed_precision)
    store = drop_bad_samples(open_data(config.data.location), "train", config.data.max_bad_samples)
    costs = estimate(config, store, world_size)
    print(to_yaml(config))
    print("parameters           " + ", ".join(f"{name} {count:,}" for name, count in costs.parameters.items()))
    print(f"total parameters     {costs.step.parameters:,}, {costs.step.trained:,} trained")
    for step, size in costs.batches.items():
        print(
            f"{f'  from step {step}' if step else 'global batch':<20} {size.global_batch_size} samples = "
            f"{world_size} processes x "
            + (
                f"micro-batches of {size.micro_batch}"
                if size.micro_batch_tokens
                else f"{size.micro_batch} x {size.accumulation(world_size)} micro-batches"
            )
        )
    print(f"  a micro-batch      {costs.largest_micro_batch:,} text and latent tokens at most")
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    for notice in data_notices(config, store, world_size, device_type):
        print(f"  notice             {notice}")
    print(f"tokens per step      {costs.tokens_per_step:,.0f} on average, no padding")
    print(f"FLOPs per step       {costs.flops_per_step / 1e9:,.1f} G (matrix products of forward and backward)")
    attention = describe_attention(attention_backend(config, device_type))
    print(f"attention            {attention} on {device_type} in {config.precision}")
    print(f"optimizer            {costs.optimizer}")
    rate = describe_lr(config.train.steps, config.optim, config.schedule, costs.batches[0].global_batch_size)
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


# --- other GPUs -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gpus:
    """The GPUs of a run."""

    nodes: int
    per_node: int
    gigabytes: float  # memory of each GPU

    @classmethod
    def parse(cls, text: str, nodes: int) -> Gpus:
        """Parse the GPUs of a node, for example "8x80GB", for this many nodes."""
        match = re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?)GB", text)
        if not match or not int(match[1]) or not float(match[2]):
            raise UsageError(f"--gpus: expected number and memory of a node's GPUs, such as 8x80GB, found {text!r}")
        if nodes < 1:
            raise UsageError(f"--nodes: expected at least 1, found {nodes}")
        return cls(nodes, int(match[1]), float(match[2]))

    @property
    def count(self) -> int:
        return self.nodes * self.per_node


class Choice(NamedTuple):
    """One way to train the config, and the memory that it needs."""

    micro_batch: str  # the setting
    checkpointing: Literal["none", "selective", "full"]
    tokens: int  # text and latent tokens of the largest micro-batch
    engine: str
    gigabytes: float  # estimated memory of each GPU
    excess: float  # gigabytes over the limit, 0 or less if it fits


def print_choices(config: RunConfig, gpus: Gpus, arguments: Sequence[str]) -> None:
    """Print the memory of every engine and micro-batch, the save interval, and the command of the first choice.

    `arguments` are the config file and the overrides for that command. If nothing fits, a `ConfigError` follows the
    table.
    """
    config = resolve_precision(config)
    store = drop_bad_samples(open_data(config.data.location), "train", config.data.max_bad_samples)
    config.train.check_batches(gpus.count)
    choices, costs = search(config, store, gpus)
    print("\n".join(table(choices, gpus)))
    best = first_choice(choices, gpus)
    save_s = costs.checkpoint_mib * MIB / SAVE_BYTES_S
    failure_s = 3600 * GPU_HOURS_BETWEEN_FAILURES / gpus.count
    interval_s = save_interval(save_s, failure_s)
    print(
        f"save every {human_duration(interval_s)}: by Young/Daly, if a save takes {save_s:.2g} s (1 GB/s per process) "
        f"and there is an interruption every {failure_s / 3600:,.0f} h (as on Llama 3's GPUs, arXiv 2407.21783)"
    )
    print(f"first choice: {best.engine} (keeps a GPU busy, then recomputes least, then has the simplest engine)")
    settings = (
        best.micro_batch,
        f"memory.activation_checkpointing={best.checkpointing}",
        "checkpoint.every_steps=0",
        f"checkpoint.every_minutes={max(1, round(interval_s / 60))}",
    )
    command = "mmldlm train"
    if gpus.count > 1:
        nodes = f"NNODES={gpus.nodes} NODE_RANK=... MASTER_ADDR=... " if gpus.nodes > 1 else ""
        command = f"{nodes}NPROC_PER_NODE={gpus.per_node} bash scripts/launch_node.sh {best.engine}"
    print(f"  {command} {shlex.join([*arguments, *settings])}")


def search(config: RunConfig, store: Store, gpus: Gpus) -> tuple[list[Choice], Estimate]:
    """Return the choices, by activation checkpointing, micro-batch and engine, and the cost of the last one.

    We halve micro-batches until one fits under all engines. If the largest fits, we try no more recomputation.
    """
    features = requested_features(config)
    engines = [
        engine
        for engine in (GPU_ENGINES if gpus.count > 1 else (SINGLE,))
        if (engine != HSDP or 1 < gpus.nodes < gpus.count)
        and all(supports(feature, FSDP2 if engine == HSDP else engine) for feature in features)
    ]
    if not engines:
        raise ConfigError(f"--gpus: no engine of {gpus.count} GPUs runs {', '.join(features)} together")
    name, sizes = micro_batches(config.train, store, gpus.count)
    choices: list[Choice] = []
    for checkpointing in CHECKPOINTING:
        memory = replace(config.memory, activation_checkpointing=checkpointing)
        for size in sizes:
            changed: Any = {name: size}
            tried = replace(config, train=replace(config.train, **changed), memory=memory)
            costs = estimate(tried, store, gpus.count, device="cuda")
            for engine in engines:
                replicas = gpus.nodes if engine == HSDP else 1
                sharding = Sharding(FSDP2 if engine == HSDP else engine, config.precision, gpus.count, replicas)
                needed = rank_memory(costs.step, sharding).peak * MIB / 1e9
                excess = needed - USABLE_SHARE * gpus.gigabytes
                tokens = costs.largest_micro_batch
                choices.append(Choice(f"train.{name}={size}", checkpointing, tokens, engine, needed, excess))
            if all_fit := all(choice.excess <= 0 for choice in choices[-len(engines) :]):
                break
        if all_fit and size == sizes[0]:
            break
    return choices, costs


def micro_batches(train: TrainConfig, store: Store, world_size: int) -> tuple[str, list[int]]:
    """Return the setting's name and the sizes to try, largest first. With a token budget, the sizes are in tokens."""
    if budget := train.micro_batch_tokens:
        least = store.split("train").mean_length
        smaller = takewhile(lambda size: size >= least, (4 * budget >> halvings for halvings in count(1)))
        return "micro_batch_tokens", [4 * budget, *smaller]
    share = train.global_batch_size // world_size
    halves = (share >> halvings for halvings in range(share.bit_length()))
    return "micro_batch_size", [size for size in halves if share % size == 0]


def first_choice(choices: Sequence[Choice], gpus: Gpus) -> Choice:
    """Return the best choice: it fits and keeps a GPU busy, then recomputes least, then has the simplest engine."""
    if fitting := [choice for choice in choices if choice.excess <= 0]:
        order = (SINGLE, *GPU_ENGINES)
        return min(
            fitting,
            key=lambda choice: (
                -min(choice.tokens, BUSY_TOKENS),
                CHECKPOINTING.index(choice.checkpointing),
                order.index(choice.engine),
                -choice.tokens,
            ),
        )
    least = format_number(min(choice.gigabytes for choice in choices))
    raise ConfigError(
        f"--gpus: nothing fits into {USABLE_SHARE:.0%} of {gpus.gigabytes:g} GB, the smallest choice needs {least} GB; "
        "try more GPUs under fsdp2 or zero3, zero3_offload, GPUs with more memory, a smaller network or shorter samples"
    )


def table(choices: Sequence[Choice], gpus: Gpus) -> list[str]:
    """Return a table with a row for each micro-batch and a column for each engine."""
    rows = [list(row) for _, row in groupby(choices, key=lambda choice: choice[:3])]
    lines = [
        f"estimated GB on each of {gpus.count} GPUs with {gpus.gigabytes:g} GB, {USABLE_SHARE:.0%} of it usable; "
        "(+x): x GB too many",
        f"{'micro-batch':<32}{'tokens':>8}  {'recomputed':<11}" + "".join(f"{choice.engine:>18}" for choice in rows[0]),
    ]
    for row in rows:
        micro_batch, checkpointing, tokens, *_ = row[0]
        cells = [
            format_number(one.gigabytes) + (f" (+{format_number(one.excess)})" if one.excess > 0 else "") for one in row
        ]
        lines.append(f"{micro_batch:<32}{tokens:>8,}  {checkpointing:<11}" + "".join(f"{cell:>18}" for cell in cells))
    return lines


def save_interval(save_s: float, failure_s: float) -> float:
    """Return the seconds between checkpoints that waste the least time: sqrt(2 x save x mean time between failures).

    From Young 1974 (doi 10.1145/361147.361115). If saves are much shorter than the time between failures, it equals the
    first order of Daly 2006 (doi 10.1016/j.future.2004.11.016).
    """
    return sqrt(2 * save_s * failure_s)
