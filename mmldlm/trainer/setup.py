"""Sets up a run: checks that the engine can run the settings, and builds data, model, objective and optimizer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from mmldlm.batch import BatchSize
from mmldlm.config import RunConfig
from mmldlm.data.loader import Loader
from mmldlm.data.mixture import open_data
from mmldlm.data.store import Store
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.data.verify import verify
from mmldlm.diffusion.corruption import Corruption, StaticSizes
from mmldlm.diffusion.objective import Objective
from mmldlm.distributed.capabilities import WEIGHT_SHARDING_ENGINES, check_supported, supports
from mmldlm.distributed.deepspeed_file import StepPlan
from mmldlm.distributed.engine import Engine
from mmldlm.distributed.exit_files import clear_exit_files
from mmldlm.distributed.flight_recorder import set_trace_folder
from mmldlm.distributed.init import start_engine
from mmldlm.distributed.launch import DDP, FSDP2, LauncherEnv
from mmldlm.distributed.library_calls import require_deepspeed
from mmldlm.distributed.notify import check_notify
from mmldlm.distributed.optimizers import build_optimizer, check_device
from mmldlm.errors import ConfigError
from mmldlm.evaluation.prompts import Prompts, read_prompts
from mmldlm.evaluation.validate import validation_ids
from mmldlm.loading.factory import build_corruption, build_meta_model, build_objective, set_matmul_precision
from mmldlm.model.compile import compile_regions
from mmldlm.model.flops import ModelFlops
from mmldlm.model.initial_weights import InitialWeights
from mmldlm.model.mmdit import MMDiT, count_parameters
from mmldlm.telemetry.experiment_trackers import check_trackers
from mmldlm.trainer.consistency import check_run_folder, compare_ranks
from mmldlm.trainer.graphs import why_no_graphs
from mmldlm.trainer.run_end import RunEnd
from mmldlm.utils.files import make_folder
from mmldlm.utils.lock import RunLock
from mmldlm.utils.malloc import keep_freed_memory
from mmldlm.utils.short_repr import short_repr


def requested_features(config: RunConfig) -> list[str]:
    """Return the settings that some engine may not support, as "key: value"."""
    return [
        f"optim.name: {config.optim.name}",
        f"precision: {config.precision}",
        f"compile.scope: {config.compile.scope}",
        f"compile.graphs: {str(config.compile.graphs).lower()}",
        f"train.auto_micro_batch: {str(config.train.auto_micro_batch).lower()}",
    ]


def check_settings(config: RunConfig, launch: LauncherEnv, device_type: str) -> None:
    """Check that this launch can run the settings, before anything is created.

    Raise `ConfigError` if a setting does not fit engine, device, number of ranks, environment or installed packages.
    """
    if config.resume not in ("auto", "never") and not Path(config.resume).is_dir():
        raise ConfigError(f"resume: expected auto, never or a checkpoint's folder, found {short_repr(config.resume)}")
    check_trackers(config.log.trackers)
    if not launch.rank:  # which alone notifies
        check_notify(config.log.notify)
    config.train.check_batches(launch.world_size)
    if config.optim.name == "deepspeed_adam":
        require_deepspeed("optim.name: deepspeed_adam")
    for feature in requested_features(config):
        check_supported(feature, launch.engine)
    check_device(config.optim, launch.offloads_optimizer, device_type)
    if (launch.engine, config.distributed.ddp.comm_hook) == (DDP, "bf16") and device_type != "cuda":
        raise ConfigError("distributed.ddp.comm_hook: expected none or fp16 over gloo, found bf16 (needs NCCL)")
    if launch.deepspeed is not None:
        launch.deepspeed.check_ema(config.ema.decay)


def open_run(config: RunConfig, launch: LauncherEnv, end: RunEnd) -> tuple[Components, dict[str, str]]:
    """Check the settings, start the engine, build the components, and create and lock the folder (collective).

    Return the components and the ranks' common fingerprint. Everything opened here is closed at the `end`.
    """
    run_dir = Path(config.run.dir)
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    check_settings(config, launch, device_type)
    if config.memory.keep_freed and device_type == "cpu":
        keep_freed_memory()
    set_trace_folder(run_dir)
    set_matmul_precision(config)
    engine = start_engine(config.distributed, launch, step_plan(config, launch.world_size))
    end.own_engine(engine)
    with engine.raise_on_all_ranks("opening of the data"):
        components = build_components(config, engine)
    fingerprint = compare_ranks(engine, config, components.store)
    with engine.raise_on_all_ranks("opening of the run folder"):
        if engine.is_main:
            make_folder(run_dir)
            end.enter_context(RunLock(run_dir))
            clear_exit_files(run_dir)
    check_run_folder(engine, run_dir)
    end.own_folder()
    return components, fingerprint


def step_plan(config: RunConfig, world_size: int) -> StepPlan:
    """Return the batch sizes and precision that the engine is configured with.

    Batch sizes must be divisible by `world_size` and by the micro-batch. Among several stages we take the one with the
    most micro-batches. `ZeroEngine` itself marks the last micro-batch of a step, but DeepSpeed may leave out buffers
    for gradient accumulation if its config has no accumulation. With a token budget or `train.auto_micro_batch` we
    assume the largest possible number of micro-batches.
    """
    size = max(config.train.batch_stages(world_size).values(), key=lambda size: size.accumulation(world_size))
    if size.micro_batch_tokens or config.train.auto_micro_batch:
        size = BatchSize(size.global_batch_size, 1)
    return StepPlan(
        micro_batch_size=size.micro_batch_size,
        accumulation=size.accumulation(world_size),
        global_batch_size=size.global_batch_size,
        clip_norm=config.optim.clip_norm,
        precision=config.precision,
        width=config.model.width,
    )


@dataclass(frozen=True)
class Components:
    """Components of a run. Model and optimizer are as they were before the engine wrapped them."""

    config: RunConfig
    engine: Engine
    store: Store
    loader: Loader
    objective: Objective
    corruption: Corruption
    tokenizer: Tokenizer
    skipped_samples: list[str]  # location and problem of each sample
    validation_ids: list[int]
    prompts: Prompts | None
    model: MMDiT  # on the meta device
    initial_weights: InitialWeights
    compiled: str  # which parts are compiled, and why this differs from the settings
    optimizer: torch.optim.Optimizer
    parameters: dict[str, int]  # number by part of the network
    trainable: int
    flops: ModelFlops

    def for_data(self, config: RunConfig, store: Store) -> Components:
        """Rebuild objective, corruption and loader for other batch sizes or another standardization of latents."""
        objective = build_objective(config, store.manifest)
        corruption = build_corruption(config, objective, self.corruption.sizes)
        loader = build_loader(config, self.engine, store, corruption)
        return replace(self, config=config, store=store, loader=loader, objective=objective, corruption=corruption)


def build_components(config: RunConfig, engine: Engine) -> Components:
    """Open the data and build model, objective, loader and optimizer (collective).

    Raise `DataError` if we cannot train on the data, `ConfigError` if settings do not fit the data or this machine.
    """
    with engine.raise_on_all_ranks("opening of the data store"):
        store = open_data(config.data.location)
    store, skipped = verify(store, config.data.verify == "full", config.data.max_bad_samples, engine)
    validation, device_type = store.split("validation"), engine.device.type
    with engine.raise_on_all_ranks("reading of validation.prompts"):
        prompts = read_prompts(config, store)
    objective = build_objective(config, store.manifest)
    model = build_meta_model(config, store.manifest, device_type)
    model.shards_blocks = engine.name in WEIGHT_SHARDING_ENGINES
    is_supported = supports("compile.scope: regional", engine.name)
    compiled = compile_regions(model, config.compile, engine.device, is_supported)
    no_graphs = why_no_graphs(config, engine.name, device_type, model.backend)
    engine.sums_after_backward = not no_graphs
    if device_type != "cpu":
        compiled += f"; no CUDA graphs: {no_graphs}" if no_graphs else "; CUDA graphs"
    sizes = None if no_graphs else StaticSizes(store.manifest.max_length)
    corruption = build_corruption(config, objective, sizes)
    return Components(
        config=config,
        engine=engine,
        store=store,
        loader=build_loader(config, engine, store, corruption),
        objective=objective,
        corruption=corruption,
        tokenizer=Tokenizer.load(store.path / "tokenizer"),
        skipped_samples=skipped,
        validation_ids=validation_ids(validation, config.validation.samples),
        prompts=prompts,
        model=model,
        initial_weights=model.initial_weights(config.run.weights_seed),
        compiled=compiled,
        optimizer=build_optimizer(model, config.optim, engine.launch.offloads_optimizer, sharded=engine.name == FSDP2),
        parameters=count_parameters(model),
        trainable=sum(count_parameters(model, trainable_only=True).values()),
        flops=ModelFlops.from_model(model),
    )


def build_loader(config: RunConfig, engine: Engine, store: Store, corruption: Corruption) -> Loader:
    """Build the loader of this rank's micro-batches."""
    batch_at = partial(config.train.batch_at, world_size=engine.world_size)
    place = engine.rank, engine.world_size, engine.device.type
    return Loader(store, "train", config.data, config.run.seed, batch_at, *place, corruption)
