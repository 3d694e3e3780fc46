"""Metrics of edits and interpolations, of runs whose answers are known."""

from __future__ import annotations

from dataclasses import replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmldlm.evaluation import Evaluation, EvaluationConfig
from mmldlm.evaluation.changes import draw_spans, edit_metrics, interpolation_metrics, share_kept
from mmldlm.evaluation.suite import evaluate
from mmldlm.evaluation.table import samples_markdown, table
from mmldlm.inference.generate import interpolate
from tests.helpers.known_runs import fresh_run, perfect_run

pytestmark = pytest.mark.quick


class WritesOneToken(torch.nn.Module):
    """Writes one token everywhere, whatever is known."""

    def __init__(self, token: int, vocab_size: int):
        super().__init__()
        self.logits = torch.zeros(vocab_size).index_fill(0, torch.tensor([token]), 50.0)

    def forward(self, tokens, latents, t_text, t_latent, layout, positions, targets=None):  # type: ignore
        return self.logits.expand(len(positions), -1), latents, torch.zeros(len(latents), 32)


def test_spans_are_a_quarter_and_begin_with_a_word(tiny_store: Path) -> None:
    evaluation = Evaluation(fresh_run(tiny_store), EvaluationConfig(texts=40))
    words = set(evaluation.run.tokenizer.word_ids)
    spans = draw_spans(evaluation, 40)
    assert spans == draw_spans(evaluation, 40)
    for span, tokens in zip(spans, evaluation.tokens, strict=False):
        assert 0 <= span.start < span.stop <= len(tokens)
        assert span.stop - span.start == max(1, round(len(tokens) / 4))
        assert tokens[span.start] in words or not words & set(tokens)
    assert len({span.start for span in spans}) > 3


def test_a_run_that_knows_all_documents_changes_nothing_by_their_own_latents(tiny_store: Path) -> None:
    metrics = edit_metrics(Evaluation(perfect_run(tiny_store), EvaluationConfig(texts=72)))
    assert metrics["texts"] == 18
    assert metrics["changed_own_latent"] == 0 and metrics["kept"] == 1
    assert metrics["trigram_bits_per_token_own_latent"] == metrics["trigram_bits_per_token_true"]
    assert metrics["changed_shuffled"] > 0.5 and metrics["changed_unigram"] > 0.8
    assert metrics["trigram_bits_per_token_unigram"] > metrics["trigram_bits_per_token_true"] + 0.5


def test_only_the_span_is_written(tiny_store: Path) -> None:
    """A network that writes one word everywhere: each span is that word, and all other words stay."""
    run = fresh_run(tiny_store)
    (token,) = run.tokenizer.encode_batch([" rose"])[0][:1]
    run = replace(run, model=WritesOneToken(token, run.store.manifest.vocab_size))
    evaluation = Evaluation(run, EvaluationConfig(texts=72))
    metrics = edit_metrics(evaluation)
    spans, documents = draw_spans(evaluation, 18), evaluation.tokens[:18]
    changed = [text[span] != [token] * (span.stop - span.start) for text, span in zip(documents, spans, strict=True)]
    for suffix in ("", "_own_latent", "_shuffled"):
        assert metrics[f"changed{suffix}"] == sum(changed) / 18
    for sample, text, span in zip(metrics["samples"], documents, spans, strict=True):
        expected = [*text[: span.start], *[token] * (span.stop - span.start), *text[span.stop :]]
        assert sample["text"] == evaluation.decode([expected])[0]
        assert f"[{evaluation.decode([text[span]])[0]}]" in sample["edit"]


def test_the_latent_is_drawn_if_the_run_can(tiny_store: Path) -> None:
    run = perfect_run(tiny_store)
    both, alone = (
        edit_metrics(Evaluation(replace(run, config=replace(run.config, mode=mode)), EvaluationConfig(texts=72)))
        for mode in (run.config.mode, "l2t")
    )
    assert both["changed"] > both["changed_own_latent"] == alone["changed"] == 0


def test_kept_tokens_are_counted_from_both_ends() -> None:
    document, span = [1, 2, 3, 4, 5], slice(1, 3)
    for text, kept in (([1, 9, 9, 4, 5], 3), ([1, 9, 4, 5], 3), ([1, 9, 9, 9, 4, 5], 3), ([7, 2, 8, 5], 1), ([5], 1)):
        assert share_kept([text], [document], [span]) == kept / 3
    assert share_kept([[9]], [[1]], [slice(0, 1)]) is None


def test_texts_between_documents_are_those_of_interpolate(tiny_store: Path) -> None:
    """The perfect run writes the document whose latent is nearest: a copy of an end, or a third one."""
    run = perfect_run(tiny_store)
    evaluation = Evaluation(run, EvaluationConfig(texts=72))
    metrics = interpolation_metrics(evaluation)
    assert metrics["pairs"] == len(metrics["samples"]) == 3 and metrics["texts"] == 9
    copies = []
    for pair, shown in enumerate(metrics["samples"]):
        ends = [evaluation.tokens[pair], evaluation.tokens[evaluation.others[pair]]]
        raw = np.stack([evaluation.raw_latents[index] for index in (pair, evaluation.others[pair])])
        _, texts = interpolate(run, run.config.sampling, 0, raw, 5)
        assert shown == [evaluation.decode(ends[:1])[0], *texts[1:-1], evaluation.decode(ends[1:])[0]]
        for text in run.tokenizer.encode_batch(shown[1:-1]):
            copies.append(max(SequenceMatcher(None, text, end, autojunk=False).ratio() for end in ends) >= 0.9)
    assert metrics["copies"] == pytest.approx(sum(copies) / 9)
    rows = metrics["by_way"]
    assert [row["way"] for row in rows] == [0.25, 0.5, 0.75]
    assert sum(row["copies"] for row in rows) / 3 == pytest.approx(metrics["copies"])
    assert rows[0]["cosine_start_given"] > rows[1]["cosine_start_given"] > rows[2]["cosine_start_given"]
    assert rows[0]["cosine_end_given"] < rows[1]["cosine_end_given"] < rows[2]["cosine_end_given"]
    assert rows[0]["cosine_start"] > rows[2]["cosine_start"]


def test_both_are_shown(tiny_store: Path) -> None:
    result: dict[str, Any] = evaluate(fresh_run(tiny_store), EvaluationConfig(samples=30, texts=20, times=1))
    shown, samples = table(result), samples_markdown(result)
    for words in ("trigram bits per token", "spans that changed", "near copies", "worse than trigram", "drawn latent"):
        assert words in shown
    assert samples.count("edited: ") == 5 and result["interpolation"]["samples"][0][1].strip() in samples
    assert "edit" not in evaluate(fresh_run(tiny_store), EvaluationConfig(samples=30, texts=20, times=1), ["t2l"])
