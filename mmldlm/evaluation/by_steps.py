"""`mmldlm evaluate --steps 1,2,4`: quality and speed of generation over the number of reverse steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mmldlm.diffusion.noise import Mode
from mmldlm.evaluation.evaluator import Condition, Evaluation
from mmldlm.evaluation.joint import diversity_metrics
from mmldlm.evaluation.l2t import reencoding_metrics, reference_metrics
from mmldlm.evaluation.t2l import latent_similarity_metrics

COLUMNS: dict[Mode, tuple[str, ...]] = {
    "l2t": ("bleu", "chrf", "exact_match", "token_accuracy", "reencoded_cosine", "token_entropy"),
    "t2l": ("cosine", "recall_at_1"),
    "joint": ("token_entropy", "distinct_2", "repetition_4", "reencoded_cosine"),
}


def steps_metrics(evaluation: Evaluation, modes: Sequence[Mode], steps: Sequence[int]) -> dict[str, Any]:
    """Return for each mode a row of metrics per number of reverse steps (collective).

    Texts are generated as for the metrics of the mode; `per_s` are samples per second of all processes.
    """
    return {mode: [_row(evaluation, mode, number) for number in steps] for mode in modes}


def _row(evaluation: Evaluation, mode: Mode, steps: int) -> dict[str, Any]:
    evaluation.progress.phase(f"{mode}, {steps} steps")
    run, count = evaluation.run, evaluation.num_texts
    condition: Condition = "none" if mode == "joint" else "own"
    sampling = replace(run.config.sampling, steps=steps, t2l_steps=steps)
    if mode == "t2l":
        count = len(evaluation.ids)
    elif mode == "joint":
        sampling = replace(sampling, guidance=1.0)
    start = time.perf_counter()
    generated = evaluation.generate(mode, condition, count, sampling)
    per_s = count / (time.perf_counter() - start)
    latents = run.store.restore(generated.latents)
    if mode == "t2l":
        metrics = latent_similarity_metrics(evaluation, latents)
    else:
        texts, tokens = evaluation.decode(generated.tokens), evaluation.tokens[:count]
        truth = latents if mode == "joint" else evaluation.raw_latents[:count]
        metrics = reencoding_metrics(evaluation.encode(texts), truth) | diversity_metrics(generated.tokens)
        metrics |= reference_metrics(generated.tokens, texts, tokens, evaluation.decode(tokens))
    return {"steps": steps, **{name: metrics[name] for name in COLUMNS[mode]}, "per_s": per_s}
