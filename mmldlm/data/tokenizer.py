"""`Tokenizer`: byte-level BPE, whole words, single characters, or any `tokenizer.json`, with one interface."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from mmldlm.errors import DataError
from mmldlm.utils.files import read_regular

MASK, PAD = "[MASK]", "[PAD]"
BUILT_IN = ("bpe", "words", "characters")  # names. Any other tokenizer is given as a tokenizer.json
LOWERCASE_ALPHABET = "abcdefghijklmnopqrstuvwxyz "  # of text8
_MAX_ID = 1 << 24  # arrays of counts and embeddings have a row for each id below the largest
_MAX_GROWTH = 256  # times the characters of a text, by replacements

# Letters after a space, which is Ġ in byte-level vocabularies and ▁ in SentencePiece vocabularies. Letters outside of
# ASCII are spelled in several ways, so every character except ASCII digits and signs counts as a letter.
_WORD, _WORD_WITHOUT_SPACE = re.compile(r"[Ġ▁][^!-@\[-`{-~]+"), re.compile(r"[^!-@\[-`{-~]{2,}")


class Tokenizer:
    """Maps text to token ids below `vocab_size` and back. `[MASK]` and `[PAD]` are never encoded from text.

    Samples are not padded. `[PAD]` stands between the prefix of a sample and its text.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        """Wrap `backend`, and append `[MASK]` and `[PAD]` to its vocabulary if they are missing."""
        missing = [token for token in (MASK, PAD) if backend.token_to_id(token) is None]
        backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in missing])
        # Check this before writing JSON, which walks through all ids up to the largest.
        ids = [*backend.get_vocab(with_added_tokens=True).values()]
        if len({*ids}) < len(ids) or max(ids) > _MAX_ID:
            raise DataError(f"{len(ids)} tokens have {len({*ids})} ids up to {max(ids)}, expected one each, up to 2^24")
        # A tokenizer.json may set all of these, but the options of `prepare` alone decide on the length of a sample.
        make_deterministic(backend)
        backend.no_truncation()
        backend.no_padding()
        # Otherwise a literal "[MASK]" in a user's text would become the mask id. tokenizer.json does not save this.
        backend.encode_special_tokens = True
        self._backend = backend
        self.mask_id: int = backend.token_to_id(MASK)  # type: ignore[assignment]
        self.pad_id: int = backend.token_to_id(PAD)  # type: ignore[assignment]
        self._json = backend.to_str(pretty=True)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Train a byte-level BPE of at most `vocab_size` tokens, deterministic and lossless for any UTF-8 text."""
        alphabet = _byte_alphabet(vocab_size)
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=[MASK, PAD], initial_alphabet=alphabet, show_progress=False
        )
        backend.train_from_iterator(texts, trainer)
        return cls(backend)

    @classmethod
    def words(cls, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Build a vocabulary of lower-cased words with the space before them, and of runs of punctuation.

        It contains the most frequent words of `texts`, `vocab_size` tokens in all. Other words are spelled in bytes, so
        it can encode any UTF-8 text. Only case and white space at the start are lost.
        """
        alphabet = _byte_alphabet(vocab_size)
        lower, split = normalizers.Lowercase(), pre_tokenizers.ByteLevel(add_prefix_space=True)
        counts = Counter(
            word for text in texts for word, _ in split.pre_tokenize_str(lower.normalize_str(text)) if len(word) > 1
        )
        # Ties are in alphabetical order, so that the vocabulary does not depend on the order of `texts`.
        words = sorted(counts, key=lambda word: (-counts[word], word))[: vocab_size - len(alphabet) - 2]
        vocabulary = {token: index for index, token in enumerate([MASK, PAD, *alphabet, *words])}
        # Without merges a word is either a token or spelled in bytes.
        backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], ignore_merges=True))
        backend.normalizer, backend.pre_tokenizer = lower, split
        # `add_prefix_space` put a space before the first word, which decoding removes.
        backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
        return cls(backend)

    @classmethod
    def characters(cls) -> Tokenizer:
        """Build a vocabulary of the `LOWERCASE_ALPHABET`. Encoding any other character is a `DataError`."""
        ids = {character: i for i, character in enumerate(LOWERCASE_ALPHABET)}
        backend = tokenizers.Tokenizer(models.WordLevel(ids))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        backend.decoder = decoders.Fuse()
        return cls(backend)

    @classmethod
    def load(cls, path: Path | str) -> Tokenizer:
        """Load a `tokenizer.json`, or the one in a folder, or raise `DataError` if it is missing or not readable."""
        path = Path(path)
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise DataError(f"{file}: no such file; expected a tokenizer.json or a folder that contains one")
        try:
            content = read_regular(file).decode()
            # Check this before the library reads the file and normalizes added tokens.
            growth = max(_growth(json.loads(content).get(key)) for key in ("normalizer", "decoder"))
            if growth > _MAX_GROWTH:
                raise ValueError(f"it makes texts {growth:,} times as long, expected at most {_MAX_GROWTH} times")
            return cls(tokenizers.Tokenizer.from_str(content))
        except Exception as error:  # the library raises plain Exception
            raise DataError(f"{file}: not a readable tokenizer.json ({_one_line(error)})") from None

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json`, and the config that AutoTokenizer of transformers needs to load the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "mask_token": MASK,
            "pad_token": PAD,
            # The counterpart of `encode_special_tokens`, for users who load the folder with transformers.
            "split_special_tokens": True,
            "clean_up_tokenization_spaces": False,
        }
        (folder / "tokenizer.json").write_text(self._json, encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text without special tokens, or raise `DataError` if one cannot be spelled."""
        with _reporting_unknown_characters():
            return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_prefixes(self, prefixes: Sequence[str]) -> list[list[int]]:
        """Return the ids of each prefix, with its end token. A prefix of white space becomes []."""
        encoded = self.encode_batch([prefix.strip() for prefix in prefixes])
        return [[*ids, self.pad_id] if ids else [] for ids in encoded]

    def encode_each(self, texts: Sequence[str]) -> list[list[int] | DataError]:
        """Return the ids of each text, or a `DataError` in its place if the vocabulary cannot spell it."""
        try:
            return [*self.encode_batch(texts)]
        except DataError as error:
            if len(texts) == 1:
                return [error]
            return [ids for text in texts for ids in self.encode_each([text])]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of `text`, and the range [start, stop) of its characters that each id spells."""
        with _reporting_unknown_characters():
            encoding = self._backend.encode(text, add_special_tokens=False)
            return encoding.ids, encoding.offsets

    def decode_batch(self, ids: Sequence[Sequence[int]], keep_special: bool = False) -> list[str]:
        """Return the texts of ids. Prefixes, `[MASK]` and `[PAD]` are left out unless `keep_special`."""
        texts = [list(sample) if keep_special else split_prefix(sample, self.pad_id)[1] for sample in ids]
        return self._backend.decode_batch(texts, skip_special_tokens=not keep_special)

    def count_losses(self, texts: Sequence[str], ids: Sequence[Sequence[int]]) -> Counter[str]:
        """Count `tokens`, `unknown` tokens, `documents` and `lossy` documents.

        A document is lossy if its ids decode to another text, apart from case, white space and what the normalizer
        changes.
        """
        unknown = sum(token == self.unknown_id for sample in ids for token in sample)
        pairs = [*zip(texts, self.decode_batch(ids), strict=True)]
        lossy = sum(one != other and self._comparable(one) != self._comparable(other) for one, other in pairs)
        return Counter(tokens=sum(map(len, ids)), unknown=unknown, documents=len(texts), lossy=lossy)

    def _comparable(self, text: str) -> str:
        normalizer = self._backend.normalizer
        return "".join((normalizer.normalize_str(text) if normalizer else text).casefold().split())

    @cached_property
    def unknown_id(self) -> int | None:
        """Id of the token for words outside of the vocabulary, or None if the vocabulary can spell every text."""
        model = json.loads(self._json)["model"]
        return model["unk_id"] if "unk_id" in model else self._backend.token_to_id(model.get("unk_token") or "")

    @cached_property
    def vocab_size(self) -> int:
        """The largest id plus one."""
        return max(self._backend.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def word_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that are words or beginnings of words."""
        vocabulary = self._backend.get_vocab(with_added_tokens=False)
        has_spaces = any(token.startswith(("Ġ", "▁")) for token in vocabulary)
        word = _WORD if has_spaces else _WORD_WITHOUT_SPACE  # WordPiece, where ## marks a token within a word
        return tuple(sorted(index for token, index in vocabulary.items() if word.fullmatch(token)))

    @property
    def identity(self) -> str:
        """SHA-256 of the `tokenizer.json` that `save` writes."""
        return hashlib.sha256(self._json.encode()).hexdigest()


def make_deterministic(backend: tokenizers.Tokenizer) -> None:
    """Reset the options that make a model draw the tokens of a text at random."""
    for option in ("dropout", "alpha", "nbest_size"):  # the first of BPE, the others of Unigram
        if getattr(backend.model, option, None) is not None:
            setattr(backend.model, option, None)


def _growth(part: Any) -> int:
    """Return the most characters that the replacements of a normalizer or decoder make of one character."""
    if not isinstance(part, dict):
        return 1
    parts = [*part.get("normalizers", ()), *part.get("decoders", ())]
    matched = len(part.get("pattern", {}).get("String", "")) or 1  # a regex matches at least one, as a rule
    return math.prod(map(_growth, parts)) * max(1, -(-len(str(part.get("content", ""))) // matched))


def split_prefix(tokens: Sequence[int], prefix_end: int) -> tuple[list[int], list[int]]:
    """Split a sample into its prefix, with the token that ends it, and its text. The prefix may be empty."""
    whole = list(tokens)
    start = whole.index(prefix_end) + 1 if prefix_end in whole else 0
    return whole[:start], whole[start:]


def _byte_alphabet(vocab_size: int) -> list[str]:
    """Return the tokens of the 256 bytes, or raise `DataError` if they, `[MASK]` and `[PAD]` exceed `vocab_size`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < len(alphabet) + 2:
        raise DataError(f"--vocab-size {vocab_size}: expected at least {len(alphabet) + 2} for a byte-level tokenizer")
    return alphabet


@contextmanager
def _reporting_unknown_characters() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"a text has characters outside the tokenizer's alphabet ({_one_line(error)})") from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
