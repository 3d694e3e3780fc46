"""Fixtures for all folders: a small real store, a short config, and the commands as a user calls them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine_runs import ROOT, environment
from forked_runs import ForkedRuns
from sample_corpus import small_config, write_corpus
from tiny_run import TINY
from waiting import PATIENCE_S

from mmldlm.data.prepare.pipeline import prepare

# Whoever starts the tests in the background may have them ignore Ctrl-C, and so would all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 short documents, vocabulary 300, 8 latent channels."""
    folder = tmp_path_factory.mktemp("store")
    prepare(small_config(folder / "store", write_corpus(folder / "corpus.txt", 400), max_length=32), progress=False)
    return folder / "store"


@pytest.fixture
def tiny_config(tmp_path: Path, tiny_store: Path) -> Path:
    """A config file that trains 8 steps into `tmp_path/run`."""
    path = tmp_path / "config.yaml"
    path.write_text(TINY.format(run=tmp_path / "run", store=tiny_store), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def command() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `python -m MODULE ARGUMENTS` in a process of its own."""

    def run(module: str, *arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", module, *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout=PATIENCE_S,
            **options,  # type: ignore[call-overload]
        )

    return run


@pytest.fixture(scope="session")
def forked() -> Iterator[ForkedRuns]:
    with ForkedRuns(environment(PYTHONPATH=str(ROOT))) as runs:
        yield runs
