"""When a setting matters, and what to choose: sentences that docs/settings.md has behind its meaning.

Only where there is a choice to make, and something is known of it: benchmarks/LOG.md, docs/performance.md.
"""

from __future__ import annotations

ADVICE = {
    "freeze": "Saves the gradients and moments of what is frozen; a loss with nothing left to train is refused",
    "mode": "One mode where the job is known. Guidance, and texts without a latent, need a share of joint",
    "mode_schedule": "Where one job is to be learned before another; the curve jumps where the shares do",
    "precision": "bf16 on GPUs, fp16 on those too old for it. On a CPU without instructions for them, both are many "
    "times slower",
    "resume": "Leave auto: the same command then goes on after any stop. never moves the run's checkpoints aside",
    "data.num_workers": "Raise it where speed/data_wait_s is not near 0; 0 helps to see an error where it happens",
    "data.window": "Lower it for a small store: in one window, samples of like length meet again in each epoch",
    "data.verify": "sizes where a large store on a slow disk is started often, and was verified once",
    "model.depth": "Change it together with the width; configs/ has four sizes",
    "model.num_heads": "Heads of 64 channels are usual: width / 64",
    "model.latent_width": "The text's width where a text has many latent vectors; with one, it would lie idle",
    "model.dropout": "For a small corpus that is read many times, where the held-out loss rises. The curve then "
    "depends on the number of processes",
    "memory.activation_checkpointing": "none as long as the micro-batch fits, then selective, then full: "
    "[performance.md](performance.md)",
    "memory.kept_blocks": "With full, raise it as far as the memory goes: a block that is kept is not computed twice",
    "compile.scope": "For long runs. Also on CPUs, given a C++ compiler: 1.15 x the speed in fp32, 1.3 x in bf16. "
    "Not under ZeRO-3",
    "latent.prediction": "x0 learns t2l within the first hundreds of steps; epsilon and v need longer runs",
    "loss.text": "elbo where bits per token are to be compared; it is what evaluation measures in any case",
    "loss.latent": "cosine where only the direction of a latent counts, as in retrieval; mse where its length does",
    "loss.latent_weight": "Below 1 the cosine loss of t2l drowns beside nats per token; 1 where latents alone are "
    "trained, or where the loss is mse",
    "optim.name": "adamw unless you compare; deepspeed_adam where an engine offloads the optimizer",
    "optim.lr": "The first thing to tune. Lower for larger models: configs/ has 1e-3 at 10 million parameters, 3e-4 at "
    "386. Halve it where a run diverges",
    "optim.clip_norm": "Lower it to 0.5 where optim/grad_norm has peaks",
    "optim.warmup_steps": "Longer for a high learning rate or a large batch",
    "schedule.lr": "constant where it is not known yet how long the run will be: a course over train.steps is another "
    "one with more steps",
    "train.steps": "With schedule.lr other than constant, choose it at the start",
    "train.global_batch_size": "Part of the method: another one wants another learning rate",
    "train.micro_batch_size": "No part of the method: as large as memory allows; the curve stays",
    "train.auto_micro_batch": "Where the longest samples of a store are rare, and nobody will be there when they come",
    "sampling.steps": "Time grows with them; many more than there are tokens to write change little",
    "sampling.temperature": "Below 1 for small models: the quickstart has 0.6",
    "sampling.decoding": "confidence writes better texts from a latent; ancestral where samples are to follow the "
    "likelihood, as in joint",
    "validation.text_samples": "Looked at in passing, so with at most 8 reverse steps, or one for each four tokens "
    "of the longest",
    "validation.every": "512 samples cost, for each trained mode, the forward passes of four steps of 128",
    "validation.quality_every": "64 samples cost, for each trained mode, as many of their forward passes as there are "
    "sampling.steps: with 32 and three modes about what 16 steps of 128 do, so every 2,000 steps under 1 %",
    "validation.quality_samples": "64 tell a trend; of two runs, compare `mmldlm evaluate`",
    "log.every": "On a GPU, each record is a wait for the device: not below 10",
    "checkpoint.every_steps": "As much work as you are ready to lose; writing goes on beside the training",
    "checkpoint.every_minutes": "Where a scheduler ends jobs after a time, or steps take long",
    "checkpoint.keep_best": "For runs that may overfit or diverge: each is a whole checkpoint on disk",
    "guard.grad_norm_spike": "For runs that diverge now and then: 10. Costs a wait for the GPU in each step",
    "distributed.timeout_s": "Lower it where a hang should be told soon; longer than what one rank does alone, such as "
    "texts at a validation",
    "distributed.blocking_wait": "For finding which collective hangs, not for training",
    "distributed.nccl": "NCCL_SOCKET_IFNAME where a node has several networks, NCCL_DEBUG: INFO to see what NCCL chose",
    "distributed.ddp.comm_hook": "Only where the exchange of gradients is the bottleneck: it changes the curve",
}
