"""Texts that Debian ships: definitions of WordNet, and descriptions of packages.

`apt-get` fetches them from the package sources of this machine into a folder of its own. It installs nothing and need
not be root. What a text is:

- of `wordnet`: the definition of a meaning, without its examples
- of `debian`: of each source package the synopsis (kind "one sentence"), and the first paragraph of the description
  (kind "several sentences") if it has several sentences and at most `MAX_CHARACTERS`
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import subprocess
import tarfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from mmldlm.errors import DataError
from mmldlm.utils.files import write_atomically

Text = dict[str, str]  # text, kind and group
ONE, SEVERAL = "one sentence", "several sentences"
MAX_CHARACTERS = 300
_CAT_FILE = "/usr/lib/apt/apt-helper"  # reads an index however apt has compressed it
_BREAK = re.compile(r"(?<!e\.g)(?<!i\.e)[.!?] (?=[A-Z])")  # between sentences


def _run(folder: Path, *command: str) -> bytes:
    """Return the output of a command of apt or dpkg in `folder`."""
    if shutil.which(command[0]) is None:
        raise DataError(
            f"{command[0]}: no such command, expected a machine with apt and dpkg, such as Debian or Ubuntu"
        )
    places = f"Dir::State::Lists={folder}/lists", f"Dir::Cache={folder}/cache", "Acquire::Languages=en"
    options = [part for place in places for part in ("-o", place)] if "apt" in command[0] else []
    done = subprocess.run([command[0], *options, *command[1:]], cwd=folder, capture_output=True)
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise DataError(f"{' '.join(command[:2])}: {' '.join(reason)}, expected a network and Debian's package sources")
    return done.stdout


def _update(folder: Path) -> None:
    """Fetch the indices of packages."""
    for name in ("lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    _run(folder, "apt-get", "update")


def definitions(lines: Iterable[str]) -> Iterator[str]:
    """Yield the definition of each line of WordNet's `data.*` files, up to the first semicolon."""
    for line in lines:
        if not line.startswith("  "):  # the license
            yield line.partition("| ")[2].partition(";")[0].strip()


def stanzas(text: str) -> Iterator[dict[str, str]]:
    """Yield the fields of each stanza of an index of packages. Continued lines keep their line breaks."""
    for stanza in text.split("\n\n"):
        fields = re.findall(r"(?m)^([\w-]+):[ ]?(.*(?:\n[ \t].*)*)", stanza)
        if fields:
            yield dict(fields)


def descriptions(packages: str, translation: str) -> Iterator[Text]:
    """Yield synopsis and first paragraph of each source package, of its package of the same name or the first one.

    Args:
        packages: An index `Packages`, which names the source of a package.
        translation: An index `Translation-en`, with the descriptions.
    """
    sources = {fields["Package"]: fields.get("Source", "").split(" ")[0] for fields in stanzas(packages)}
    of_source = defaultdict[str, dict[str, str]](dict)
    for fields in stanzas(translation):
        if (package := fields["Package"]) in sources:
            of_source[sources[package] or package].setdefault(package, fields["Description-en"])
    for source, by_package in sorted(of_source.items()):
        synopsis, *lines = by_package[min(by_package, key=lambda name: (name != source, name))].split("\n")
        yield {"text": synopsis.strip(), "kind": ONE, "group": source}
        # A line " ." ends a paragraph, and two spaces begin a line of a list.
        paragraph = " ".join(line.strip() for line in takewhile(lambda line: re.match(r" [^ .]", line), lines))
        if _BREAK.search(paragraph) and len(paragraph) <= MAX_CHARACTERS and paragraph[-1] in ".!?":
            yield {"text": paragraph, "kind": SEVERAL, "group": source}


def _wordnet(folder: Path) -> tuple[Iterator[Text], str]:
    _run(folder, "apt-get", "download", "wordnet-base")
    (package,) = folder.glob("wordnet-base_*.deb")
    with tarfile.open(fileobj=io.BytesIO(_run(folder, "dpkg-deb", "--fsys-tarfile", package.name))) as archive:
        members = [member for member in archive if re.search(r"/data\.(adj|adv|noun|verb)$", member.name)]
        lines = [archive.extractfile(member).read().decode() for member in members]  # type: ignore[union-attr]
    texts = ({"text": text, "kind": "definition", "group": ""} for text in definitions("".join(lines).splitlines()))
    return texts, unquote(package.name)  # apt writes the colon of a version as %3a


def _debian(folder: Path) -> tuple[Iterator[Text], str]:
    def index(creator: str) -> str:
        wanted = "indextargets", "--format", "$(FILENAME)", f"Created-By: {creator}", "Component: main"
        paths = [path for path in _run(folder, "apt-get", *wanted).decode().split() if "_debian_" in path]
        return "\n\n".join(_run(folder, _CAT_FILE, "cat-file", path).decode() for path in paths)

    releases = [path.read_text(errors="replace") for path in sorted((folder / "lists").glob("*Release"))]
    named = "; ".join(" ".join(re.findall(r"(?m)^(?:Origin|Codename|Date): (.+)", release)) for release in releases)
    return descriptions(index("Packages"), index("Translations")), f"Packages, Translation-en ({named})"


SOURCES: dict[str, Callable[[Path], tuple[Iterator[Text], str]]] = {"wordnet": _wordnet, "debian": _debian}


def write_texts(name: str, folder: Path, limit: int | None = None) -> tuple[Path, dict[str, Any]]:
    """Write the texts of a source as JSON lines, and return the file and where the texts are from.

    Of texts that differ only in case and spaces the first counts. A `limit` keeps the texts with the lowest hashes.
    """
    path, about = folder / f"{name}.jsonl", folder / f"{name}.source.json"
    if not about.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        _update(folder)
        texts, origin = SOURCES[name](folder)
        unique: dict[str, Text] = {}
        for row in texts:
            if row["text"]:
                unique.setdefault(" ".join(row["text"].casefold().split()), row)
        ordered = sorted(unique.values(), key=lambda row: hashlib.sha256(row["text"].encode()).digest())[:limit]
        content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ordered)
        write_atomically(path, content)
        kinds = [row["kind"] for row in ordered]
        described = {
            "origin": origin,
            "sha256": hashlib.sha256(content.encode()).hexdigest(),
            "texts": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        }
        write_atomically(about, json.dumps(described))
    return path, json.loads(about.read_text(encoding="utf-8"))
