"""Hooks of mkdocs.yml: pages of the repository outside docs/ as pages of the site."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PAGES = {  # by path in the repository
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "AGENTS.md": "agents.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "license.md",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/LOG.md": "log.md",
}
NOTEBOOK = "examples/first_steps.ipynb"  # to download
_FENCE = re.compile(r"^(```\w+) [\w -]+$", re.MULTILINE)  # with more than a language: what a test does with the block
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)[^)#\s]+")  # the target in [text](target#anchor), unless it is a URL


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, uri in {**PAGES, NOTEBOOK: NOTEBOOK}.items():
        files.append(File.generated(config, uri, content=(ROOT / path).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make links relative in the site, which are so in the repository, and leave fences their language alone."""
    uri = page.file.src_uri
    source = next((path for path, own in PAGES.items() if own == uri), f"docs/{uri}")

    def in_site(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[0]))
        return posixpath.relpath(PAGES.get(path, path.removeprefix("docs/")), posixpath.dirname(uri) or ".")

    return _LINK.sub(in_site, _FENCE.sub(r"\1", markdown))
