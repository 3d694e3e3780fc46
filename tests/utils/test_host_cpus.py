"""OpenMP's spinning is chosen by the load of the machine, before torch is imported, unless the environment sets it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.overhead import busy_loops
from mmldlm.utils.host_cpus import (
    SHORT_SPIN,
    SPIN_CHOICE_ENV,
    CpuTimes,
    busy_seconds,
    configure_openmp_spinning,
    cores_used_by_others,
    cpu_times,
    openmp_spinning,
)
from tests.helpers.paths import ROOT
from tests.helpers.waiting import wait_until

quick = pytest.mark.quick
CPUS = os.sched_getaffinity(0)
TEAM = str(max(2, len(CPUS)))  # threads that leave no CPU to others
STAT = """\
cpu  900 0 0 900 0 0 0 0 0 0
cpu0 100 20 30 4000 500 6 7 8 99 99
cpu1 1 0 0 9000 0 0 0 0 0 0
cpu10 70000 0 0 0 0 0 0 0 0 0
intr 12345 0 0
ctxt 1990473
"""


@contextmanager
def all_cores_busy() -> Iterator[None]:
    """Keep all cores busy, whatever else this machine does, by loops that take what others leave."""
    with busy_loops(2 * len(CPUS), niceness=19):
        yield


@pytest.fixture
def before_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of a process that has not imported torch."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)


@quick
def test_busy_time_is_that_of_our_cpus_without_their_idle_time() -> None:
    """Time of guests is part of that of users; stolen time counts."""
    ticks = os.sysconf("SC_CLK_TCK")
    assert busy_seconds(STAT, {0}) * ticks == 100 + 20 + 30 + 6 + 7 + 8
    assert busy_seconds(STAT, {0, 1}) * ticks == 172 and busy_seconds(STAT, {1}) * ticks == 1
    assert busy_seconds(STAT, {7}) == 0 and busy_seconds("", {0}) == 0


@quick
def test_own_cpu_time_is_no_load() -> None:
    assert cores_used_by_others(CpuTimes(10, 100, 50), CpuTimes(12, 104, 51)) == 1.5
    assert cores_used_by_others(CpuTimes(10, 100, 50), CpuTimes(12, 101, 52)) == 0, "clocks that disagree by a tick"


@quick
def test_children_count_as_the_runs_while_they_live_and_after(tmp_path: Path) -> None:
    burn = "import time, sys\nwhile time.process_time() < 0.3: pass\nopen(sys.argv[1], 'w').close()\ntime.sleep(60)"
    before = cpu_times()
    child = subprocess.Popen([sys.executable, "-c", burn, str(tmp_path / "done")])
    try:
        wait_until((tmp_path / "done").exists, "0.3 s of CPU time")
        alive = cpu_times()
    finally:
        child.kill()
        child.wait()
    ended = cpu_times()
    assert before and alive and ended
    assert alive.run - before.run > 0.25 and ended.run >= alive.run and alive.busy - before.busy > 0.2


@quick
def test_load_of_other_processes() -> None:
    """This process has started the loops, so where it counts as the launcher, they are the run's."""
    measure = (
        "import time; from mmldlm.utils.host_cpus import cores_used_by_others, cpu_times; before = cpu_times(); "
        "time.sleep(0.5); "
        "after = cpu_times(); print(cores_used_by_others(before, after), after.run, time.process_time())"
    )

    def measured(**variables: str) -> list[float]:
        inherited = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"}
        environment = {**inherited, "PYTHONPATH": str(ROOT), **variables}
        done = subprocess.run([sys.executable, "-c", measure], env=environment, capture_output=True, text=True)
        return [float(value) for value in done.stdout.split()]

    with all_cores_busy():
        others, own, alone = measured()
        assert 0.7 * len(CPUS) < others < 1.3 * len(CPUS) and own == pytest.approx(alone, abs=0.1)
        launcher = time.process_time()
        _, own, alone = measured(LOCAL_RANK="0")
        assert own > launcher + alone - 0.1


@quick
@pytest.mark.parametrize(
    ("loads", "is_short"),
    [([0.0], False), ([0.4], False), ([2.0, 0.2], False), ([2.0, 3.0, 0.6], True), ([0.5, 0.5, 0.5], True)],
)
def test_quietest_sample_decides(before_torch: None, loads: list[float], is_short: bool) -> None:
    environment, left = {"OMP_NUM_THREADS": TEAM}, list(loads)
    configure_openmp_spinning(environment, lambda: left.pop(0))
    assert left == [] and environment.get("GOMP_SPINCOUNT") == (SHORT_SPIN if is_short else None)
    assert openmp_spinning(environment).startswith("short spinning (GOMP_SPINCOUNT=1000), " if is_short else "default ")
    assert f"{min(loads):.1f} of {len(CPUS)} CPUs busy" in openmp_spinning(environment)


@quick
@pytest.mark.parametrize(
    ("cpus", "environment", "most"),
    [
        (8, {"OMP_NUM_THREADS": "2"}, 6),
        (8, {"OMP_NUM_THREADS": "2,4", "LOCAL_WORLD_SIZE": "2"}, 4),
        (8, {"OMP_NUM_THREADS": "2", "LOCAL_WORLD_SIZE": "8"}, 0),
        (2, {"OMP_NUM_THREADS": "many"}, 0),
    ],
)
def test_others_may_have_the_cpus_that_no_thread_needs(
    before_torch: None, monkeypatch: pytest.MonkeyPatch, cpus: int, environment: dict[str, str], most: float
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(1000, 1000 + cpus)))
    for load, is_short in ((most + 0.4, False), (most + 0.6, True)):
        result = dict(environment)
        configure_openmp_spinning(result, lambda load=load: load)  # type: ignore[misc]
        assert ("GOMP_SPINCOUNT" in result) == is_short, load


@quick
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"OMP_NUM_THREADS": "1"}, "a single thread, which never waits"),
        ({"GOMP_SPINCOUNT": "7"}, "GOMP_SPINCOUNT=7, set by the environment"),
        ({"OMP_WAIT_POLICY": "passive"}, "OMP_WAIT_POLICY=passive, set by the environment"),
        ({"GOMP_CPU_AFFINITY": "0-1"}, "GOMP_CPU_AFFINITY=0-1, set by the environment"),
    ],
)
def test_nothing_is_measured_where_there_is_nothing_to_choose(
    before_torch: None, given: dict[str, str], expected: str
) -> None:
    def sample() -> float:
        raise AssertionError("measured")

    environment = {"OMP_NUM_THREADS": TEAM, **given}
    configure_openmp_spinning(environment, sample)
    assert openmp_spinning(environment) == expected
    assert {name: value for name, value in environment.items() if name != SPIN_CHOICE_ENV} == {
        "OMP_NUM_THREADS": TEAM,
        **given,
    }


@quick
def test_no_choice_without_a_load_or_after_torch(before_torch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"OMP_NUM_THREADS": TEAM}
    configure_openmp_spinning(environment, lambda: None)
    assert "GOMP_SPINCOUNT" not in environment and "load at the start: unknown" in openmp_spinning(environment)
    monkeypatch.setitem(sys.modules, "torch", sys)
    late = {"OMP_NUM_THREADS": TEAM}
    configure_openmp_spinning(late, lambda: 9.0)
    assert late == {"OMP_NUM_THREADS": TEAM} and openmp_spinning(late) == "default spinning"


@pytest.fixture
def when_torch_comes(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """The environment of a command at the moment at which it imports torch, or at its end."""
    (tmp_path / "torch.py").write_text(
        "import json, os\nprint(json.dumps(dict(os.environ)), flush=True)\nos._exit(0)\n", encoding="utf-8"
    )

    def run(*command: str, **variables: str) -> dict[str, str]:
        inherited = {
            name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", SPIN_CHOICE_ENV)
        }
        environment = {**inherited, "PYTHONPATH": f"{tmp_path}:{ROOT}", "OMP_NUM_THREADS": TEAM, **variables}
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


ENTRIES = [
    ("-m", "mmldlm.cli", "train"),
    ("-m", "mmldlm.cli", "evaluate"),
    ("-m", "mmldlm.cli", "sample"),
    ("-m", "mmldlm.cli", "demo"),
    ("-m", "mmldlm.train"),
    ("-m", "mmldlm.evaluate"),
    ("mmldlm/train.py",),
    ("mmldlm/evaluate.py",),
]


def test_busy_machine_shortens_spinning_of_every_entry_point(
    when_torch_comes: Callable[..., dict[str, str]],
) -> None:
    with all_cores_busy():
        for entry in ENTRIES:
            result = when_torch_comes(*entry)
            assert result.get("GOMP_SPINCOUNT") == SHORT_SPIN, (entry, result.get(SPIN_CHOICE_ENV))
        assert when_torch_comes("-m", "mmldlm.train", GOMP_SPINCOUNT="5")["GOMP_SPINCOUNT"] == "5"
        library = when_torch_comes("-c", "import mmldlm.cli, mmldlm.train")
        assert "GOMP_SPINCOUNT" not in library and SPIN_CHOICE_ENV not in library


def test_spinning_and_load_are_reported(tiny_config: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": TEAM, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mmldlm.cli", "train", str(tiny_config), "validation.every=0"]
    with all_cores_busy():
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (rank,) = json.loads((tmp_path / "run" / "startup.json").read_text())["ranks"]
    assert rank["openmp"].startswith("short spinning (GOMP_SPINCOUNT=1000), load at the start: ")
    assert f"  threads      {TEAM} a process, {rank['openmp']}\n" in done.stdout
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    taken = [record["speed/cores_of_others"] for record in lines if record["kind"] == "train"]
    assert len(taken) == 8 and all(math.isfinite(value) and value >= 0 for value in taken)
