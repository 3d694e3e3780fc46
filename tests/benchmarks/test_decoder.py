"""The autoregressive decoder of the benchmark: causal, with a search that finds the best text, and stopped in time."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import decoder, learning
from benchmarks.__main__ import main
from benchmarks.common.causal_decoder import CausalDecoder
from benchmarks.common.report import RESULTS
from benchmarks.common.store_writer import StoreWriter
from benchmarks.decoder import BOUND, DECODINGS, EXACT, Contest
from benchmarks.results_figure import draw_crossover
from mmldlm.data.encoders import ChunkedEncoder, LsaEncoder
from mmldlm.data.store import Store
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.model.mmdit import ModelConfig
from tests.helpers.sample_corpus import write_corpus

CONFIG = ModelConfig(depth=1, width=32, num_heads=2)
SIZE = ("model.depth=1", "model.width=32", "model.latent_width=16", "model.num_heads=2", "train.global_batch_size=8")
quick = pytest.mark.quick


def write_store(folder: Path, unseen: int) -> Store:
    """Eight documents for training. The other splits have them as well, or as many that are `unseen`."""
    texts = write_corpus(folder / "corpus.txt", 100).read_text().lower().splitlines()
    encoder, tokenizer = ChunkedEncoder(LsaEncoder.fit(texts, 8), 2), Tokenizer.words(texts, 320)
    with StoreWriter(folder / "store", tokenizer, encoder, "float32") as writer:
        for split, first in (("train", 0), ("validation", unseen), ("test", unseen)):
            shown = texts[first : first + 8]
            writer.add(split, tokenizer.encode_batch(shown), encoder.encode(shown), [len(text) for text in shown])
        writer.finish([], {}, {}, {})
    return Store.open(folder / "store")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write_store(tmp_path_factory.mktemp("memorized"), unseen=0)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command on a small corpus, with two numbers of steps."""
    folder = tmp_path_factory.mktemp("contest")
    corpus = write_corpus(folder / "corpus.txt", 300)
    fractions = ("--validation-fraction", "0.1", "--test-fraction", "0.1")
    case = learning.Case((str(corpus), "--tokenizer", "words", "--latent-tokens", "2", *fractions), {})
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(learning.CASES, "small", case)
        where = ("--corpora", "small", "--keep", str(folder), "--out", str(folder), "--seeds", "1")
        assert main(["decoder", *SIZE, "train.steps=20", *where, "--steps", "20", "4"]) == 0
    torch.set_num_threads(threads)
    return folder


def random_decoder(store: Store, stir: float = 0.0, **manifest: int) -> CausalDecoder:
    torch.manual_seed(0)
    model = CausalDecoder(CONFIG, replace(store.manifest, **manifest)).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter += stir * torch.randn_like(parameter)
    return model


def test_both_networks_are_measured_on_all_documents(out: Path) -> None:
    corpus = json.loads((out / "decoder.json").read_text(encoding="utf-8"))["corpora"]["small"]
    count = len(Store.open(out / "small" / "small").split("train"))
    for runs in (corpus["decoder"], corpus["mmldlm"]):
        assert [(run["seed"], run["steps"], run["reads"]) for run in runs] == [
            (1, steps, steps * 8 / count) for steps in (20, 4)
        ]
        assert runs[0][EXACT] < runs[1][EXACT], "more reads are better"
    whole = corpus["mmldlm"][0]
    assert whole[BOUND] > whole[EXACT] and whole["cpu_ms_per_text"] > 0
    made = decoder.blocks({"corpora": {"small": corpus}})
    head, *rows = made["decoder-small"].splitlines()
    assert head == f"| `small`, seeds: 1 | {' | '.join(DECODINGS)} | mmldlm, seeds: 1 |"
    assert not any("| - |" in row for row in rows), "no row lacks a value"
    assert made["decoder-small-reads"].count("\n") == 3
    assert draw_crossover(decoder.curves(corpus)).count("<circle") == 6


def test_the_validation_split_decides_about_the_learning_rate(out: Path) -> None:
    corpus = json.loads((out / "decoder.json").read_text(encoding="utf-8"))["corpora"]["small"]
    rates = corpus["validation_bits_by_rate"]
    assert len(rates) == len(decoder.RATES) == len(set(rates.values()))
    best = min(rates, key=rates.__getitem__)
    assert all(f"{run['rate']:g}" == best for run in corpus["decoder"])


def test_a_later_call_measures_what_is_missing(out: Path) -> None:
    contest = Contest(Store.open(out / "small" / "small"), out / "small", "simple-docs", (*SIZE, "train.steps=20"))
    before = {path: path.stat().st_mtime_ns for path in contest.folder.glob("*.json")}
    lost = {*contest.folder.glob("decoder-4-*.json"), contest.folder / "mmldlm-4-seed-1.json"}
    killed = contest.folder / "steps-4-seed-1"
    for path in (*lost, killed.with_suffix(".cpu_s"), killed / "exit.json"):
        path.unlink()
    (killed / "of-the-killed-start").touch()
    *_, corpus = decoder.results(contest, Namespace(seeds=[1], steps=[20, 4]))
    after = {path: path.stat().st_mtime_ns for path in contest.folder.glob("*.json")}
    assert {path for path in after if after[path] != before[path]} == lost and after.keys() == before.keys()
    assert not (killed / "of-the-killed-start").exists(), "its CPU seconds are those of a whole training"
    earlier = json.loads((out / "decoder.json").read_text(encoding="utf-8"))["corpora"]["small"]
    for network in ("decoder", "mmldlm"):
        assert [run[EXACT] for run in corpus[network]] == [run[EXACT] for run in earlier[network]]


@quick
def test_a_decoder_reproduces_what_it_has_memorized(store: Store, tmp_path: Path) -> None:
    contest = Contest(store, tmp_path, "simple-docs", (*SIZE, "train.steps=200"))
    model, curve = decoder.train(contest.config("optim.lr=1e-2"), store, CausalDecoder)
    bits = decoder.decoder_bits(model, store.split("test"))[EXACT]
    assert bits < 0.1 and bits == pytest.approx(min(curve.values()))
    for decoding, texts in contest.decoder_texts(model).items():
        assert decoding in DECODINGS and texts["exact_match"] == 1 and texts["reencoded_cosine"] > 0.999
    _, (text, *_), latents = store.split("test").samples(np.arange(1))
    mask_id, given = store.manifest.mask_id, torch.from_numpy(store.standardize(latents))
    for place, token in enumerate(text.tolist()):  # a search asks for the token of each place
        template = [*text[:place].tolist(), mask_id, *text[place + 1 :].tolist()]
        assert model.likely_tokens(given, [template], mask_id, 3)[0][0] == token


@quick
def test_a_decoder_that_gets_no_better_stops_with_its_best_weights(tmp_path: Path) -> None:
    store = write_store(tmp_path, unseen=8)
    contest = Contest(store, tmp_path, "simple-docs", (*SIZE, "train.steps=600"))
    model, curve = decoder.train(contest.config("optim.lr=1e-2"), store, CausalDecoder)
    steps = sorted(curve)
    assert steps[-1] < 600 and steps.index(min(curve, key=curve.__getitem__)) == len(steps) - 1 - decoder.PATIENCE
    assert decoder.decoder_bits(model, store.split("validation"))[EXACT] == min(curve.values())


@quick
def test_the_table_has_the_run_that_validation_prefers(tmp_path: Path) -> None:
    texts, decoded = dict.fromkeys(decoder.TEXT_ROWS.values(), 0.5), dict.fromkeys(DECODINGS)
    runs = [
        {"seed": 0, "steps": steps, "reads": steps / 10, "validation_bits": bits, EXACT: bits, **beams}
        for steps, bits, beams in ((20, 2.0, decoded), (10, 1.0, decoded), (40, 0.5, {}))
    ]
    shown: list[dict[str, Any]] = [{**run, **{name: texts for name in DECODINGS if name in run}} for run in runs]
    table = decoder.blocks({"corpora": {"simple-docs": {"decoder": shown, "mmldlm": []}}})["decoder-simple-docs"]
    gate = json.loads((RESULTS / "learning.json").read_text(encoding="utf-8"))["corpora"]["simple-docs"]["seeds"]
    exact = sorted(seed["metrics"]["l2t"]["exact_match"] for seed in gate)
    rows = {line.split(" | ")[0].strip("| "): line.split(" | ")[1:] for line in table.splitlines()}
    assert rows["reads of the corpus"][:4] == ["1"] * 4, "20 steps are worse, and no texts of 40 were measured"
    assert rows["exact matches"] == ["0.5"] * 4 + [f"{exact[1]:.3g} ({exact[0]:.3g} to {exact[-1]:.3g}) |"]


@quick
def test_later_tokens_change_no_earlier_logits(store: Store) -> None:
    model = random_decoder(store, stir=0.1)
    latents, tokens = torch.randn(2, 2, 8), torch.randint(0, model.end, (2, 6))
    changed = tokens.clone()
    changed[:, 3] = (changed[:, 3] + 1) % model.end
    logits = model.text_logits(latents, tokens)

    def difference(latents: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return (model.text_logits(latents, tokens) - logits).abs().amax((0, 2))

    places = difference(latents, changed)
    # Those before and at the place of the token, which they predict; then those after it.
    assert places.shape == (7,) and places[:4].max() < 1e-5 and places[4:].min() > 1e-2
    assert difference(latents + 1, tokens).min() > 1e-2


@quick
def test_padding_changes_no_bits(store: Store) -> None:
    model = random_decoder(store, stir=0.1)
    latents, texts = torch.randn(2, 2, 8), (torch.arange(3), torch.arange(5, 13))
    together = model.nats(latents, texts)
    alone = model.nats(latents[:1], texts[:1])
    assert together.shape == (2, 9) and alone.shape == (1, 4) and (together[0, 4:] == 0).all()
    torch.testing.assert_close(together[:1, :4], alone)


@quick
def test_without_training_all_tokens_and_the_end_are_equally_likely(store: Store) -> None:
    split, bits = store.split("test"), math.log2(store.manifest.vocab_size + 1)
    lengths = np.asarray(split.lengths)
    measured = decoder.decoder_bits(random_decoder(store), split)[EXACT]
    assert measured == pytest.approx(bits * (lengths + 1).sum() / lengths.sum(), rel=0.02), "the end counts as well"


@quick
def test_one_beam_takes_the_most_likely_token_each_time(store: Store) -> None:
    model = random_decoder(store, stir=0.5, vocab_size=3, max_length=6)
    latents = torch.randn(16, 2, 8)
    texts = [text for (text,) in model.generate(latents, beams=1)]
    for latent, text in zip(latents, texts, strict=True):
        best = model.text_logits(latent[None], torch.tensor([text], dtype=torch.int64)).argmax(-1)[0].tolist()
        assert best[: len(text)] == text and (best[-1] == model.end or len(text) == 6)
    assert len({len(text) for text in texts}) > 2


@quick
def test_a_wide_beam_finds_the_best_of_all_texts(store: Store) -> None:
    model = random_decoder(store, stir=0.3, vocab_size=3, max_length=3)
    latents = torch.randn(16, 2, 8)
    texts = [list(text) for length in range(4) for text in product(range(3), repeat=length)]
    tensors = [torch.tensor(text, dtype=torch.int64) for text in texts]
    sizes = torch.tensor([len(text) + 1 for text in texts])
    found = [ranked[0] for ranked in model.generate(latents, beams=len(texts))]
    for latent, text in zip(latents, found, strict=True):
        means = model.nats(latent.expand(len(texts), -1, -1), tensors).sum(1) / sizes
        assert text == texts[means.argmin()]
    assert len({len(text) for text in found}) > 1 and found != [text for (text,) in model.generate(latents, beams=1)]
