"""Advice on settings, which docs/settings.md shows after their descriptions.

Only settings where there is a choice to make and something is known about it: benchmarks/LOG.md, docs/performance.md.
"""

from __future__ import annotations

ADVICE = {
    "freeze": "Saves the gradients and moments of the frozen parts; a loss without trainable parameters is refused",
    "mode": "One mode if the task is known. Guidance, and texts without a latent, need a share of joint",
    "mode_schedule": "To learn one task before another; the loss curve jumps where the shares do",
    "precision": "bf16 on GPUs, fp16 on those too old for it. On a CPU without instructions for them, both are many "
    "times slower",
    "resume": "Leave it at auto: the same command then continues after any stop. never moves the run's checkpoints "
    "aside",
    "data.num_workers": "Raise it if speed/data_wait_s is not near 0; 0 helps to debug errors in loading",
    "data.window": "Lower it for a small store: in one window, samples of similar length meet again in each epoch",
    "data.verify": "sizes if a large store on a slow disk is opened often and was verified once",
    "model.depth": "Change it together with the width; configs/ has four sizes",
    "model.num_heads": "Heads of 64 channels are usual: width / 64",
    "model.latent_width": "The text's width if a text has many latent tokens; with one it would be wasted",
    "model.dropout": "For a small corpus that is read many times, if the held-out loss rises. The curve then depends "
    "on the number of processes",
    "memory.activation_checkpointing": "none as long as the micro-batch fits, then selective, then full: "
    "[performance.md](performance.md)",
    "memory.kept_blocks": "With full, raise it as far as memory allows: the activations of a kept block are not "
    "recomputed",
    "compile.scope": "For long runs. Also on CPUs with a C++ compiler: 1.15 x the speed in fp32, 1.3 x in bf16. "
    "Not under ZeRO-3",
    "latent.prediction": "x0 learns t2l within the first hundreds of steps; epsilon and v need longer runs",
    "loss.text": "elbo to compare bits per token; evaluation measures it in any case",
    "loss.latent": "cosine if only the direction of a latent matters, as in retrieval; mse if its length does",
    "loss.latent_weight": "Below 1 the cosine loss of t2l is negligible next to nats per token; 1 if only latents are "
    "trained, or the loss is mse",
    "optim.name": "adamw unless you compare optimizers; deepspeed_adam if an engine offloads the optimizer",
    "optim.lr": "The first setting to tune. Lower for larger models: configs/ has 1e-3 at 10 million parameters, 3e-4 "
    "at 386. Halve it if a run diverges",
    "optim.clip_norm": "Lower it to 0.5 if optim/grad_norm has peaks",
    "optim.warmup_steps": "Longer for a high learning rate or a large batch",
    "schedule.lr": "constant if the length of the run is not known yet: other schedules depend on train.steps",
    "train.steps": "With schedule.lr other than constant, choose it at the start",
    "train.global_batch_size": "Part of the method: another one needs another learning rate",
    "train.micro_batch_size": "Not part of the method: as large as memory allows; the curve does not change",
    "train.auto_micro_batch": "If the longest samples of a store are rare, and the run is unattended",
    "sampling.steps": "Time is proportional to it; many more steps than tokens to generate change little",
    "sampling.temperature": "Below 1 for small models: the quickstart has 0.6",
    "sampling.decoding": "confidence generates better texts from a latent; ancestral if samples should follow the "
    "likelihood, as in joint",
    "validation.text_samples": "For monitoring only, so with at most 8 reverse steps, or one for every four tokens of "
    "the longest text",
    "validation.every": "512 samples cost, for each trained mode, the forward passes of four steps of 128",
    "validation.quality_every": "64 samples cost, for each trained mode, sampling.steps forward passes each: with 32 "
    "and three modes about as much as 16 steps of 128, so every 2,000 steps under 1 %",
    "validation.quality_samples": "64 show a trend; to compare two runs, use `mmldlm evaluate`",
    "log.every": "On a GPU, each record forces a host-device synchronization: not below 10",
    "checkpoint.every_steps": "As much work as you can afford to lose; training continues during the write",
    "checkpoint.every_minutes": "If a scheduler ends jobs after a time, or steps are slow",
    "checkpoint.keep_best": "For runs that may overfit or diverge: each is a full checkpoint on disk",
    "guard.grad_norm_spike": "For runs that diverge now and then: 10. Costs a host-device synchronization in each step",
    "distributed.timeout_s": "Lower it to detect a hang sooner; it must exceed what one rank does alone, such as "
    "generating texts at a validation",
    "distributed.blocking_wait": "To find which collective hangs, not for training",
    "distributed.nccl": "NCCL_SOCKET_IFNAME if a node has several networks, NCCL_DEBUG: INFO to see what NCCL chose",
    "distributed.ddp.comm_hook": "Only if the exchange of gradients is the bottleneck: it changes the curve",
}
