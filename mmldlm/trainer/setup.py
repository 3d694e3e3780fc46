"""Start-up: builds the components, checks that all ranks have the same inputs and run folder, and reports both."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mmldlm.config import RunConfig
from mmldlm.data.batch_schedule import BatchSize
from mmldlm.data.loader import Loader
from mmldlm.data.manifest import LatentInfo
from mmldlm.data.mixture import open_data
from mmldlm.data.store import Store
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.data.verify import verify
from mmldlm.diffusion.objective import Objective
from mmldlm.distributed.deepspeed_config import StepPlan
from mmldlm.distributed.engine import Engine
from mmldlm.distributed.environment import settings_to_export, unread_variables
from mmldlm.distributed.optimizers import build_optimizer, describe_optimizer, resolve_fused
from mmldlm.errors import ConfigError, StorageError
from mmldlm.evaluation.validate import validation_ids
from mmldlm.model.compile import compile_regions
from mmldlm.model.cpu_half import has_bf16_instructions
from mmldlm.model.mmdit import MMDiT, count_parameters
from mmldlm.optim.ema import EmaConfig
from mmldlm.optim.lr_schedule import batch_scale, describe_lr, resolved_warmup
from mmldlm.run.factory import build_model, build_objective
from mmldlm.telemetry import memory_limits
from mmldlm.trainer.auto_batch_size import halve_micro_batch
from mmldlm.trainer.consistency import disagreements, fingerprint
from mmldlm.utils.files import make_folder, probe_file, wait_until_visible
from mmldlm.utils.host_cpus import openmp_spinning

SHARED_FOLDER_TIMEOUT_S = 5.0


def step_plan(config: RunConfig, world_size: int) -> StepPlan:
    """Return the batch sizes and precision that the engine is configured with.

    Batch sizes must be divisible by `world_size` and by the micro-batch. Of several stages, the one with the most
    micro-batches counts: `ZeroEngine` itself marks the last micro-batch of a step, but DeepSpeed may omit the buffers
    for gradient accumulation if its config has none. For the same reason `train.auto_micro_batch`, which may halve
    micro-batches later, yields at least two.
    """
    size = max(config.train.batch_stages(world_size).values(), key=lambda size: size.accumulation(world_size))
    if config.train.auto_micro_batch and size.accumulation(world_size) == 1:
        size = BatchSize(size.global_batch_size, halve_micro_batch(size, world_size) or 1)
    return StepPlan(
        micro_batch_size=size.micro_batch_size,
        accumulation=size.accumulation(world_size),
        global_batch_size=size.global_batch_size,
        clip_norm=config.optim.clip_norm,
        precision=config.precision,
    )


@dataclass(frozen=True)
class Components:
    """Components of a run, before the engine wraps the model and the optimizer."""

    store: Store
    loader: Loader
    objective: Objective
    tokenizer: Tokenizer
    skipped_samples: list[str]  # location and problem of each
    validation_ids: list[int]
    model: MMDiT
    compiled: str  # what is compiled, and why if that differs from the settings
    optimizer: torch.optim.Optimizer
    parameters: dict[str, int]  # by part of the network
    trainable: int


def build_components(config: RunConfig, runtime: Engine) -> Components:
    """Open the data and build model, objective, loader and optimizer (collective).

    Raises:
        DataError: the data cannot be trained on.
        ConfigError: the settings do not fit the data or this machine.
    """
    with runtime.raise_on_all_ranks("opening of the data store"):
        store = open_data(config.data.location)
    store, skipped = verify(store, config.data.verify == "full", config.data.max_bad_samples, runtime)
    validation, device_type = store.split("validation"), runtime.device.type
    model = build_model(config, store.manifest, device_type).to(runtime.device)
    compiled = compile_regions(model, config.compile, runtime.device)
    return Components(
        store=store,
        loader=_loader(config, runtime, store),
        objective=build_objective(config, store.manifest),
        tokenizer=Tokenizer.load(store.path / "tokenizer"),
        skipped_samples=skipped,
        validation_ids=validation_ids(validation, config.validation.samples),
        model=model,
        compiled=compiled,
        optimizer=build_optimizer(model, config.optim, device_type, runtime.launch.offloads_optimizer),
        parameters=count_parameters(model),
        trainable=sum(count_parameters(model, trainable_only=True).values()),
    )


def _loader(config: RunConfig, runtime: Engine, store: Store) -> Loader:
    batch_at = partial(config.train.batch_at, world_size=runtime.world_size)
    rank, world_size, device_type = runtime.rank, runtime.world_size, runtime.device.type
    return Loader(store, "train", config.data, config.run.seed, batch_at, rank, world_size, device_type)


def with_latent_stats(latents: LatentInfo, components: Components, config: RunConfig, runtime: Engine) -> Components:
    """Return `components` with another standardization of latents; call it before the loader has read any."""
    if latents == components.store.manifest.latent:
        return components
    store = components.store.with_manifest(replace(components.store.manifest, latent=latents))
    loader, objective = _loader(config, runtime, store), build_objective(config, store.manifest)
    return replace(components, store=store, loader=loader, objective=objective)


def compare_ranks(runtime: Engine, config: RunConfig, store: Store) -> dict[str, str]:
    """Return the fingerprint that all ranks share (collective).

    Raises:
        ConfigError: configs, versions or data differ; the message names ranks and keys.
    """
    fingerprints = runtime.gather(fingerprint(config, store), "comparison of configs, versions and data")
    differences = disagreements(fingerprints)
    if differences:
        more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
        raise ConfigError("the ranks were not started alike: " + "; ".join(differences[:3]) + more)
    return fingerprints[0]


def create_run_folder(run_dir: Path) -> None:
    """Create the run folder, or raise `StorageError`."""
    try:
        make_folder(run_dir)
    except OSError as error:
        raise StorageError(f"run.dir: cannot create {run_dir}: {error.strerror}") from None


def check_shared_folder(runtime: Engine, run_dir: Path) -> None:
    """Raise `ConfigError` on all ranks if any of them does not see a file of rank 0 in the run folder (collective)."""
    if runtime.world_size == 1:
        return
    with ExitStack() as stack:
        name = stack.enter_context(probe_file(run_dir)) if runtime.is_main else None
        name = runtime.gather(name, "name of a file in the run folder")[0]
        visible = wait_until_visible(run_dir / name, SHARED_FOLDER_TIMEOUT_S)
        results = runtime.gather((visible, socket.gethostname()), "sight of a file in the run folder")
    missing = [f"rank {rank} on {host}" for rank, (visible, host) in enumerate(results) if not visible]
    if missing:
        raise ConfigError(
            f"run.dir: {run_dir} is not the same folder on all nodes: {', '.join(missing)} does not see rank 0's; "
            "put it on a file system that all nodes share"
        )


def startup_report(
    runtime: Engine,
    config: RunConfig,
    components: Components,
    fingerprint: Mapping[str, str],
) -> dict[str, Any]:
    """Return the content of `startup.json`: hardware, resolved settings, batch sizes and versions (collective)."""
    rank_info = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "device": str(runtime.device),
        "name": torch.cuda.get_device_name(runtime.device) if runtime.device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "openmp": openmp_spinning(os.environ),
        **memory_limits(),
    }
    ranks = runtime.gather(rank_info, "start-up report")
    batches = {
        step: {
            **asdict(size),
            "accumulation": size.accumulation(runtime.world_size),
            "peak_lr": batch_scale(config.optim, size.global_batch_size) * config.optim.lr,
        }
        for step, size in config.train.batch_stages(runtime.world_size).items()
    }
    first = config.train.batch_at(0, runtime.world_size)
    on_cuda, distributed = runtime.device.type == "cuda", config.distributed
    exported = settings_to_export(distributed)
    report: dict[str, Any] = {
        "engine": runtime.engine,
        "launcher": runtime.launch.launcher,
        "world_size": runtime.world_size,
        "nodes": runtime.launch.nodes,
        "ranks": ranks,
        "precision": config.precision,
        "attention": getattr(runtime.unwrapped_model, "backend", ""),
        "compile": components.compiled,
        "activation_checkpointing": config.memory.activation_checkpointing,
        "optimizer": _optimizer_name(runtime, config),
        "ema": _describe_ema(config.ema),
        "parameters": components.parameters,
        "parameters_total": sum(components.parameters.values()),
        "parameters_trainable": components.trainable,
        "frozen": list(config.freeze),
        **batches.pop(0),
        "batch_schedule": {str(step): sizes for step, sizes in batches.items()},
        "warmup_steps": resolved_warmup(config.optim, config.train.steps),
        "learning_rate": describe_lr(config.train.steps, config.optim, config.schedule, first.global_batch_size),
        "data_order": f"seed {config.run.seed}, windows of {config.data.window} samples sorted by length",
        "timeouts": {
            "collective_s": distributed.timeout_s,
            "nccl_heartbeat_s": distributed.heartbeat_timeout_s if on_cuda else None,
        },
        "exported": exported if on_cuda else {},
        "not_read": unread_variables(exported) if runtime.is_main else [],
        "deepspeed_file": runtime.launch.deepspeed_file,
        "git": fingerprint.get("git", ""),
        "versions": {key[len("version.") :]: value for key, value in fingerprint.items() if key.startswith("version.")},
        "data_manifest": fingerprint.get("data.manifest", ""),
        "mixture": _mixture(config, components),
        "skipped_samples": components.skipped_samples,
    }
    return report


def _mixture(config: RunConfig, components: Components) -> list[dict[str, Any]]:
    """Return share, samples and epochs over the whole run of each store of a mixture; empty for a single store."""
    split = components.store.split("train")
    epochs = components.loader.order.epochs(config.train.samples_before(config.train.steps))
    sources = [
        {
            "name": source.name,
            "path": str(source.path),
            "share": float(source.share),
            "samples": stop - first,
            "epochs": final_epoch,
        }
        for (source, first, stop), final_epoch in zip(split.source_ranges(), epochs, strict=True)
    ]
    return sources if len(sources) > 1 else []


def _optimizer_name(runtime: Engine, config: RunConfig) -> str:
    """Return the implementation that the engine steps with."""
    name = describe_optimizer(runtime.unwrapped_optimizer)
    fused = config.optim.name != "deepspeed_adam" and resolve_fused(config.optim.fused, runtime.device.type)
    assert (", fused" in name) == fused, f"{name} is not the configured implementation (fused: {fused})"
    return name


def _describe_ema(config: EmaConfig) -> str:
    """Return the EMA settings as a line for the user."""
    if not config.decay:
        return "none"
    weights = "the EMA" if config.eval_weights == "ema" else "the trained weights"
    return f"decay {config.decay:g}{', with warmup' if config.warmup else ''}; validations use {weights}"


def report_lines(report: Mapping[str, Any]) -> list[str]:
    """Return the start-up report as lines for a terminal."""
    hosts = sorted({rank["host"] for rank in report["ranks"]})
    devices = sorted({rank["name"] for rank in report["ranks"]})
    versions = report["versions"]
    threads = sorted({f"{rank['threads']} a process, {rank['openmp']}" for rank in report["ranks"]})

    def batch(sizes: Mapping[str, Any]) -> str:
        factors = (report["world_size"], sizes["micro_batch_size"], sizes["accumulation"])
        return f"{sizes['global_batch_size']} samples = {' x '.join(map(str, factors))}"

    lines = [
        f"engine       {report['engine']}, {report['world_size']} process{'es' * (report['world_size'] > 1)} on "
        f"{', '.join(hosts)} ({', '.join(devices)}), started by {report['launcher']}",
        f"threads      {'; '.join(threads)}",
        f"model        {report['parameters_total']:,} parameters, {report['parameters_trainable']:,} trained, "
        f"{report['precision']}, attention {report['attention']}, "
        f"activation checkpointing {report['activation_checkpointing']}",
        *([f"compile      {report['compile']}"] if report["compile"] != "none" else []),
        f"batch        {batch(report)} (processes x micro-batch x accumulation)",
        *(
            f"             {batch(sizes)} from step {step} on, peak rate {sizes['peak_lr']:.4g}"
            for step, sizes in report["batch_schedule"].items()
        ),
        f"optimizer    {report['optimizer']}; data: {report['data_order']}",
        f"rate         {report['learning_rate']}",
    ]
    if report["ema"] != "none":
        lines.append(f"ema          {report['ema']}")
    lines += [
        f"{'data' if not number else '':<12} {store['share']:.2%} from {store['name']}: {store['samples']:,} samples, "
        f"read {store['epochs']:.3g} times"
        for number, store in enumerate(report["mixture"])
    ]
    if report["world_size"] > 1:
        lines.append(f"timeout      {report['timeouts']['collective_s']:g} s for a collective")
    lines.append(
        f"versions     mmldlm {versions.get('mmldlm')} {report['git']}".rstrip()
        + f", torch {versions.get('torch')}, accelerate {versions.get('accelerate')}, "
        f"deepspeed {versions.get('deepspeed')}, python {versions.get('python')}"
    )
    precision = report["precision"]
    slow = not {"fp32": lambda: True, "bf16": has_bf16_instructions, "fp16": has_fp16_instructions}[precision]()
    if slow and "cpu" in devices:
        lines.append(
            f"warning      this CPU has no instructions for {precision}: matrix products are far slower than in fp32"
        )
    lines += [f"warning      left out: {sample}" for sample in report["skipped_samples"]]
    if report["not_read"]:
        lines.append(f"warning      the installed PyTorch and NCCL do not read {', '.join(report['not_read'])}")
    return lines


def has_fp16_instructions() -> bool:
    """Return whether this CPU has instructions for products of float16 matrices."""
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
