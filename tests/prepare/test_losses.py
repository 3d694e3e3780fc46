"""A tokenizer that does not know the text is told, and refused where most of the text is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from mmldlm import cli
from mmldlm.data.store import Store
from mmldlm.data.tokenizer import Tokenizer
from tests.helpers.sample_corpus import TOPICS, write_corpus
from tests.helpers.user_errors import assert_user_error

WORDS = ["the", "of", "and", ".", *sorted({word for words in TOPICS.values() for word in words})]


def write_tokenizer(folder: Path, kind: str, words: list[str]) -> Path:
    vocabulary = ["[UNK]", *words]
    numbered = {word: index for index, word in enumerate(vocabulary)}
    backend = {
        "words": lambda: tokenizers.Tokenizer(models.WordLevel(numbered, unk_token="[UNK]")),
        "pieces": lambda: tokenizers.Tokenizer(models.WordPiece(numbered, unk_token="[UNK]")),
        "unigram": lambda: tokenizers.Tokenizer(models.Unigram([(word, -1.0) for word in vocabulary], unk_id=0)),
    }[kind]()
    backend.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()])
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if kind == "pieces":
        backend.decoder = decoders.WordPiece()
    if kind == "unigram":
        backend.decoder = decoders.Fuse()
    backend.save(str(folder / f"{kind}.json"))
    return folder / f"{kind}.json"


@pytest.mark.parametrize("kind", ["words", "pieces", "unigram"])
def test_unknown_text_is_counted_warned_of_and_refused(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = write_corpus(tmp_path / "corpus.txt", 400).read_text().splitlines()
    # One word of 2 % of the documents is unknown.
    lines = [f"{line} Zebra" if index % 50 == 7 else f"{line} Tulíp" for index, line in enumerate(lines)]
    (tmp_path / "corpus.txt").write_text("\n".join(lines))
    options = ["prepare", str(tmp_path / "corpus.txt"), "--channels", "8", "--validation-fraction", "0.1"]
    known = str(write_tokenizer(tmp_path, kind, WORDS))
    unknown_share = 8 / sum(len(line.replace(".", " .").split()) for line in lines)
    for name, more in (("one", ()), ("parts", ("--part-bytes", "900", "--processes", "2"))):
        assert cli.main([*options, "--tokenizer", known, "--out", str(tmp_path / name), *more]) == 0
        shown = capsys.readouterr().err
        assert "problems: none" in shown and "warning: " in shown and " of tokens are unknown, 2.0% of doc" in shown
        result = Store.open(tmp_path / name).manifest.tokenizer
        assert result["lossy_documents"] == 0.02
        assert result["unknown_tokens"] == pytest.approx(unknown_share, rel=1e-9 if kind != "unigram" else 10)
    assert cli.main(["data", "info", str(tmp_path / "one")]) == 0
    assert " of tokens are unknown, 2.0% of doc" in capsys.readouterr().out
    # The same tokenizer, whose words are of another language.
    other = str(write_tokenizer(tmp_path, kind, ["le", "la", "et"]))
    command = [*options, "--tokenizer", other, "--out", str(tmp_path / "none")]
    status = cli.main(command)
    error = capsys.readouterr().err.splitlines()[-1] + "\n"
    assert_user_error((status, error), 65, f"--tokenizer {other}", "100.0% of documents", "--lossy")
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["one", "parts"]
    assert cli.main([*command, "--lossy"]) == 0
    assert Store.open(tmp_path / "none").manifest.tokenizer["lossy_documents"] == 1


@pytest.mark.parametrize("tokenizer", ["bpe", "words", "characters"])
def test_built_in_tokenizers_lose_nothing(tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = write_corpus(tmp_path / "corpus.txt", 300).read_text()
    text = text.lower().replace(".", "") if tokenizer == "characters" else text.replace("tulip", "  TULÍP 漢字\t")
    (tmp_path / "corpus.txt").write_text(text)
    options = ["--channels", "8", "--validation-fraction", "0.1", "--vocab-size", "300", "--tokenizer", tokenizer]
    assert cli.main(["prepare", str(tmp_path / "corpus.txt"), *options, "--out", str(tmp_path / "store")]) == 0
    shown = capsys.readouterr().err
    assert "warning" not in shown
    assert "0.0% of tokens are unknown, 0.0% of documents are not what their tokens decode to" in shown


def test_losses_are_counted_without_case_and_white_space(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, "words", ["one"]))
    assert tokenizer.count_losses(["one", "One two"], tokenizer.encode_batch(["one", "One two"])) == {
        "tokens": 3,
        "unknown": 1,
        "documents": 2,
        "lossy": 1,
    }
    assert tokenizer.count_losses([], []) == {"tokens": 0, "unknown": 0, "documents": 0, "lossy": 0}
