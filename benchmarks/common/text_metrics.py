"""What texts from latents score beside the true ones, and how many bits our network needs for a text."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

import numpy as np
from sacrebleu import corpus_bleu
from sacrebleu.metrics import BLEU
from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

from mmldlm.data.encoders import LatentEncoder
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.evaluation import Evaluation
from mmldlm.evaluation.l2t import reencoding_metrics, reference_metrics
from mmldlm.evaluation.likelihood import confidence_nats, text_bound
from mmldlm.evaluation.statistics import BITS, with_interval
from mmldlm.utils.intervals import ratio_of_sums

Record = dict[str, Any]
SHOWN = 10


def bits(name: str, nats: np.ndarray, lengths: np.ndarray) -> Record:
    """Return the bits per token of documents, with their interval."""
    return with_interval(name, ratio_of_sums(nats, lengths.astype(np.float64)) * BITS)


def our_nats(evaluation: Evaluation) -> tuple[np.ndarray, np.ndarray]:
    """Return the nats of our texts and their lengths, exactly and by the bound, float64 [n] each."""
    bound = text_bound(evaluation, "own")
    length = bound.length.mean(0)
    return confidence_nats(evaluation, "own", evaluation.run.store.manifest.max_length) + length, bound.nats + length


def token_set_f1(text: str, reference: str) -> float:
    """Return the F1 (0 to 100) of the two sets of words, as vec2text has it, with sacreBLEU's words for NLTK's."""
    ours, true = (set(Tokenizer13a()(each).split()) for each in (text, reference))
    return 200 * len(ours & true) / max(1, len(ours) + len(true))


def text_metrics(
    tokens: Sequence[Sequence[int]],
    references: Sequence[Sequence[int]],
    tokenizer: Tokenizer,
    encoder: LatentEncoder | None,
    raw_latents: np.ndarray,
    cpu_s: float,
) -> Record:
    """Compare texts with the true ones. Without an encoder there is no cosine. BLEU by text is vec2text's mean."""
    texts, true = tokenizer.decode_batch(tokens), tokenizer.decode_batch(references)
    near = {} if encoder is None else reencoding_metrics(encoder.encode(texts), raw_latents)
    pairs = [*zip(texts, true, strict=True)]
    return {
        **reference_metrics(tokens, texts, references, true, with_intervals=True),
        "bleu_by_text": mean(corpus_bleu([text], [[reference]]).score for text, reference in pairs),
        "token_set_f1": mean(token_set_f1(*pair) for pair in pairs),
        **near,
        "cpu_ms_per_text": 1000 * cpu_s / len(texts),
        "samples": [{"reference": reference, "generation": text} for text, reference in pairs[:SHOWN]],
    }


def bleu_signature(texts: Sequence[str]) -> str:
    """Return how sacreBLEU computes the BLEU of texts in one language, by its own words."""
    bleu = BLEU()
    bleu.corpus_score(list(texts), [list(texts)])
    return str(bleu.get_signature())
