"""The embedded corpora `python-docs` and `simple-docs`: English sentences from docstrings of installed packages.

The sources are the standard library of the running Python and the dependencies of this project, which are parsed with
`ast` and never imported. Code, doctests, lists, tables and markup are removed, and each sentence is a document.
`simple-docs` consists of the short sentences with only common words, without near copies.
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
from collections.abc import Callable, Iterable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

from mmldlm.prepare.documents import Document

PYTHON_DOCS, SIMPLE_DOCS = CORPORA = ("python-docs", "simple-docs")
EXTRACTION_VERSION = 1  # recorded in stores. Increment it when the rules below change

# Distribution by import name, in the order of reading. The list is fixed: what `scripts/setup.sh` installs without
# options, so that other packages of the environment do not change the corpus.
_MODULES = (
    "torch numpy accelerate deepspeed huggingface_hub tokenizers safetensors tensorboard sacrebleu tqdm yaml networkx "
    "jinja2 fsspec filelock packaging werkzeug markdown PIL absl pydantic einops psutil"
)
_DISTRIBUTIONS = {"yaml": "PyYAML", "jinja2": "Jinja2", "werkzeug": "Werkzeug", "markdown": "Markdown",
                  "PIL": "pillow", "absl": "absl-py"}  # fmt: skip
PACKAGES = {module: _DISTRIBUTIONS.get(module, module) for module in _MODULES.split()}
STANDARD_LIBRARY = "python"
_SKIPPED_FOLDERS = {"test", "tests", "testing", "_vendor", "site-packages", "dist-packages", "lib2to3", "idlelib",
                    "__pycache__", "third_party", "_internal_test"}  # fmt: skip
_DOCUMENTING_CALLS = {"add_docstr", "add_newdoc", "_add_docstr"}
MAX_SIMPLE_WORDS = 16  # of a sentence of simple-docs
NUM_COMMON_WORDS = 1500  # size of the vocabulary of simple-docs
NEAR_COPY_OVERLAP = 0.9  # two texts are near copies if this fraction of their words is common, in the same order
# Words that a near copy may have in addition to the common ones: at most 2 for texts of up to `MAX_SIMPLE_WORDS`.
_MAX_EXTRA_WORDS = 2


def sources(corpus: str) -> list[dict[str, Any]]:
    """Return one entry for each package that `corpus` is read from, with its version, None if it is absent."""
    packages: list[dict[str, Any]] = [{"package": STANDARD_LIBRARY, "version": platform.python_version()}]
    for distribution in PACKAGES.values():
        try:
            version: str | None = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            version = None
        packages.append({"package": distribution, "version": version})
    return [{"corpus": corpus, "extraction": EXTRACTION_VERSION, **source} for source in packages]


def read_corpus(corpus: str, track: Callable[[Iterable[Document], str], Iterable[Document]]) -> Iterator[Document]:
    """Yield the documents of one of `CORPORA`. `track` reports progress in a unit.

    `simple-docs` are the sentences of `python-docs` with at most `MAX_SIMPLE_WORDS` words, all of them among its
    `NUM_COMMON_WORDS` most frequent ones, without case and with ties in alphabetical order. Near copies of earlier
    sentences are omitted, so that no held-out sentence has a near copy in training.
    """
    if corpus == PYTHON_DOCS:
        yield from read_python_docs()
        return
    documents = list(track(read_python_docs(), "sentences"))  # most of the time
    counts = Counter(word for document in documents for word in split_words(document.text))
    common = set(sorted(counts, key=lambda word: (-counts[word], word))[:NUM_COMMON_WORDS])
    parts_of_documents = ((document, [split_words(part) for part in document.text.split()]) for document in documents)
    yield from without_near_copies(
        document
        for document, parts in parts_of_documents
        if len(parts) <= MAX_SIMPLE_WORDS and all(part and common.issuperset(part) for part in parts)
    )


def without_near_copies(documents: Iterable[Document]) -> Iterator[Document]:
    """Yield the documents that are not near copies of an earlier one (see `NEAR_COPY_OVERLAP`).

    Two texts are near copies if removing up to `_MAX_EXTRA_WORDS` words from each leaves equal sequences of at least
    the required length. `seen` has the hash of each such sequence with the length of its document.
    """
    seen: set[int] = set()
    for document in documents:
        words = split_words(document.text)
        subsequences = [
            part for extra in range(_MAX_EXTRA_WORDS + 1) for part in combinations(words, len(words) - extra)
        ]
        # (common words, length of the other text). The other text may have extra words too.
        others = [(part, len(part) + extra) for part in subsequences for extra in range(_MAX_EXTRA_WORDS + 1)]
        near = ((part, length) for part, length in others if 2 * len(part) >= NEAR_COPY_OVERLAP * (len(words) + length))
        if seen.isdisjoint(map(hash, near)):
            seen.update(hash((part, len(words))) for part in subsequences)
            yield document


def split_words(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation."""
    return _WORD.findall(text.lower())


def read_python_docs() -> Iterator[Document]:
    """Yield every sentence once, at its first occurrence, in a fixed order. `source` is `PACKAGE/file.py`."""
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
    """Yield the name and folder of the standard library and of each installed package in `PACKAGES`."""
    yield STANDARD_LIBRARY, Path(sysconfig.get_paths()["stdlib"])
    for module, distribution in PACKAGES.items():
        spec = importlib.util.find_spec(module)  # does not import a top-level module
        if spec is not None and spec.submodule_search_locations:
            yield distribution, Path(next(iter(spec.submodule_search_locations)))


def _python_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name not in _SKIPPED_FOLDERS and not path.is_symlink():
            yield from _python_files(path)
        elif path.suffix in (".py", ".pyi") and path.is_file() and not path.name.startswith("test_"):
            yield path


def _docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each docstring of a file, and of texts passed to `add_docstr` and the like."""
    gc_was_enabled = gc.isenabled()
    gc.disable()  # a syntax tree is many objects without cycles: garbage collection would take half of the time
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in strings of the packages
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, OSError, RecursionError):
        return
    finally:
        if gc_was_enabled:
            gc.enable()
    if path.parts[-2:] == ("pydoc_data", "topics.py"):
        # The help topics are the values of a dict, not docstrings.
        for node in ast.walk(tree):
            yield from _text(node)
    else:
        yield from _documenting_texts(tree.body)


def _documenting_texts(body: list[ast.stmt], has_docstring: bool = True) -> Iterator[tuple[int, str]]:
    """Yield the docstrings of `body` and of its functions and classes, and the texts of documenting calls."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _documenting_texts(statement.body)
        elif isinstance(statement, ast.If | ast.Try):
            yield from _documenting_texts(statement.body + statement.orelse, has_docstring=False)
        elif isinstance(statement, ast.Expr) and isinstance(call := statement.value, ast.Call):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            for node in ast.walk(call) if name in _DOCUMENTING_CALLS else ():
                yield from _text(node)
        elif has_docstring and statement is body[0] and isinstance(statement, ast.Expr):
            yield from _text(statement.value)


def _text(node: ast.AST) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
        yield node.lineno, inspect.cleandoc(node.value)


# --- prose from docstrings -----------------------------------------------------------------------

_LIST_ITEM = re.compile(r"([-*+•o]|\(?[0-9a-zA-Z]{1,2}[.)]|\[\d+\]|#\.)\s")
_NOT_PROSE = re.compile(r"\.\.\.\s|\.\.\s|[:@]\w+|\$\s|[|+=~^]|```|~~~|#|%|In \[|!|--?\w")
_UNDERLINE = re.compile(r"([-=~^*#\"'`.+_])\1{2,}\s*$")
_TABLE_BORDER = re.compile(r"[=-]{2,}(\s+[=-]{2,})+$|\+[-=]+\+")
_FENCE = re.compile(r"\s*(```|~~~)")


def sentences(text: str) -> Iterator[str]:
    """Yield the English sentences of a docstring without markup."""
    for paragraph in _paragraphs(text.expandtabs().splitlines()):
        cleaned = _clean(" ".join(paragraph.split()))
        for sentence in _SENTENCE_END.split(cleaned):
            sentence = sentence.strip().replace("\0", ".")
            if is_prose(sentence):
                yield sentence


def _paragraphs(lines: list[str]) -> Iterator[str]:
    """Yield runs of lines with equal indentation that are not code, list, table, heading or directive."""
    paragraph: list[str] = []
    indent, fenced, until_blank = 0, False, False
    # Deeper lines belong to a literal block or list item. `until_blank` skips a doctest or table.
    skip_deeper_than: int | None = None
    # The blank line at the end completes the last paragraph.
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
            # reStructuredText: an indented literal block follows.
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
            paragraph = []  # the lines before the underline are a heading
        elif _LIST_ITEM.match(stripped) or _NOT_PROSE.match(stripped):
            if paragraph:
                yield " ".join(paragraph)
                paragraph = []
            skip_deeper_than = depth  # continuation lines of the item
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
    """Remove markup, and turn periods of abbreviations into NUL, so that they do not end a sentence."""
    text = _ROLE.sub(lambda match: _last_part(match[1]), text)
    text = _TARGET.sub(r"\1", text)
    text = _LINK.sub(r"\1", text)
    text = _FOOTNOTE.sub("", text)
    text = re.sub(r"`+_*", "", text)
    text = re.sub(r"(?<!\w)(\*\*?|_)(\w[^*_]*?\w|\w)\1(?!\w)", r"\2", text)
    text = re.sub(r"\|(\w+)\|", r"\1", text)
    text = text.replace("\u2019", "'").replace("\u201c", '"').replace("\u201d", '"').replace("--", " - ")
    text = re.sub(r"\s+", " ", text).replace(" - - ", " - ")
    return _ABBREVIATION.sub(lambda match: match[0].replace(".", "\0"), text)


def _last_part(role: str) -> str:
    """Return the visible text of a cross-reference: its title, or the last part of the name after a tilde."""
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
_NOT_LATIN = re.compile(r"[^\x20-\x7e\u00c0-\u017f\u2013\u2014]")


def is_prose(sentence: str) -> bool:
    """Return whether a text looks like an English sentence: capital, full stop, mostly plain lower-case words."""
    words = sentence.split()
    if not (4 <= len(words) <= 60 and 20 <= len(sentence) <= 400):
        return False
    if not (sentence[0].isupper() and sentence[-1] in ".!?" and not sentence.endswith("..")):
        return False
    if _FORBIDDEN.search(sentence) or _NOT_LATIN.search(sentence):
        return False
    if sentence.count("(") != sentence.count(")") or sentence.count('"') % 2:
        return False
    # Code, names and formulas have few plain words, few function words and many single letters.
    plain = sum(bool(_PLAIN.fullmatch(word)) for word in words)
    known = sum(word.strip("(,").lower() in _FUNCTION_WORDS for word in words)
    single = sum(len(word.strip(".,()'\"")) == 1 and word.strip(".,()") not in "aAI" for word in words)
    return plain >= 0.85 * len(words) and known >= max(1, 0.15 * len(words)) and single <= 0.1 * len(words)


_WORD = re.compile(r"\w+")
_PLAIN = re.compile(r"[(\"']?(?:[A-Z]?[a-z]+(?:['-][a-z]+)*|A|I)(?:'s)?[)\"']?[.,:!?]?[)\"']?")
