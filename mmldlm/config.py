"""The run config: composed of its owners' parts, read from YAML and `key.sub=value`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mmldlm.checkpoint.retention import Retention
from mmldlm.data.batch_schedule import TrainConfig
from mmldlm.data.loader import DataConfig
from mmldlm.diffusion.gaussian import LatentConfig
from mmldlm.diffusion.masked import TextConfig
from mmldlm.diffusion.noise import ModeShares, trained_modes
from mmldlm.diffusion.objective import LossConfig
from mmldlm.diffusion.sampling import GUIDANCE_NEEDS, SamplingConfig
from mmldlm.distributed.config import DistributedConfig
from mmldlm.errors import ConfigError
from mmldlm.model.activation_checkpoint import MemoryConfig
from mmldlm.model.attention import AttentionConfig
from mmldlm.model.compile import CompileConfig
from mmldlm.model.mmdit import ModelConfig
from mmldlm.model.parts import Freezable, Loss, check_trainable, frozen_parts
from mmldlm.optim.config import OptimConfig
from mmldlm.optim.ema import EmaConfig
from mmldlm.optim.lr_schedule import ScheduleConfig
from mmldlm.settings.fields import build, is_setting_text, set_dotted, setting, to_yaml
from mmldlm.settings.layers import EXTENDS, ConfigLayer, Provenance, merged, read_layers
from mmldlm.telemetry.profiler import ProfileConfig
from mmldlm.utils.short_repr import named

CONFIG_NAME = "config.yaml"


@dataclass(frozen=True)
class GuardConfig:
    nonfinite: Literal["skip", "stop"] = setting(
        "skip", "a step whose loss or gradient norm is not finite; stop is noticed when the step's numbers are read"
    )
    grad_norm_spike: float | None = setting(
        None,
        "skip a step whose gradient norm is above this many times the median of the last 100 taken; null: never. "
        "Has the host wait for a GPU once in each step",
        above=1,
    )
    max_consecutive: int = setting(
        10,
        "skipped steps in a row before the run is stopped; at least so often a GPU's numbers are read",
        at_least=1,
    )


@dataclass(frozen=True)
class RunSettings:
    dir: str = setting("", "folder of this run: config, metrics, TensorBoard, checkpoints")
    seed: int = setting(0, "seed of initialization, sample order, noise times, masks and noise", at_least=0)


@dataclass(frozen=True)
class LogConfig:
    every: int = setting(10, "optimizer steps between log records", at_least=1)
    noise_levels: int = setting(
        5, "equal parts of the noise times in [0, 1] whose losses are shown one by one; 1: none", at_least=1, at_most=10
    )
    tensorboard: bool = setting(True, "write TensorBoard files into the run folder")
    figures_every: int = setting(
        1000,
        "optimizer steps between figures, histograms and the quality/ numbers behind them in TensorBoard; they come "
        "with the next validation, and with the last; 0: none",
        at_least=0,
    )
    figure_samples: int = setting(32, "held-out samples behind each of the figures", at_least=2, at_most=4096)
    projector: bool = setting(False, "with the figures, latents and texts for TensorBoard's projector")

    def __post_init__(self) -> None:
        if self.projector and not (self.tensorboard and self.figures_every):
            raise ValueError("projector: comes with figures, expected tensorboard: true and figures_every above 0")


@dataclass(frozen=True)
class ValidationConfig:
    every: int = setting(250, "optimizer steps between validations; 0: none", at_least=0)
    samples: int = setting(512, "held-out samples of a validation", at_least=1)
    text_samples: int = setting(
        4,
        "texts to write at each validation in l2t, and with the figures in joint (of log.figure_samples at most), for "
        "TensorBoard; 0: none",
        at_least=0,
    )
    quality_every: int = setting(
        0,
        "optimizer steps between measurements of what the run generates, `quality/` in the curves; 0: none",
        at_least=0,
    )
    quality_samples: int = setting(64, "held-out samples of such a measurement, in each trained mode", at_least=2)


@dataclass(frozen=True)
class CheckpointConfig:
    every_steps: int = setting(500, "optimizer steps between checkpoints; 0: only the last", at_least=0)
    every_minutes: float | None = setting(None, "minutes between checkpoints, beside every_steps; null: none", above=0)
    keep_last: int = setting(3, "newest checkpoints to keep", at_least=1)
    keep_steps: list[int] = setting(factory=list, doc="steps that get a checkpoint, kept for good: [250000, 500000]")
    keep_every: int = setting(0, "every multiple of this step gets a checkpoint, kept for good; 0: none", at_least=0)
    keep_best: int = setting(
        0, "checkpoints with the lowest validation loss to keep, saved when it is measured", at_least=0
    )
    async_: bool = setting(True, "write files beside the training, which waits only for the copy to the host's memory")

    def __post_init__(self) -> None:
        if min(self.keep_steps, default=1) < 1:
            raise ValueError(f"keep_steps: expected steps from 1 on, found {min(self.keep_steps)}")

    @property
    def retention(self) -> Retention:
        return Retention(self.keep_last, tuple(self.keep_steps), self.keep_every, self.keep_best)


@dataclass(frozen=True)
class RunConfig:
    run: RunSettings = setting(RunSettings(), "the run")
    data: DataConfig = setting(DataConfig(), "the data store and its loader")
    model: ModelConfig = setting(ModelConfig(), "the network")
    attention: AttentionConfig = setting(AttentionConfig(), "the joint attention")
    memory: MemoryConfig = setting(MemoryConfig(), "memory against computing")
    compile: CompileConfig = setting(CompileConfig(), "fused kernels by torch.compile")
    freeze: list[Freezable] = setting(
        factory=list,
        doc="parts that are not trained and keep their weights, in a new run the initial ones. text_encoder: token "
        "embedding, with it a tied head matrix; latent_encoder: what takes latents in; noise_times: time embeddings; "
        "text_stream, latent_stream: sides of the blocks; backbone: both",
    )
    mode: ModeShares = setting(
        factory=lambda: {"l2t": 0.5, "t2l": 0.25, "joint": 0.25},
        doc="one mode, or the shares of several; drawn per sample",
    )
    mode_schedule: dict[int, ModeShares] = setting(
        factory=dict, doc="optimizer steps, counted from 0, from which on another `mode` holds: {1000: joint}"
    )
    text: TextConfig = setting(TextConfig(), "diffusion of the text")
    latent: LatentConfig = setting(LatentConfig(), "diffusion of the latents")
    loss: LossConfig = setting(LossConfig(), "the losses")
    optim: OptimConfig = setting(OptimConfig(), "the optimizer")
    schedule: ScheduleConfig = setting(ScheduleConfig(), "courses over the steps")
    ema: EmaConfig = setting(EmaConfig(), "an exponential moving average of the trained weights, in float32")
    train: TrainConfig = setting(TrainConfig(), "length and batch")
    precision: Literal["fp32", "bf16", "fp16"] = setting(
        "fp32",
        "of matrix products; weights, moments and losses are float32. fp16 (single, ddp, fsdp2) scales the loss and "
        "skips steps whose gradients overflow",
    )
    sampling: SamplingConfig = setting(SamplingConfig(), "generation in training, `evaluate` and `sample`")
    validation: ValidationConfig = setting(ValidationConfig(), "held-out losses in training")
    log: LogConfig = setting(LogConfig(), "metrics")
    profile: ProfileConfig = setting(ProfileConfig(), "a trace of some steps, for Perfetto (ui.perfetto.dev)")
    checkpoint: CheckpointConfig = setting(CheckpointConfig(), "saving")
    guard: GuardConfig = setting(GuardConfig(), "what to do about numbers that are not finite")
    resume: str = setting("auto", "auto: from the newest good checkpoint of run.dir; never; or a checkpoint's folder")
    distributed: DistributedConfig = setting(DistributedConfig(), "several processes")

    def __post_init__(self) -> None:
        trained = trained_modes(self.mode, self.mode_schedule)
        if self.sampling.guidance != 1 and "joint" not in trained:
            raise ValueError(f"sampling.guidance: {self.sampling.guidance} needs {GUIDANCE_NEEDS}")
        losses: dict[Loss, str] = {"text": "trained by l2t and joint"} if trained != ("t2l",) else {}
        if trained != ("l2t",) and self.loss.latent_weight:
            losses["latent"] = f"loss.latent_weight {self.loss.latent_weight:g}"
        if self.loss.length_weight:
            losses["length"] = f"loss.length_weight {self.loss.length_weight:g}"
        check_trainable(self.freeze, losses)
        if self.loss.latent_weighting != "fixed" and trained in (("l2t",), ("t2l",)):
            raise ValueError(
                f"loss.latent_weighting: {self.loss.latent_weighting} weighs text against latents, expected modes that "
                f"train both, found {trained[0]} alone"
            )
        if self.memory.activation_checkpointing != "none" and self.memory.kept_blocks >= self.model.depth:
            raise ValueError(
                f"memory.kept_blocks: expected fewer than the {self.model.depth} blocks that "
                f"memory.activation_checkpointing {self.memory.activation_checkpointing} is for, "
                f"found {self.memory.kept_blocks}"
            )
        if self.schedule.lr == "plateau" and self.schedule.min_lr > self.optim.lr:
            raise ValueError(
                f"schedule.min_lr: expected at most optim.lr {self.optim.lr:g}, found {self.schedule.min_lr:g}"
            )
        if self.optim.name == "muon" and frozen_parts(self.freeze) >= {"text_stream", "latent_stream"}:
            raise ValueError(
                "optim.name: muon trains the matrices of the blocks, found backbone frozen; expected adamw"
            )


def load_config(path: Path | str | None, overrides: Sequence[str] = (), may_extend: bool = True) -> RunConfig:
    """The run config from a YAML file, those that it extends, and `key.sub=value`; `ConfigError` in one line.

    What a run wrote is complete: without `may_extend`, it leads to no other file.
    """
    return load_with_origins(path, overrides, may_extend)[0]


def load_with_origins(
    path: Path | str | None, overrides: Sequence[str] = (), may_extend: bool = True
) -> tuple[RunConfig, Provenance]:
    """The run config, and where each value that is not a default comes from."""
    tree: dict[str, Any] = {}
    layers: list[ConfigLayer] = []
    if path is not None:
        layers = read_layers(Path(path)) if may_extend else [ConfigLayer.read(Path(path))]
        tree = merged(RunConfig, layers)
    for assignment in overrides:
        if assignment.partition("=")[0].strip() == EXTENDS:
            raise ConfigError(f"{EXTENDS}: expected in a config file, found on the command line")
        set_dotted(tree, assignment)
    try:
        return build(RunConfig, tree), Provenance(RunConfig, layers, overrides, tree)
    except ConfigError as error:
        source = f"{named(str(path))}: " if path is not None and not overrides else ""
        raise ConfigError(f"{source}{error}") from None


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Config files and `key.sub=value` overrides of a command line."""
    return [each for each in arguments if "=" not in each], [each for each in arguments if "=" in each]


def require(config: RunConfig, *keys: str) -> None:
    """Refuse a config in which one of these text keys is empty; in place of data.path, data.mixture will do."""
    for key in keys:
        if key == "data.path" and config.data.mixture:
            continue
        value: Any = config
        for part in key.split("."):
            value = getattr(value, part)
        if not value:
            raise ConfigError(f"{key}: expected a path, found nothing; set it in the config or as {key}=PATH")


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """The same run, wherever it is started from."""
    resume = config.resume if config.resume in ("auto", "never") else _absolute(config.resume)
    run = replace(config.run, dir=_absolute(config.run.dir))
    mixture = {_absolute(path): weight for path, weight in config.data.mixture.items()}
    data = replace(config.data, path=_absolute(config.data.path), mixture=mixture)
    return replace(config, run=run, data=data, resume=resume)


def _absolute(path: str) -> str:
    """As it is where it is empty, or would be no setting: the working folder may have any name."""
    absolute = str(Path(path).absolute())
    return absolute if path and is_setting_text(absolute) else path


def write_config(config: RunConfig, run_dir: Path) -> None:
    """Complete and with absolute paths: `mmldlm train RUN/config.yaml run.dir=NEW` is the same run again."""
    (run_dir / CONFIG_NAME).write_text(to_yaml(with_absolute_paths(config)), encoding="utf-8")


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Lines `key: old -> new` of two dumped configs."""
    lines: list[str] = []
    for key in {**old, **new}:
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            lines += differences(before, after, f"{prefix}{key}.")
        elif before != after:
            lines.append(f"{prefix}{key}: {before} -> {after}")
    return lines
