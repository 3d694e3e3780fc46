"""One short run that all tests of sampling share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_run import TINY

from mmldlm import train
from mmldlm.run.load import LoadedRun, load_run
from mmldlm.tools.demo.api import Api
from mmldlm.tools.demo.server import DemoServer

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
def server(short_run: LoadedRun) -> Iterator[DemoServer]:
    """What `mmldlm demo` serves, in a thread of this process."""
    with DemoServer(Api(short_run), 0) as serving:
        thread = threading.Thread(target=serving.serve_forever, args=(0.05,))
        thread.start()
        yield serving
        serving.shutdown()
        thread.join()
