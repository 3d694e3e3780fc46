"""Tokenizer, encoders, corpora and near-duplicates."""

from __future__ import annotations

import inspect
import json
import random
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch

from mmldlm.data.encoders import LsaEncoder, load_encoder
from mmldlm.data.tokenizer import MASK, PAD, Tokenizer
from mmldlm.errors import DataError
from mmldlm.prepare.corpus import exact_group, near_duplicate_groups
from mmldlm.prepare.documents import Document, Problem
from mmldlm.prepare.readers.files import find_files
from mmldlm.prepare.readers.python_docs import (
    NEAR_COPY_OVERLAP,
    is_prose,
    sentences,
    split_words,
    without_near_copies,
)
from mmldlm.prepare.readers.text import read_text, text_parts
from tests.helpers.operations import count_calls
from tests.helpers.sample_corpus import read_file, write_corpus
from tests.helpers.user_errors import refused

pytestmark = pytest.mark.quick

TEXTS = [
    "plain words",
    "  two  spaces\tand tabs \r\n",
    "Größe, naïve, Ελληνικά, 漢字かな, עברית, 👩‍👩‍👧 e\u0301",
    "\x00\x01\x7f \u2028 \ufeff \U0010ffff",
    f"literal {MASK}, {PAD}{MASK} and [CLS] </s> <unk>",
    "",
]


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return Tokenizer.train(["the quick brown fox [MASK] jumps over the lazy dog " * 20], 300)


def test_byte_level_round_trip_is_exact(bpe: Tokenizer) -> None:
    draw = random.Random(0)
    valid = [point for point in range(0x110000) if not 0xD800 <= point < 0xE000]
    texts = TEXTS + ["".join(map(chr, draw.choices(valid, k=40))) for _ in range(50)]
    assert bpe.decode_batch(bpe.encode_batch(texts)) == texts


def test_special_tokens_never_come_from_text(bpe: Tokenizer, tmp_path: Path) -> None:
    bpe.save(tmp_path)
    for tokenizer in (bpe, Tokenizer.load(tmp_path), Tokenizer.load(tmp_path / "tokenizer.json")):
        for ids in tokenizer.encode_batch(TEXTS):
            assert not {tokenizer.mask_id, tokenizer.pad_id} & set(ids)
    assert bpe.decode_batch([[bpe.mask_id, *bpe.encode_batch(["a"])[0]]], keep_special=True) == [f"{MASK}a"]


def test_training_and_saving_keep_the_identity(bpe: Tokenizer, tmp_path: Path) -> None:
    texts = write_corpus(tmp_path / "corpus.txt").read_text().splitlines()
    one, other = Tokenizer.train(texts, 300), Tokenizer.train(iter(texts), 300)
    assert one.identity == other.identity != bpe.identity
    one.save(tmp_path / "saved")
    loaded = Tokenizer.load(tmp_path / "saved")
    assert (loaded.identity, loaded.vocab_size, loaded.mask_id) == (one.identity, one.vocab_size, one.mask_id)
    assert loaded.encode_batch(texts) == one.encode_batch(texts)
    with refused(DataError, "--vocab-size 100", 258):
        Tokenizer.train(texts, 100)


def test_a_foreign_tokenizer_gets_mask_and_pad(tmp_path: Path) -> None:
    foreign = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[UNK]": 1, "[PAD]": 2}, unk_token="[UNK]"))
    foreign.add_special_tokens(["[CLS]"])
    foreign.post_processor = tokenizers.processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 3)])
    foreign.enable_truncation(2)
    foreign.save(str(tmp_path / "foreign.json"))
    loaded = Tokenizer.load(tmp_path / "foreign.json")
    assert (loaded.mask_id, loaded.pad_id, loaded.vocab_size) == (4, 2, 5)
    assert loaded.encode_batch(["a"]) == [[0]], "nothing is added, nothing cut"
    for path in (tmp_path / "none.json", Path(__file__)):
        with refused(DataError, path):
            Tokenizer.load(path)


@pytest.mark.parametrize("kind", ["BPE", "Unigram"])
def test_a_tokenizer_that_draws_tokens_at_random_no_longer_does(kind: str, bpe: Tokenizer, tmp_path: Path) -> None:
    """Subword regularization is for training a model; here a text has one latent and one row of tokens."""
    backend = tokenizers.Tokenizer.from_str(bpe._json)
    if kind == "BPE":
        backend.model.dropout = 0.5  # type: ignore[attr-defined]
    else:
        pieces = [(piece, -float(len(piece))) for piece in [*"the quickbrown", "th", "he", "qu", "ck", "the"]]
        backend = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, 0, False))
        backend.model.alpha, backend.model.nbest_size = 0.1, 64  # type: ignore[attr-defined]
    assert len({str(backend.encode("the quick brown the").ids) for _ in range(40)}) > 1
    backend.save(str(tmp_path / "tokenizer.json"))
    for tokenizer in (Tokenizer(backend), Tokenizer.load(tmp_path)):
        assert len({str(tokenizer.encode_batch(["the quick brown the"])) for _ in range(40)}) == 1
        assert json.loads(tokenizer._json)["model"].get("dropout") is None, "also for who loads it elsewhere"


GROWING = {
    "type": "Sequence",
    "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 16}] * 8,
}


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("normalizer", GROWING, "4,294,967,296 256"),
        ("model", {"vocab": {"a": 0, "b": 1 << 31}}, "2147483648 2^24"),
        ("model", {"vocab": {"a": 0, "b": 3, "c": 3}}, "5 3"),
    ],
)
def test_a_tokenizer_without_bounds_is_refused(key: str, value: dict, named: str, tmp_path: Path) -> None:
    content = json.loads(tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a")).to_str())
    content[key] = {**(content[key] or {}), **value}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with refused(DataError, "tokenizer.json", *named.split()):
        Tokenizer.load(tmp_path)


def test_words_are_tokens_and_all_else_is_spelled_by_bytes(tmp_path: Path) -> None:
    texts = ["Return the list, or the tuple.", "the list is empty", "Return a tuple"]
    words = Tokenizer.words(texts, 512)
    known, unknown = "return the tuple, or the list.", "the zoo's list \u00e9"
    assert len(words.encode_batch([known])[0]) == 8
    assert len(words.encode_batch([unknown])[0]) > 8
    again = Tokenizer.load((words.save(tmp_path), tmp_path)[1])
    for tokenizer in (words, again):
        assert tokenizer.decode_batch(tokenizer.encode_batch([known, unknown])) == [known, unknown]
    assert words.decode_batch(words.encode_batch([texts[0]])) == [texts[0].lower()]
    assert words.identity == again.identity == Tokenizer.words(texts[::-1], 512).identity


def test_the_commonest_words_get_the_tokens() -> None:
    tokenizer = Tokenizer.words(["aa aa aa bb bb cc"], 258 + 2)
    assert [len(ids) for ids in tokenizer.encode_batch(["aa", "bb", "cc"])] == [1, 1, 3]
    with refused(DataError, "--vocab-size 200", 258):
        Tokenizer.words(["aa"], 200)


def test_characters() -> None:
    tokenizer = Tokenizer.characters()
    assert (tokenizer.vocab_size, tokenizer.mask_id, tokenizer.pad_id) == (29, 27, 28)
    text = "  the quick  brown fox jumps over a lazy dog "
    (ids,) = tokenizer.encode_batch([text])
    assert len(ids) == len(text) and tokenizer.decode_batch([ids]) == [text]
    with refused(DataError, "alphabet"):
        tokenizer.encode_batch(["Upper"])


# --- encoders ------------------------------------------------------------------------------------


def test_lsa_tells_topics_apart_and_comes_back_from_disk(tmp_path: Path) -> None:
    texts = write_corpus(tmp_path / "corpus.txt").read_text().splitlines()
    before = torch.random.get_rng_state()
    encoder = LsaEncoder.fit(texts, channels=8, seed=3)
    assert torch.equal(torch.random.get_rng_state(), before), "the global generator was touched"
    latents = encoder.encode(texts)
    assert latents.shape == (600, 1, 8) and latents.dtype == np.float32
    assert np.allclose(np.linalg.norm(latents, axis=-1), 1, atol=1e-5)
    same, one, other = encoder.encode(["The rose and tulip.", "soil water SEED!", "whale coral"])[:, 0]
    assert same @ one > 0.5 > 0.2 > abs(same @ other)
    assert LsaEncoder.fit(texts, 8, 3).identity == encoder.identity
    encoder.save(tmp_path / "encoder")
    loaded = load_encoder(tmp_path / "encoder")
    assert np.array_equal(loaded.encode(texts), latents) and loaded.identity == encoder.identity
    assert np.array_equal(np.concatenate([encoder.encode([text]) for text in texts[:20]]), latents[:20])
    assert not [file for file in (tmp_path / "encoder").iterdir() if b"pickle" in file.read_bytes()]


def test_lsa_is_refused_for_texts_without_spaces(tmp_path: Path) -> None:
    texts = ["今天今天读城市晚上给", "房子书在书他们鸟跑晚上一本走", "今天 读 书"]
    with refused(DataError, "--encoder lsa", "'今天", "--encoder learned"):
        LsaEncoder.fit(texts * 5, 2)
    spaced = [" ".join(text) for text in texts]
    assert LsaEncoder.fit([*spaced, "ein Wort 今天今天今天今天 und zehn andere von hier bis da"], 2).channels == 2


def test_lsa_gives_nan_where_it_knows_no_word(tmp_path: Path) -> None:
    encoder = LsaEncoder.fit(["one two", "two three", "three four"], 2)
    latents = encoder.encode(["one", "unknown words", "", "!!!", "FOUR two"])
    assert np.isnan(latents).all(axis=(1, 2)).tolist() == [False, True, True, True, False]
    assert encoder.encode([]).shape == (0, 1, 2)
    with refused(DataError, "--channels 9", "3 texts", "4 words", "at most 3"):
        LsaEncoder.fit(["one two", "two three", "three four"], 9)
    with refused(DataError, "encoder.json"):
        load_encoder(tmp_path)
    (tmp_path / "encoder.json").write_text('{"kind": "lsa", "terms": [], "seed": 0}')
    with refused(DataError, "encoder.json"):
        load_encoder(tmp_path)


# --- readers -------------------------------------------------------------------------------------


def read(path: Path, content: bytes, *options: object) -> list[tuple[int, str]]:
    path.write_bytes(content)
    result = read_file(path, *options)  # type: ignore[arg-type]
    return [(item.line, item.text if isinstance(item, Document) else f"<{item.kind}>") for item in result]


def test_lines(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbffirst\r\n\n  \nfour\x0b\xe2\x80\xa8still four\nbad \xff byte\nlast"
    assert read(tmp_path / "a.txt", content) == [
        (1, "first"), (2, "<empty>"), (3, "<empty>"), (4, "four\x0b\u2028still four"), (5, "<unreadable>"), (6, "last"),
    ]  # fmt: skip
    problem = next(item for item in read_file(tmp_path / "a.txt") if isinstance(item, Problem) and not item.harmless)
    assert str(problem) == f"{tmp_path / 'a.txt'}:5: byte 5 (0xff) is not UTF-8"


def test_blocks(tmp_path: Path) -> None:
    content = b"\n\none\ntwo\n\n \nthree\n\nbad\n\xc3\x28\nmore\n\nend"
    expected = [(3, "one\ntwo"), (7, "three"), (10, "<unreadable>"), (13, "end")]
    assert read(tmp_path / "a.txt", content, "blocks") == expected


def test_blocks_between_lines_of_ones_own(tmp_path: Path) -> None:
    """Blank lines are part of a story, and any parts of the file give the same stories."""
    content = b"<eot>\n\none\n\ntwo\n <eot> \nthree\n\n<eot>\n<eot>\n\xc3\x28\n<eot>\nend <eot>\n\n"
    (path := tmp_path / "a.txt").write_bytes(content)
    for target in (1, 12, 1 << 20):
        parts = text_parts(str(path), target, "blocks", "<eot>")
        items = [item for part in parts for item in read_text(part, "text", "blocks", separator="<eot>")]
        assert [item.text if isinstance(item, Document) else item.kind for item in items] == [
            "one\n\ntwo", "three", "unreadable", "end <eot>",
        ]  # fmt: skip
        assert [item.line for item in items] == [3, 7, 11, 13]


def test_jsonl(tmp_path: Path) -> None:
    rows = [b'{"text": "a"}', b"{text", b'{"body": "b"}', b'{"text": 3}', b"[1]", b'{"text": " "}', b"", b"\xff",
            b'{"text": "\\ud800"}', b'{"text": "\\u00e9\\nline"}']  # fmt: skip
    kinds = ["a", "<invalid>", "<invalid>", "<invalid>", "<invalid>", "<empty>", "<empty>", "<unreadable>",
             "<unreadable>", "é\nline"]  # fmt: skip
    assert read(tmp_path / "a.jsonl", b"\n".join(rows)) == list(enumerate(kinds, 1))
    reasons = [item.reason for item in read_file(tmp_path / "a.jsonl", field="body") if isinstance(item, Problem)]
    assert reasons[0] == "no field 'body', found 'text'"
    assert read(tmp_path / "a.json", b"\n".join(rows)) == list(enumerate(kinds, 1)), "JSON lines with another suffix"


def test_inputs_are_found_or_named(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.jsonl", "d.bin"):
        (tmp_path / name).write_text("x")
    for name, expected in ((tmp_path / "b.txt", ["b.txt"]), (tmp_path, ["a.txt", "b.txt", "c.jsonl"]),
                           (tmp_path / "*.bin", ["d.bin"])):  # fmt: skip
        assert [Path(path).name for path in find_files(str(name))] == expected
    for missing in ("none.txt", "*.none"):
        with refused(DataError, missing):
            find_files(str(tmp_path / missing))


# --- near-duplicates -----------------------------------------------------------------------------


def test_near_duplicates_share_a_key() -> None:
    alike = [
        "Return the length of foo.",
        "return the length of Bar.",
        "Return the size of bar!",
        "Return the length of 12.",
        "Return the whole length of foo.",
        "The return length of foo.",
    ]
    others = ["Return the foo.", "Return the bar.", "Length of return foo the.", "Something else is said in here."]
    keys, statistics = near_duplicate_groups(alike + others)
    assert len(set(keys[: len(alike)])) == 1 and len(set(keys)) == 1 + len(others)
    assert statistics["largest_group"] == len(alike) and statistics["groups"] == 5
    shuffled = (alike + others)[::-1]
    assert near_duplicate_groups(shuffled)[0] == keys[::-1]
    assert near_duplicate_groups(alike)[0] == keys[: len(alike)]
    assert len({*near_duplicate_groups(["Cafe\u0301 noir", "caf\u00e9 NOIR."])[0]}) == 1
    one, other = near_duplicate_groups(["Call foo_bar with care.", "Call numpy.where with care."])[0]
    assert one == other
    assert near_duplicate_groups([])[0] == []


def test_exact_groups_ignore_what_does_not_make_another_text() -> None:
    one, *others = map(exact_group, ["A  caf\u00e9\n", "a CAFE\u0301", "a caf\u00e9.", "“A café!”", "- a café…"])
    assert {*others} == {one} and one not in map(exact_group, ["a cafe", "ac afé", "a, café"])
    assert len({*map(exact_group, ["?", "...", "!?"])}) == 3


def test_the_work_on_near_duplicates_is_proportional_to_the_texts(tmp_path: Path) -> None:
    texts = write_corpus(tmp_path / "corpus.txt", 20_000).read_text().splitlines()
    calls, half = (count_calls(lambda count=count: near_duplicate_groups(texts[:count])) for count in (20_000, 10_000))  # type: ignore[misc]
    assert calls < 2.2 * half


# --- the embedded corpus -------------------------------------------------------------------------


def test_prose_is_kept_and_all_else_dropped() -> None:
    docstring = """Return the :class:`~torch.Tensor` of all ``values`` (e.g. the mean) that it has [1]_.

    A second sentence follows here, and it is *quite* long. Is this one a question?

    Parameters
    ----------
    x : array_like
        The array that holds what is to be sorted.

    .. note:: This is a note of
        several lines that are dropped.

    - a list item that would read like prose.
      and its continuation is dropped too.

    Example of the code that follows::

        This is code that reads like a sentence.

    >>> this_is(a_doctest)
    The output of a doctest is not prose.

    ========  ======
    The table has a row here.
    ========  ======
    """
    assert list(sentences(inspect.cleandoc(docstring))) == [
        "Return the Tensor of all values (e.g. the mean) that it has.",
        "A second sentence follows here, and it is quite long.",
        "Is this one a question?",
        "The array that holds what is to be sorted.",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "Too short.",
        "no capital at the start of it.",
        "It has no end",
        "Set x = 3 in the file.",
        "See https://a.b for the rest.",
    ],
)
def test_what_is_no_sentence_is_refused(text: str) -> None:
    assert not is_prose(text)


def shared_words(one: list[str], other: list[str]) -> int:
    """Return the length of the longest common subsequence."""
    row = [0] * (len(other) + 1)
    for word in one:
        above, row = row, [0]
        for place, other_word in enumerate(other):
            row.append(above[place] + 1 if word == other_word else max(above[place + 1], row[-1]))
    return row[-1]


def test_no_sentence_stays_that_is_a_near_copy_of_another() -> None:
    """Against every pair compared in full: what is left out has a near copy, what stays has none."""
    draw = random.Random(0)
    words = [f"w{number}" for number in range(30)]
    texts = [" ".join(draw.choices(words, k=draw.randint(4, 16))) for _ in range(60)]
    for text in tuple(texts) * 4:
        copy = text.split()
        for _ in range(draw.randint(1, 3)):
            place = draw.randrange(len(copy))
            copy[place : place + draw.randint(0, 1)] = draw.choices(words, k=draw.randint(0, 1))
        texts.append(" ".join(copy).capitalize() + ".")
    kept = [document.text for document in without_near_copies(Document(text, "test", 1) for text in texts)]
    assert 60 < len(kept) < len(texts) - 60
    expected: list[list[str]] = []
    for mine in map(split_words, texts):
        if all(2 * shared_words(mine, other) < NEAR_COPY_OVERLAP * (len(mine) + len(other)) for other in expected):
            expected.append(mine)
    assert [split_words(text) for text in kept] == expected
