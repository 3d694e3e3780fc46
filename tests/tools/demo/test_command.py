"""`mmldlm demo` as a process: it says where it is, calls nothing, and ends cleanly."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from mmldlm.errors import run_command
from mmldlm.tools import demo as command
from mmldlm.tools.demo import Page
from tests.helpers.paths import ROOT
from tests.helpers.waiting import TEST_TIMEOUT_S

gradio_client = pytest.importorskip("gradio_client", reason="needs the extra demo")


@pytest.mark.parametrize("stop", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_the_command_serves_until_it_is_stopped(short_run_dir: Path, tmp_path: Path, stop: signal.Signals) -> None:
    """Behind a proxy that nothing may call: no telemetry, no check of versions, and itself without a detour."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        proxies = {
            name: address for scheme in ("http", "https", "all") for name in (f"{scheme}_proxy", f"{scheme}_PROXY")
        }
        server = subprocess.Popen(
            [sys.executable, "-m", "mmldlm.cli", "demo", str(short_run_dir), "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **proxies, "TMPDIR": str(tmp_path)},
        )
        try:
            assert server.stdout is not None and server.stderr is not None
            url = re.search(r"open (http://127\.0\.0\.1:\d+/) \(Ctrl-C ends\)", server.stdout.readline())[1]  # type: ignore[index]
            text = "The rose of soil and water."
            client = gradio_client.Client(url, verbose=False)
            assert len(client.predict(text, 1, 5, 2, 1, 1, 0, api_name="/write")["data"]) == 1
            body = json.dumps({"data": [text, 16, 32, 512, 1, 1, 0]}).encode()
            call = urllib.request.Request(f"{url}gradio_api/call/write", body, {"Content-Type": "application/json"})
            urllib.request.urlopen(call, timeout=TEST_TIMEOUT_S).close()
            time.sleep(0.5)
            server.send_signal(stop)  # in the middle of a generation
            assert server.wait(timeout=TEST_TIMEOUT_S) == 130
            assert server.stderr.read() == "" and server.stdout.read() == ""
        finally:
            server.kill()
            server.wait()
        proxy.setblocking(False)
        with pytest.raises(BlockingIOError):
            proxy.accept()
    assert not list(tmp_path.iterdir()), "temporary files are left"


@pytest.mark.quick
def test_the_command_refuses(short_run_dir: Path, demo_page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    port = demo_page.blocks.server_port
    for arguments, code, expected in (
        ([str(short_run_dir), "--port", str(port)], 2, f"--port: {port} is in use, expected a free one"),
        ([str(short_run_dir), "--port", "80"], 2, "--port: expected 0 or 1024 to 65535, found 80"),
        ([str(short_run_dir), "--port", "70000"], 2, "--port: expected 0 or 1024"),
        (["/nowhere"], 65, "/nowhere: not a run folder"),
    ):
        assert run_command(lambda given=arguments: command.main(given)) == code  # type: ignore[misc]
        error = capsys.readouterr().err
        assert expected in error and error.count("\n") == 1


@pytest.mark.quick
def test_without_the_extra_the_command_says_what_to_install(
    short_run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)  # as Python marks a module that cannot be imported
    assert run_command(lambda: command.main([str(short_run_dir)])) == 2
    assert "the demo needs gradio: pip install 'gradio>=" in capsys.readouterr().err
