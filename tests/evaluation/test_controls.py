"""Likelihood by confidence, lengths, linear controls and similarity to training texts, against plain references."""

from __future__ import annotations

import math
from dataclasses import replace
from difflib import SequenceMatcher
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.common.store_writer import StoreWriter
from mmldlm.batch import PackedLayout
from mmldlm.data.encoders import ChunkedEncoder, LsaEncoder, load_encoder
from mmldlm.data.store import Store
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.evaluation import Evaluation, EvaluationConfig
from mmldlm.evaluation.controls import bag_of_words_nats, ridge_latents
from mmldlm.evaluation.evaluator import Condition
from mmldlm.evaluation.likelihood import (
    MAX_ORDERED_TOKENS,
    confidence_nats,
    likelihood_given_latents,
    likelihood_of_text,
    text_bound,
)
from mmldlm.evaluation.statistics import BITS
from mmldlm.evaluation.t2l import latent_metrics, latent_similarity_metrics
from mmldlm.loading.load import LoadedRun
from tests.helpers.known_runs import fresh_run, perfect_run

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def fresh(tiny_store: Path) -> LoadedRun:
    return fresh_run(tiny_store)


class Independent(torch.nn.Module):
    """Gives each token a fixed probability, whatever is known; `seen` are the last latents."""

    def __init__(self, vocab_size: int):
        super().__init__()
        self.logits = torch.linspace(0, 3, vocab_size)

    def forward(self, tokens, latents, t_text, t_latent, layout, positions, targets=None):  # type: ignore[no-untyped-def]
        self.seen = latents
        found = self.logits.expand(len(positions), -1) if targets is None else -self.logits.log_softmax(0)[targets]
        return found, latents, torch.zeros(len(latents), 32)


def test_likelihood_by_confidence_is_that_of_independent_tokens(fresh: LoadedRun) -> None:
    model = Independent(fresh.store.manifest.vocab_size)
    evaluation = Evaluation(replace(fresh, model=model), EvaluationConfig(texts=20, batch=7))
    log_p = model.logits.double().log_softmax(0)
    expected = [-float(log_p[text].sum()) for text in evaluation.tokens[:20]]
    for condition in ("own", "none"):
        assert confidence_nats(evaluation, condition) == pytest.approx(expected)


@pytest.mark.parametrize("condition", ["own", "none"])
def test_likelihood_by_confidence_follows_the_order_of_confidence(condition: Condition, tiny_store: Path) -> None:
    """One document at a time, by the words of the definition; under `none` all documents get their own noise."""
    run = fresh_run(tiny_store)
    with torch.no_grad():
        for parameter in run.model.parameters():  # an untrained network is equally sure of all places
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
    evaluation = Evaluation(run, EvaluationConfig(texts=6))
    found = confidence_nats(evaluation, condition)
    if condition == "none":
        assert found != pytest.approx(confidence_nats(evaluation, "own"))
        return
    mask_id = run.store.manifest.mask_id
    for index in range(6):
        truth, latents = evaluation.tokens[index], torch.from_numpy(evaluation.latents["own"][index : index + 1])
        tokens, nats, order = [mask_id] * len(truth), 0.0, []
        while mask_id in tokens:
            masked = [place for place, token in enumerate(tokens) if token == mask_id]
            time = torch.tensor([len(masked) / len(truth)])
            layout = PackedLayout((len(truth),), latents.shape[1])
            with torch.no_grad():
                logits, *_ = run.model(
                    torch.tensor(tokens), latents, time, torch.zeros(1), layout, torch.tensor(masked), None
                )
            p = logits.double().softmax(-1)
            row = int(p.amax(-1).argmax())
            nats -= math.log(float(p[row, truth[masked[row]]]))
            tokens[masked[row]] = truth[masked[row]]
            order.append(masked[row])
        assert found[index] == pytest.approx(nats, rel=1e-5)
        assert len(truth) < 3 or order != sorted(order) or index  # the order is not always that of the text


def test_likelihood_by_confidence_and_what_stands_beside_it_is_of_short_documents(
    fresh: LoadedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Independent(fresh.store.manifest.vocab_size)
    evaluation = Evaluation(replace(fresh, model=model), EvaluationConfig(texts=20))
    lengths = evaluation.lengths[:20]
    limit = int(np.median(lengths))
    assert limit < MAX_ORDERED_TOKENS
    short = np.flatnonzero(lengths <= limit)
    nats = confidence_nats(evaluation, "own", limit)
    assert np.flatnonzero(np.isfinite(nats)).tolist() == short.tolist()
    monkeypatch.setattr("mmldlm.evaluation.likelihood.MAX_ORDERED_TOKENS", limit)
    result, tokens = likelihood_given_latents(evaluation), lengths[short].sum()
    assert result["confidence_documents"] == len(short)
    assert result["bits_per_token_by_confidence_up_to_64"] == pytest.approx(nats[short].sum() / tokens * BITS)
    bound = text_bound(evaluation, "own").nats[short].sum() / tokens * BITS
    assert result["bits_per_token_by_confidence_up_to_64_bound"] == pytest.approx(bound)
    # The model's length logits are all zero, of 32 lengths.
    assert result["length_bits_per_token_up_to_64"] == pytest.approx(len(short) * 5 / tokens)


def test_a_perfect_run_knows_each_token_and_length(tiny_store: Path) -> None:
    evaluation = Evaluation(perfect_run(tiny_store), EvaluationConfig(texts=20))
    assert confidence_nats(evaluation, "own").max() < 1e-6


def test_lengths_are_paid_for(fresh: LoadedRun) -> None:
    """The length head starts at equal probabilities."""
    evaluation = Evaluation(fresh, EvaluationConfig())
    longest = fresh.store.manifest.max_length
    assert text_bound(evaluation, "own").length.mean(0) == pytest.approx(math.log(longest))
    result = likelihood_given_latents(evaluation)
    per_token = math.log2(longest) / evaluation.lengths.mean()
    assert result["length_bits_per_token"] == pytest.approx(per_token)
    assert result["bits_per_token_with_length"] == pytest.approx(result["bits_per_token"] + per_token)
    low, high = result["bits_per_token_with_length_ci95"]
    assert low < result["bits_per_token_with_length"] < high
    train = np.asarray(fresh.store.split("train").lengths)
    expected = [
        -math.log((1 + (train == length).sum()) / (len(train) + longest)) for length in evaluation.lengths.tolist()
    ]
    assert evaluation.marginal_length_nats() == pytest.approx(expected)


def test_novel_bits_leave_out_the_most_similar_tenth(fresh: LoadedRun) -> None:
    evaluation = Evaluation(fresh, EvaluationConfig(samples=20, texts=2))
    similarity = np.random.default_rng(0).permutation(20) / 20.0
    evaluation.document_similarity = similarity  # instead of the cached one
    novel, nats = similarity < 0.9, text_bound(evaluation, "none").nats
    expected = nats[novel].sum() / evaluation.lengths[novel].sum() * BITS
    result = likelihood_of_text(evaluation)
    assert novel.sum() == 18 and result["bits_per_token_novel"] == pytest.approx(expected)
    assert result["bits_per_token_novel"] != pytest.approx(result["bits_per_token"])


def test_ridge_regression_matches_the_normal_equations(fresh: LoadedRun) -> None:
    evaluation = Evaluation(fresh, EvaluationConfig())
    train, vocab_size = fresh.store.split("train"), fresh.store.manifest.vocab_size

    def features(texts: list[list[int]]) -> np.ndarray:
        return np.stack([np.append(np.bincount(text, minlength=vocab_size), 1.0) for text in texts])

    x = features([train.tokens(index).tolist() for index in range(len(train))])
    y = np.stack([train.latents(index) for index in range(len(train))])
    y = fresh.store.standardize(y).reshape(len(train), -1).astype(np.float64)
    weights = np.linalg.solve(x.T @ x + np.eye(len(x.T)), x.T @ y)
    expected = (features(evaluation.tokens) @ weights).reshape(evaluation.raw_latents.shape)
    found = fresh.store.standardize(ridge_latents(evaluation))
    assert found == pytest.approx(expected, abs=1e-3)


def test_bag_of_words_beats_the_unigram_and_needs_the_latent(fresh: LoadedRun) -> None:
    evaluation = Evaluation(fresh, EvaluationConfig())
    own, unigram = bag_of_words_nats(evaluation).sum(), evaluation.unigram_nats().sum()
    assert 0 < own < unigram
    evaluation.latents["own"] = evaluation.latents["shuffled"]
    assert bag_of_words_nats(evaluation).sum() > own


def test_bag_of_words_is_fitted_without_the_documents_that_are_measured(tiny_store: Path, tmp_path: Path) -> None:
    """Another test split, of latents that say nothing, changes no number of the validation split."""
    store, tokenizer = Store.open(tiny_store), Tokenizer.load(tiny_store / "tokenizer")
    nats = []
    for order in (1, -1):
        path = tmp_path / f"store{order}"
        with StoreWriter(path, tokenizer, load_encoder(tiny_store / "encoder"), "float32") as writer:
            for name in ("train", "validation", "test"):
                _, texts, latents = store.split(name).samples(np.arange(len(store.split(name))))
                writer.add(name, texts, latents[:: order if name == "test" else 1], [9] * len(texts))
            writer.finish([], {}, {}, {})
        run = fresh_run(path)
        nats.append(
            [bag_of_words_nats(Evaluation(run, EvaluationConfig(split=name))) for name in ("validation", "test")]
        )
    assert nats[0][0].tolist() == nats[1][0].tolist() and nats[0][1].tolist() != nats[1][1].tolist()


def test_the_mean_latent_is_that_of_each_latent_token(tiny_store: Path, tmp_path: Path) -> None:
    """Two latent tokens around opposite points: the mean over both is near neither of them."""
    store, tokenizer = Store.open(tiny_store), Tokenizer.load(tiny_store / "tokenizer")
    corpus = (tiny_store.parent / "corpus.txt").read_text(encoding="utf-8").splitlines()
    encoder, rng, centers = ChunkedEncoder(LsaEncoder.fit(corpus, 8), 2), np.random.default_rng(0), np.ones((2, 8))
    centers[1] = -1
    with StoreWriter(tmp_path / "store", tokenizer, encoder, "float32") as writer:
        for name in ("train", "validation", "test"):
            _, texts, _ = store.split(name).samples(np.arange(len(store.split(name))))
            writer.add(name, texts, centers + rng.normal(0, 0.1, (len(texts), 2, 8)), [9] * len(texts))
        writer.finish([], {}, {}, {})
    run = fresh_run(tmp_path / "store")
    model = Independent(run.store.manifest.vocab_size)
    evaluation = Evaluation(replace(run, model=model), EvaluationConfig(times=1))
    text_bound(evaluation, "mean")
    assert run.store.restore(model.seen.numpy()) == pytest.approx(np.broadcast_to(centers, model.seen.shape), abs=0.05)
    assert latent_similarity_metrics(evaluation, evaluation.raw_latents)["cosine_mean_latent"] > 0.98
    assert all(
        row["cosine_mean_latent"] > 0.98 for row in latent_metrics(Evaluation(run, EvaluationConfig()))["by_t_latent"]
    )


def test_similarity_to_training_texts_matches_all_pairs(fresh: LoadedRun) -> None:
    evaluation = Evaluation(fresh, EvaluationConfig(samples=20))
    train = fresh.store.split("train")
    pool = [train.tokens(index).tolist() for index in range(len(train))]
    best = [max(SequenceMatcher(None, text, other, autojunk=False).ratio() for other in pool)
            for text in evaluation.tokens]  # fmt: skip
    found = evaluation.document_similarity
    assert found.tolist() == pytest.approx(best)
    assert evaluation.training_similarity(pool[:10]).tolist() == [1.0] * 10
