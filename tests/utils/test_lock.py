"""One process at a time owns a run folder, and a killed one frees it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from mmldlm.errors import ExitCode, RunInUseError
from mmldlm.utils.lock import RunLock
from tests.helpers.paths import ROOT
from tests.helpers.waiting import TEST_TIMEOUT_S

pytestmark = pytest.mark.quick


def holder(run_dir):
    """A child process that holds the lock until it is killed; returns when it does."""
    ready, started = os.pipe()
    child = os.fork()
    if not child:
        with RunLock(run_dir):
            os.write(started, b"x")
            time.sleep(600)
        os._exit(0)
    os.close(started)
    assert os.read(ready, 1) == b"x"
    os.close(ready)
    return child


def kill(child):
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_second_run_is_refused(tmp_path):
    child = holder(tmp_path)
    try:
        with (
            pytest.raises(RunInUseError, match=f"process {child} on host {socket.gethostname()}") as caught,
            RunLock(tmp_path),
        ):
            pass
        assert caught.value.exit_code == ExitCode.RUN_IN_USE == 73
        assert json.loads((tmp_path / "run.lock").read_text())["pid"] == child
    finally:
        kill(child)
    with RunLock(tmp_path):  # the file is still there, and recognized as stale
        assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()


def test_clean_exit_releases_the_lock(tmp_path):
    for _ in range(2):
        folder = tmp_path / "new" / "folder"
        with RunLock(folder), pytest.raises(RunInUseError, match=str(os.getpid())), RunLock(folder):
            pass


def test_forked_workers_do_not_keep_the_lock(tmp_path):
    with RunLock(tmp_path):
        worker = os.fork()
        if not worker:
            time.sleep(600)
            os._exit(0)
    try:
        with RunLock(tmp_path):
            pass
    finally:
        kill(worker)


def test_workers_of_a_killed_run_do_not_keep_the_lock(tmp_path):
    ready, started = os.pipe()
    child = os.fork()
    if not child:
        with RunLock(tmp_path):
            if not os.fork():
                os.write(started, os.getpid().to_bytes(8, "big"))
            time.sleep(600)
        os._exit(0)
    worker = int.from_bytes(os.read(ready, 8), "big")
    kill(child)
    try:
        with RunLock(tmp_path):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_worker_that_leaves_the_block_does_not_free_the_lock(tmp_path):
    with RunLock(tmp_path) as lock:
        worker = os.fork()
        if not worker:
            lock.__exit__(None, None, None)
            os._exit(0)
        os.waitpid(worker, 0)
        assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()
        with pytest.raises(RunInUseError), RunLock(tmp_path):
            pass


RACE = """
import os, sys, time
from mmldlm.errors import RunInUseError
from mmldlm.utils.lock import RunLock
(ready, go), (held, release) = os.pipe(), os.pipe()
children = []
for _ in range(4):
    if not (child := os.fork()):
        os.close(go)
        os.close(release)
        os.read(ready, 1)
        try:
            RunLock(sys.argv[1]).__enter__()
        except RunInUseError:
            os._exit(73)
        os.read(held, 1)
        os._exit(0)
    children.append(child)
os.close(go)  # end of file releases all at once
codes = {}
while len(codes) < 3:
    for child in children:
        pid, status = os.waitpid(child, os.WNOHANG) if child not in codes else (0, 0)
        if pid:
            codes[pid] = os.waitstatus_to_exitcode(status)
    time.sleep(0.001)
os.close(release)
codes |= {c: os.waitstatus_to_exitcode(os.waitpid(c, 0)[1]) for c in children if c not in codes}
os.close(ready)
os.close(held)
assert sorted(codes.values()) == [0, 73, 73, 73], codes
"""


def test_one_of_many_racing_processes_gets_the_lock(tmp_path):
    """20 times; the winner holds it until the others have been refused, however late they come."""
    indented = RACE.replace("\n", "\n    ")  # a process without torch, which forks at once
    program = f"for _ in range(20):{indented}"
    subprocess.run([sys.executable, "-c", program, tmp_path], cwd=ROOT, check=True, timeout=TEST_TIMEOUT_S)
