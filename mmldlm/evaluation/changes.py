"""Metrics of two uses of a network: to generate a span of a text again, and to generate texts between two others.

Shape letters: n pairs of documents, P points from one document to the other, M latent tokens, C latent channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from itertools import islice
from typing import Any

import numpy as np

from mmldlm.diffusion.sampling import SamplingConfig
from mmldlm.evaluation.evaluator import Evaluation
from mmldlm.evaluation.l2t import NEAR_COPY, NUM_SHOWN_SAMPLES, reencoding_metrics
from mmldlm.evaluation.statistics import share_with_interval
from mmldlm.utils.slerp import slerp

TEXTS_PER_EDIT, TEXTS_PER_PAIR = 4, 20  # so few that both take less than a tenth of the evaluation's time
SPAN = 0.25  # share of a document's tokens that an edit generates again
POINTS = 5  # from one document to the other, both included


def edit_sampling(config: SamplingConfig, count: int) -> SamplingConfig:
    """Return the settings of joint that fill a span with `count` texts, from noise in place of a latent.

    The span and the latent are generated together, or the span first. A latent that comes first disturbs more than it
    knows of the span.
    """
    joint_order = "together" if config.joint_order == "latents_first" else config.joint_order
    order = "confidence" if config.decoding == "auto" and not config.remask else config.decoding
    temperature = config.resolve_temperature("l2t", 1, count)
    return replace(config, joint_order=joint_order, decoding=order, temperature=temperature)


def interpolation_sampling(config: SamplingConfig) -> SamplingConfig:
    """Return the settings for latents between those of two texts: by default without search.

    No text has such a latent, and a search for it finds the words of both texts in no order.
    """
    return replace(config, search=config.search or 0)


def draw_spans(evaluation: Evaluation, count: int) -> list[slice]:
    """Draw a span of each of the first `count` documents: a quarter of its tokens, the first of which is a word."""
    rng, words = np.random.default_rng(evaluation.config.seed), frozenset(evaluation.run.tokenizer.word_ids)
    spans = []
    for tokens in evaluation.tokens[:count]:
        size = max(1, round(SPAN * len(tokens)))
        starts = range(len(tokens) - size + 1)
        first = int(rng.choice([place for place in starts if tokens[place] in words] or starts))
        spans.append(slice(first, first + size))
    return spans


def edit_metrics(evaluation: Evaluation) -> dict[str, Any]:
    """Return metrics of documents with one span generated again, as `mmldlm sample --edit` does it (collective).

    If the run trained joint, the span has no latent. A suffix says that it has one: `_own_latent` the document's,
    `_shuffled` another document's. `_unigram` has spans drawn by token frequency.
    """
    evaluation.progress.phase("documents with another span")
    run, count = evaluation.run, max(1, evaluation.num_texts // TEXTS_PER_EDIT)
    mask_id, documents, spans = run.store.manifest.mask_id, evaluation.tokens[:count], draw_spans(evaluation, count)

    def filled(fillings: Sequence[Sequence[int]]) -> list[list[int]]:
        whole = zip(documents, spans, fillings, strict=True)
        return [[*text[: span.start], *filling, *text[span.stop :]] for text, span, filling in whole]

    templates = filled([[mask_id] * (span.stop - span.start) for span in spans])
    sampling, prefixes, own = run.config.sampling, evaluation.prefixes, evaluation.latents["own"]
    other, unigram = evaluation.latents["shuffled"], evaluation.unigram_tokens(count)
    edited = {
        "_own_latent": evaluation.generate_from("l2t", templates, prefixes, own, sampling).tokens,
        "_shuffled": evaluation.generate_from("l2t", templates, prefixes, other, sampling).tokens,
        "_unigram": filled([text[span] for text, span in zip(unigram, spans, strict=True)]),
    }
    edited[""] = edited["_own_latent"]
    if "joint" in run.config.trained_modes:
        without = replace(edit_sampling(sampling, 1), guidance=1.0)
        edited[""] = evaluation.generate_from("joint", templates, prefixes, own, without).tokens
    texts = evaluation.decode(edited[""])
    metrics: dict[str, Any] = {"texts": count, "kept": share_kept(run.tokenizer.encode_batch(texts), documents, spans)}
    for suffix, tokens in edited.items():
        changed = [new[span] != old[span] for new, old, span in zip(tokens, documents, spans, strict=True)]
        share = share_with_interval("changed", np.array(changed))
        metrics |= {f"changed{suffix}": share["changed"]} if suffix else share
        metrics[f"trigram_bits_per_token{suffix}"] = evaluation.trigram_bits_per_token(tokens)
    metrics["trigram_bits_per_token_true"] = evaluation.trigram_bits_per_token(documents)
    metrics["samples"] = []
    for text, span, new in list(zip(documents, spans, texts, strict=True))[:NUM_SHOWN_SAMPLES]:
        before, old, behind = evaluation.decode([text[: span.start], text[span], text[span.stop :]])
        metrics["samples"].append({"edit": f"{before} [{old}] {behind}".strip(), "text": new})
    return metrics


def share_kept(
    texts: Sequence[Sequence[int]], documents: Sequence[Sequence[int]], spans: Sequence[slice]
) -> float | None:
    """Return the share of the documents' tokens outside of the spans that texts have at the same places.

    Places before the span count from the start of a text, and places behind the span from its end.
    """
    kept, outside = 0, 0
    for text, document, span in zip(texts, documents, spans, strict=True):
        for own, other in ((document[: span.start], text), (document[span.stop :][::-1], text[::-1])):
            kept += sum(map(int.__eq__, own, other))
            outside += len(own)
    return kept / outside if outside else None


def interpolation_metrics(evaluation: Evaluation) -> dict[str, Any]:
    """Return metrics of texts from latents between those of two documents, like `sample --interpolate` (collective).

    `_ends` is measured on the documents, and `_given` on the latents between them.
    """
    evaluation.progress.phase("texts between two documents")
    count, inner = max(1, evaluation.num_texts // TEXTS_PER_PAIR), POINTS - 2
    own, sampling = evaluation.latents["own"], interpolation_sampling(evaluation.run.config.sampling)
    starts = np.repeat(np.arange(count), inner)
    ends = evaluation.others[starts]
    between = np.concatenate([slerp(own[i], own[evaluation.others[i]], POINTS)[1:-1] for i in range(count)])
    prefixes, places = [evaluation.prefixes[i] for i in starts], [evaluation.tokens[i] for i in starts]
    tokens = evaluation.generate_from("l2t", places, prefixes, between, sampling, "encoder").tokens
    texts = evaluation.decode(tokens)
    encoded, given = evaluation.encode(texts), evaluation.run.store.restore(between)

    def copies(text: list[int], *documents: int) -> bool:
        others = (evaluation.tokens[document] for document in documents)
        return any(SequenceMatcher(None, text, other, autojunk=False).ratio() >= NEAR_COPY for other in others)

    copied = np.array([copies(*each) for each in zip(tokens, starts.tolist(), ends.tolist(), strict=True)])
    rows = []
    for place, way in enumerate(np.linspace(0, 1, POINTS)[1:-1].tolist()):
        here = slice(place, None, inner)
        row: dict[str, Any] = {"way": way, "trigram_bits_per_token": evaluation.trigram_bits_per_token(tokens[here])}
        for name, latents in (("start", evaluation.raw_latents[starts]), ("end", evaluation.raw_latents[ends])):
            row[f"cosine_{name}"] = reencoding_metrics(encoded[here], latents[here])["reencoded_cosine"]
            row[f"cosine_{name}_given"] = reencoding_metrics(given[here], latents[here])["reencoded_cosine"]
        rows.append({**row, "copies": float(copied[here].mean())})
    both = [evaluation.tokens[index] for i in range(count) for index in (i, evaluation.others[i])]
    shown, rest = evaluation.decode(both[: 2 * NUM_SHOWN_SAMPLES]), iter(texts)
    return {
        "pairs": count,
        "texts": len(texts),
        "trigram_bits_per_token": evaluation.trigram_bits_per_token(tokens),
        "trigram_bits_per_token_ends": evaluation.trigram_bits_per_token(both),
        **reencoding_metrics(encoded, given),
        **share_with_interval("copies", copied),
        "by_way": rows,
        "samples": [[a, *islice(rest, inner), b] for a, b in zip(shown[::2], shown[1::2], strict=True)],
    }
