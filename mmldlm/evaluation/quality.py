"""The part of the evaluation that goes with a training: what the run generates from a few held-out samples.

It needs no encoder and no other model, so that it runs wherever the training does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mmldlm.diffusion.noise import Mode, trained_modes
from mmldlm.distributed.collectives import Collectives
from mmldlm.evaluation.evaluator import Evaluation, EvaluationConfig, check_count
from mmldlm.evaluation.joint import frechet_metrics, variety
from mmldlm.evaluation.l2t import likeness
from mmldlm.evaluation.t2l import closeness
from mmldlm.run.load import LoadedRun

SEED = 20_260  # of all draws: every time in every run sees the same
BATCH = 16  # samples at a time, beside all that training holds


def quality(run: LoadedRun, ids: Sequence[int], processes: Collectives) -> dict[str, float]:
    """Collective: `quality/MODE_METRIC` of each trained mode, on the rows `ids` of the validation split.

    DataError where they are fewer than two.
    """
    config = EvaluationConfig("validation", samples=len(ids), texts=len(ids), seed=SEED, batch=BATCH)
    check_count(len(ids), config.split, run.store)
    evaluation = Evaluation(run, config, processes, ids)
    measure = {"l2t": _texts, "t2l": _latents, "joint": _both}
    modes: tuple[Mode, ...] = trained_modes(run.config.mode, run.config.mode_schedule)
    return {
        f"quality/{mode}_{key}": value
        for mode in modes
        for key, value in measure[mode](evaluation).items()
        if isinstance(value, float)
    }


def _texts(evaluation: Evaluation) -> dict[str, Any]:
    references = evaluation.decode(evaluation.tokens)
    found: dict[str, Any] = {}
    written = evaluation.write("l2t", "own", len(references), evaluation.run.config.sampling).tokens
    for suffix, tokens in (("", written), ("_unigram", evaluation.unigram_tokens(len(references)))):
        measured = likeness(tokens, evaluation.decode(tokens), evaluation.tokens, references)
        found |= {key + suffix: value for key, value in measured.items()}
    return found


def _latents(evaluation: Evaluation) -> dict[str, Any]:
    made = evaluation.write("t2l", "own", len(evaluation.ids), evaluation.run.config.sampling).latents
    return closeness(evaluation, evaluation.run.store.restore(made))


def _both(evaluation: Evaluation) -> dict[str, Any]:
    sampling = replace(evaluation.run.config.sampling, guidance=1.0)
    made = evaluation.write("joint", "none", len(evaluation.ids), sampling)
    found = variety(made.tokens) | {f"{key}_true": value for key, value in variety(evaluation.tokens).items()}
    return found | frechet_metrics(evaluation, made.latents)
