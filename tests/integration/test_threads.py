"""On a CPU a run has the threads that others leave it, in one OpenMP team, whatever happens in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.waiting import TEST_TIMEOUT_S

SCRIPT = ROOT / "tests" / "helpers" / "scripts" / "counted_threads.py"
WIDE = ("model.width=256", "model.conditioning_width=64")  # tensors that torch shares out among threads


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Run processes that keep a core busy each."""
    loop = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
    loops = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(count)]
    try:
        yield
    finally:
        for process in loops:
            process.kill()
            process.wait()


def train(config: Path, *settings: str, script: Path | None = None, **variables: str) -> str:
    """Train in a process of its own without OMP_NUM_THREADS unless given; return what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment["OMP_WAIT_POLICY"] = "passive"  # threads that spin take minutes for a few steps beside other tests
    program = [str(script)] if script else ["-m", "mmldlm.train"]
    done = subprocess.run(
        [sys.executable, *program, str(config), *settings],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=TEST_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def saved_threads(run: Path) -> int:
    newest = max((run / "checkpoints").glob("step-*"))
    return json.loads((newest / "state.json").read_text())["threads"]


def test_only_the_main_thread_runs_parallel_operators(tiny_config: Path, tmp_path: Path) -> None:
    """Saves, validations, figures, quality, a mirror and TensorBoard start no second OpenMP team.

    libgomp counts the threads of all teams. If there are more than CPUs, the threads of every barrier go to sleep, and
    steps of small operators take twice as long from then on.
    """
    pytest.importorskip("matplotlib", reason="needs the extra figures")
    settings = (
        *WIDE,
        "train.steps=6",
        "log.tensorboard=true",
        "log.figures_every=2",
        "validation.every=3",
        "validation.quality_every=3",
        "checkpoint.every_steps=2",
        f"checkpoint.mirror={tmp_path / 'mirror'}",
    )
    variables = {"OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false", "FACTS": str(tmp_path)}
    train(tiny_config, *settings, script=SCRIPT, **variables)
    counts = [int(line) for line in (tmp_path / "threads").read_text().splitlines()]
    assert len(counts) == 6 and len(set(counts)) == 1, f"threads that are not Python's after each step: {counts}"


def test_a_second_thread_that_computes_makes_a_second_team() -> None:
    """So the test above sees what it is to see."""
    program = (
        "import os, threading, torch\n"
        "compute = lambda: torch.ones(1 << 20).add_(1).amax()\n"
        "count = lambda: len(os.listdir('/proc/self/task')) - threading.active_count()\n"
        "done, end = threading.Event(), threading.Event()\n"
        "def second():\n    compute(); done.set(); end.wait()\n"
        "compute(); before = count()\n"
        "threading.Thread(target=second).start(); done.wait(); print(count() - before); end.set()\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout == "1\n", done.stderr


@pytest.mark.slow
def test_a_busy_machine_leaves_one_thread_and_a_resume_keeps_it(tiny_config: Path, tmp_path: Path) -> None:
    """Results depend on the number of threads to the last bit, so a resumed run takes its checkpoint's."""
    cpus = len(os.sched_getaffinity(0))
    with busy_loops(2 * cpus):
        printed = train(tiny_config, "train.steps=4")
    assert "  threads      1 a process, other processes keep " in printed
    assert saved_threads(tmp_path / "run") == 1
    assert "  threads      1 a process, as in the checkpoint\n" in train(tiny_config)
    assert saved_threads(tmp_path / "run") == 1


@pytest.mark.slow
def test_the_environment_comes_first(tiny_config: Path, tmp_path: Path) -> None:
    train(tiny_config, "train.steps=4", OMP_NUM_THREADS="2")
    assert saved_threads(tmp_path / "run") == 2
    assert "threads      1 a process, set by OMP_NUM_THREADS\n" in train(tiny_config, OMP_NUM_THREADS="1")
    (rank,) = json.loads((tmp_path / "run" / "startup.json").read_text())["ranks"]
    assert (rank["threads"], rank["threads_reason"]) == (1, "set by OMP_NUM_THREADS")
    records = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert all(record["speed/cores_of_others"] >= 0 for record in records if record["kind"] == "train")
