"""Fixtures for all folders: a small real store, short configs and runs, and commands as a user calls them."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from getpass import getuser
from itertools import count
from pathlib import Path
from tempfile import gettempdir

import pytest

# As in scripts/test.sh: results depend on the number of threads, and by default that depends on the load.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Inductor's cache does not know this variable, and code for one width of vectors fails in a process with another.
if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{gettempdir()}/torchinductor-{getuser()}-{capability}")

from mmldlm import train
from mmldlm.data.store import Store
from mmldlm.loading.load import LoadedRun, load_run
from mmldlm.prepare.pipeline import prepare
from tests.helpers.engine_runs import PARITY, environment
from tests.helpers.forked_runs import ForkedRuns
from tests.helpers.paths import ROOT
from tests.helpers.sample_corpus import small_config, write_corpus
from tests.helpers.tiny_config import TINY
from tests.helpers.waiting import TEST_TIMEOUT_S

SHORT_RUN = (
    "train.steps=20",
    "optim.lr=1e-2",
    "optim.warmup_steps=0",
    "validation.every=0",
    "checkpoint.every_steps=0",
)

# Tests started in the background or by nohup may inherit ignored signals, and so would every process that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

STARTED_TESTS = count()
TESTED_SETTINGS = pytest.StashKey[set[str]]()


@pytest.hookimpl(tryfirst=True)  # before tests are deselected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Collect the keys in the marks `setting(KEY, ...)` of tests that run by default."""
    default = [item for item in items if not any(item.iter_markers("slow")) and not any(item.iter_markers("gpu"))]
    marks = [mark for item in default for mark in item.iter_markers("setting")]
    config.stash[TESTED_SETTINGS] = {key for mark in marks for key in mark.args}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave what is there before a test out of the collections of its runs, which look at every object otherwise."""
    if next(STARTED_TESTS) % 200 == 0:
        gc.unfreeze()
        gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tested_settings(request: pytest.FixtureRequest) -> set[str]:
    """Keys of the settings that have a test in the default suite."""
    config = request.config
    if not {(config.rootpath / argument).resolve() for argument in config.args} & {ROOT, ROOT / "tests"}:
        pytest.skip("only part of the suite is collected")
    return config.stash[TESTED_SETTINGS]


@pytest.fixture(scope="session")
def store_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small store that tests read and copy, but never change."""
    folder = tmp_path_factory.mktemp("store")
    prepare(small_config(folder / "store", write_corpus(folder / "corpus.txt")), progress=False)
    return folder / "store"


@pytest.fixture(scope="session")
def store(store_path: Path) -> Store:
    return Store.open(store_path)


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
            timeout=TEST_TIMEOUT_S,
            **options,  # type: ignore[call-overload]
        )

    return run


@pytest.fixture(scope="session")
def forked() -> Iterator[ForkedRuns]:
    with ForkedRuns(environment(PYTHONPATH=str(ROOT))) as runs:
        yield runs


@pytest.fixture(scope="session")
def parity_config(tmp_path_factory: pytest.TempPathFactory, tiny_store: Path) -> Path:
    folder = tmp_path_factory.mktemp("parity")
    path = folder / "config.yaml"
    path.write_text(PARITY.format(run=folder / "run", store=tiny_store), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def single(tmp_path_factory: pytest.TempPathFactory, parity_config: Path) -> Callable[..., Path]:
    """The run folder of one process with these settings; trained once."""
    made: dict[tuple[str, ...], Path] = {}

    def reference(*settings: str) -> Path:
        if settings not in made:
            folder = tmp_path_factory.mktemp("single")
            assert train.main([str(parity_config), f"run.dir={folder}", *settings]) == 0
            made[settings] = folder
        return made[settings]

    return reference


@pytest.fixture
def two_ranks(forked: ForkedRuns, tmp_path: Path) -> Iterator[Callable[..., list[int]]]:
    """Start a run of two processes, its output in `tmp_path/log`; killed at the end."""
    started: list[int] = []

    def start(engine: str, *arguments: object, script: str = "", **variables: str) -> list[int]:
        started.extend(forked.start(engine, arguments, 2, tmp_path / "log", script, **variables))
        return started

    yield start
    forked.kill(started)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a command in the background, its output in `tmp_path/log`; killed with all its children at the end."""
    processes = []

    def start(command: list[str], **variables: str) -> subprocess.Popen[bytes]:
        log = (tmp_path / "log").open("w")
        env = environment(PYTHONPATH=str(ROOT), **variables)
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=log, stderr=log, text=True, start_new_session=True
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def short_run_dir(tmp_path_factory: pytest.TempPathFactory, tiny_store: Path) -> Path:
    """Twenty steps: what it writes is nonsense."""
    folder = tmp_path_factory.mktemp("short")
    config = folder / "config.yaml"
    config.write_text(TINY.format(run=folder / "run", store=tiny_store), encoding="utf-8")
    assert train.main([str(config), *SHORT_RUN]) == 0
    return folder / "run"


@pytest.fixture(scope="session")
def short_run(short_run_dir: Path) -> LoadedRun:
    return load_run(short_run_dir)
