"""`mmldlm plan`: which engine, micro-batch, activation checkpointing and save interval to take."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any

import mmldlm
from mmldlm.config import load_config, require_paths, resolve_precision, split_arguments
from mmldlm.data.mixture import open_data
from mmldlm.data.verify import drop_bad_samples
from mmldlm.errors import ConfigError, ExitCode, UsageError
from mmldlm.settings.fields import set_dotted
from mmldlm.settings.yaml import read_yaml
from mmldlm.tools.config import config_file
from mmldlm.tools.plan.candidates import (
    GPU_HOURS_BETWEEN_FAILURES,
    Candidate,
    Prediction,
    choose,
    engines_for,
    save_interval,
    search,
)
from mmldlm.tools.plan.costs import HSDP
from mmldlm.tools.plan.devices import GPUS, INTERVAL, measured_rates
from mmldlm.trainer.dry_run import MIB
from mmldlm.utils.files import write_atomically
from mmldlm.utils.format import human_duration

LAUNCHER_FILES = Path(mmldlm.__file__).parent / "project"  # with accelerate_configs/ and ds_configs/
GB = 1e9
SAVE_BYTES_S = 1e9  # of a rank, for the time of a save
PORT = 29500


@dataclass(frozen=True)
class Machines:
    """The devices of a plan."""

    nodes: int
    per_node: int
    gigabytes: float  # of a device

    @property
    def world_size(self) -> int:
        return self.nodes * self.per_node

    @property
    def capacity_mib(self) -> float:
        return self.gigabytes * GB / MIB


@dataclass(frozen=True)
class Plan:
    """The candidates of a config on some devices."""

    machines: Machines
    device: str
    rates: str  # published or measured
    candidates: Sequence[Candidate]  # by step time
    tokens_per_step: float
    steps: int
    save_s: float  # of a checkpoint
    failure_s: float  # mean time between failures

    @cached_property
    def best(self) -> Candidate:
        """The candidate to take.

        Raises:
            ConfigError: None fits.
        """
        best = choose(self.candidates)
        if best is not None:
            return best
        least = min(self.candidates, key=lambda candidate: candidate.memory_mib[2])
        help_ = "more memory, a smaller network or shorter samples"
        if any(candidate.engine in ("fsdp2", "zero3") for candidate in self.candidates):
            help_ = "more GPUs, which share the state under fsdp2 and zero3, zero3_offload, " + help_
        raise ConfigError(
            f"--gpus: nothing fits into {self.machines.gigabytes:g} GB: {_name(least)} takes "
            f"{_gb(least.memory_mib[2]):,.3g} GB, {_gb(least.excess_mib):,.3g} GB too many; what helps: {help_}"
        )

    @property
    def save_every(self) -> int:
        """Steps between checkpoints."""
        steps = save_interval(self.save_s, self.failure_s) / self.best.seconds[0]
        return max(1, min(self.steps, round(steps)))

    def hours(self, candidate: Candidate) -> Prediction:
        """Return the hours of all steps, without validations."""
        value, low, high = (self.steps * seconds / 3600 for seconds in candidate.seconds)
        return value, low, high

    def tag(self, candidate: Candidate) -> str:
        if not candidate.fits:
            return "too large"
        return "best" if candidate is self.best else "close" if candidate.is_close_to(self.best) else ""

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON has it; a prediction is [value, low, high]."""
        return {
            "device": self.device,
            "rates": self.rates,
            "world_size": self.machines.world_size,
            "capacity_mib": self.machines.capacity_mib,
            "save_every_steps": self.save_every,
            "save_s": self.save_s,
            "mtbf_h": self.failure_s / 3600,
            "candidates": [
                {
                    "engine": candidate.engine,
                    "activation_checkpointing": candidate.checkpointing,
                    "micro_batch_size": candidate.train.micro_batch_size,
                    "micro_batch_tokens": candidate.train.micro_batch_tokens,
                    "text_tokens_of_a_micro_batch": candidate.micro_batch_text_tokens,
                    "memory_mib": candidate.memory_mib,
                    "excess_mib": max(0.0, candidate.excess_mib),
                    "step_s": candidate.seconds,
                    "tokens_per_s": [self.tokens_per_step / candidate.seconds[index] for index in (0, 2, 1)],
                    "hours": self.hours(candidate),
                    "status": self.tag(candidate),
                }
                for candidate in self.candidates
            ],
        }

    def lines(self) -> list[str]:
        """Return the tables for the terminal."""
        world = self.machines.world_size
        factors = "x {:.2f} to {:g}".format(*INTERVAL)
        source = f"step times UNVERIFIED: a roofline of {self.rates} rates, taken as right within {factors}"
        lines = [f"{world} processes on {self.device} of {self.machines.gigabytes:g} GB; {source}"]
        row = "{:<9}  {:<10}  {:<22}  {:<9}  {:>20}  {:>24}  {:>26}  {:>20}"
        header = row.format(
            "", "engine", "micro-batch", "recompute", "memory GB", "step s", "tokens/s", "hours"
        ).rstrip()
        lines.append(header)
        for candidate in sorted(self.candidates, key=lambda candidate: not candidate.fits):
            memory = (_gb(candidate.memory_mib[0]), _gb(candidate.memory_mib[1]), _gb(candidate.memory_mib[2]))
            value, low, high = (self.tokens_per_step / seconds for seconds in candidate.seconds)
            parts = (_batch(candidate), candidate.checkpointing, _text(memory))
            if candidate.fits:
                speed = (_text(candidate.seconds), _text((value, high, low)), _text(self.hours(candidate)))
                lines.append(row.format(self.tag(candidate), candidate.engine, *parts, *speed))
            else:
                excess = f"{_gb(candidate.excess_mib):,.3g} GB too many"
                lines.append(row.format(self.tag(candidate), candidate.engine, *parts, excess, "", "").rstrip())
        seconds = save_interval(self.save_s, self.failure_s)
        lines.append(
            f"checkpoint.every_steps={self.save_every}: at most every {human_duration(seconds)}, by saves of "
            f"{self.save_s:.3g} s and a failure every {self.failure_s / 3600:,.0f} h (Young/Daly)"
        )
        return lines


def _gb(mib: float) -> float:
    return mib * MIB / GB


def _text(prediction: Prediction) -> str:
    value, low, high = (f"{number:,.0f}" if number >= 1000 else f"{number:.3g}" for number in prediction)
    return f"{value} ({low}-{high})"


def _batch(candidate: Candidate) -> str:
    tokens = f"{candidate.micro_batch_text_tokens:,.0f} tokens"
    budget = candidate.train.micro_batch_tokens
    return f"{tokens} of {budget:,}" if budget else f"{candidate.train.micro_batch_size} = {tokens}"


def _name(candidate: Candidate) -> str:
    recompute = f"activation checkpointing {candidate.checkpointing}"
    return f"{candidate.engine} with a micro-batch of {_batch(candidate)}, {recompute},"


# --- files ------------------------------------------------------------------------------------------------


def apply(plan: Plan, config: Path, overrides: Sequence[str], folder: Path) -> str:
    """Write config and launcher file of the best candidate into `folder`; return the command that trains."""
    best, machines = plan.best, plan.machines
    tree: dict[str, Any] = {"extends": str(config.resolve())}
    batch = "micro_batch_tokens" if best.train.micro_batch_tokens else "micro_batch_size"
    own = (
        f"train.{batch}={getattr(best.train, batch)}",
        f"memory.activation_checkpointing={best.checkpointing}",
        f"checkpoint.every_steps={plan.save_every}",
    )
    for assignment in (*overrides, *own):
        set_dotted(tree, assignment)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.yaml"
    write_atomically(path, json.dumps(tree, indent=1) + "\n")  # JSON is YAML
    command = [sys.executable, "-m"]
    if machines.world_size > 1:
        values: dict[str, Any] = {"num_processes": machines.world_size, "num_machines": machines.nodes}
        if best.engine == HSDP:
            sizes = {"dp_replicate_size": machines.nodes, "dp_shard_size": machines.per_node}
            values["parallelism_config"] = {f"parallelism_config_{name}": size for name, size in sizes.items()}
        launcher = launcher_file(best.engine, folder, **values)
        command += ["accelerate.commands.launch", "--config_file", str(launcher), "-m"]
    text = shlex.join([*command, "mmldlm.train", str(path)])
    if machines.nodes > 1:  # for the shell of each node
        node = f'--machine_rank "$NODE_RANK" --main_process_ip "$MASTER_ADDR" --main_process_port {PORT} '
        text = text.replace("-m mmldlm.train", f"{node}-m mmldlm.train")
    return text


def launcher_file(engine: str, folder: Path, **values: Any) -> Path:
    """Write the accelerate file of an engine, and its DeepSpeed file, into `folder`; `values` replace entries."""
    tree = read_yaml(LAUNCHER_FILES / "accelerate_configs" / f"{engine}.yaml")
    if "deepspeed_config" in tree:
        name = Path(tree["deepspeed_config"]["deepspeed_config_file"]).name
        write_atomically(folder / "deepspeed.json", (LAUNCHER_FILES / "ds_configs" / name).read_text(encoding="utf-8"))
        tree["deepspeed_config"]["deepspeed_config_file"] = str((folder / "deepspeed.json").resolve())
        if values.get("num_machines", 1) > 1:
            tree["deepspeed_config"]["deepspeed_multinode_launcher"] = "standard"
    path = folder / "accelerate.yaml"
    write_atomically(path, json.dumps({**tree, **values}, indent=1) + "\n")  # JSON is YAML
    return path


# --- command ----------------------------------------------------------------------------------------------


def _machines(gpus: str, nodes: int) -> Machines:
    found = re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?)GB", gpus)
    if not found or not int(found[1]) or not float(found[2]):
        raise UsageError(f"--gpus: expected number and memory of a node's GPUs, such as 8x80GB, found {gpus!r}")
    if nodes < 1:
        raise UsageError(f"--nodes: expected at least 1, found {nodes}")
    return Machines(nodes, int(found[1]), float(found[2]))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "mmldlm plan",
        description="Predict memory and step time of the ways to train a config, and choose one. Hours are those of "
        "the training steps alone, with the batch size of the first step.",
    )
    add = parser.add_argument
    add("config", nargs="+", metavar="CONFIG", help="config file or run folder, and key.sub=value settings")
    add("--gpus", required=True, metavar="NxMGB", help="number and memory of a node's GPUs, such as 8x80GB")
    add("--nodes", type=int, default=1, help="number of nodes (%(default)s)")
    add("--device", default="h100", help=f"one of {', '.join(GPUS)} (%(default)s)")
    add("--network", type=float, default=50, metavar="GB/S", help="of a GPU between nodes (%(default)s: 400 Gbit/s)")
    add(
        "--rates",
        type=Path,
        metavar="FILE",
        help="rates of the GPU, by `python -m benchmarks gpu_check smoke`",
    )
    add("--mtbf", type=float, metavar="HOURS",
        help=f"mean time between failures of the job (default: {GPU_HOURS_BETWEEN_FAILURES:,.0f} divided by the number "
        "of GPUs, as of Llama 3's training, arXiv 2407.21783)")  # fmt: skip
    add("--save-seconds", type=float, metavar="S", help="time of a save (default: a rank's share at 1 GB/s)")
    add("--apply", type=Path, metavar="DIR", help="write launcher file and config of the best one, print the command")
    add("--json", action="store_true", help="print one JSON object")
    options = parser.parse_intermixed_args(argv)
    if options.device not in GPUS:
        raise UsageError(f"--device: expected one of {', '.join(GPUS)}, found {options.device!r}")
    for name in ("network", "mtbf", "save_seconds"):
        value = getattr(options, name)
        if value is not None and not 0 < value < inf:
            raise UsageError(f"--{name.replace('_', '-')}: expected a number above 0, found {value:g}")
    return options


def main(argv: list[str] | None = None) -> int:
    """Run `mmldlm plan`; an `MmldlmError` propagates."""
    options = _parse(argv)
    machines = _machines(options.gpus, options.nodes)
    files, overrides = split_arguments(options.config)
    if len(files) != 1:
        raise UsageError(f"expected one config, found {len(files)}")
    path = config_file(files[0])
    config = resolve_precision(load_config(path, overrides))
    require_paths(config, "data.path")
    store = drop_bad_samples(open_data(config.data.location), "train", config.data.max_bad_samples)
    world_size = machines.world_size
    config.train.check_batches(world_size)
    engines = engines_for(config, world_size, machines.nodes)
    gpu = GPUS[options.device]
    rates = measured_rates(options.rates, config.precision) if options.rates else gpu.rates(config.precision)
    candidates, costs = search(
        config, store, world_size, engines, machines.capacity_mib, "cuda", rates,
        lambda engine, costs: gpu.predict(engine, costs, rates, options.network * GB), machines.nodes,
    )  # fmt: skip
    estimate = costs.estimate
    plan = Plan(
        machines,
        options.device,
        "measured" if options.rates else "published",
        candidates,
        estimate.tokens_per_step,
        config.train.steps,
        options.save_seconds or estimate.checkpoint_mib * MIB / SAVE_BYTES_S,
        3600 * (options.mtbf or GPU_HOURS_BETWEEN_FAILURES / world_size),
    )
    command = apply(plan, path, overrides, options.apply) if options.apply else ""
    if options.json:
        print(json.dumps(plan.to_dict() | ({"command": command} if command else {}), allow_nan=False))
    else:
        print("\n".join([*plan.lines(), *([command] if command else [])]))
    return ExitCode.DONE
