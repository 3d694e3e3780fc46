"""A small learning gate: a model learns within seconds to generate texts from latents and latents from texts.

`python -m benchmarks learning` compares the quickstart with thresholds, over seeds. These tests plant faults of the
same kinds; each must miss a threshold that the unchanged trainer reaches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.common.store_writer import StoreWriter
from mmldlm.config import load_config
from mmldlm.data.encoders import LsaEncoder
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.distributed.collectives import Collectives
from mmldlm.evaluation.quality import quality
from mmldlm.loading.load import LoadedRun, load_run
from mmldlm.model.mmdit import MMDiT
from mmldlm.train import train
from tests.helpers.metrics import read_metrics

# The least value of each metric after the last step. Without latents, the grammar alone gives a token accuracy of 0.55.
BARS = {"t2l_cosine": 0.9, "t2l_recall_at_1": 0.9, "l2t_token_accuracy": 0.9}

# No word has two places, so that the words of a sentence, which are all that its latent knows, tell their order.
SENTENCE = [
    "the", "old young small happy", "cat dog bird horse child king", "sees hears follows likes finds",
    "the", "brave quiet tall clever", "farmer teacher sailor baker doctor singer", "in",
    "the", "garden house river forest city",
]  # fmt: skip


def sentence(draw: np.random.Generator) -> str:
    """Draw one of 14,400 sentences."""
    return " ".join(str(draw.choice(words.split())) for words in SENTENCE)


def make_store(path: Path, shuffled: bool = False) -> Path:
    """A store of sentences of a small grammar; `shuffled`: each with another one's latent."""
    draw = np.random.default_rng(0)
    texts = list(dict.fromkeys(sentence(draw) for _ in range(2600)))
    encoder, tokenizer = LsaEncoder.fit(texts, 24), Tokenizer.words(texts, 400)
    latents = encoder.encode(texts)
    if shuffled:
        latents = latents[draw.permutation(len(texts))]
    ends = {"train": (0, 2000), "validation": (2000, 2100), "test": (2100, 2150)}
    with StoreWriter(path, tokenizer, encoder, "float32") as writer:
        for split, (start, stop) in ends.items():
            part = texts[start:stop]
            writer.add(split, tokenizer.encode_batch(part), latents[start:stop], [len(text) for text in part])
        writer.finish([], {}, {}, {})
    return path


def learn(run: Path, store: Path, *settings: str) -> dict[str, float]:
    """Train the model on `store` with the defaults of what is learned; what was measured after the last step."""
    config = [
        f"run={{dir: {run}, seed: 0}}",
        f"data.path={store}",
        "model={depth: 2, width: 64, num_heads: 2, conditioning_width: 64, modulation_rank: 0}",
        "mode={l2t: 0.5, t2l: 0.3, joint: 0.2}",
        "optim.lr=5e-3",
        "train={steps: 400, global_batch_size: 32}",
        "log={every: 100, tensorboard: false, figures_every: 0}",
        "validation={every: 400, samples: 100, text_samples: 0, quality_every: 400, quality_samples: 100}",
        "checkpoint.every_steps=0",
        "sampling.steps=12",
    ]
    train(load_config(None, [*config, *settings]))
    *_, last = (record for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "quality")
    return {name: last[f"quality/{name}"] for name in BARS}


def missed(measured: dict[str, float]) -> set[str]:
    return {name for name, bar in BARS.items() if measured[name] < bar}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("store") / "store")


def test_learning_gate_passes_and_detects_random_decoding(store: Path, tmp_path: Path) -> None:
    measured = learn(tmp_path / "run", store)
    assert not missed(measured), measured

    run = load_run(tmp_path / "run")
    check_fit_by_network(run)
    at_random = replace(run.config.sampling, temperature=1e6)  # all tokens are equally likely
    run = replace(run, config=replace(run.config, sampling=at_random))
    result = quality(run, range(100), Collectives())
    assert missed({name: result[f"quality/{name}"] for name in BARS}) == {"l2t_token_accuracy"}


def check_fit_by_network(run: LoadedRun) -> None:
    """The network tells a text from the same text with a word dropped, and each text by itself."""
    _, texts, raw = run.store.split("validation").samples(np.arange(100))
    tokens, latents = [text.tolist() for text in texts], torch.from_numpy(run.store.standardize(raw))
    fit = run.fit_by_network(run.config.sampling)
    whole, cut = fit(tokens, latents), fit([[*text[:1], *text[2:]] for text in tokens], latents)
    assert (whole > cut).double().mean() > 0.95
    others = fit(tokens, latents.roll(1, 0))
    assert (whole > others).double().mean() > 0.95
    torch.testing.assert_close(fit(tokens[7:9], latents[7:9]), whole[7:9], rtol=0, atol=1e-5)


class WithSkip(MMDiT):
    """The network with a learned skip whatever it predicts, as it once was."""

    def __init__(self, *arguments: Any, latent_skip: bool, **more: Any):
        super().__init__(*arguments, latent_skip=True, **more)


@pytest.mark.slow
def test_skip_of_x0_is_detected(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmldlm.loading.factory.MMDiT", WithSkip)
    assert missed(learn(tmp_path / "run", store)) >= {"t2l_cosine", "t2l_recall_at_1"}


@pytest.mark.slow
def test_missing_latent_loss_is_detected(store: Path, tmp_path: Path) -> None:
    assert missed(learn(tmp_path / "run", store, "loss.latent_weight=0")) >= {"t2l_cosine", "t2l_recall_at_1"}


@pytest.mark.slow
def test_shuffled_latents_are_detected(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", shuffled=True)
    assert missed(learn(tmp_path / "run", store)) == set(BARS)
