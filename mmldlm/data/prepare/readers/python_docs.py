"""The embedded corpora `python-docs` and `simple-docs`: English sentences from docstrings that every installation has.

Sources are the running Python's standard library and the project's own dependencies, read with `ast`
and never imported. Code, doctests, lists, tables and markup are dropped or cleaned away; a document is
one sentence. `simple-docs` keeps the short sentences that are made of common words only, but for near copies.
"""

from __future__ import annotations

import ast
import gc
import importlib.metadata
import importlib.util
import inspect
import platform
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

from mmldlm.data.prepare.documents import Document

PYTHON_DOCS, SIMPLE_DOCS = CORPORA = ("python-docs", "simple-docs")
EXTRACTION = 1  # raise when the rules below change, so that prepared stores are seen to be of other data

# Import name and distribution, in the order read. A fixed list of what this project installs in any case,
# so that extras and whatever else is in the environment do not change the corpus.
PACKAGES = {
    "torch": "torch",
    "numpy": "numpy",
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "huggingface_hub": "huggingface_hub",
    "tokenizers": "tokenizers",
    "safetensors": "safetensors",
    "tensorboard": "tensorboard",
    "sacrebleu": "sacrebleu",
    "tqdm": "tqdm",
    "yaml": "PyYAML",
    "networkx": "networkx",
    "jinja2": "Jinja2",
    "fsspec": "fsspec",
    "filelock": "filelock",
    "packaging": "packaging",
    "werkzeug": "Werkzeug",
    "markdown": "Markdown",
    "PIL": "pillow",
    "absl": "absl-py",
    "pydantic": "pydantic",
    "einops": "einops",
    "psutil": "psutil",
}
STANDARD_LIBRARY = "python"
_SKIPPED_FOLDERS = {"test", "tests", "testing", "_vendor", "site-packages", "dist-packages", "lib2to3", "idlelib",
                    "__pycache__", "third_party", "_internal_test"}  # fmt: skip
_DOCUMENTING_CALLS = {"add_docstr", "add_newdoc", "_add_docstr"}
SIMPLE_WORDS = 16  # longest sentence of simple-docs
COMMON_WORDS = 1500  # size of its vocabulary
NEAR_COPY = 0.9  # share of two texts' words that they have in common, in the same order, from which on one is left out
_MOST_OWN_WORDS = 2  # that a text of simple-docs may have beside those it shares with a near copy


def sources(corpus: str) -> list[dict[str, Any]]:
    """Return one entry for each package that `corpus` is read from, with its version, None where it is absent."""
    found: list[dict[str, Any]] = [{"package": STANDARD_LIBRARY, "version": platform.python_version()}]
    for distribution in PACKAGES.values():
        try:
            version: str | None = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            version = None
        found.append({"package": distribution, "version": version})
    return [{"corpus": corpus, "extraction": EXTRACTION, **source} for source in found]


def read_corpus(corpus: str) -> Iterator[Document]:
    """Yield the documents of one of `CORPORA`."""
    return read_simple_docs() if corpus == SIMPLE_DOCS else read_python_docs()


def read_simple_docs() -> Iterator[Document]:
    """Yield the sentences of `python-docs` with at most `SIMPLE_WORDS` words, all among the `COMMON_WORDS` commonest.

    Words are compared without case. They are counted over all of `python-docs`, ties in alphabetical order.
    A near copy of an earlier sentence is left out, so that no held-out sentence has one in training.
    """
    documents = list(read_python_docs())
    counts = Counter(word for document in documents for word in words_of(document.text))
    common = set(sorted(counts, key=lambda word: (-counts[word], word))[:COMMON_WORDS])
    yield from without_near_copies(document for document in documents if _is_simple(document.text, common))


def _is_simple(text: str, common: set[str]) -> bool:
    parts = [words_of(part) for part in text.split()]
    return len(parts) <= SIMPLE_WORDS and all(part and common.issuperset(part) for part in parts)


def without_near_copies(documents: Iterable[Document]) -> Iterator[Document]:
    """Yield the documents of which no earlier one has `NEAR_COPY` of the words of both in common, in the same order."""
    seen: set[int] = set()  # hashes of each text's length and what is left of it without up to `_MOST_OWN_WORDS` words
    for document in documents:
        words = words_of(document.text)
        left = [part for own in range(_MOST_OWN_WORDS + 1) for part in combinations(words, len(words) - own)]
        others = [(part, len(part) + own) for part in left for own in range(_MOST_OWN_WORDS + 1)]
        near = ((part, other) for part, other in others if 2 * len(part) >= NEAR_COPY * (len(words) + other))
        if seen.isdisjoint(map(hash, near)):
            seen.update(hash((part, len(words))) for part in left)
            yield document


def words_of(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation."""
    return _WORD.findall(text.lower())


def read_python_docs() -> Iterator[Document]:
    """Every sentence once, at its first occurrence, in a fixed order; `source` is `PACKAGE/file.py`."""
    seen: set[str] = set()
    for package, folder in _folders():
        for path in _python_files(folder):
            source = f"{package}/{path.relative_to(folder).as_posix()}"
            for line, text in _docstrings(path):
                for sentence in sentences(text):
                    key = " ".join(sentence.casefold().split())
                    if key not in seen:
                        seen.add(key)
                        yield Document(sentence, source, line)


def _folders() -> Iterator[tuple[str, Path]]:
    yield STANDARD_LIBRARY, Path(sysconfig.get_paths()["stdlib"])
    for module, distribution in PACKAGES.items():
        spec = importlib.util.find_spec(module)  # of a top-level name: finds it without running it
        if spec is not None and spec.submodule_search_locations:
            yield distribution, Path(next(iter(spec.submodule_search_locations)))


def _python_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name not in _SKIPPED_FOLDERS and not path.is_symlink():
            yield from _python_files(path)
        elif path.suffix in (".py", ".pyi") and path.is_file() and not path.name.startswith("test_"):
            yield path


def _docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and cleaned text of each docstring of a file, of each text handed to `add_docstr` and the like."""
    collecting = gc.isenabled()
    gc.disable()  # a tree is a million young objects without a cycle: collecting amid them takes half the time
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes of other people's strings
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, OSError, RecursionError):
        return
    finally:
        if collecting:
            gc.enable()
    if path.parts[-2:] == ("pydoc_data", "topics.py"):
        for node in ast.walk(tree):
            yield from _text(node)
        return
    yield from _first_text(tree.body)
    yield from _texts_within(tree.body)


def _texts_within(body: list[ast.stmt]) -> Iterator[tuple[int, str]]:
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _first_text(statement.body)
            yield from _texts_within(statement.body)
        elif isinstance(statement, ast.If | ast.Try):
            yield from _texts_within(statement.body + statement.orelse)
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            yield from _call_texts(statement.value)


def _first_text(body: list[ast.stmt]) -> Iterator[tuple[int, str]]:
    if body and isinstance(body[0], ast.Expr):
        yield from _text(body[0].value)


def _text(node: ast.AST) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
        yield node.lineno, inspect.cleandoc(node.value)


def _call_texts(call: ast.Call) -> Iterator[tuple[int, str]]:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in _DOCUMENTING_CALLS:
        for node in ast.walk(call):
            yield from _text(node)


# --- prose from docstrings -----------------------------------------------------------------------

_LIST_ITEM = re.compile(r"([-*+•o]|\(?[0-9a-zA-Z]{1,2}[.)]|\[\d+\]|#\.)\s")
_NOT_PROSE = re.compile(r"\.\.\.\s|\.\.\s|[:@]\w+|\$\s|[|+=~^]|```|~~~|#|%|In \[|!|--?\w")
_UNDERLINE = re.compile(r"([-=~^*#\"'`.+_])\1{2,}\s*$")
_TABLE_BORDER = re.compile(r"[=-]{2,}(\s+[=-]{2,})+$|\+[-=]+\+")
_FENCE = re.compile(r"\s*(```|~~~)")


def sentences(text: str) -> Iterator[str]:
    """The English sentences of a docstring's prose, cleaned of markup."""
    for paragraph in _paragraphs(text.expandtabs().splitlines()):
        cleaned = _clean(" ".join(paragraph.split()))
        for sentence in _SENTENCE_END.split(cleaned):
            sentence = sentence.strip().replace("\0", ".")
            if is_prose(sentence):
                yield sentence


def _paragraphs(lines: list[str]) -> Iterator[str]:
    """Runs of lines of equal indentation that are neither code, list, table, heading nor directive."""
    paragraph: list[str] = []
    indent, fenced, until_blank = 0, False, False
    skip_deeper_than: int | None = None
    for line in [*lines, ""]:
        stripped = line.strip()
        depth = len(line) - len(line.lstrip())
        if _FENCE.match(line):
            fenced = not fenced
            paragraph = []
            continue
        if fenced:
            continue
        if paragraph and (not stripped or depth != indent):
            yield " ".join(paragraph)
            if paragraph[-1].endswith("::"):
                skip_deeper_than = indent
            paragraph = []
        until_blank = until_blank and bool(stripped)
        if not stripped or until_blank:
            continue
        if skip_deeper_than is not None and depth > skip_deeper_than:
            continue
        skip_deeper_than = None
        if stripped.startswith(">>>") or _TABLE_BORDER.match(stripped):
            paragraph, until_blank = [], True
        elif _UNDERLINE.match(stripped):
            paragraph = []  # the lines before it were a heading
        elif _LIST_ITEM.match(stripped) or _NOT_PROSE.match(stripped):
            if paragraph:
                yield " ".join(paragraph)
                paragraph = []
            skip_deeper_than = depth  # and what continues it
        else:
            paragraph.append(stripped)
            indent = depth


_ROLE = re.compile(r":(?:\w+[:+-])*\w+:`([^`]*)`")
_TARGET = re.compile(r"`+([^`<]*?)\s*<[^`>]*>`+_{0,2}")
_LINK = re.compile(r"\[([^\]\[]+)\]\([^)]*\)")
_FOOTNOTE = re.compile(r"\s*\[(?:\d+|#\w*|\w+\d{2,4})\]_?")
_ABBREVIATION = re.compile(
    r"\b(e\.g|i\.e|etc|vs|cf|Fig|Eq|Dr|Mr|al|resp|approx|incl|Sec|Ref|No|Vol|pp)\.(?=\s*[\w,(`'\"])"
)
_SENTENCE_END = re.compile(r"(?<=[.!?])(?<![.][.])[\"')]?\s+(?=[\"'(]?[A-Z])")


def _clean(text: str) -> str:
    text = _ROLE.sub(lambda match: _last_part(match[1]), text)
    text = _TARGET.sub(r"\1", text)
    text = _LINK.sub(r"\1", text)
    text = _FOOTNOTE.sub("", text)
    text = re.sub(r"`+_*", "", text)
    text = re.sub(r"(?<!\w)(\*\*?|_)(\w[^*_]*?\w|\w)\1(?!\w)", r"\2", text)
    text = re.sub(r"\|(\w+)\|", r"\1", text)
    text = text.replace("\u2019", "'").replace("\u201c", '"').replace("\u201d", '"').replace("--", " - ")
    text = re.sub(r"\s+", " ", text).replace(" - - ", " - ")
    # \0 stands for a full stop that ends no sentence.
    return _ABBREVIATION.sub(lambda match: match[0].replace(".", "\0"), text)


def _last_part(role: str) -> str:
    """What a reader sees of a cross-reference: the title, or the last name after a tilde."""
    role = role.split("<")[0].strip() if "<" in role else role
    return role.rsplit(".", 1)[-1] if role.startswith("~") else role.lstrip("!.")


_FUNCTION_WORDS = frozenset(
    re.findall(
        r"\w+",
        "a an the of to in is are be this that it for with on by as at from or and not if when which can will should"
        " may must has have was were its you we use used all any no each only into than then these",
    )
)
_FORBIDDEN = re.compile(r"[\\{}<>=|@$^~#_*%\[\]\0/;]|https?:|::|\(\)|\.\w+\(|TODO|FIXME|XXX|Copyright|\w\.\w+\.\w")
_STRANGE = re.compile(r"[^\x20-\x7e\u00c0-\u017f\u2013\u2014]")


def is_prose(sentence: str) -> bool:
    """Whether it reads like an English sentence: from capital to full stop, mostly plain lower-case words."""
    words = sentence.split()
    if not (4 <= len(words) <= 60 and 20 <= len(sentence) <= 400):
        return False
    if not (sentence[0].isupper() and sentence[-1] in ".!?" and not sentence.endswith("..")):
        return False
    if _FORBIDDEN.search(sentence) or _STRANGE.search(sentence):
        return False
    if sentence.count("(") != sentence.count(")") or sentence.count('"') % 2:
        return False
    plain = sum(bool(_PLAIN.fullmatch(word)) for word in words)
    known = sum(word.strip("(,").lower() in _FUNCTION_WORDS for word in words)
    single = sum(len(word.strip(".,()'\"")) == 1 and word.strip(".,()") not in "aAI" for word in words)
    return plain >= 0.85 * len(words) and known >= max(1, 0.15 * len(words)) and single <= 0.1 * len(words)


_WORD = re.compile(r"\w+")
_PLAIN = re.compile(r"[(\"']?(?:[A-Z]?[a-z]+(?:['-][a-z]+)*|A|I)(?:'s)?[)\"']?[.,:!?]?[)\"']?")
