"""The data behind figures, histograms and text tables of a few held-out samples, equal on any number of ranks.

These generations are only for monitoring, and cost more than everything else that a run logs. So we do not take more
reverse steps than make a visible difference. `mmldlm sample` and `mmldlm evaluate` use `sampling.steps`.

Shape letters: n samples, B samples and N tokens of a micro-batch, D = M x C numbers of a latent.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from mmldlm.config import RunConfig
from mmldlm.data.nearest import unit_vectors
from mmldlm.data.store import Store
from mmldlm.diffusion.sampling import SamplingConfig
from mmldlm.distributed.collectives import Collectives
from mmldlm.evaluation.evaluator import Evaluation, EvaluationConfig
from mmldlm.evaluation.statistics import retrieval_ranks
from mmldlm.evaluation.validate import SEED, validation_ids
from mmldlm.loading.load import LoadedRun
from mmldlm.telemetry.figures import FigureData

SPLIT = "validation"
# Limits of samples and tokens in a forward pass, because all its logits are in memory at once.
MAX_BATCH_SAMPLES, MAX_BATCH_TOKENS = 16, 2048
NUM_JOINT_SAMPLES = 8  # each takes a latent and a text, which is expensive
# Limits of the reverse steps. More than eight steps do not change the latents visibly (cosine of 0.995 to 32 steps),
# and texts with four tokens per step are as close to their references as texts with fewer tokens per step.
MAX_STEPS, TOKENS_PER_STEP = 8, 4


def figures_due(step: int, config: RunConfig) -> bool:
    """Return whether the validation after optimizer step `step` draws figures. This depends only on the step."""
    every = config.log.figures_every
    if not config.log.tensorboard or not every:
        return False
    # The previous validation, or an earlier one.
    previous = (step - 1) // config.validation.every * config.validation.every
    # True if a multiple of `every` lies after the previous validation, up to this one.
    return step == config.train.steps or step // every > previous // every


def figure_metrics(data: FigureData) -> dict[str, float]:
    """Return the metrics of the few generations for figures.

    `validation.quality_every` measures more samples, under other names.
    """
    values: dict[str, float] = {}
    if data.token_hits is not None:
        hits, tokens = data.token_hits
        values["quality/figures_l2t_first_guess_accuracy"] = float(hits.sum() / tokens.sum())
    if data.similarity is not None:
        own = data.similarity.diagonal()
        rank = retrieval_ranks(data.similarity)
        values["quality/figures_t2l_cosine"] = float(own.mean())
        values["quality/figures_t2l_recall_at_1"] = float((rank <= 1).mean())
    return values


def collect_figure_data(run: LoadedRun, processes: Collectives) -> FigureData:
    """Generate for `log.figure_samples` held-out samples, in the modes that the run trains (collective)."""
    config = run.config
    evaluation = small_evaluation(run, config.log.figure_samples, processes)
    trained, count = config.trained_modes, len(evaluation.ids)
    likeliest_lengths, token_hits = _first_guesses(evaluation) if "l2t" in trained else (None, None)
    t2l_latents: np.ndarray | None = None
    similarity: np.ndarray | None = None
    if "t2l" in trained:
        latents = evaluation.generate("t2l", "own", count, cap_steps(config.sampling, 0)).latents
        similarity = unit_vectors(run.store.restore(latents)) @ unit_vectors(evaluation.raw_latents).T
        t2l_latents = _flat(latents)
    joint_latents: np.ndarray | None = None
    joint_tokens: list[list[int]] = []
    if "joint" in trained:
        # Generate enough for the table of texts, too: it shows the same generations.
        joint_count = min(count, max(NUM_JOINT_SAMPLES, config.validation.text_samples))
        sampling = cap_steps(config.sampling, int(evaluation.lengths[:joint_count].max()))
        joint = evaluation.generate("joint", "none", joint_count, sampling)
        joint_latents, joint_tokens = _flat(joint.latents), joint.tokens
    return FigureData(
        tokens=[np.array(tokens) for tokens in evaluation.tokens],
        true_latents=_flat(evaluation.latents["own"]),
        t2l_latents=t2l_latents,
        joint_latents=joint_latents,
        joint_tokens=joint_tokens,
        similarity=similarity,
        likeliest_lengths=likeliest_lengths,
        token_hits=token_hits,
    )


def text_samples(run: LoadedRun, processes: Collectives, data: FigureData | None) -> dict[str, list[dict[str, str]]]:
    """Return, by tag, rows of a few generated texts and a held-out text to compare each with (collective).

    In l2t, the reference is the document of the latent. With figure `data`, the joint generations follow, each with the
    held-out document whose latent is nearest to the generated one.
    """
    config, count = run.config, run.config.validation.text_samples
    if not config.log.tensorboard or not count:
        return {}
    tables: dict[str, list[dict[str, str]]] = {}
    if "l2t" in config.trained_modes:
        evaluation = small_evaluation(run, count, processes)
        sampling = replace(cap_steps(config.sampling, int(evaluation.lengths.max())), tried_lengths=1)
        tokens = evaluation.generate("l2t", "own", len(evaluation.ids), sampling, "likelihood").tokens
        pairs = zip(evaluation.decode(evaluation.tokens), evaluation.decode(tokens), strict=True)
        tables["samples/l2t"] = [{"reference": reference, "generation": text} for reference, text in pairs]
    if data is not None and data.joint_latents is not None:
        ids = _nearest(data.joint_latents[:count], run.store, config.validation.samples)
        split = run.store.split(SPLIT)
        nearest = run.tokenizer.decode_batch([split.tokens(index).tolist() for index in ids])
        pairs = zip(nearest, run.tokenizer.decode_batch(data.joint_tokens[:count]), strict=True)
        tables["samples/joint"] = [
            {"held-out text of the nearest latent": reference, "generation": text} for reference, text in pairs
        ]
    return tables


def cap_steps(sampling: SamplingConfig, max_length: int) -> SamplingConfig:
    """Return the settings with fewer steps, but enough for texts of `max_length` tokens."""
    return replace(sampling, steps=min(sampling.steps, max(MAX_STEPS, -(-max_length // TOKENS_PER_STEP))))


def small_evaluation(run: LoadedRun, count: int, processes: Collectives) -> Evaluation:
    """Return an evaluation of the first `count` samples that each validation draws."""
    split = run.store.split(SPLIT)
    ids = validation_ids(split, count)
    max_length = int(split.lengths[np.asarray(ids, np.int64)].max())
    batch = max(1, min(MAX_BATCH_SAMPLES, MAX_BATCH_TOKENS // max_length))
    return Evaluation(run, EvaluationConfig(SPLIT, seed=SEED, batch=batch), processes, ids)


@torch.no_grad()
def _first_guesses(evaluation: Evaluation) -> tuple[np.ndarray, np.ndarray]:
    """Predict lengths and tokens from the latents alone, in one pass (collective).

    Return each sample's likeliest length [n], and by position the numbers of right tokens and of tokens [2, longest].
    """
    run, device = evaluation.run, evaluation.run.device
    likeliest_lengths, token_hits = np.zeros(len(evaluation.ids)), np.zeros((2, evaluation.lengths.max()))
    for counted, batch in evaluation.batches("own"):
        layout = batch.layout
        # t_text = 1 and t_latent = 0: the whole text is masked and the latent is clean.
        is_text, text_lengths = run.objective.text.find_texts(batch.tokens, layout)
        masked = batch.tokens.masked_fill(is_text, run.objective.text.mask_id).to(device)
        t_text, places = torch.ones(layout.num_samples, device=device), is_text.nonzero().squeeze(1)
        positions = places.to(device)
        given = masked, batch.latents.to(device), t_text, torch.zeros_like(t_text), layout.to(device), positions, None
        logits, _, lengths, *_ = run.model(*given)
        if counted:
            position = np.concatenate([np.arange(length) for length in text_lengths.tolist()])
            np.add.at(token_hits[0], position, (logits.argmax(-1).cpu() == batch.tokens[places]).numpy())
            np.add.at(token_hits[1], position, 1)
            # The first class of the length head is one token.
            likeliest_lengths[batch.slots.numpy()] = lengths.argmax(-1).cpu() + 1
    return evaluation.sum_over_ranks(likeliest_lengths).astype(np.int64), evaluation.sum_over_ranks(token_hits)


def _nearest(latents: np.ndarray, store: Store, count: int) -> list[int]:
    """For each of the standardized `latents` [n, D], return the index of the nearest of `count` held-out samples."""
    split = store.split(SPLIT)
    ids = validation_ids(split, count)
    candidates = unit_vectors(store.standardize(split.gather(np.asarray(ids, np.int64))[2]))
    # The norm of a query does not change which candidate is nearest.
    return [ids[index] for index in (latents @ candidates.T).argmax(1)]


def _flat(latents: np.ndarray) -> np.ndarray:
    return latents.reshape(len(latents), -1)
