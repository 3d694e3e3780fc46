"""The run config, composed of the settings of all subsystems and read from YAML and `key.sub=value`.

Only the functions that read and write files import pydantic and YAML, since loading a bundle needs neither.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mmldlm.checkpoint.retention import Retention
from mmldlm.data.batch_schedule import TrainConfig
from mmldlm.data.loader import DataConfig
from mmldlm.diffusion.gaussian import LatentConfig
from mmldlm.diffusion.masked import TextConfig
from mmldlm.diffusion.noise import Mode, ModeShares, trained_modes
from mmldlm.diffusion.objective import LossConfig
from mmldlm.diffusion.sampling import GUIDANCE_NEEDS, SamplingConfig
from mmldlm.distributed.config import DistributedConfig
from mmldlm.errors import ConfigError
from mmldlm.model.activation_checkpoint import MemoryConfig
from mmldlm.model.attention import AttentionConfig
from mmldlm.model.compile import CompileConfig
from mmldlm.model.initial_weights import InitConfig
from mmldlm.model.mmdit import ModelConfig
from mmldlm.model.parts import Freezable, Loss, check_trainable, frozen_parts
from mmldlm.optim.config import OptimConfig
from mmldlm.optim.ema import EmaConfig
from mmldlm.optim.lr_schedule import ScheduleConfig
from mmldlm.settings.declaration import flat_settings, setting
from mmldlm.settings.successors import current, current_overrides
from mmldlm.telemetry.profiler import ProfileConfig
from mmldlm.utils.files import write_atomically
from mmldlm.utils.printable import hide_passwords
from mmldlm.utils.short_repr import display_name

if TYPE_CHECKING:
    from mmldlm.settings.layers import ConfigLayer

CONFIG_NAME = "config.yaml"
_DATA_KEYS = ("data.path", "data.mixture")


@dataclass(frozen=True)
class GuardConfig:
    """Handling of steps with non-finite numbers or gradient spikes."""

    nonfinite: Literal["skip", "stop"] = setting(
        "skip",
        "how to handle a step whose loss or gradient norm is non-finite. skip: leave out its update. stop: end "
        "the run, when the numbers of the step are read at the next record",
    )
    grad_norm_spike: float | None = setting(
        None,
        "skip a step whose gradient norm is above this multiple of the median of the last 100 accepted steps, "
        "once there are 20; null: never",
        above=1,
        advice="10 for runs that diverge now and then. It makes the host wait for the device in each step",
    )
    max_consecutive: int = setting(
        10,
        "number of consecutive skipped steps that stops the run. Numbers are read from a GPU at least once in "
        "this many steps",
        at_least=1,
    )
    verify_updates_every: int = setting(
        1000,
        "steps between checks that all ranks have the same learning rate and the same weights; 0: never. The "
        "first step of every start is checked as well. A check reads all weights once",
        at_least=0,
    )


@dataclass(frozen=True)
class RunSettings:
    """Folder and seed of a run."""

    dir: str = setting("", "folder of this run: config, metrics, TensorBoard, checkpoints")
    seed: int = setting(
        0, "seed of initialization, sample order, noise times, masks and noise", at_least=0, at_most=2**63 - 1
    )
    init_seed: int | None = setting(
        None,
        "seed of the initial weights; null: run.seed",
        at_least=0,
        at_most=2**63 - 1,
        advice="With another init_seed and the same samples and noise, you see how much of a difference between two "
        "runs is luck",
    )

    @property
    def weights_seed(self) -> int:
        """Seed of the initial weights."""
        return self.seed if self.init_seed is None else self.init_seed


@dataclass(frozen=True)
class LogConfig:
    """Metrics, TensorBoard and figures."""

    every: int = setting(
        10,
        "optimizer steps between log records",
        at_least=1,
        advice="On a GPU, the host waits for the device at each record",
    )
    noise_levels: int = setting(
        5, "number of equal noise bins in [0, 1] whose losses are logged separately; 1: no bins", at_least=1, at_most=10
    )
    tensorboard: bool = setting(True, "write TensorBoard files to the run folder")
    trackers: list[str] = setting(
        factory=list,
        doc="experiment trackers that get the scalars. You can use the trackers of Accelerate, e.g. [wandb, "
        "trackio, mlflow]",
        advice="Training waits until a tracker has started, and never afterwards",
    )
    figures_every: int = setting(
        1000,
        "optimizer steps between figures, histograms and quality/ metrics in TensorBoard; 0: none. They are "
        "written at the next validation, and at the last one",
        at_least=0,
    )
    figure_samples: int = setting(32, "held-out samples for each figure", at_least=2, at_most=4096)
    notify: str = setting(
        "",
        "env:NAME, an environment variable MMLDLM_NOTIFY... with a URL or command that gets a small JSON when the run "
        "ends: finished, overfitted, stopped, failed, diverged, peer_lost or interrupted; empty: none",
        advice="The URL of a webhook is a secret, and every run has copies of the config",
    )

    def __post_init__(self) -> None:
        if self.notify and not re.fullmatch(r"env:MMLDLM_NOTIFY[A-Z0-9_]*", self.notify):
            expected = "env:NAME of an environment variable MMLDLM_NOTIFY... that has the URL or command"
            raise ValueError(f"notify: expected {expected}, found something else, which may be a secret")


@dataclass(frozen=True)
class ValidationConfig:
    """Validation losses, and evaluation of generated samples during training."""

    every: int = setting(
        250,
        "optimizer steps between validations; 0: none",
        at_least=0,
        advice="For each trained mode, 512 samples cost the forward passes of four steps of 128 samples",
    )
    first: int | None = setting(
        None,
        "step of the first validation. Until `every`, more validations follow, each at twice the step of the "
        "one before. null: after one epoch or 5 % of the steps, whichever comes first; 0: none before `every`",
        at_least=0,
        advice="Leave it at null: a small corpus is often learned best within its first epochs",
    )
    samples: int = setting(512, "held-out samples per validation", at_least=1)
    text_samples: int = setting(
        4,
        "number of texts to generate for TensorBoard: at each validation in l2t, and with the figures in joint "
        "(at most log.figure_samples); 0: none",
        at_least=0,
        advice="They are for monitoring only, so they take at most 8 reverse steps, or one for every four tokens of "
        "the longest text",
    )
    prompts: str = setting(
        "",
        "file of texts, as for `mmldlm sample --texts`: at each validation, TensorBoard gets a text generated from the "
        "latent of each (l2t); empty: none",
    )
    quality_every: int = setting(
        0,
        "optimizer steps between evaluations of generated samples, which are `quality/` in the curves; 0: none",
        at_least=0,
        advice="For each trained mode, 64 samples cost sampling.steps forward passes. With 32 steps and three modes "
        "that is about as much as 16 steps of 128 samples, so less than 1 % if you set 2000",
    )
    quality_samples: int = setting(
        64,
        "held-out samples of each evaluation, for each trained mode",
        at_least=2,
        advice="64 show a trend. To compare two runs, use `mmldlm evaluate`",
    )


@dataclass(frozen=True)
class EvaluationSettings:
    """Metrics of generated texts."""

    bleu_tokenize: Literal["auto", "13a", "intl", "zh", "char", "none"] = setting(
        "auto",
        "sacreBLEU's tokenizer for BLEU; auto: zh or char for scripts without spaces, Chinese or others, else 13a",
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save checkpoints, and which to keep."""

    every_steps: int = setting(
        500,
        "optimizer steps between checkpoints; 0: only the last",
        at_least=0,
        advice="Save as often as the work in between would be too much to lose. Training continues during the write",
    )
    every_minutes: float | None = setting(
        None,
        "minutes between checkpoints, in addition to every_steps; null: none",
        above=0,
        advice="For schedulers that end jobs after a time, and for slow steps",
    )
    keep_last: int = setting(3, "number of newest checkpoints to keep", at_least=1)
    keep_steps: list[int] = setting(factory=list, doc="steps to save and keep permanently: [250000, 500000]")
    keep_every: int = setting(
        0, "save and permanently keep a checkpoint at every multiple of this step; 0: none", at_least=0
    )
    keep_best: int = setting(
        1,
        "number of checkpoints with the lowest validation loss to keep. They are saved at the validation. The "
        "loss is that of texts, or of latents if the run trains t2l alone",
        at_least=0,
        advice="Each is a full checkpoint on disk. Set 0 if the disk has no room for it",
    )
    mirror: str = setting(
        "",
        "place for copies of the checkpoints, in a subfolder with the name of run.dir: a folder on another "
        "disk, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX. A start on an empty disk resumes from there. Empty: no "
        "copies",
        advice="For machines and disks that may be taken away",
    )
    mirror_wait_s: float = setting(
        300.0,
        "seconds that the end of a run, also by a signal, waits for the last copy",
        at_least=0,
        advice="Choose less than the time between a scheduler's signal and its kill, minus the time of a save",
    )
    async_: bool = setting(True, "write files in the background: training waits only for the copy to host memory")

    def __post_init__(self) -> None:
        if min(self.keep_steps, default=1) < 1:
            raise ValueError(f"keep_steps: expected steps from 1 on, found {min(self.keep_steps)}")
        if (shown := hide_passwords(self.mirror)) != self.mirror:
            raise ValueError(f"mirror: found {shown}, expected no password: give it to the store's own package")

    def is_due(self, step: int) -> bool:
        """Return whether the settings demand a checkpoint after `step`."""
        return bool(self.every_steps and step % self.every_steps == 0) or self.retention.is_permanent(step)

    @property
    def retention(self) -> Retention:
        """The `keep_*` settings as a retention policy."""
        return Retention(self.keep_last, tuple(self.keep_steps), self.keep_every, self.keep_best)


@dataclass(frozen=True)
class RunConfig:
    """All settings of a run. `__post_init__` checks the settings that depend on several groups."""

    run: RunSettings = setting(RunSettings(), "the run")
    data: DataConfig = setting(DataConfig(), "the data store and its loader")
    model: ModelConfig = setting(ModelConfig(), "the network")
    attention: AttentionConfig = setting(AttentionConfig(), "the joint attention")
    memory: MemoryConfig = setting(MemoryConfig(), "activation checkpointing, which saves memory at the cost of time")
    compile: CompileConfig = setting(CompileConfig(), "fused kernels by torch.compile")
    init: InitConfig = setting(InitConfig(), "trained weights that a new run starts from")
    freeze: list[Freezable] = setting(
        factory=list,
        doc="parts that are not trained and keep their weights (in a new run the weights from `init`). "
        "text_encoder: token embedding, and the head matrix if tied; latent_encoder: input layers of the "
        "latents; noise_times: time embeddings; text_stream, latent_stream: one side of the blocks; backbone: "
        "both sides",
        advice="Frozen parts need no gradients and no moments. A run is refused if a loss has no part left to train",
    )
    mode: ModeShares = setting(
        factory=lambda: {"l2t": 0.5, "t2l": 0.25, "joint": 0.25},
        doc="one mode, or the shares of several modes. The mode is drawn for each sample",
        advice="One mode if you know the task. Guidance, and texts without a latent, need a share of joint",
    )
    mode_schedule: dict[int, ModeShares] = setting(
        factory=dict,
        doc="optimizer steps, counted from 0, at which `mode` changes, e.g. {1000: joint}",
        advice="To learn one task before another. The loss curve jumps where the shares change",
    )
    text: TextConfig = setting(TextConfig(), "diffusion of the text")
    latent: LatentConfig = setting(LatentConfig(), "diffusion of the latents")
    loss: LossConfig = setting(LossConfig(), "the losses")
    optim: OptimConfig = setting(OptimConfig(), "the optimizer")
    schedule: ScheduleConfig = setting(ScheduleConfig(), "schedules over the optimizer steps")
    ema: EmaConfig = setting(EmaConfig(), "exponential moving average of the trained weights, in float32")
    train: TrainConfig = setting(TrainConfig(), "number of steps and batch sizes")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = setting(
        "auto",
        "precision of matrix products. Weights, moments and losses are float32. fp16 (single, ddp, fsdp2) "
        "scales the loss, and skips steps whose gradients overflow. auto: mixed_precision of the launcher, or "
        "fp32 without one",
        advice="bf16 on GPUs, fp16 on GPUs that are too old for bf16. Both are many times slower on a CPU without "
        "instructions for them",
    )
    tf32: bool = setting(
        False,
        "round the inputs of float32 matrix products to TF32 (8 bits of exponent, 10 of mantissa), on GPUs from "
        "Ampere on. Sums stay float32",
        advice="For fp32 on such GPUs: it is several times faster, and the curve differs by rounding",
    )
    sampling: SamplingConfig = setting(SamplingConfig(), "generation during training, in `evaluate` and in `sample`")
    validation: ValidationConfig = setting(ValidationConfig(), "validation on held-out samples during training")
    evaluation: EvaluationSettings = setting(EvaluationSettings(), "metrics of generated texts")
    log: LogConfig = setting(LogConfig(), "metrics")
    profile: ProfileConfig = setting(ProfileConfig(), "a trace of some steps for Perfetto (ui.perfetto.dev)")
    checkpoint: CheckpointConfig = setting(CheckpointConfig(), "checkpoints")
    guard: GuardConfig = setting(GuardConfig(), "handling of non-finite numbers and gradient spikes")
    resume: str = setting(
        "auto",
        "auto: resume from the newest valid checkpoint of run.dir. never: start again. Or the folder of a checkpoint",
        advice="Leave it at auto: the same command then continues after any stop. never moves the run's checkpoints "
        "aside",
    )
    distributed: DistributedConfig = setting(DistributedConfig(), "several processes")

    def __post_init__(self) -> None:
        trained = self.trained_modes
        if self.sampling.guidance != 1 and "joint" not in trained:
            raise ValueError(f"sampling.guidance: {self.sampling.guidance} needs {GUIDANCE_NEEDS}")
        if self.validation.prompts and ("l2t" not in trained or not self.log.tensorboard):
            raise ValueError(
                f"validation.prompts: expected l2t among the trained modes and log.tensorboard: true, found "
                f"{', '.join(trained)} and {str(self.log.tensorboard).lower()}"
            )
        # The losses that the run trains, each with the reason for the message of `check_trainable`.
        losses: dict[Loss, str] = {"text": "trained by l2t and joint"} if trained != ("t2l",) else {}
        if trained != ("l2t",) and self.loss.latent_weight:
            losses["latent"] = f"loss.latent_weight {self.loss.latent_weight:g}"
        if self.loss.length_weight:
            losses["length"] = f"loss.length_weight {self.loss.length_weight:g}"
        check_trainable(self.freeze, losses)
        if self.loss.latent_weighting != "fixed" and trained in (("l2t",), ("t2l",)):
            raise ValueError(
                f"loss.latent_weighting: {self.loss.latent_weighting} weighs text against latents, expected modes "
                f"that train both, found {trained[0]} alone"
            )
        kept = self.memory.kept_blocks
        if self.memory.activation_checkpointing != "none" and 1 < kept >= self.model.depth:
            raise ValueError(
                f"memory.kept_blocks: expected fewer than model.depth {self.model.depth}, since otherwise "
                f"memory.activation_checkpointing {self.memory.activation_checkpointing} does nothing, found {kept}"
            )
        if self.schedule.lr == "plateau" and self.schedule.min_lr > self.optim.lr:
            raise ValueError(
                f"schedule.min_lr: expected at most optim.lr {self.optim.lr:g}, found {self.schedule.min_lr:g}"
            )
        if self.optim.name == "muon" and frozen_parts(self.freeze) >= {"text_stream", "latent_stream"}:
            raise ValueError(
                "optim.name: muon trains the matrices of the blocks, found backbone frozen; expected adamw"
            )

    @property
    def trained_modes(self) -> tuple[Mode, ...]:
        """The modes with a share at some step."""
        return trained_modes(self.mode, self.mode_schedule)

    @property
    def judged_by(self) -> str:
        """The validation loss that determines the best checkpoint. In a sum, latents could hide worse texts."""
        return "validation/latent" if self.trained_modes == ("t2l",) else "validation/text"

    def validation_due(self, step: int, samples: int) -> bool:
        """Return whether a validation follows the `step`-th step of a run over `samples` training samples."""
        every, epoch = self.validation.every, -(-samples // self.train.global_batch_size)
        given = self.validation.first
        first = min(epoch, -(-self.train.steps // 20)) if given is None else given
        is_early = 0 < first <= step < every and step % first == 0 and (step // first).bit_count() == 1
        return is_early or self.train.is_due(step, every)


def load_config(path: Path | str | None, overrides: Sequence[str] = (), may_extend: bool = True) -> RunConfig:
    """Load the run config from a YAML file, the files that it extends, and `key.sub=value` overrides.

    Without a `path` the config has defaults and overrides only. The config in a run folder is complete, so it may not
    extend others.

    Raises:
        ConfigError: One line names all unknown keys and bad values.
    """
    return _load(path, overrides, may_extend)[0]


def load_with_provenance(path: Path | str, overrides: Sequence[str] = ()) -> tuple[RunConfig, dict[str, str]]:
    """Load the run config as `load_config` does, with the origin of each value by dotted key."""
    from mmldlm.settings.layers import origins

    overrides = current_overrides(overrides)
    config, layers, tree = _load(path, overrides, may_extend=True)
    return config, origins(RunConfig, layers, overrides, tree)


def _load(
    path: Path | str | None, overrides: Sequence[str], may_extend: bool
) -> tuple[RunConfig, list[ConfigLayer], dict[str, Any]]:
    """Return the run config, its files, and the tree of settings that it was built from."""
    from mmldlm.settings.fields import build, set_dotted
    from mmldlm.settings.layers import EXTENDS, ConfigLayer, drop_alternatives, merge_layers, read_layers

    tree: dict[str, Any] = {}
    layers: list[ConfigLayer] = []
    if path is not None:
        layers = read_layers(Path(path)) if may_extend else [ConfigLayer.read(Path(path), Path(path).parent)]
        tree = merge_layers(RunConfig, layers, _DATA_KEYS)
    given: dict[str, Any] = {}
    overrides = current_overrides(overrides)
    for assignment in overrides:
        if assignment.partition("=")[0].strip() == EXTENDS:
            raise ConfigError(f"{EXTENDS}: expected in a config file, found on the command line")
        set_dotted(given, assignment)
    tree = drop_alternatives(tree, given, _DATA_KEYS)
    for assignment in overrides:
        set_dotted(tree, assignment)
    tree = current(tree, "command line")  # keys within the value of an override
    if len(foreign := [key for key in ("training", "logging", "optimizer", "tokenizer") if key in tree]) > 1:
        raise ConfigError(
            f"{', '.join(foreign)}: keys of LGDLM, expected keys of docs/settings.md; docs/migration.md has a table"
        )
    try:
        return build(RunConfig, tree), layers, tree
    except ConfigError as error:
        # The faulty value may come from an override, so then we name no file.
        source = f"{display_name(str(path))}: " if path is not None and not overrides else ""
        raise ConfigError(f"{source}{error}") from None


def resolve_precision(config: RunConfig, mixed_precision: str = "no") -> RunConfig:
    """Return the config with the precision of the run instead of auto.

    Args:
        mixed_precision: The launcher's setting: no, bf16 or fp16.

    Raises:
        ConfigError: The run config names another precision.
    """
    if config.precision == "auto":
        return replace(config, precision="fp32" if mixed_precision == "no" else mixed_precision)  # type: ignore[arg-type]
    if mixed_precision not in ("no", config.precision):
        raise ConfigError(
            f"mixed_precision: {mixed_precision} in the launcher's config contradicts precision: {config.precision} in "
            f'the run config; set mixed_precision: "no" there, or precision: auto or {mixed_precision} here'
        )
    return config


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split command-line arguments into config files and `key.sub=value` overrides."""
    return [arg for arg in arguments if "=" not in arg], [arg for arg in arguments if "=" in arg]


def require_paths(config: RunConfig, *keys: str) -> None:
    """Raise `ConfigError` if one of these text settings is empty. data.mixture may replace data.path."""
    for key in keys:
        if key == "data.path" and config.data.mixture:
            continue
        if not flat_settings(config)[key]:
            raise ConfigError(f"{key}: expected a path, found nothing; set it in the config or as {key}=PATH")


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Return the config with absolute paths, so that it does not depend on the working folder."""
    resume = config.resume if config.resume in ("auto", "never") else _absolute(config.resume)
    run = replace(config.run, dir=_absolute(config.run.dir))
    mixture = {_absolute(path): weight for path, weight in config.data.mixture.items()}
    data = replace(config.data, path=_absolute(config.data.path), mixture=mixture)
    given = config.init.from_, config.init.embeddings
    source, embeddings = (path and _absolute(path) for path in given)
    init = replace(config.init, from_=source, embeddings=embeddings)
    validation = replace(config.validation, prompts=_absolute(config.validation.prompts))
    mirror = config.checkpoint.mirror
    checkpoint = replace(config.checkpoint, mirror=mirror if "://" in mirror else _absolute(mirror))
    return replace(config, run=run, data=data, init=init, validation=validation, checkpoint=checkpoint, resume=resume)


def _absolute(path: str) -> str:
    return str(Path(path).absolute()) if path else path


def write_config(config: RunConfig, run_dir: Path) -> None:
    """Write all settings with absolute paths, so that `mmldlm train RUN/config.yaml run.dir=NEW` repeats the run."""
    from mmldlm.settings.fields import to_yaml

    write_atomically(run_dir / CONFIG_NAME, to_yaml(with_absolute_paths(config)))


def diff_configs(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return lines `key: old -> new` for the settings that differ between two dumped configs."""
    lines: list[str] = []
    for key in {**old, **new}:
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            lines += diff_configs(before, after, f"{prefix}{key}.")
        elif before != after:
            lines.append(f"{prefix}{key}: {before} -> {after}")
    return lines
