"""Generative perplexity matches transformers, with a small random GPT-2 in a folder."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mmldlm.errors import DataError, UsageError
from mmldlm.evaluation import Evaluation, EvaluationConfig
from mmldlm.evaluation.perplexity import CausalModel, perplexity
from mmldlm.evaluation.suite import evaluate
from tests.helpers.known_runs import fresh_run, perfect_run

OF_ITS_OWN_CODE = {"model_type": "own", "auto_map": {"AutoConfig": "a.A", "AutoModelForCausalLM": "a.B"}}
CPU = torch.device("cpu")
TEXTS = ["The rose of soil and water.", "The wave.", "T", "", "The tide " * 40]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_store: Path) -> Path:
    """A GPT-2 with 48 positions and the store's tokenizer."""
    from transformers import GPT2Config, GPT2LMHeadModel

    made = tmp_path_factory.mktemp("gpt2")
    run = fresh_run(tiny_store)
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=run.tokenizer.vocab_size, n_positions=48, n_embd=32, n_layer=2, n_head=2)
    config.initializer_range = 0.3  # so that tokens are far from equally likely
    GPT2LMHeadModel(config).save_pretrained(made)
    run.tokenizer.save(made)
    return made


def test_nats_match_transformers(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ours = CausalModel(folder, CPU)
    assert ours.limit == 48
    total, tokens = 0.0, 0
    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt").input_ids[:, :48]
        nats, count = ours.nats(text)
        assert count == max(0, ids.shape[1] - 1)
        if count:
            with torch.no_grad():
                loss = float(theirs(ids, labels=ids).loss)
            assert nats / count == pytest.approx(loss, rel=1e-5)
            total, tokens = total + count * loss, tokens + count
    assert perplexity(np.array([ours.nats(text) for text in TEXTS])) == pytest.approx(
        math.exp(total / tokens), rel=1e-5
    )


def test_perplexity_has_held_out_texts_as_baseline(folder: Path, tiny_store: Path) -> None:
    config = EvaluationConfig(texts=12, times=1)
    joint = evaluate(perfect_run(tiny_store), config, ["joint"], perplexity_model=folder)["joint"]
    evaluation = Evaluation(perfect_run(tiny_store), config)
    model = CausalModel(folder, CPU)
    for suffix, tokens in (("_true", evaluation.tokens[:12]), ("_unigram", evaluation.unigram_tokens(12))):
        expected = perplexity(np.array([model.nats(text) for text in evaluation.decode(tokens)]))
        assert joint[f"generative_perplexity{suffix}"] == expected
    assert joint["generative_perplexity"] > 1


def pickle_weights(folder: Path) -> None:
    """Save the weights with pickle, as older models, which transformers would read."""
    file = folder / "model.safetensors"
    torch.save(load_file(file), folder / "pytorch_model.bin")
    file.unlink()


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda folder: (folder / "config.json").unlink(), "expected the folder of a causal language model"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 100), "cannot load the model"),
        (pickle_weights, "cannot load the model"),
        (lambda folder: (folder / "config.json").write_text(json.dumps(OF_ITS_OWN_CODE)), "cannot load the model"),
    ],
)
def test_invalid_language_model_is_refused(
    folder: Path, tmp_path: Path, spoil: Callable[[Path], object], expected: str
) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    spoil(tmp_path)
    with pytest.raises(DataError, match=expected) as caught:
        CausalModel(tmp_path, CPU)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.quick
def test_missing_transformers_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match="needs transformers: pip install 'transformers>="):
        CausalModel(tmp_path, CPU)
