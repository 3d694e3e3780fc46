"""Start-up report of a run: hardware, resolved settings, batch sizes and versions, as JSON and as lines.

This module also writes the other files that a start puts into the run folder.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from mmldlm.batch import BatchSize
from mmldlm.config import RunConfig, with_absolute_paths, write_config
from mmldlm.data.store import Store
from mmldlm.data.writer import publish, write_description
from mmldlm.distributed.optimizers import describe_optimizer
from mmldlm.distributed.process_group import kept_variables, settings_to_export
from mmldlm.loading.factory import describe_attention
from mmldlm.loading.load import DESCRIPTION
from mmldlm.optim.ema import EmaConfig
from mmldlm.optim.lr_schedule import batch_scale, describe_lr, resolved_warmup
from mmldlm.settings.declaration import dump
from mmldlm.telemetry.metrics import recorded_run_id
from mmldlm.telemetry.resources import memory_limits
from mmldlm.telemetry.tracker import Tracker
from mmldlm.trainer.checkpointer import checkpoint_record
from mmldlm.trainer.restore import RestoredRun
from mmldlm.trainer.setup import Components
from mmldlm.utils.cpu import choose_threads, hardware, slowdown
from mmldlm.utils.files import write_atomically

TILE_ROWS = 128  # rows of FlashAttention's tiles, forward and backward, at the usual head width


def open_records(
    components: Components, restored: RestoredRun, fingerprint: Mapping[str, str], notes: Sequence[str], end: ExitStack
) -> tuple[Tracker, dict[str, Any]]:
    """Open the records of a run, write its start-up report, and print it after `notes` (collective).

    Return the tracker and the report. The tracker is closed at the `end`.
    """
    config, engine, state = components.config, components.engine, restored.state
    run_dir = Path(config.run.dir)
    threads_reason = choose_threads(state.threads) if engine.world_size == 1 else "the launcher's choice"
    state.threads = torch.get_num_threads()
    report = startup_report(components, fingerprint, threads_reason) | {"init": restored.origin}
    # Only rank 0 writes the id, to records and checkpoints.
    recorded = recorded_run_id(run_dir / "metrics.jsonl") if config.resume != "never" else None
    saved = restored.run_id if config.resume == "auto" else None
    report["run_id"] = recorded or saved or uuid.uuid4().hex[:16]
    # A run that died before its first checkpoint starts again at step 0, and its old records are dropped.
    resumed = config.resume != "never" and (run_dir / "metrics.jsonl").exists()
    outputs = config.log.tensorboard, config.log.trackers
    tracker = end.enter_context(Tracker(run_dir, config.train.steps, state.step, resumed, engine.is_main, *outputs))
    if engine.is_main:
        write_run_files(run_dir, config, components.store, report)
        samples = {name: split.samples for name, split in components.store.manifest.splits.items()}
        start = {"samples": samples, "resumed_from": restored.path and checkpoint_record(restored.path)}
        tracker.start({**report, **start}, dump(with_absolute_paths(config)))
        lines = [*restored.notes, *notes, f"run {run_dir}: steps {state.step} to {config.train.steps}"]
        print("\n".join(lines + [f"  {line}" for line in report_lines(report)]), flush=True)
    return tracker, report


def startup_report(components: Components, fingerprint: Mapping[str, str], threads_reason: str) -> dict[str, Any]:
    """Return the content of `startup.json`: hardware, resolved settings, batch sizes and versions (collective)."""
    config, engine = components.config, components.engine
    rank_info = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "device": str(engine.device),
        **hardware(engine.device),
        "threads_reason": threads_reason,
        **memory_limits(),
    }
    ranks = engine.gather(rank_info, "start-up report")
    batches = {
        step: {
            **asdict(size),
            "accumulation": size.accumulation(engine.world_size),
            "peak_lr": batch_scale(config.optim, size.global_batch_size) * config.optim.lr,
        }
        for step, size in config.train.batch_stages(engine.world_size).items()
    }
    first = config.train.batch_at(0, engine.world_size)
    on_cuda, distributed = engine.device.type == "cuda", config.distributed
    return {
        "engine": engine.name,
        "sharding": engine.launch.sharding,
        "launcher": engine.launch.launcher,
        "notices": [
            *engine.launch.notices,
            *kept_variables(distributed),
            *data_notices(config, components.store, engine.world_size, engine.device.type),
            *precision_notices(config.precision, engine.device.type),
            *["profile.memory_history: has no effect on a CPU, because it records a GPU's allocations"]
            * (config.profile.memory_history > 0 and not on_cuda),
        ],
        "world_size": engine.world_size,
        "nodes": engine.launch.nodes,
        "ranks": ranks,
        "precision": config.precision,
        "attention": describe_attention(engine.unwrapped_model.backend),
        "compile": components.compiled,
        "activation_checkpointing": config.memory.activation_checkpointing,
        "optimizer": describe_optimizer(engine.unwrapped_optimizer),
        "ema": _describe_ema(config.ema),
        "parameters": components.parameters,
        "parameters_total": sum(components.parameters.values()),
        "parameters_trainable": components.trainable,
        "frozen": list(config.freeze),
        # Sizes of the first stage are entries of the report itself, and later stages are nested.
        **batches.pop(0),
        "batch_schedule": {str(step): sizes for step, sizes in batches.items()},
        "warmup_steps": resolved_warmup(config.optim, config.train.steps),
        "learning_rate": describe_lr(config.train.steps, config.optim, config.schedule, first.global_batch_size),
        "data_order": f"seed {config.run.seed}, windows of {config.data.window} samples sorted by length",
        "timeouts": {
            "collective_s": distributed.timeout_s,
            "nccl_heartbeat_s": distributed.heartbeat_timeout_s if on_cuda else None,
        },
        "exported": {name: os.environ.get(name) for name in settings_to_export(distributed)} if on_cuda else {},
        "deepspeed_file": engine.launch.deepspeed.name if engine.launch.deepspeed else "",
        "git": fingerprint["git"],
        "versions": {key[len("version.") :]: value for key, value in fingerprint.items() if key.startswith("version.")},
        "data_manifest": fingerprint["data.manifest"],
        "mixture": _mixture(components),
        "skipped_samples": components.skipped_samples,
    }


def _mixture(components: Components) -> list[dict[str, Any]]:
    """Return share, samples and epochs of each store in a mixture over the whole run, or nothing for a single store."""
    split, train = components.store.split("train"), components.config.train
    epochs = components.loader.order.epochs(train.samples_before(train.steps))
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


def data_notices(config: RunConfig, store: Store, world_size: int, device_type: str) -> list[str]:
    """Return a notice for each size that does not suit the data: global batch, width of the latent stream, rows."""
    size = max(size.global_batch_size for size in config.train.batch_stages(world_size).values())
    notices = [
        f"a global batch of {size} reads the {stop - first} training samples of {source.name} "
        f"{float(size * source.share / (stop - first)):.2g} times in one step"
        for source, first, stop in store.split("train").source_ranges()
        if size * source.share > stop - first
    ]
    if any(source.manifest.mean_weight for source in store.sources):
        notices.append("samples have weights, which logged losses, validations and evaluations do not use")
    channels, longest = store.manifest.latent.channels, store.manifest.max_length
    rows, above = divmod(longest + store.manifest.latent.tokens, TILE_ROWS)
    notices += [
        f"the longest sample has {rows * TILE_ROWS + above} rows, {above} above a multiple of {TILE_ROWS}, the tile of "
        f"attention: `mmldlm prepare --max-length {longest - above}` would make it faster"
    ] * (device_type == "cuda" and rows > 0 and 0 < above <= TILE_ROWS // 8)
    if (width := config.model.resolve_latent_width(channels)) < channels:
        notices.append(
            f"model.latent_width {width} cannot pass on all {channels} latent channels; expected at least {channels}, "
            "also for model.width"
        )
    return notices


def precision_notices(precision: str, device_type: str) -> list[str]:
    """Return a notice if this CPU multiplies matrices more slowly in the run's precision than in fp32."""
    if device_type != "cpu" or precision == "fp32":
        return []
    times = slowdown(torch.bfloat16 if precision == "bf16" else torch.float16)
    return [f"matrix products in {precision} take {times:.1f} times as long as in fp32 on this CPU"] * (times > 1.2)


def _describe_ema(config: EmaConfig) -> str:
    """Describe the EMA settings in one line."""
    if not config.decay:
        return "none"
    weights = "the EMA" if config.eval_weights == "ema" else "the trained weights"
    return f"decay {config.decay:g}{', with warmup' if config.warmup else ''}; validations use {weights}"


def report_lines(report: Mapping[str, Any]) -> list[str]:
    """Format the start-up report for a terminal."""
    hosts, devices = (", ".join(sorted({rank[key] for rank in report["ranks"]})) for key in ("host", "name"))
    threads = sorted({f"{rank['threads']} a process, {rank['threads_reason']}" for rank in report["ranks"]})
    count, versions = report["world_size"], report["versions"]
    processes = f"{count} process{'es' * (count > 1)}" + (f", {report['sharding']}" if report["sharding"] else "")
    packages = ", ".join(f"{name} {versions.get(name)}" for name in ("torch", "accelerate", "deepspeed", "python"))

    def batch(sizes: Mapping[str, Any]) -> str:
        return BatchSize(*(sizes[size.name] for size in fields(BatchSize))).describe(count)

    rows = {  # label: lines
        "engine": [f"{report['engine']}, {processes} on {hosts} ({devices}), started by {report['launcher']}"],
        "threads": ["; ".join(threads)],
        "model": [
            f"{report['parameters_total']:,} parameters, {report['parameters_trainable']:,} trained, "
            f"{report['precision']}, attention {report['attention']}, "
            f"activation checkpointing {report['activation_checkpointing']}"
        ],
        "compile": [report["compile"]] * (report["compile"] != "none"),
        "batch": [
            batch(report),
            *(
                f"{batch(sizes)} from step {step} on, peak rate {sizes['peak_lr']:.4g}"
                for step, sizes in report["batch_schedule"].items()
            ),
        ],
        "optimizer": [f"{report['optimizer']}; data: {report['data_order']}"],
        "rate": [report["learning_rate"]],
        "ema": [report["ema"]] * (report["ema"] != "none"),
        "data": [
            f"{store['share']:.2%} from {store['name']}: {store['samples']:,} samples, read {store['epochs']:.3g} times"
            for store in report["mixture"]
        ],
        "timeout": [f"{report['timeouts']['collective_s']:g} s for a collective"] * (count > 1),
        "versions": [f"mmldlm {versions.get('mmldlm')} {report['git']}".rstrip() + f", {packages}"],
    }
    lines = [f"{'' if index else label:<13}{line}" for label, part in rows.items() for index, line in enumerate(part)]
    lines += [f"notice       {notice}" for notice in report["notices"]]
    return lines + [f"warning      left out: {sample}" for sample in report["skipped_samples"]]


def write_run_files(run_dir: Path, config: RunConfig, store: Store, report: Mapping[str, Any]) -> None:
    """Write the config, the report, and a description of the data. With it, sampling needs no data store."""
    write_config(config, run_dir)
    write_atomically(run_dir / "startup.json", json.dumps(report, indent=1) + "\n")
    temporary = run_dir / f".{DESCRIPTION}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    write_description(store, temporary)
    publish(temporary, run_dir / DESCRIPTION, run_dir / f".{DESCRIPTION}.old")
