"""The keys and shell variables of the LGDLM trainer, also named MM-LDLM, and what becomes of each.

What is said here of LGDLM was read in its code: `train_mmdit.py`, `improved_trainer.py` and what they import.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

from mmldlm.errors import ConfigError
from mmldlm.utils.short_repr import short_repr

HEAD_CHANNELS = 64
_DAY_S = 86_400

Old = Mapping[str, Any]  # values by key of LGDLM or shell variable


@dataclass(frozen=True)
class Outcome:
    """What becomes of a key: settings of a run, options of `mmldlm prepare` ("--max-length"), or nothing; and why."""

    settings: Mapping[str, Any]
    why: str = ""
    stays_variable: bool = False  # of the environment


Rule = Callable[[str, Any, Old], Outcome]


def _is_one_of(value: Any, names: Container[Any]) -> bool:
    return isinstance(value, str | bool) and value in names  # other types may have no hash


def _to(target: str, why: str = "", values: Mapping[Any, Any] | None = None) -> Rule:
    """Return the rule of a key that is `target` here, with the same values or those of `values`."""

    def rule(key: str, value: Any, old: Old) -> Outcome:
        if values is not None and not _is_one_of(value, values):
            expected = ", ".join(str(name).lower() if isinstance(name, bool) else name for name in values)
            raise ConfigError(f"{key}: expected {expected}, found {short_repr(value)}")
        return Outcome({target: value if values is None else values[value]}, why)

    return rule


def _keep(keys: str, why: str) -> dict[str, Rule]:
    """Return the rules of shell variables, separated by spaces, that have the same meaning here."""
    return dict.fromkeys(keys.split(), lambda key, value, old: Outcome({}, why, stays_variable=True))


def _only(expected: Any, why: str) -> Rule:
    """Return the rule of a key that is dropped, and must have the value that this project implements."""

    def rule(key: str, value: Any, old: Old) -> Outcome:
        if value != expected:
            raise ConfigError(f"{key}: expected {expected}, found {short_repr(value)}; no other can be converted")
        return Outcome({}, why)

    return rule


def _whole(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key}: expected a whole number, at least 1, found {short_repr(value)}")
    return value


def _processes(old: Old) -> int:
    """Return the number of processes: the launcher overwrote `training.world_size`."""
    if "NPROC_PER_NODE" in old:
        return _whole("NPROC_PER_NODE", old["NPROC_PER_NODE"]) * _whole("NNODES", old.get("NNODES", 1))
    return _whole("training.world_size", old.get("training.world_size", 1))


# --- rules of several keys, or of values ---

_PRECISIONS = {
    **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
    **dict.fromkeys(("fp16", "float16", "half"), "fp16"),
    **dict.fromkeys(("fp32", "float32", "float"), "fp32"),
}
_MODES = {"unconditional": "joint", "l2t": "l2t", "t2l": "t2l"}


def _loss_type(key: str, value: Any, old: Old) -> Outcome:
    if _is_one_of(value, _MODES):
        why = "" if value == "unconditional" else "at all noise times; LGDLM trained it at noise time 1 alone"
        return Outcome({"mode": _MODES[value]}, why)
    if value == "random":
        names = ("joint", "l2t", "t2l")
        weights = old.get("training.mode_weights", [1, 1, 1])
        if not isinstance(weights, list) or len(weights) != len(names):
            raise ConfigError(f"training.mode_weights: expected 3 numbers, found {short_repr(weights)}")
        return Outcome({"mode": dict(zip(names, weights, strict=True))}, "per sample, in LGDLM per batch")
    if value == "mixed":
        weights = {name: old.get(f"training.loss_type_weights.{name}", 0.25) for name in (*_MODES, "partial")}
        if not all(isinstance(weight, int | float) for weight in weights.values()):
            raise ConfigError(f"training.loss_type_weights: expected numbers, found {short_repr(weights)}")
        shares = {"joint": weights["unconditional"] + weights["partial"], "l2t": weights["l2t"], "t2l": weights["t2l"]}
        return Outcome({"mode": shares}, "partial is joint at low noise times, which joint contains")
    if value == "sequential":
        return Outcome({}, "see training.sequential_schedule")
    if value == "multimodal_mdlm":
        return Outcome({}, "the only loss; training.loss_type chose the mode")
    expected = ", ".join((*_MODES, "sequential", "random", "mixed", "multimodal_mdlm"))
    raise ConfigError(f"{key}: expected {expected}, found {short_repr(value)}")


def _sequential_schedule(key: str, value: Any, old: Old) -> Outcome:
    if "sequential" not in (old.get("loss.loss_type"), old.get("training.loss_type")):
        return Outcome({}, "loss_type is not sequential")
    if not (isinstance(value, list) and value and all(isinstance(part, dict) and "type" in part for part in value)):
        raise ConfigError(f"{key}: expected a list of maps with type and steps, found {short_repr(value)}")
    if not all("steps" in part for part in value):
        return Outcome({}, "counts epochs: set mode and mode_schedule, which counts steps")
    start, modes = 0, dict[int, str]()
    for part in value:
        if not _is_one_of(part["type"], _MODES):
            raise ConfigError(f"{key}: expected types {', '.join(_MODES)}, found {short_repr(part['type'])}")
        modes[start] = _MODES[part["type"]]
        start += _whole(f"{key}: steps", part["steps"])
    first = modes.pop(0)
    return Outcome(
        {"mode": first, "mode_schedule": modes}, f"the last mode stays; LGDLM started again after {start} steps"
    )


def _tokenizer_name(key: str, value: Any, old: Old) -> Outcome:
    if "tokenizer.path" in old:
        return Outcome({}, "LGDLM took tokenizer.path")
    return Outcome({"--tokenizer": value}, "save it to a folder first: docs/data.md")


def _width(key: str, value: Any, old: Old) -> Outcome:
    width = _whole(key, value)
    heads = next(n for n in range(max(1, width // HEAD_CHANNELS), 0, -1) if width % (2 * n) == 0 or n == 1)
    return Outcome(
        {"model.width": width, "model.num_heads": heads},
        "heads of 64 channels, as LGDLM had whatever n_heads said; model.latent_width: null makes the latent stream "
        "narrower, in LGDLM it had the text's width",
    )


def _batch_size(key: str, value: Any, old: Old) -> Outcome:
    micro, processes = _whole(key, value), _processes(old)
    sizes = {"train.global_batch_size": micro * processes, "train.micro_batch_size": micro}
    return Outcome(sizes, f"x {processes} processes, which is training.world_size or NNODES x NPROC_PER_NODE")


def _eval_batches(key: str, value: Any, old: Old) -> Outcome:
    batch = _whole("training.eval_batch_size", old.get("training.eval_batch_size", 1))
    return Outcome(
        {"validation.samples": _whole(key, value) * batch * _processes(old)}, "x eval_batch_size x processes"
    )


def _betas(key: str, value: Any, old: Old) -> Outcome:
    if "optimizer.betas" in old:
        return Outcome({}, "read by nothing: optimizer.betas, of optimizer/adam.yaml, were the optimizer's")
    betas = [old.get("optimizer.beta1", 0.9), old.get("optimizer.beta2", 0.99)]
    return Outcome({"optim.betas": betas}, "LGDLM read optimizer.betas, [0.9, 0.99] in its optimizer/adam.yaml")


def _optimizer(key: str, value: Any, old: Old) -> Outcome:
    if value in ("adam", "adamw"):
        return Outcome({"optim.name": "adamw"}, "LGDLM's adam was AdamW")
    return Outcome({}, "not in this project: optim.name is adamw, or muon")


def _lr_schedule(key: str, value: Any, old: Old) -> Outcome:
    ratios = {"cosine": 0.1, "linear": 0.0}
    if _is_one_of(value, ratios):
        return Outcome({"schedule.lr": value, "schedule.min_lr_ratio": ratios[value]}, "decays until train.steps")
    outcome = _to("schedule.lr", values={"constant": "constant"} | dict.fromkeys(ratios))(key, value, old)
    return Outcome(outcome.settings, "LGDLM had no warmup with it: optim.warmup_steps: 0")


def _resume(key: str, value: Any, old: Old) -> Outcome:
    if value is None:
        return Outcome({"resume": "auto"}, "the same command continues the run")
    return Outcome({}, "checkpoints of LGDLM cannot be loaded: they are of another network")


def _heartbeat(key: str, value: Any, old: Old) -> Outcome:
    if isinstance(value, int) and value <= _DAY_S:
        return Outcome({"distributed.heartbeat_timeout_s": value})
    return Outcome({}, "above 24 hours, at which a hang is never noticed; the default is 1800 s")


def _flag(target: str) -> Rule:
    """Return the rule of an environment variable that is 1 or 0."""

    def rule(key: str, value: Any, old: Old) -> Outcome:
        if value not in (0, 1):
            raise ConfigError(f"{key}: expected 0 or 1, found {short_repr(value)}")
        return Outcome({target: bool(value)})

    return rule


def _nccl(key: str, value: Any, old: Old) -> Outcome:
    return Outcome({f"distributed.nccl.{key}": value})


# --- the rules ---

# Without a counterpart; docs/migration.md says why.
DROPPED = """
    data.dataset_name data.max_val_samples training.total_steps loss.reduction loss.text_kl_weight model.p_uniform
    model.t_eps defaults hydra.run.dir hydra.sweep.dir hydra.sweep.subdir data.latent_data_root data.data_dir
    data.token_dir data.latent_dir data.data_files.train data.data_files.validation data.preprocessed_dir
    data.preprocessed_file data.use_preprocessed data.load_tokens data.max_length data.max_samples
    data.initial_scan_limit data.tokenizer_name data.tokenizer_path data.cache_dir data.local_files_only
    tokenizer.cache_dir tokenizer.local_files_only data.sequential_schedule model.use_multimodal model.qk_rmsnorm
    tokenizer.add_mask_token loss.use_cross_entropy model.n_heads model.dropout model.num_residual_streams
    model.latent_dim model.latent_beta_min model.latent_beta_max model.latent_timesteps training.eval_batch_size
    training.gradient_accumulation_steps training.num_epochs training.world_size
    training.loss_type_weights.unconditional training.loss_type_weights.l2t training.loss_type_weights.t2l
    training.loss_type_weights.partial training.mode_weights training.save_every_n_steps loss.loss_scale
    loss.text_loss_weight logging.save_dir logging.wandb_project logging.wandb_entity logging.wandb_dir
    optimizer.use_fused WORLD_SIZE RANK RENDEZVOUS_ID MAX_RETRIES LOG_FILE BASE_WORLD_SIZE BASE_LR L2T_CONFIG
    NCCL_SOCKET_TIMEOUT TORCH_NCCL_ENABLE_MONITORING WANDB_DISABLED WANDB_MODE WANDB_DIR
"""
_NODES = "a variable of scripts/launch_node.sh"

RULES: dict[str, Rule] = {
    **dict.fromkeys(DROPPED.split(), lambda key, value, old: Outcome({}, "no counterpart: docs/migration.md")),
    "data.num_workers": _to("data.num_workers", "per process; null chooses by the number of CPUs"),
    "data.prefetch_factor": _to("data.prefetch_factor"),
    "data.persistent_workers": _to("data.persistent_workers"),
    "data.val_ratio": _to("--validation-fraction", "a text's split is a function of the text: copies share it"),
    "tokenizer.name": _tokenizer_name,
    "tokenizer.path": _to("--tokenizer"),
    "model.type": _only("multimodal_mmdit", "there is one network"),
    "model.diffusion_process": _only("mdlm", "always: masked diffusion of the text"),
    "model.latent_diffusion_process": _only("continuous", "always: Gaussian diffusion of the latents"),
    "model.cluster_size": _only(0, "no clusters"),
    "model.hidden_size": _width,
    "model.n_blocks": _to("model.depth"),
    **dict.fromkeys(
        ("model.use_gradient_checkpointing", "training.use_gradient_checkpointing"),
        _to("memory.activation_checkpointing", "also selective, or every k-th block", {True: "full", False: "none"}),
    ),
    "model.cond_dim": _to("model.conditioning_width", "it enters the blocks by model.modulation_rank"),
    "model.max_seq_len": _to("--max-length", "positions are rotary: no parameter depends on it"),
    "model.latent_beta_schedule": _to(
        "latent.process",
        "LGDLM looked for it outside `model`, and so always took cosine",
        {"cosine": "vp_cosine", "linear": "vp_linear", "sigmoid": "vp_sigmoid"},
    ),
    "model.latent_parameterization": _to(
        "latent.prediction",
        "LGDLM looked for it outside `model`, and so always took epsilon; x0, the default, learns t2l far sooner",
        {"epsilon": "epsilon", "x0": "x0", "v_param": "v"},
    ),
    "training.seed": _to("run.seed", "of noise and order; it is the same for any number of processes"),
    "training.train_batch_size": _batch_size,
    "training.num_train_steps": _to("train.steps", "in LGDLM only the length of the learning-rate schedule"),
    "training.dtype": _to("precision", "of products alone: weights and moments are float32", _PRECISIONS),
    "training.compile_model": _to("compile.scope", "block by block", {True: "regional", False: "none"}),
    "training.lr_schedule": _lr_schedule,
    "training.warmup_steps": _to("optim.warmup_steps"),
    "training.resume": _resume,
    "training.loss_type": _loss_type,
    "loss.loss_type": _loss_type,
    "training.sequential_schedule": _sequential_schedule,
    "loss.latent_loss_weight": lambda key, value, old: Outcome(
        {"loss.latent": "mse", "loss.latent_weight": value},
        "of the mean squared error; only train_mmdit_stable.py read it, for unit vectors: loss.latent: cosine, with "
        "2 / channels of the weight",
    ),
    "logging.run_name": lambda key, value, old: Outcome({} if value is None else {"run.dir": f"runs/{value}"}),
    "logging.log_freq": _to("log.every"),
    "logging.eval_freq": _to("validation.every"),
    "logging.num_eval_batches": _eval_batches,
    "logging.save_freq": _to("checkpoint.every_steps", "each is complete, and the last three are kept"),
    "optimizer.name": _optimizer,
    "optimizer.type": _optimizer,
    "optimizer.lr": _to("optim.lr"),
    "optimizer.weight_decay": _to("optim.weight_decay", "of matrices only: norms, biases and embeddings have none"),
    "optimizer.betas": _to("optim.betas"),
    "optimizer.beta1": _betas,
    "optimizer.beta2": _betas,
    "optimizer.eps": _to("optim.eps"),
    "optimizer.grad_clip_norm": _to("optim.clip_norm"),
    # Shell variables.
    **_keep("NNODES NPROC_PER_NODE", f"{_NODES}; a factor of train.global_batch_size"),
    **_keep("NODE_RANK MASTER_ADDR MASTER_PORT", _NODES),
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": _heartbeat,
    "NCCL_TIMEOUT": _to("distributed.timeout_s", "nothing reads the variable: LGDLM's timeout was 30 minutes"),
    "TORCH_DISTRIBUTED_TIMEOUT": _to("distributed.timeout_s", "nothing reads the variable"),
    "TORCH_NCCL_BLOCKING_WAIT": _flag("distributed.blocking_wait"),
    "NCCL_BLOCKING_WAIT": _flag("distributed.blocking_wait"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": _flag("distributed.async_error_handling"),
    "NCCL_ASYNC_ERROR_HANDLING": _flag("distributed.async_error_handling"),
    **dict.fromkeys(("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"), _nccl),
    **dict.fromkeys(("NCCL_IB_TIMEOUT", "NCCL_IB_DISABLE", "NCCL_SOCKET_IFNAME"), _nccl),
    **dict.fromkeys(("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"), _nccl),
    **_keep("PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF TORCH_DISTRIBUTED_DEBUG", "set it as before"),
    **_keep("CUDA_VISIBLE_DEVICES OMP_NUM_THREADS MKL_NUM_THREADS", "set it as before"),
}

# Shell variables of LGDLM's scripts that stood for a key.
VARIABLES = {
    "L2T_TRAIN_BS": "training.train_batch_size",
    "L2T_EVAL_BS": "training.eval_batch_size",
    "GRAD_ACCUM_STEPS": "training.gradient_accumulation_steps",
    "L2T_STEPS": "training.num_train_steps",
    "L2T_BASE_STEPS": "training.num_train_steps",
    "L2T_SAVE_FREQ": "logging.save_freq",
    "L2T_BASE_SAVE_FREQ": "logging.save_freq",
    "L2T_LOG_FREQ": "logging.log_freq",
    "L2T_BASE_LOG_FREQ": "logging.log_freq",
    "L2T_EVAL_FREQ": "logging.eval_freq",
    "L2T_BASE_EVAL_FREQ": "logging.eval_freq",
    "L2T_RUN_NAME": "logging.run_name",
    "L2T_SAVE_DIR": "logging.save_dir",
    "L2T_COMPILE": "training.compile_model",
    "LATENT_DIM": "model.latent_dim",
    "DTYPE": "training.dtype",
    "DATA_WORKERS": "data.num_workers",
    "TOKEN_DIR": "data.token_dir",
    "LATENT_DIR": "data.latent_dir",
    "LEARNING_RATE": "optimizer.lr",
    "WARMUP_STEPS": "training.warmup_steps",
    "GRAD_CLIP_NORM": "optimizer.grad_clip_norm",
    "LATENT_LOSS_WEIGHT": "loss.latent_loss_weight",
}
