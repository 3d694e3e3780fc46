"""Signals to a run that is on its way out."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.quick

SCRIPT = """
import os, signal
from mmldlm.trainer.signals import SignalRequests
with SignalRequests() as requests:
    if {stopped}:
        os.kill(os.getpid(), signal.{name})
        assert requests.stop == "{name}"
os.kill(os.getpid(), signal.{name})
print("left", flush=True)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGXCPU"])
@pytest.mark.parametrize("stopped", [True, False])
def test_a_repeated_signal_changes_nothing(stopped: bool, name: str) -> None:
    script = SCRIPT.format(stopped=stopped, name=name)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    code, output = (0, "left\n") if stopped else (-signal.Signals[name], "")
    assert (done.returncode, done.stdout) == (code, output), done.stderr
