"""`mmldlm demo` as a process: it says where it is, and ends quietly."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mmldlm.errors import run_command
from mmldlm.tools.demo import command
from mmldlm.tools.demo.server import DemoServer
from tests.helpers.paths import ROOT
from tests.helpers.waiting import PATIENCE_S


def test_the_command_serves_until_ctrl_c(short_run_dir: Path) -> None:
    demo = subprocess.Popen(
        [sys.executable, "-m", "mmldlm.cli", "demo", str(short_run_dir), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert demo.stdout is not None and demo.stderr is not None
        told = demo.stdout.readline()
        port = int(re.search(r"open http://127\.0\.0\.1:(\d+)/ \(Ctrl-C ends\)", told)[1])  # type: ignore[index]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        connection.request("GET", "/api/run")
        assert connection.getresponse().status == 200
        # Also in the midst of a request.
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        request = {"text": "The rose of soil and water.", "count": 16, "length": 32, "sampling": {"steps": 512}}
        connection.request("POST", "/api/write", json.dumps(request), {"Content-Type": "application/json"})
        time.sleep(0.5)
        demo.send_signal(signal.SIGINT)
        assert demo.wait(timeout=PATIENCE_S) == 130
        assert demo.stderr.read() == "" and demo.stdout.read() == ""
    finally:
        demo.kill()
        demo.wait()


@pytest.mark.quick
def test_the_command_refuses(short_run_dir: Path, server: DemoServer, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code, expected in (
        ([str(short_run_dir), "--port", str(server.port)], 2, f"--port: {server.port} is in use, expected a free one"),
        ([str(short_run_dir), "--port", "80"], 2, "--port: expected 0 or 1024 to 65535, found 80"),
        ([str(short_run_dir), "--port", "70000"], 2, "--port: expected 0 or 1024"),
        (["/nowhere"], 65, "/nowhere: not a run folder"),
    ):
        assert run_command(lambda given=arguments: command.main(given)) == code  # type: ignore[misc]
        told = capsys.readouterr().err
        assert expected in told and told.count("\n") == 1
