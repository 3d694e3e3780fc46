"""The autoregressive decoder of the benchmark: it is causal, its search finds the best text, and it learns."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.common.causal_decoder import CausalDecoder
from benchmarks.common.report import RESULTS
from benchmarks.common.store_writer import StoreWriter
from benchmarks.learning import CASES
from benchmarks.reference_decoder import BEAMS, blocks
from mmldlm.data.encoders import ChunkedEncoder, LsaEncoder
from mmldlm.data.store import Store
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.model.mmdit import ModelConfig
from tests.helpers.sample_corpus import write_corpus
from tests.helpers.user_errors import assert_user_error

pytestmark = pytest.mark.quick
CONFIG = ModelConfig(depth=1, width=32, num_heads=2)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Eight documents, which are the training split as well as the held-out one."""
    folder = tmp_path_factory.mktemp("memorized")
    texts = write_corpus(folder / "corpus.txt", 100).read_text().lower().splitlines()
    encoder, tokenizer = ChunkedEncoder(LsaEncoder.fit(texts, 8), 2), Tokenizer.words(texts, 320)
    shown = texts[:8]
    with StoreWriter(folder / "store", tokenizer, encoder, "float32") as writer:
        for split in ("train", "validation", "test"):
            writer.add(split, tokenizer.encode_batch(shown), encoder.encode(shown), [len(text) for text in shown])
        writer.finish([], {}, {}, {})
    return Store.open(folder / "store")


@pytest.fixture(scope="module")
def result(store: Store, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two decoders that have seen the eight documents some hundred times."""
    out = tmp_path_factory.mktemp("out")
    size = ("model.depth=1", "model.width=32", "model.latent_width=16", "model.num_heads=2")
    settings = (*size, "train.steps=200", "train.global_batch_size=8", "optim.lr=1e-2")
    where = ("--store", str(store.path), "--corpora", "simple-docs", "--out", str(out))
    assert main(["reference_decoder", *settings, *where, "--seeds", "0", "1"]) == 0
    return json.loads((out / "reference_decoder.json").read_text(encoding="utf-8"))


def random_decoder(store: Store, stir: float = 0.0, **manifest: int) -> CausalDecoder:
    torch.manual_seed(0)
    model = CausalDecoder(CONFIG, replace(store.manifest, **manifest)).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter += stir * torch.randn_like(parameter)
    return model


def test_it_reproduces_what_it_has_memorized(result: dict[str, Any]) -> None:
    seeds = result["corpora"]["simple-docs"]["seeds"]
    assert [seed["seed"] for seed in seeds] == [0, 1]
    assert seeds[0]["bits_per_token_with_length"] != seeds[1]["bits_per_token_with_length"]
    for seed in seeds:
        assert seed["texts"] == 8 and seed["bits_per_token_with_length"] < 0.1
        for decoding in BEAMS:
            assert seed[decoding]["exact_match"] == 1 and seed[decoding]["reencoded_cosine"] > 0.999


def test_table(result: dict[str, Any]) -> None:
    made = blocks(result)
    assert made.keys() == {"reference-decoder-simple-docs"}
    table = made["reference-decoder-simple-docs"].splitlines()
    assert table[0] == f"| `simple-docs`, seeds: 2 | {' | '.join(BEAMS)} | mmldlm, seeds: 3 |"
    (row,) = (line for line in table if line.startswith("| exact matches"))
    gate = json.loads((RESULTS / "learning.json").read_text(encoding="utf-8"))["corpora"]["simple-docs"]["seeds"]
    exact = sorted(seed["metrics"]["l2t"]["exact_match"] for seed in gate)
    ours = f"{exact[1]:.3g} ({exact[0]:.3g} to {exact[2]:.3g})"
    assert row == f"| exact matches | {'1 (1 to 1) | ' * len(BEAMS)}{ours} |"
    ours_by_row = {line.split(" | ")[0].strip("| "): line.split(" | ")[-1].strip("| ") for line in table}
    assert ours_by_row["the same of texts up to 64 tokens"] == "-", "measured of the decoders alone"
    assert ours_by_row["bits per token, with the end or length"] != "-", "no text of this corpus is longer"
    other = {"corpora": {"python-docs": result["corpora"]["simple-docs"]}}
    (row,) = (line for line in blocks(other)["reference-decoder-python-docs"].splitlines() if "bits per token" in line)
    assert row.endswith("| - |"), "of fewer texts than those of the decoders"


def test_a_store_is_of_one_corpus(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["reference_decoder", "--store", str(store.path)])
    assert_user_error((status, capsys.readouterr().err), 2, "--store", ", ".join(CASES))


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


def test_padding_changes_no_bits(store: Store) -> None:
    model = random_decoder(store, stir=0.1)
    latents, texts = torch.randn(2, 2, 8), (torch.arange(3), torch.arange(5, 13))
    together = model.nats(latents, texts)
    alone = model.nats(latents[:1], texts[:1])
    assert together.shape == (2, 9) and alone.shape == (1, 4) and (together[0, 4:] == 0).all()
    torch.testing.assert_close(together[:1, :4], alone)


def test_without_training_all_tokens_and_the_end_are_equally_likely(store: Store) -> None:
    model = random_decoder(store)
    tokens, lengths, latents = store.split("test").gather(torch.arange(8).numpy())
    texts = torch.from_numpy(tokens).split(lengths.tolist())
    nats = model.nats(torch.from_numpy(store.standardize(latents)), texts)
    bits = nats.sum().item() / math.log(2) / (len(tokens) + len(texts))
    assert bits == pytest.approx(math.log2(store.manifest.vocab_size + 1), rel=0.02)


def test_one_beam_takes_the_most_likely_token_each_time(store: Store) -> None:
    model = random_decoder(store, stir=0.5, vocab_size=3, max_length=6)
    latents = torch.randn(16, 2, 8)
    texts = [text for (text,) in model.generate(latents, beams=1)]
    for latent, text in zip(latents, texts, strict=True):
        best = model.text_logits(latent[None], torch.tensor([text], dtype=torch.int64)).argmax(-1)[0].tolist()
        assert best[: len(text)] == text and (best[-1] == model.end or len(text) == 6)
    assert len({len(text) for text in texts}) > 2


def test_a_wide_beam_finds_the_best_of_all_texts(store: Store) -> None:
    model = random_decoder(store, stir=0.2, vocab_size=3, max_length=3)
    latents = torch.randn(16, 2, 8)
    texts = [list(text) for length in range(4) for text in product(range(3), repeat=length)]
    tensors = [torch.tensor(text, dtype=torch.int64) for text in texts]
    sizes = torch.tensor([len(text) + 1 for text in texts])
    found = [ranked[0] for ranked in model.generate(latents, beams=len(texts))]
    for latent, text in zip(latents, found, strict=True):
        means = model.nats(latent.expand(len(texts), -1, -1), tensors).sum(1) / sizes
        assert text == texts[means.argmin()]
    assert len({len(text) for text in found}) > 1 and found != [text for (text,) in model.generate(latents, beams=1)]
