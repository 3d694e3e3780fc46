"""One short run that all tests of sampling share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_run import TINY

from mmldlm import train
from mmldlm.run.load import LoadedRun, load_run
from mmldlm.tools.demo import Demo, Page, import_gradio

SETTINGS = ["train.steps=20", "optim.lr=1e-2", "optim.warmup_steps=0", "validation.every=0", "checkpoint.every_steps=0"]


@pytest.fixture(scope="session")
def short_run_dir(tmp_path_factory: pytest.TempPathFactory, tiny_store: Path) -> Path:
    """Twenty steps: what it writes is nonsense."""
    folder = tmp_path_factory.mktemp("short")
    config = folder / "config.yaml"
    config.write_text(TINY.format(run=folder / "run", store=tiny_store), encoding="utf-8")
    assert train.main([str(config), *SETTINGS]) == 0
    return folder / "run"


@pytest.fixture(scope="session")
def short_run(short_run_dir: Path) -> LoadedRun:
    return load_run(short_run_dir)


@pytest.fixture(scope="session")
def demo_page(short_run: LoadedRun) -> Iterator[Page]:
    """The page of `mmldlm demo`, served by this process."""
    page = Page(import_gradio(), Demo(short_run))
    page.launch(0)
    yield page
    page.blocks.close()
