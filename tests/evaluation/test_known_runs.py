"""Metrics of a perfect run are optimal, those of an untrained run are at chance."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmldlm.data.nearest import unit_vectors
from mmldlm.diffusion.noise_schedule import NoiseSchedule
from mmldlm.evaluation import Evaluation, EvaluationConfig
from mmldlm.evaluation.joint import frechet_metrics
from mmldlm.evaluation.l2t import text_metrics
from mmldlm.evaluation.likelihood import (
    LATENT_TIMES,
    latent_nats,
    likelihood_given_latents,
    likelihood_of_text,
    text_bound,
)
from mmldlm.evaluation.statistics import cosine, frechet_distance, retrieval_ranks
from mmldlm.evaluation.suite import evaluate
from mmldlm.evaluation.t2l import denoise_latents, latent_metrics, latent_similarity_metrics
from mmldlm.evaluation.table import samples_markdown, table
from mmldlm.loading.load import LoadedRun
from mmldlm.utils.nested import replace_nonfinite
from tests.helpers.known_runs import fresh_run, perfect_run
from tests.helpers.toy_pairs import SCHEDULE_NAMES


@pytest.fixture(scope="module")
def fresh(tiny_store: Path) -> LoadedRun:
    return fresh_run(tiny_store)


@pytest.fixture(scope="module")
def pairs(tiny_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs of held-out documents, and as score the cosine of their latents."""
    run = perfect_run(tiny_store)
    split = run.store.split("test")
    texts = run.tokenizer.decode_batch([split.tokens(row).tolist() for row in range(len(split))])
    latents = np.stack([split.latents(row) for row in range(len(split))])
    scores = cosine(latents[:-1], latents[1:])
    path = tmp_path_factory.mktemp("sts") / "pairs.tsv"
    lines = [
        "\t".join([first, second, f"{score:.9f}"])
        for first, second, score in zip(texts, texts[1:], scores, strict=False)
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def perfect(tiny_store: Path, pairs: Path) -> dict[str, Any]:
    return evaluate(perfect_run(tiny_store), EvaluationConfig(texts=20), sts=pairs)


def test_texts_of_a_perfect_run(perfect: dict[str, Any]) -> None:
    l2t = perfect["l2t"]
    assert (
        l2t["bits_per_token"] < 1e-6 and 10 < l2t["bits_per_token_shuffled"] != l2t["bits_per_token_mean_latent"] > 10
    )
    assert l2t["token_accuracy"] == l2t["exact_match"] == 1
    assert l2t["bleu"] == pytest.approx(100) and l2t["chrf"] == pytest.approx(100)
    assert l2t["reencoded_cosine"] == l2t["reencoded_cosine_true"] == pytest.approx(1, abs=1e-5)
    assert l2t["unencodable"] == 0
    # It writes another document's text from another document's latent, and that is no success.
    for suffix in ("_shuffled", "_mean_latent", "_unigram"):
        assert l2t[f"token_accuracy{suffix}"] < 0.3 and l2t[f"exact_match{suffix}"] < 0.1
        assert l2t[f"bleu{suffix}"] < 30 and l2t[f"chrf{suffix}"] < 50 and l2t[f"reencoded_cosine{suffix}"] < 0.9
    assert all(pair["reference"] == pair["generation"] for pair in l2t["samples"])


def test_no_text_is_exact_where_the_reference_lacks_words(tiny_store: Path) -> None:
    """Of a run that writes each token of the references, one of which is said to stand for unknown words."""
    run = perfect_run(tiny_store)
    evaluation = Evaluation(run, EvaluationConfig(samples=20, texts=20))
    run.tokenizer.unknown_id = unknown = evaluation.tokens[0][0]
    result, lacking = text_metrics(evaluation), [unknown in tokens for tokens in evaluation.tokens]
    assert 0 < sum(lacking) < 20 and result["references_lacking_words"] == sum(lacking) / 20
    assert result["token_accuracy"] == 1 and result["exact_match"] == lacking.count(False) / 20
    by_length = result["exact_match_by_length"]
    assert sum(row["exact_match"] * row["texts"] for row in by_length) == pytest.approx(20 - sum(lacking))


class KnowsNormalLatents(torch.nn.Module):
    """The best estimate of standard normal latents from noised ones, whatever the text is."""

    def __init__(self, schedule: NoiseSchedule):
        super().__init__()
        self.schedule = schedule

    def forward(self, tokens, latents, t_text, t_latent, layout, positions, targets=None):  # type: ignore[no-untyped-def]
        assert (t_text == 1).all() and len(positions) == len(tokens), "no token is known"
        alpha, sigma = (
            value[:, None, None] for value in (self.schedule.alpha(t_latent), self.schedule.sigma(t_latent))
        )
        return torch.zeros(len(positions)), latents * alpha / (alpha**2 + sigma**2), torch.zeros(len(latents), 32)


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_nats_of_a_latent_are_exact_for_the_best_estimate(schedule: str, tiny_store: Path) -> None:
    """KL(N(alpha x0, sigma^2) || N(0, alpha^2 + sigma^2)), document by document."""
    run = fresh_run(tiny_store, f"latent.noise_schedule={schedule}")
    run.objective.latent.max_norm = math.inf
    evaluation = Evaluation(
        replace(run, model=KnowsNormalLatents(run.objective.latent.noise_schedule)), EvaluationConfig(times=200)
    )
    shape = evaluation.latents["own"].shape
    evaluation.latents["own"] = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    squares, size = np.square(evaluation.latents["own"]).sum((1, 2)), shape[1] * shape[2]
    for nats, time in zip(latent_nats(evaluation), LATENT_TIMES, strict=True):
        t = torch.tensor(time, dtype=torch.float64)
        alpha2, sigma2 = (
            float(run.objective.latent.noise_schedule.alpha(t) ** 2),
            float(run.objective.latent.noise_schedule.sigma(t) ** 2),
        )
        total = alpha2 + sigma2
        expected = ((alpha2 * squares + size * sigma2) / total - size - size * math.log(sigma2 / total)) / 2
        assert nats.mean() == pytest.approx(expected.mean(), rel=0.04)
        assert nats == pytest.approx(expected, rel=0.5, abs=1e-3)


def test_bound_by_way_of_the_latent(perfect: dict[str, Any], tiny_store: Path) -> None:
    """The closer the latent is to data, the more it costs; a network that knows nothing gains nothing by it."""
    rows = perfect["by_way_of_the_latent"]
    assert [row["t_latent"] for row in rows] == [*LATENT_TIMES, 1.0]
    for row in rows:
        assert row["bits_per_token"] == pytest.approx(row["latent_bits_per_token"] + row["text_bits_per_token"])
    assert rows[-1]["latent_bits_per_token"] == 0 and rows[-1]["text_bits_per_token"] == perfect["bits_per_token"]
    latent_bits = [row["latent_bits_per_token"] for row in rows]
    assert latent_bits == sorted(latent_bits, reverse=True) and latent_bits[0] > 0.1
    untrained = likelihood_of_text(Evaluation(fresh_run(tiny_store), EvaluationConfig()))["by_way_of_the_latent"]
    assert all(row["bits_per_token"] >= untrained[-1]["bits_per_token"] for row in untrained)


def test_latents_of_a_perfect_run(perfect: dict[str, Any], tiny_store: Path) -> None:
    t2l, truth = perfect["t2l"], Evaluation(perfect_run(tiny_store), EvaluationConfig()).raw_latents
    assert t2l["cosine"] == pytest.approx(1, abs=1e-4)
    own = retrieval_ranks(unit_vectors(truth) @ unit_vectors(truth).T)
    assert t2l["recall_at_1"] == (own <= 1).mean() > 0.8  # nothing distinguishes equal documents
    assert t2l["recall_at_10"] == 1 and t2l["median_rank"] == 1
    assert t2l["cosine_shuffled"] < t2l["cosine_mean_latent"] < 0.9
    assert t2l["sts_spearman"] > 0.999 and t2l["sts_spearman_encoder"] > 0.999
    assert abs(t2l["sts_spearman_shuffled"]) < 0.72  # 4.5 deviations of 39 pairs
    for row in t2l["by_t_latent"]:  # it looks at the text and at nothing else
        assert row["cosine"] == pytest.approx(1, abs=1e-4) and row["recall_at_1"] > 0.8
        assert row["cosine_shuffled"] < row["cosine_mean_latent"] < 0.9


def test_texts_and_latents_together_of_a_perfect_run(perfect: dict[str, Any]) -> None:
    joint = perfect["joint"]
    bits, own = joint["trigram_bits_per_token"], joint["trigram_bits_per_token_true"]
    assert abs(bits - own) < 1 and own + 1 < joint["trigram_bits_per_token_shuffled_words"]
    low, high = joint["reencoded_cosine_drawn_ci95"]
    assert low <= joint["reencoded_cosine_drawn"] <= high and joint["reencoded_cosine_drawn_shuffled"] < 0.8
    assert joint["reencoded_cosine"] == pytest.approx(1, abs=1e-4) and joint["reencoded_cosine_shuffled"] < 0.8
    assert joint["token_entropy"] == pytest.approx(joint["token_entropy_true"], rel=0.05)
    assert joint["frechet_distance"] < joint["frechet_distance_noise"] / 2
    assert joint["repetition_4"] == pytest.approx(joint["repetition_4_true"], abs=0.05)


def test_untrained_run_is_at_chance(tiny_store: Path) -> None:
    fresh = fresh_run(
        tiny_store, "latent.prediction=epsilon"
    )  # which leaves its latents noise; of x0 they are the mean
    config = EvaluationConfig(split="train", samples=300, texts=20, times=2)
    result = evaluate(fresh, config)
    l2t, t2l, joint = result["l2t"], result["t2l"], result["joint"]
    # The head's first logits are small: all but [MASK] and [PAD] are nearly as likely. Variance as in test_elbo.py.
    words = fresh.store.manifest.vocab_size - 2
    for bits in (result["bits_per_token"], l2t["bits_per_token"]):
        assert bits == pytest.approx(math.log2(words), rel=0.1)
    for control in ("bits_per_token_shuffled", "bits_per_token_mean_latent"):
        assert l2t[control] == pytest.approx(l2t["bits_per_token"], rel=1e-5)
    assert result["controls"]["unigram_bits_per_token"] < l2t["bits_per_token"]
    assert l2t["token_accuracy"] < 0.02 and l2t["exact_match"] == 0 and l2t["bleu"] < 3
    evaluation = Evaluation(fresh, config)
    for row in l2t["exact_match_by_length"]:  # of the references, however long the texts are
        assert row["texts"] == sum(row["tokens_from"] <= each <= row["tokens_to"] for each in evaluation.lengths[:20])
    characters = sum(map(len, evaluation.decode(evaluation.tokens)))
    assert result["bits_per_character"] * characters == pytest.approx(
        result["bits_per_token"] * evaluation.lengths.sum()
    )
    count, chance = 300, 10 / 300
    assert abs(t2l["recall_at_10"] - chance) < 4.5 * math.sqrt(chance * (1 - chance) / count)
    assert abs(t2l["median_rank"] - t2l["median_rank_chance"]) < 4.5 * count / (2 * math.sqrt(count))
    assert t2l["cosine"] < t2l["cosine_mean_latent"]
    assert joint["frechet_distance"] > joint["frechet_distance_true"]
    assert joint["token_entropy"] > joint["token_entropy_true"]
    assert joint["reencoded_cosine_drawn"] != joint["reencoded_cosine"], "latents of the text, which are other ones"


class Uniform(torch.nn.Module):
    def forward(self, tokens, latents, t_text, t_latent, layout, positions, targets=None):  # type: ignore[no-untyped-def]
        return torch.full((len(positions),), math.log(1000.0)), latents, torch.zeros(len(latents), 32)


def test_bound_of_a_uniform_network_is_log_v(fresh: LoadedRun) -> None:
    """Through the evaluation's own path: the estimator, its weights and its normalization."""
    evaluation = Evaluation(replace(fresh, model=Uniform()), EvaluationConfig(times=200))
    bound = text_bound(evaluation, "own")
    assert bound.weighted == pytest.approx(np.tile(evaluation.lengths * math.log(1000), (200, 1)))
    assert bound.nll.sum() / bound.masked.sum() == pytest.approx(math.log(1000))
    assert bound.masked.mean() == pytest.approx((evaluation.lengths.mean() + 1) / 2, rel=0.01)


def test_tables_sum_to_the_bound(fresh: LoadedRun) -> None:
    evaluation = Evaluation(fresh, EvaluationConfig())
    for result in (likelihood_of_text(evaluation), likelihood_given_latents(evaluation)):
        assert sum(row["bits_of_bound"] for row in result["by_t_text"]) == pytest.approx(result["bits_per_token"])
        assert sum(row["draws"] for row in result["by_t_text"]) == 4 * len(evaluation.ids)
        rows = result["by_length"]
        inside = [(evaluation.lengths >= row["tokens_from"]) & (evaluation.lengths <= row["tokens_to"]) for row in rows]
        assert np.sum(inside, axis=0).tolist() == [1] * len(evaluation.ids)
        tokens = [evaluation.lengths[own].sum() for own in inside]
        mean = np.average([row["bits_per_token"] for row in rows], weights=tokens)
        assert mean == pytest.approx(result["bits_per_token"])
        low, high = result["bits_per_token_ci95"]
        assert low < result["bits_per_token"] < high


class GivesBack(torch.nn.Module):
    """Takes latents for what they are with their noise, whatever the text."""

    def forward(self, tokens, latents, t_text, t_latent, layout, positions, targets=None):  # type: ignore[no-untyped-def]
        return torch.zeros(len(positions)), latents, torch.zeros(len(latents), 32)


def test_network_that_only_reads_the_latent_degrades_with_noise(fresh: LoadedRun) -> None:
    evaluation = Evaluation(replace(fresh, model=GivesBack()), EvaluationConfig(times=50))
    rows = latent_metrics(evaluation)["by_t_latent"]
    cosines, recall = ([row[key] for row in rows] for key in ("cosine", "recall_at_1"))
    assert (
        cosines == sorted(cosines, reverse=True) and cosines[0] > 0.98 and cosines[-1] < rows[-1]["cosine_mean_latent"]
    )
    assert recall[0] > 0.7 and recall[-1] < 0.2
    # Another text next to the latent changes nothing.
    assert [row["cosine_shuffled"] for row in rows] == pytest.approx(cosines, abs=0.03)


@pytest.mark.parametrize("prediction", ["x0", "epsilon", "v"])
def test_one_pass_of_a_perfect_network_recovers_the_latent(prediction: str, tiny_store: Path) -> None:
    evaluation = Evaluation(
        perfect_run(tiny_store, "test", f"latent.prediction={prediction}"), EvaluationConfig(times=3)
    )
    count = len(evaluation.ids)
    t, result = denoise_latents(evaluation, "own")
    for latents in result:
        assert latents == pytest.approx(evaluation.raw_latents, abs=1e-3)
    # Each draw has one time in each n-th part of [0, 1], and all conditions have the same.
    assert np.sort(np.floor(t * count)).tolist() == [list(range(count))] * 3
    assert np.array_equal(t, denoise_latents(evaluation, "shuffled")[0])


def test_rows_by_latent_noise_level_use_all_draws(fresh: LoadedRun) -> None:
    evaluation = Evaluation(fresh, EvaluationConfig(samples=30))
    result = latent_metrics(evaluation)
    rows = result["by_t_latent"]
    assert [(row["t_from"], row["t_to"]) for row in rows] == [(n / 10, (n + 1) / 10) for n in range(10)]
    assert sum(row["draws"] for row in rows) == 4 * 30 and min(row["draws"] for row in rows) >= 4 * 2
    t, made = denoise_latents(evaluation, "own")
    all_draws = np.stack([cosine(latents, evaluation.raw_latents) for latents in made])
    for row in rows:
        inside = (row["t_from"] <= t) & (t < row["t_to"])
        assert row["draws"] == inside.sum() and row["cosine"] == pytest.approx(all_draws[inside].mean())
    shown = table(evaluate(fresh, EvaluationConfig(samples=30), modes=["t2l"]))
    assert "latents from texts by noise bin, in one pass" in shown and f"{rows[-1]['cosine']:.3f}" in shown
    few = latent_metrics(Evaluation(fresh, EvaluationConfig(samples=2, times=1)))["by_t_latent"]
    empty = [row for row in few if not row["draws"]]
    assert len(empty) >= 8 and all(row["cosine"] is None and row["recall_at_1"] is None for row in empty)


def test_unigram_baseline_is_the_cross_entropy(fresh: LoadedRun) -> None:
    evaluation = Evaluation(fresh, EvaluationConfig(samples=20))
    train = fresh.store.split("train")
    counts = np.ones(fresh.store.manifest.vocab_size)
    for index in range(len(train)):
        np.add.at(counts, train.tokens(index), 1)
    expected = [-np.log(counts[text] / counts.sum()).sum() for text in evaluation.tokens]
    assert evaluation.unigram_nats() == pytest.approx(expected)


def test_unigram_texts_follow_training_frequencies(fresh: LoadedRun) -> None:
    evaluation = Evaluation(fresh, EvaluationConfig(split="train", samples=320))
    texts = evaluation.unigram_tokens(320)
    assert [len(text) for text in texts] == evaluation.lengths.tolist()
    drawn = np.bincount(np.concatenate(texts), minlength=fresh.store.manifest.vocab_size) / evaluation.lengths.sum()
    p = fresh.store.token_counts / fresh.store.token_counts.sum()
    assert (np.abs(drawn - p) <= 4.5 * np.sqrt(p * (1 - p) / evaluation.lengths.sum())).all()
    assert evaluation.unigram_tokens(5) == texts[:5]


def test_shuffled_latents_have_no_fixed_points(fresh: LoadedRun) -> None:
    evaluation = Evaluation(fresh, EvaluationConfig(samples=24))
    own, shuffled = evaluation.latents["own"], evaluation.latents["shuffled"]
    assert sorted(own.flatten().tolist()) == sorted(shuffled.flatten().tolist())
    rows = {tuple(row.flatten().tolist()) for row in own}
    same = [np.array_equal(a, b) for a, b in zip(own, shuffled, strict=True)]
    assert sum(same) <= 24 - len(rows)  # only true duplicates may coincide


def test_recall_counts_ranks_up_to_its_number(fresh: LoadedRun) -> None:
    """Directions of a fan: the true latent of document i, counted from 0, is the (i + 1)-th nearest to the first."""
    evaluation = Evaluation(fresh, EvaluationConfig(samples=20))
    fan, angle = np.zeros((20, 1, 8), np.float32), 0.1 * np.arange(20)
    fan[:, 0, 0], fan[:, 0, 1] = np.cos(angle), np.sin(angle)
    evaluation.raw_latents = fan
    result = latent_similarity_metrics(evaluation, np.repeat(fan[:1], 20, axis=0))
    assert (result["recall_at_1"], result["recall_at_10"], result["median_rank"]) == (1 / 20, 10 / 20, 10.5)
    assert (result["recall_at_1_chance"], result["recall_at_10_chance"]) == (1 / 20, 10 / 20)


def test_nonfinite_latents_match_nothing(fresh: LoadedRun) -> None:
    evaluation = Evaluation(fresh, EvaluationConfig(samples=20))
    assert latent_similarity_metrics(evaluation, np.full((20, 1, 8), np.nan, np.float32))["recall_at_10"] == 0
    assert frechet_metrics(evaluation, np.full((20, 1, 8), np.nan))["frechet_distance"] is None
    json.dumps(replace_nonfinite({"a": [float("inf"), {"b": float("nan")}]}), allow_nan=False)


def test_frechet_distance_needs_enough_samples(fresh: LoadedRun) -> None:
    evaluation = Evaluation(fresh, EvaluationConfig())
    result = frechet_metrics(evaluation, evaluation.latents["shuffled"][:8])
    assert result["frechet_distance"] is None and result["frechet_samples_needed"] == 9
    result = frechet_metrics(evaluation, evaluation.latents["own"][:20])
    assert result["frechet_distance"] == pytest.approx(0, abs=1e-5)
    assert result["frechet_distance_noise"] > result["frechet_distance_true"] > 0.1
    rows = evaluation.latents["own"].reshape(len(evaluation.ids), -1)
    assert result["frechet_distance_true"] == pytest.approx(frechet_distance(rows[20:40], rows[:20])), "other documents"
    shown = table(evaluate(fresh, EvaluationConfig(texts=8), modes=["joint"]))
    assert "the Frechet distance needs --texts 9 or more" in shown


@pytest.mark.parametrize("modes", [["l2t"], ["t2l"], ["joint"]])
def test_only_requested_metrics_are_measured(fresh: LoadedRun, modes: list[Any]) -> None:
    result = evaluate(fresh, EvaluationConfig(samples=20, texts=10, times=1), modes=modes)
    assert [mode for mode in ("l2t", "t2l", "joint") if mode in result] == result["modes"] == modes
    assert ("bits_per_token" in result) == (modes == ["joint"])
    shown = table(result)
    assert modes[0] in shown and not re.search(r"(?m)(baseline:| )$", shown)  # a row need not have a baseline
    assert samples_markdown(result).startswith("# Samples at step 0")
    narrow = replace(fresh, config=replace(fresh.config, mode=modes[0]))
    expected = {**result, "modes_trained": modes}
    measured = evaluate(narrow, EvaluationConfig(samples=20, texts=10, times=1))
    assert measured.pop("edit", {}).keys() == expected.pop("edit", {}).keys()  # its latents depend on what was trained
    if modes == ["l2t"]:  # the network's t2l chooses among texts only where it was trained
        assert "exact_match_by_network" in expected["l2t"]
        expected["l2t"] = {key: value for key, value in expected["l2t"].items() if "_by_network" not in key}
    assert measured == expected


def test_batch_size_changes_rounding_only(fresh: LoadedRun) -> None:
    """Noise of a document does not depend on the other documents of its batch."""
    small, large = (Evaluation(fresh, EvaluationConfig(batch=batch)) for batch in (3, 64))
    for mode in ("l2t", "t2l", "joint"):
        one, two = (each.generate(mode, "own", 20, fresh.config.sampling) for each in (small, large))
        assert one.tokens == two.tokens
        assert one.latents == pytest.approx(two.latents, abs=1e-4)
    assert text_bound(small, "own").nats == pytest.approx(text_bound(large, "own").nats, rel=1e-5)
    other = Evaluation(fresh, EvaluationConfig(seed=1))
    other.ids, other.lengths = large.ids, large.lengths
    assert other.generate("joint", "none", 20, fresh.config.sampling).tokens != two.tokens
