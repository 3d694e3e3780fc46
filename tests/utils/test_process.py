"""Standard streams that are closed, broken or full, and what hangs on the launcher of a process."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from mmldlm.errors import StoppedBySignal
from mmldlm.utils.process import stop_at_signals
from mmldlm.utils.progress import Progress
from tests.helpers.paths import ROOT
from tests.helpers.waiting import TEST_TIMEOUT_S

pytestmark = pytest.mark.quick

WRITES = """
import os, sys
from mmldlm.utils.process import start_process
start_process(outlives_terminal={outlives})
with open(sys.argv[1], "w") as file:
    assert file.fileno() > 2
    for number in range(3):
        print("out", number, flush=True)
        print("err", number, file=sys.stderr)
        os.system("echo child; echo child >&2")
    file.write("done")
"""


def broken_pipe() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize("lost", ["pipe", "full", "closed"])
def test_lost_streams_do_not_end_what_makes_files(lost: str, tmp_path: Path) -> None:
    def close() -> None:
        os.close(1)
        os.close(2)

    stream = {"pipe": broken_pipe, "full": lambda: os.open("/dev/full", os.O_WRONLY), "closed": lambda: None}[lost]()
    command = [sys.executable, "-c", WRITES.format(outlives=True), str(tmp_path / "file")]
    hook: Callable[[], None] | None = close if lost == "closed" else None
    done = subprocess.run(command, cwd=ROOT, stdout=stream, stderr=stream, preexec_fn=hook, timeout=TEST_TIMEOUT_S)
    assert done.returncode == 0 and (tmp_path / "file").read_text() == "done"


def test_streams_that_are_there_get_all_in_order(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITES.format(outlives=True), str(tmp_path / "file")]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    lines = [line for number in range(3) for line in (f"out {number}", f"err {number}", "child", "child")]
    assert done.stdout.splitlines() == lines


# --- the launcher -----------------------------------------------------------------------------------------

WAITS = r"""
import os, signal, sys, time
from mmldlm.utils.process import start_process
signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b"stopped\n"), os._exit(75)))
start_process(outlives_terminal=True)
print(os.getpid(), flush=True)
time.sleep(300)
"""
# Starts the above as a launcher does, lets its program begin, and is killed.
LAUNCHES = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], env={**os.environ, sys.argv[2]: "1"})
time.sleep(float(sys.argv[3]))
"""


# Keeps the thread that watches the launcher from looking at it for a second.
SLOW_IMPORT = """
import sys, time
class Slow:
    def find_spec(self, name, *rest):
        if name == "psutil":
            time.sleep(1)
sys.meta_path.insert(0, Slow())
"""
PR_SET_CHILD_SUBREAPER = 36


@pytest.fixture
def adopts_orphans() -> Iterator[None]:
    """Make this process the parent of its grandchildren whose parents end, as a container's first process is."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    yield
    prctl(PR_SET_CHILD_SUBREAPER, 0)


def orphan(variable: str) -> subprocess.Popen[str]:
    """Start a process whose parent is gone before Python has begun."""
    script = f'{variable}=1 exec "$0" -c "$1"'
    command = ["sh", "-c", f'sh -c \'sleep 1; {script}\' "$0" "$1" &', sys.executable, WAITS]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def launched(variable: str, before: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", LAUNCHES, before + WAITS, variable, "300"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_a_process_stops_when_its_launcher_is_killed() -> None:
    with launched("TORCHELASTIC_RUN_ID") as launcher:
        assert launcher.stdout is not None and launcher.stdout.readline().strip().isdecimal()
        launcher.kill()
        assert launcher.stdout.readline() == "stopped\n"


def test_a_launcher_that_is_killed_before_the_first_look_is_noticed(adopts_orphans: None) -> None:
    with launched("TORCHELASTIC_RUN_ID", SLOW_IMPORT) as launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        launcher.kill()
        try:
            assert select.select([launcher.stdout], [], [], TEST_TIMEOUT_S)[0]
            assert launcher.stdout.readline() == "stopped\n"
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_a_process_stops_when_its_launcher_was_gone_before() -> None:
    with orphan("CROSS_RANK") as launcher:
        assert launcher.stdout is not None and "stopped\n" in launcher.stdout.readlines()


def test_a_process_outlives_a_parent_that_is_no_launcher() -> None:
    with launched("UNRELATED") as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
        try:
            assert not os.read(parent.stdout.fileno(), 0)
            os.kill(pid, 0)
        finally:
            os.kill(pid, signal.SIGKILL)


def test_a_stop_that_a_library_drops_ends_the_next_item() -> None:
    """As an import that tolerates any error, or a destructor, drops it."""
    with pytest.raises(StoppedBySignal, match="stopped by SIGTERM; go on"), stop_at_signals("go on"):
        with suppress(Exception):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        for item in Progress(enabled=False).track(range(3), "items"):
            assert item < 0, "began another item"
    Progress(enabled=False).advance(1, "items")  # the stop is over
