"""For every setting, how it is shown that it does something. Whoever adds a key adds its entry; the test says so.

`Run(VALUE, sees=WHAT)`: two runs of three steps, in which this key alone differs, differ in WHAT (`observed.SIGHTS`).
VALUE is as on a command line; `under` is what both runs have beside `observed.BASE`.

`ShownBy(TEST)`: for what three steps of one process cannot show; a test of the default suite that names the key and
fails where the key is ignored.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.helpers.observed_run import Sight


@dataclass(frozen=True)
class Run:
    value: str
    sees: Sight
    under: tuple[str, ...] = ()


@dataclass(frozen=True)
class ShownBy:
    test: str


MUON = ("optim.name=muon",)
EXPLODING = ("optim.lr=1e38", "optim.warmup_steps=0", "train.steps=4", "validation.every=0")
OFTEN = ("checkpoint.every_steps=1", "train.steps=5")
RECOMPUTED = ("model.depth=4", "memory.activation_checkpointing=every_k")
AVERAGED = ("ema.decay=0.999",)
DRAWN = ("log.tensorboard=true",)
WRITTEN = ("log={every: 1, tensorboard: true, figures_every: 0}",)
OF_WORKERS = "tests/data/test_loader_settings.py"
OF_ENGINES = "tests/distributed/test_engine_settings.py"

OF_PLATEAUS = "tests/optim/test_lr_schedule.py::test_plateau_is_that_of_torch_also_across_resume"

EFFECTS: dict[str, Run | ShownBy] = {
    "freeze": Run("[latent_stream]", "curve"),
    "mode": Run("l2t", "curve"),
    "mode_schedule": Run("{1: l2t}", "curve"),
    "precision": Run("bf16", "curve"),
    "resume": ShownBy("tests/integration/test_train.py::test_resume_never_starts_anew"),
    "run.dir": ShownBy("tests/integration/test_train.py::test_same_seed_same_curve_bit_for_bit"),
    "run.seed": Run("4", "curve"),
    "data.path": ShownBy("tests/integration/test_train.py::test_resume_refuses_another_tokenizer"),
    "data.num_workers": Run("1", "workers"),
    "data.prefetch_factor": ShownBy(f"{OF_WORKERS}::test_prefetch_factor_is_how_far_ahead_a_worker_is_asked"),
    "data.persistent_workers": ShownBy(f"{OF_WORKERS}::test_persistent_workers_read_on"),
    "data.pin_memory": ShownBy(f"{OF_WORKERS}::test_pin_memory_is_for_gpus"),
    "data.mixture": ShownBy(
        "tests/integration/test_mixture_runs.py::test_the_report_and_the_validation_name_each_store"
    ),
    "data.window": Run("8", "batches"),
    "data.verify": ShownBy("tests/integration/test_commands.py::test_nan_latent_in_the_store_is_named"),
    "data.max_bad_samples": ShownBy("tests/data/test_damaged_store.py::test_a_run_says_what_it_leaves_out"),
    "data.worker_timeout_s": ShownBy("tests/data/test_workers.py::test_a_stopped_worker_ends_the_wait"),
    "model.depth": Run("1", "curve"),
    "model.width": Run("64", "curve"),
    "model.latent_width": Run("16", "curve"),
    "model.num_heads": Run("4", "curve"),
    "model.mlp": Run("gelu", "curve"),
    "model.mlp_ratio": Run("2", "curve"),
    "model.conditioning_width": Run("16", "curve"),
    "model.modulation_rank": Run("0", "curve"),
    "model.tie_embeddings": Run("false", "curve"),
    "model.rope_base": Run("10", "curve"),
    "model.dropout": Run("0.5", "curve"),
    "attention.backend": Run("math", "parts"),
    "memory.activation_checkpointing": Run("selective", "parts"),
    "memory.every_k": Run("3", "parts", RECOMPUTED),
    "memory.kept_blocks": Run("3", "parts", RECOMPUTED),
    "memory.keep_freed": ShownBy("tests/utils/test_malloc.py::test_a_run_does_what_keep_freed_says"),
    "compile.scope": ShownBy("tests/model/test_compile.py::test_without_a_compiler_the_reason_is_told"),
    "compile.mode": ShownBy("tests/model/test_compile.py::test_compile_mode_reaches_the_compiler"),
    "latent.process": Run("rectified_flow", "curve"),
    "latent.prediction": Run("v", "curve"),
    "latent.time_sampling": Run("logit_normal", "curve"),
    "latent.location": Run("1", "curve", ("latent.time_sampling=logit_normal",)),
    "latent.scale": Run("0.3", "curve", ("latent.time_sampling=logit_normal",)),
    "latent.mode_scale": Run("0.5", "curve", ("latent.time_sampling=mode",)),
    "latent.stratified": Run("false", "curve"),
    "text.time_sampling": Run("mode", "curve"),
    "text.mode_scale": Run("0.5", "curve", ("text.time_sampling=mode",)),
    "text.stratified": Run("false", "curve"),
    "text.masks": Run("exact", "curve"),
    "loss.huber_delta": Run("0.1", "curve", ("loss.latent=huber",)),
    "loss.latent_weighting": Run("uncertainty", "curve"),
    "loss.text_weight_limit": Run("1.5", "curve"),
    "loss.latent_time_weighting": Run("min_snr", "curve"),
    "loss.min_snr_gamma": Run("0.1", "curve", ("loss.latent_time_weighting=min_snr",)),
    "loss.label_smoothing": Run("0.3", "curve"),
    "loss.z_loss": Run("0.1", "curve"),
    "loss.text": Run("masked_mean", "curve"),
    "loss.latent": Run("mse", "curve"),
    "loss.latent_weight": Run("1", "curve"),
    "loss.length_weight": Run("1", "curve"),
    "optim.name": Run("muon", "curve"),
    "optim.lr": Run("1e-2", "curve"),
    "optim.betas": Run("[0.5, 0.5]", "curve"),
    "optim.eps": Run("1e-2", "curve"),
    "optim.weight_decay": Run("5", "curve"),
    "optim.fused": Run("false", "parts"),
    "optim.clip_norm": Run("0.01", "curve"),
    "optim.warmup_steps": Run("3", "curve"),
    "optim.warmup_bounds": Run("[3, 3]", "curve"),
    "optim.lr_scaling": Run("sqrt", "curve"),
    "optim.lr_reference_batch": Run("64", "curve", ("optim.lr_scaling=sqrt",)),
    "optim.muon.momentum": Run("0.5", "curve", MUON),
    "optim.muon.nesterov": Run("false", "curve", MUON),
    "optim.muon.ns_steps": Run("1", "curve", MUON),
    "schedule.lr": Run("linear", "curve", ("train.steps=5",)),
    "schedule.min_lr_ratio": Run("0.5", "curve"),
    "schedule.restart_period": Run("2", "curve", ("schedule.lr=cosine_restarts", "train.steps=5")),
    "schedule.decay_steps": Run("3", "curve", ("schedule.lr=wsd", "train.steps=5")),
    "schedule.patience": ShownBy(OF_PLATEAUS),
    "schedule.factor": ShownBy(OF_PLATEAUS),
    "schedule.min_lr": ShownBy(OF_PLATEAUS),
    "schedule.threshold": ShownBy(OF_PLATEAUS),
    "ema.decay": Run("0.9", "validation"),
    "ema.warmup": Run("false", "validation", AVERAGED),
    "ema.evaluate": Run("false", "validation", AVERAGED),
    "train.steps": Run("2", "records"),
    "train.global_batch_size": Run("4", "batches"),
    "train.micro_batch_size": Run("2", "batches"),
    "train.batch_schedule": Run("{1: {micro_batch_size: 4}}", "batches"),
    "train.auto_micro_batch": ShownBy(
        "tests/trainer/test_auto_batch_size.py::test_a_rank_without_memory_halves_all_ranks_micro_batches"
    ),
    "sampling.steps": Run("2", "texts", WRITTEN),
    "sampling.temperature": Run("0", "texts", WRITTEN),
    "sampling.top_p": Run("0.05", "texts", WRITTEN),
    "sampling.guidance": Run("9", "texts", WRITTEN),
    "sampling.decoding": Run("ancestral", "texts", WRITTEN),
    "sampling.remask": Run("1", "texts", WRITTEN),
    "sampling.latent_sampler": Run("euler", "latents"),
    "validation.every": Run("1", "records"),
    "validation.samples": Run("8", "validation"),
    "validation.text_samples": Run("1", "texts", WRITTEN),
    "validation.quality_every": Run("2", "records", ("validation.quality_samples=4",)),
    "validation.quality_samples": ShownBy("tests/evaluation/test_quality.py::test_quality_is_that_of_the_checkpoint"),
    "log.every": Run("2", "records"),
    "log.noise_levels": Run("2", "validation"),
    "log.tensorboard": Run("true", "files"),
    "log.figures_every": Run("0", "validation", DRAWN),
    "log.figure_samples": Run("3", "validation", DRAWN),
    "log.projector": Run("true", "files", DRAWN),
    "profile.steps": Run("[2, 2]", "files"),
    "profile.ranks": Run("[1]", "files", ("profile.steps=[2, 2]",)),
    "checkpoint.every_steps": Run("2", "files"),
    "checkpoint.every_minutes": Run("1e-9", "files"),
    "checkpoint.keep_last": Run("1", "files", OFTEN),
    "checkpoint.keep_steps": Run("[1]", "files"),
    "checkpoint.keep_every": Run("2", "files"),
    "checkpoint.keep_best": Run("1", "files", ("validation.every=1",)),
    "checkpoint.async": ShownBy("tests/trainer/test_checkpointer.py::test_beside_the_training_or_not_the_same_bytes"),
    "guard.nonfinite": Run("stop", "end", EXPLODING),
    "guard.max_consecutive": Run("2", "end", EXPLODING),
    "guard.grad_norm_spike": ShownBy("tests/trainer/test_step_guard.py::test_a_skipped_step_leaves_no_trace"),
    **dict.fromkeys(
        (
            "distributed.timeout_s",
            "distributed.heartbeat_timeout_s",
            "distributed.blocking_wait",
            "distributed.async_error_handling",
            "distributed.flight_recorder",
            "distributed.nccl",
            "distributed.ddp.find_unused_parameters",
            "distributed.ddp.gradient_as_bucket_view",
            "distributed.ddp.broadcast_buffers",
            "distributed.ddp.static_graph",
            "distributed.ddp.bucket_cap_mb",
        ),
        ShownBy(f"{OF_ENGINES}::test_ddp_settings_changed"),
    ),
    "distributed.allow_long_timeout": ShownBy(f"{OF_ENGINES}::test_138_days_when_they_are_wanted"),
    "distributed.ddp.comm_hook": ShownBy(f"{OF_ENGINES}::test_communication_hooks"),
    "distributed.ddp.powersgd_rank": ShownBy(f"{OF_ENGINES}::test_powersgd_rank_and_start_step_change_the_curve"),
    "distributed.ddp.powersgd_start_step": ShownBy(f"{OF_ENGINES}::test_powersgd_rank_and_start_step_change_the_curve"),
}
