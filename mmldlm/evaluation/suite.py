"""`evaluate`: measure all metrics of the requested modes, in the order of `evaluation.json`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mmldlm.checkpoint.state import weights_hash
from mmldlm.diffusion.noise import Mode
from mmldlm.distributed.collectives import Collectives
from mmldlm.evaluation.changes import edit_metrics, interpolation_metrics
from mmldlm.evaluation.evaluator import Evaluation, EvaluationConfig
from mmldlm.evaluation.joint import joint_metrics
from mmldlm.evaluation.l2t import text_metrics
from mmldlm.evaluation.likelihood import likelihood_given_latents, likelihood_of_text
from mmldlm.evaluation.sts import read_pairs, sts_metrics, tokenize_sentences
from mmldlm.evaluation.t2l import latent_metrics
from mmldlm.loading.load import LoadedRun
from mmldlm.settings.declaration import dump
from mmldlm.utils.files import sha256
from mmldlm.utils.progress import Progress


def provenance(
    run: LoadedRun,
    config: EvaluationConfig,
    modes: Sequence[Mode] | None = None,
    sts_sha256: str | None = None,
) -> dict[str, Any]:
    """Identify the results of `evaluate` with these arguments by hashes of weights, data and options.

    Results with another provenance are never mistaken for these.
    """
    options = {
        **asdict(config),
        "modes": list(modes or run.config.trained_modes),
        **{key: value for key, value in dump(run.config).items() if key in ("sampling", "precision", "attention")},
        "sts": sts_sha256,
    }
    return {
        "step": run.step,
        "weights": run.weights,
        "weights_sha256": weights_hash(run.model),
        "run_id": run.info.get("run_id"),
        "data_manifest": run.store.identity,
        "options_sha256": hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest(),
    }


def evaluate(
    run: LoadedRun,
    config: EvaluationConfig,
    modes: Sequence[Mode] | None = None,
    sts: Path | None = None,
    processes: Collectives | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure a run on held-out documents (collective). All inputs are checked before anything is measured.

    Args:
        modes: The modes to measure, by default the ones that the run trained.
        sts: File of sentence pairs with scores. They add metrics of t2l, which must be in `modes`.
        processes: The ranks that share the work, by default only this process.
        progress: Reports the phases. By default it is silent.

    Returns:
        The content of `evaluation.json`, the same on every rank.
    """
    processes = processes or Collectives()
    trained = run.config.trained_modes
    modes = tuple(modes or trained)
    # An error on one rank must end all ranks, or the others would wait for it in a collective.
    with processes.raise_on_all_ranks("opening of the inputs"):
        progress = progress or Progress(enabled=False)
        progress.phase("opening documents and encoder")
        evaluation = Evaluation(run, config, processes, progress=progress)
        # Load these and tokenize the sentences now, so that errors come before all generations.
        _ = run.encoder, evaluation.given_latents("mean")
        pairs = read_pairs(sts) if sts else []
        tokenize_sentences(evaluation, pairs)
    pairs_hash = sha256(sts) if sts else None
    result: dict[str, Any] = {
        **provenance(run, config, modes, pairs_hash),
        **asdict(config),
        "documents": len(evaluation.ids),
        "modes_trained": list(trained),
        "modes": list(modes),
        **({"sts_sha256": pairs_hash} if sts else {}),
    }
    if "joint" in modes:
        result |= likelihood_of_text(evaluation)
    if "l2t" in modes:
        result["l2t"] = likelihood_given_latents(evaluation) | text_metrics(evaluation)
        result["edit"], result["interpolation"] = edit_metrics(evaluation), interpolation_metrics(evaluation)
    if "t2l" in modes:
        result["t2l"] = latent_metrics(evaluation)
        if pairs:
            result["t2l"] |= sts_metrics(evaluation, pairs)
    if "joint" in modes:
        result["joint"] = joint_metrics(evaluation)
    return result
