from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mmldlm.data.prepare.pipeline import prepare
from mmldlm.data.store import Store
from tests.helpers.sample_corpus import small_config, write_corpus


@pytest.fixture(scope="session")
def store_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small store that tests read and copy, but never change."""
    folder = tmp_path_factory.mktemp("store")
    prepare(small_config(folder / "store", write_corpus(folder / "corpus.txt")), progress=False)
    return folder / "store"


@pytest.fixture
def copy(store_path: Path, tmp_path: Path) -> Path:
    """A copy of the small store that a test may damage."""
    return Path(shutil.copytree(store_path, tmp_path / "copy"))


@pytest.fixture(scope="session")
def store(store_path: Path) -> Store:
    return Store.open(store_path)
