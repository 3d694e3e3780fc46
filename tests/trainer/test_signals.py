"""Signals to a run that is on its way out."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.quick

SCRIPT = """
import os, signal
from mmldlm.trainer.signals import SignalRequests
with SignalRequests() as requests:
    if {stopped}:
        os.kill(os.getpid(), signal.SIGTERM)
        assert requests.stop == "SIGTERM"
os.kill(os.getpid(), signal.SIGTERM)
print("left", flush=True)
"""


@pytest.mark.parametrize(("stopped", "code", "output"), [(True, 0, "left\n"), (False, -15, "")])
def test_repeated_sigterm_changes_nothing(stopped: bool, code: int, output: str) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(stopped=stopped)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, output), done.stderr
