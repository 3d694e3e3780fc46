"""What figures, histograms and tables of texts show of a few held-out samples: the same on any number of ranks.

What is generated here is looked at in passing, and costs a training more than all else that it shows. So the reverse
processes have no more steps than can be seen; those of `mmldlm sample` and `mmldlm evaluate` have `sampling.steps`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from mmldlm.batch import Batch
from mmldlm.config import RunConfig
from mmldlm.data.nearest import directions
from mmldlm.data.store import Store
from mmldlm.diffusion.noise import trained_modes
from mmldlm.diffusion.sampling import SamplingConfig
from mmldlm.distributed.collectives import Collectives
from mmldlm.evaluation.evaluator import Evaluation, EvaluationConfig
from mmldlm.evaluation.statistics import ranks_of_own
from mmldlm.evaluation.validate import SEED, validation_ids
from mmldlm.run.load import LoadedRun
from mmldlm.telemetry.figure_data import FigureData

SPLIT = "validation"
AT_ONCE, TOKENS_AT_ONCE = 16, 2048  # samples and tokens of a forward pass: its logits are all there at once
MADE = 8  # latents from noise: with each of them a text is written, which is dear
# Reverse steps, at most: latents of more than eight lie in the same place (a cosine of 0.995 to those of 32), and texts
# of which a step writes four tokens are as near to their references as those of more steps.
STEPS, TOKENS_A_STEP = 8, 4


def figures_due(step: int, config: RunConfig) -> bool:
    """Whether the validation after optimizer step `step` comes with pictures: a function of the step alone."""
    every = config.log.figures_every
    if not config.log.tensorboard or not every:
        return False
    before = (step - 1) // config.validation.every * config.validation.every  # the validation before this one
    return step == config.train.steps or step // every > before // every


def quality_of(pictures: FigureData) -> dict[str, float]:
    """Of these few samples; `validation.quality_every` measures what is generated from more, under other names."""
    values: dict[str, float] = {}
    if pictures.hits is not None:
        values["quality/figures_l2t_first_guess_accuracy"] = float(pictures.hits[0].sum() / pictures.hits[1].sum())
    if pictures.similarity is not None:
        own = pictures.similarity.diagonal()
        rank = ranks_of_own(pictures.similarity)
        values["quality/figures_t2l_cosine"] = float(own.mean())
        values["quality/figures_t2l_recall_at_1"] = float((rank <= 1).mean())
    return values


def collect_figure_data(run: LoadedRun, processes: Collectives) -> FigureData:
    """Collective: of `log.figure_samples`, in the modes that the run trains."""
    config = run.config
    evaluation = _evaluation(run, config.log.figure_samples, processes)
    trained, count = trained_modes(config.mode, config.mode_schedule), len(evaluation.ids)
    likely, hits = _guesses(evaluation) if "l2t" in trained else (None, None)
    found = evaluation.write("t2l", "own", count, _brief(config.sampling, 0)).latents if "t2l" in trained else None
    similarity = None if found is None else directions(run.store.restore(found)) @ directions(evaluation.raw_latents).T
    made: np.ndarray | None = None
    written: list[list[int]] = []
    if "joint" in trained:
        few = min(count, max(MADE, config.validation.text_samples))
        sampling = replace(config.sampling, guidance=1.0)
        joint = evaluation.write("joint", "none", few, _brief(sampling, int(evaluation.lengths[:few].max())))
        made, written = _flat(joint.latents), joint.tokens
    return FigureData(
        tokens=[np.array(tokens) for tokens in evaluation.tokens],
        truth=_flat(evaluation.latents["own"]),
        found=None if found is None else _flat(found),
        made=made,
        written=written,
        similarity=similarity,
        likely_lengths=likely,
        hits=hits,
    )


def text_samples(
    run: LoadedRun, processes: Collectives, pictures: FigureData | None
) -> dict[str, list[dict[str, str]]]:
    """Collective: by tag, a few texts that the run writes, each beside one to compare it with.

    In l2t that is the document whose latent it was given. Where there are `pictures`, also texts that came out of noise
    with their latents: each beside the held-out document whose latent is nearest to its own.
    """
    config, count = run.config, run.config.validation.text_samples
    if not config.log.tensorboard or not count:
        return {}
    found: dict[str, list[dict[str, str]]] = {}
    if "l2t" in trained_modes(config.mode, config.mode_schedule):
        evaluation = _evaluation(run, count, processes)
        sampling = _brief(config.sampling, int(evaluation.lengths.max()))
        written = evaluation.write("l2t", "own", len(evaluation.ids), sampling).tokens
        pairs = zip(evaluation.decode(evaluation.tokens), evaluation.decode(written), strict=True)
        found["samples/l2t"] = [{"reference": reference, "generation": text} for reference, text in pairs]
    if pictures is not None and pictures.made is not None:
        rows = _nearest(pictures.made[:count], run.store, config.validation.samples)
        split = run.store.split(SPLIT)
        nearest = run.tokenizer.decode_batch([split.tokens(row).tolist() for row in rows])
        pairs = zip(nearest, run.tokenizer.decode_batch(pictures.written[:count]), strict=True)
        found["samples/joint"] = [
            {"held-out text of the nearest latent": text, "generation": written} for text, written in pairs
        ]
    return found


def _brief(sampling: SamplingConfig, longest: int) -> SamplingConfig:
    """With few enough steps to be looked at; `longest`: tokens that are to be written, of one text."""
    return replace(sampling, steps=min(sampling.steps, max(STEPS, -(-longest // TOKENS_A_STEP))))


def _evaluation(run: LoadedRun, count: int, processes: Collectives) -> Evaluation:
    """Of the first `count` samples of every validation's draw."""
    split = run.store.split(SPLIT)
    ids = validation_ids(split, count)
    longest = int(split.lengths[np.asarray(ids, np.int64)].max())
    batch = max(1, min(AT_ONCE, TOKENS_AT_ONCE // longest))
    return Evaluation(run, EvaluationConfig(SPLIT, seed=SEED, batch=batch), processes, ids)


def _guesses(evaluation: Evaluation) -> tuple[np.ndarray, np.ndarray]:
    """Collective: from latents alone, in one pass, the likeliest length of each sample [n] and, by position, how many
    of the likeliest tokens are the true ones, of how many [2, longest]."""
    likely, hits = np.zeros(len(evaluation.ids)), np.zeros((2, evaluation.lengths.max()))
    for counted, batch in evaluation.batches("own"):
        lengths, right = _guess(evaluation.run, batch)
        if counted:
            likely[batch.slots.numpy()] = lengths
            position = batch.layout.position.numpy()
            np.add.at(hits[0], position, right.numpy())
            np.add.at(hits[1], position, 1)
    return evaluation.pooled(likely).astype(np.int64), evaluation.pooled(hits)


def _guess(run: LoadedRun, batch: Batch) -> tuple[Tensor, Tensor]:
    """The likeliest length [B], and whether the likeliest token is the true one [N]; on the host."""
    layout, device = batch.layout, run.device
    masked = torch.full((layout.num_tokens,), run.objective.text.mask_id, device=device)
    t_text = torch.ones(layout.num_samples, device=device)
    positions = torch.arange(layout.num_tokens, device=device)
    logits, _, lengths, *_ = run.model(
        masked, batch.latents.to(device), t_text, torch.zeros_like(t_text), layout.to(device), positions, None
    )
    return lengths.argmax(-1).cpu() + 1, logits.argmax(-1).cpu() == batch.tokens


def _nearest(latents: np.ndarray, store: Store, count: int) -> list[int]:
    """For each of the standardized `latents` [n, D] that of `count` held-out rows whose latent is nearest."""
    split = store.split(SPLIT)
    ids = validation_ids(split, count)
    candidates = directions(store.standardize(split.gather(np.asarray(ids, np.int64))[2]))
    return [ids[place] for place in (latents @ candidates.T).argmax(1)]


def _flat(latents: np.ndarray) -> np.ndarray:
    return latents.reshape(len(latents), -1)
