"""Linear models of the bag of tokens. They know neither order nor context, so a trained network should beat them.

Shape letters: n documents, V vocabulary, M latent tokens, C latent channels, D = M C features, b documents of a
mini-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mmldlm.data.nearest import draw_samples, sparse_counts
from mmldlm.data.ridge import ridge, with_bias
from mmldlm.evaluation.evaluator import Evaluation

MAX_SAMPLES = 20_000  # a control is fitted on this many random training samples
VALIDATION_SAMPLES = 1000  # this many validation samples decide when to stop fitting
EPOCHS, BATCH, LEARNING_RATE = 20, 128, 5e-3


def bag_of_words_nats(evaluation: Evaluation) -> np.ndarray:
    """Return the nats of each document under a log-linear model of its tokens given its latent (collective).

    Each token is drawn independently from softmax(W z + b), where z is the standardized latent. The model is fitted to
    training samples with Adam until the likelihood of validation samples falls. Returns float64 [n].
    """
    nats = np.zeros(len(evaluation.ids))
    with evaluation.processes.raise_on_all_ranks("bag of words given the latent"):
        if evaluation.processes.rank == 0:
            own = torch.from_numpy(evaluation.latents["own"]).flatten(1)
            nats += _token_nats(_fit_log_linear(evaluation), own, _counts(evaluation.tokens, evaluation)).numpy()
    return evaluation.sum_over_ranks(nats)


def ridge_latents(evaluation: Evaluation) -> np.ndarray:
    """Predict latents from token counts by ridge regression (collective).

    Returns float32 [n, M, C] on the encoder's scale.
    """
    predicted = np.zeros(evaluation.raw_latents.shape)
    with evaluation.processes.raise_on_all_ranks("ridge regression of the latent"):
        if evaluation.processes.rank == 0:
            tokens, latents = _draw(evaluation, "train", MAX_SAMPLES)
            weights = ridge(with_bias(_counts(tokens, evaluation)), latents.double())
            predicted += (with_bias(_counts(evaluation.tokens, evaluation)) @ weights).view(predicted.shape).numpy()
    return evaluation.run.store.restore(evaluation.sum_over_ranks(predicted).astype(np.float32))


def _draw(evaluation: Evaluation, split_name: str, count: int) -> tuple[list[np.ndarray], Tensor]:
    """Draw up to `count` samples of a split. Return their tokens and standardized latents [n, D]."""
    split = evaluation.good_split(split_name)
    drawn = np.sort(draw_samples(split, count, np.random.default_rng(evaluation.config.seed)))
    _, texts, latents = split.samples(drawn)
    return texts, torch.from_numpy(evaluation.run.store.standardize(latents)).flatten(1)


def _counts(tokens: Sequence[Sequence[int] | np.ndarray], evaluation: Evaluation) -> Tensor:
    return sparse_counts(tokens, evaluation.run.store.manifest.vocab_size)


def _fit_log_linear(evaluation: Evaluation) -> tuple[Tensor, Tensor]:
    """Fit `bag_of_words_nats`. Return the weights [D, V] and biases [V] with the best validation likelihood."""
    tokens, latents = _draw(evaluation, "train", MAX_SAMPLES)
    held_tokens, held_latents = _draw(evaluation, "validation", VALIDATION_SAMPLES)
    counts, held_counts = _counts(tokens, evaluation), _counts(held_tokens, evaluation)
    frequencies = torch.from_numpy(evaluation.token_counts).double() + 1
    bias = (frequencies / frequencies.sum()).log().float()
    weights = torch.zeros(latents.shape[1], len(bias))
    generator = torch.Generator().manual_seed(evaluation.config.seed)
    parameters = [weights.requires_grad_(), bias.requires_grad_()]
    optimizer = torch.optim.Adam(parameters, LEARNING_RATE)
    best, best_nats = (weights.detach().clone(), bias.detach().clone()), float("inf")
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(latents), generator=generator).split(BATCH):
            optimizer.zero_grad()
            part = counts.index_select(0, rows).float()
            (_log_linear_nats((weights, bias), latents[rows], part).sum() / part.sum()).backward()
            optimizer.step()
        fitted = weights.detach().clone(), bias.detach().clone()
        nats = float(_token_nats(fitted, held_latents, held_counts).sum())
        if nats >= best_nats:
            break
        best, best_nats = fitted, nats
    return best


def _log_linear_nats(model: tuple[Tensor, Tensor], latents: Tensor, counts: Tensor) -> Tensor:
    """Return the nats of each token occurrence in b texts. `counts` is sparse [b, V]."""
    log_p = F.log_softmax(latents @ model[0] + model[1], -1)
    rows, columns = counts.coalesce().indices()
    return -log_p[rows, columns] * counts.coalesce().values()


def _token_nats(model: tuple[Tensor, Tensor], latents: Tensor, counts: Tensor) -> Tensor:
    """Return the nats of each text, float64 [n]."""
    nats = torch.zeros(len(latents), dtype=torch.float64)
    for rows in torch.arange(len(latents)).split(BATCH):
        part = counts.index_select(0, rows).coalesce()
        nats.index_add_(0, rows[part.indices()[0]], _log_linear_nats(model, latents[rows], part).double())
    return nats
