"""The yardstick: texts of Debian, what its masked opponent learns, and its tables from a small corpus."""

from __future__ import annotations

import json
from argparse import Namespace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from sacrebleu.metrics import BLEU

from benchmarks import yardstick
from benchmarks.__main__ import main
from benchmarks.common.masked_inverter import SHARE, MaskedInverter
from benchmarks.common.public_texts import ONE, SEVERAL, definitions, descriptions
from benchmarks.common.text_metrics import bleu_signature, text_metrics, token_set_f1
from benchmarks.decoder import EXACT, train
from benchmarks.yardstick import ANOTHER, COPIED, FIVE_LENGTHS, METHODS, Ground
from mmldlm.config import load_config
from mmldlm.data.store import Store
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.model.mmdit import ModelConfig
from tests.benchmarks.test_decoder import write_store
from tests.helpers.sample_corpus import write_corpus
from tests.helpers.user_errors import assert_user_error

quick = pytest.mark.quick
CONFIG = ModelConfig(depth=0, width=64, num_heads=2)


@quick
def test_definitions_are_without_license_and_examples() -> None:
    lines = [
        "  1 This software and database is being provided to you, the LICENSEE, by Princeton University | under",
        '00001740 03 n 01 entity 0 003 ~ 00001930 n 0000 | that which is perceived; "it was full of rackets, balls"  ',
        "00002137 03 n 02 abstraction 0 abstract_entity 0 010 @ 00001740 n 0000 | a general concept; of many  ",
    ]
    assert [*definitions(lines)] == ["that which is perceived", "a general concept"]


@quick
def test_a_source_package_has_a_synopsis_and_perhaps_a_paragraph() -> None:
    packages = "Package: hull-dev\nSource: hull (1.2)\n\nPackage: hull\n\nPackage: bow\nPriority: optional\n"
    translation = (
        "Package: hull-dev\nDescription-md5: 0\nDescription-en: headers of hull\n Headers. Of hull.\n\n"
        "Package: hull\nDescription-md5: 1\nDescription-en: Ships, drawn\n Draws ships (e.g. boats).\n Sinks them.\n"
        " .\n It has sails.\n\nPackage: bow\nDescription-en: arrows\n Only one sentence, e.g. Perl.\n  * a list\n\n"
        "Package: gone\nDescription-en: of no index\n"
    )
    assert [*descriptions(packages, translation)] == [
        {"text": "arrows", "kind": ONE, "group": "bow"},
        {"text": "Ships, drawn", "kind": ONE, "group": "hull"},
        {"text": "Draws ships (e.g. boats). Sinks them.", "kind": SEVERAL, "group": "hull"},
    ]


@quick
def test_without_apt_one_line_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code = main(["yardstick", "--quick", "--corpora", "wordnet", "--keep", str(tmp_path), "--out", str(tmp_path)])
    assert_user_error((code, capsys.readouterr().err), 65, "apt-get", "Debian", alone=False)


# --- metrics --------------------------------------------------------------------------------------


@quick
def test_metrics_are_of_texts_as_they_are_spelled() -> None:
    true = ["The tide, at noon.", "a reef of salt and waves"]
    tokenizer = Tokenizer.train(true, 300)
    made = ["the tide, at noon.", "a reef of salt and waves"]
    result = text_metrics(*map(tokenizer.encode_batch, (made, true)), tokenizer, None, np.zeros(0), cpu_s=1)
    assert result["exact_match"] == 0.5 and result["cpu_ms_per_text"] == 500 and "reencoded_cosine" not in result
    assert result["bleu"] == pytest.approx(BLEU().corpus_score(made, [true]).score) and result["bleu"] < 100
    assert result["bleu_by_text"] == pytest.approx(np.mean([BLEU().corpus_score([made[0]], [[true[0]]]).score, 100]))
    assert "case:mixed" in bleu_signature(true) and "tok:13a" in bleu_signature(true)


@quick
def test_f1_is_of_sets_of_words() -> None:
    assert token_set_f1("a b b c", "a b d") == pytest.approx(200 * 2 / 6) and token_set_f1("", "a") == 0
    assert token_set_f1("noon.", "noon .") == 100


# --- the masked opponent ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write_store(tmp_path_factory.mktemp("memorized"), unseen=0)


@quick
def test_a_tenth_of_the_tokens_is_masked_whatever_the_batch(store: Store) -> None:
    torch.manual_seed(0)
    model = MaskedInverter(CONFIG, store.manifest)
    texts, latents = [torch.randint(5, 60, (length,)) for length in (3, 9, 25) * 200], torch.randn(600, 2, 8)
    nats = model.nats(latents, texts)
    is_text = torch.arange(25) < torch.tensor([*map(len, texts)])[:, None]
    assert ((nats > 0) & ~is_text).sum() == 0 and (nats[is_text] > 0).float().mean() == pytest.approx(SHARE, abs=0.015)
    assert (model.nats(latents, texts) != nats).any(), "training draws masks anew"
    model.eval()
    torch.testing.assert_close(model.nats(latents, texts), model.nats(latents, texts), rtol=0, atol=0)


@quick
def test_only_the_embedding_and_seen_tokens_change_a_prediction(store: Store) -> None:
    torch.manual_seed(0)
    model = MaskedInverter(CONFIG, store.manifest).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    for parameter in model.modulation.parameters():
        parameter.data.zero_()  # so that the embedding arrives through the blocks alone
    latents, tokens, is_text = (
        torch.randn(2, 2, 8),
        torch.randint(5, 60, (2, 6)),
        torch.arange(6) < torch.tensor([[6], [4]]),
    )
    logits = model(latents, tokens, is_text)
    padded = tokens.clone()
    padded[1, 4:] = 7
    torch.testing.assert_close(model(latents, padded, is_text)[1, :4], logits[1, :4])
    later = tokens.clone()
    later[0, 5] = (later[0, 5] + 1) % 50
    assert (model(latents, later, is_text) - logits).abs()[0, 0].max() > 1e-3, "attention has both directions"
    assert (model(latents + 1, tokens, is_text) - logits).abs().amax((1, 2)).min() > 1e-3


@quick
@pytest.mark.parametrize("highest", [1.0, SHARE])
def test_texts_come_back_only_if_texts_of_masks_were_trained(store: Store, highest: float) -> None:
    settings = ("model.width=64", "model.num_heads=2", "train.global_batch_size=8", "train.steps=150", "optim.lr=1e-2")
    config = load_config("configs/quickstart.yaml", [f"data.path={store.path}", *settings, "model.depth=1"])
    torch.manual_seed(0)
    model, _ = train(config, store, partial(MaskedInverter, highest=highest))
    _, texts, latents = store.split("test").samples(np.arange(8))
    given = torch.from_numpy(store.standardize(latents))
    made = model.generate(given, [*map(len, texts)], passes=4)
    exact = np.mean([text == true.tolist() for text, true in zip(made, texts, strict=True)])
    assert [*map(len, made)] == [*map(len, texts)]
    assert exact == 1 if highest == 1 else exact < 1


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command on a small corpus of both kinds, which an earlier call has left in its folder."""
    folder = tmp_path_factory.mktemp("yardstick")
    corpus = folder / "debian"
    corpus.mkdir()
    lines = sorted({*write_corpus(folder / "corpus.txt", 500).read_text().splitlines()})
    rows = [{"text": line, "kind": ONE, "group": str(number)} for number, line in enumerate(lines)]
    pairs = zip(lines[::2], lines[1::2], strict=False)
    rows += [{"text": " ".join(pair), "kind": SEVERAL, "group": str(number)} for number, pair in enumerate(pairs)]
    (corpus / "debian.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (corpus / "debian.source.json").write_text(json.dumps({"origin": "a test"}))
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        fractions = ("--validation-fraction", "0.1", "--test-fraction", "0.1")
        patch.setattr(
            yardstick, "PREPARE", ("--vocab-size", "300", "--channels", "8", "--max-length", "90", *fractions)
        )
        assert run(folder) == 0
    torch.set_num_threads(threads)
    return folder


def run(folder: Path, *options: str) -> int:
    where = ("--corpora", "debian", "--keep", str(folder), "--out", str(folder))
    return main(["yardstick", "--quick", "--seeds", "1", *where, *options])


def test_all_methods_are_measured_on_the_same_texts_of_both_kinds(out: Path) -> None:
    result = json.loads((out / "yardstick.json").read_text(encoding="utf-8"))
    corpus = result["corpora"]["debian"]
    assert corpus["methods"].keys() == METHODS.keys() and corpus["controls"].keys() == {ONE, SEVERAL}
    references = {
        kind: [pair["reference"] for pair in corpus["controls"][kind][COPIED]["samples"]] for kind in (ONE, SEVERAL)
    }
    source = [json.loads(line) for line in (out / "debian" / "debian.jsonl").read_text().splitlines()]
    kinds = {row["text"]: row["kind"] for row in source}
    for (run_of_method,) in corpus["methods"].values():
        assert run_of_method["train_cpu_minutes"] > 0
        for kind, measured in run_of_method["by_kind"].items():
            assert len(measured) >= 2
            for way in measured.values():
                assert [pair["reference"] for pair in way["samples"]] == references[kind]
                assert {kinds[text] for text in references[kind]} == {kind}
    for method in ("mmldlm", "decoder"):
        measured = corpus["methods"][method][0]["by_kind"]
        assert all(0 < way[EXACT] < 12 for ways in measured.values() for name, way in ways.items() if name != ANOTHER)
    made = yardstick.blocks(result)
    for kind in (ONE, SEVERAL):
        head, _, *rows = made[f"yardstick-debian-{kind.replace(' ', '-')}"].splitlines()
        assert kind in head and len(rows) == 1 + 3 + 2 + 2 + 2 and any(FIVE_LENGTHS in row for row in rows)
    assert "case:mixed" in made["yardstick-debian"] and "From a test," in made["yardstick-debian"]


def test_a_later_call_trains_what_is_missing_and_refuses_other_options(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in (out / "debian").glob("*.json")}
    (lost,) = (out / "debian").glob("masked 10 %*-seed-1.json")
    lost.unlink()
    with pytest.MonkeyPatch.context() as patch:
        store = Store.open(out / "debian" / "debian")
        patch.setattr(yardstick, "prepare_store", lambda *_: store.path)
        assert run(out) == 0
    after = {path: path.stat().st_mtime_ns for path in (out / "debian").glob("*.json")}
    assert [path for path in after if after[path] != before[path]] == [lost] and after.keys() == before.keys()
    capsys.readouterr()
    assert_user_error((run(out, "--limit", "7"), capsys.readouterr().err), 2, "--keep", "'limit': 7", alone=False)


@quick
def test_the_steps_fill_the_minutes(store: Store, tmp_path: Path) -> None:
    ground = Ground(store, tmp_path, {}, Namespace(quick=False, minutes=2, settings=()))
    (tmp_path / "time-decoder.json").write_text(json.dumps({"step_s": 0.25, "start_s": 20.0}))
    assert ground.steps("decoder") == (120 - 20) / 0.25
