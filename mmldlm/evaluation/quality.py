"""The part of the evaluation that runs during training: metrics of generations for a few held-out samples.

It needs no encoder or other model, so it runs wherever the training runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mmldlm.distributed.collectives import Collectives
from mmldlm.evaluation.evaluator import Evaluation, EvaluationConfig, check_num_samples
from mmldlm.evaluation.joint import diversity_metrics, frechet_metrics
from mmldlm.evaluation.l2t import reference_metrics
from mmldlm.evaluation.t2l import latent_similarity_metrics
from mmldlm.loading.load import LoadedRun

SEED = 20_260  # seed of all draws: the same at every step of every run
BATCH = 16  # samples per micro-batch, kept small because the training's memory is still in use


def quality(run: LoadedRun, ids: Sequence[int], processes: Collectives) -> dict[str, float]:
    """Return `quality/MODE_METRIC` for each trained mode, on the samples `ids` of the validation split (collective).

    Raises:
        DataError: There are fewer than two samples.
    """
    config = EvaluationConfig("validation", samples=len(ids), texts=len(ids), seed=SEED, batch=BATCH)
    check_num_samples(len(ids), config.split, run.store)
    evaluation = Evaluation(run, config, processes, ids)
    measure = {"l2t": _l2t, "t2l": _t2l, "joint": _joint}
    return {
        f"quality/{mode}_{key}": value
        for mode in run.config.trained_modes
        for key, value in measure[mode](evaluation).items()
        # Leave out counts, intervals, and metrics that cannot be measured (None).
        if isinstance(value, float)
    }


def _l2t(evaluation: Evaluation) -> dict[str, Any]:
    references = evaluation.decode(evaluation.tokens)
    metrics: dict[str, Any] = {}
    sampling = replace(evaluation.run.config.sampling, tried_lengths=1)  # each further length would multiply the passes
    generated = evaluation.generate("l2t", "own", len(references), sampling, "likelihood").tokens
    for suffix, tokens in (("", generated), ("_unigram", evaluation.unigram_tokens(len(references)))):
        compared = tokens, evaluation.decode(tokens), evaluation.tokens, references
        measured = reference_metrics(*compared, evaluation.run.config.evaluation.bleu_tokenize)
        metrics |= {key + suffix: value for key, value in measured.items()}
    return metrics


def _t2l(evaluation: Evaluation) -> dict[str, Any]:
    latents = evaluation.generate("t2l", "own", len(evaluation.ids), evaluation.run.config.sampling).latents
    return latent_similarity_metrics(evaluation, evaluation.run.store.restore(latents))


def _joint(evaluation: Evaluation) -> dict[str, Any]:
    generated = evaluation.generate("joint", "none", len(evaluation.ids), evaluation.run.config.sampling)
    metrics = diversity_metrics(generated.tokens)
    metrics |= {f"{key}_true": value for key, value in diversity_metrics(evaluation.tokens).items()}
    return metrics | frechet_metrics(evaluation, generated.latents)
