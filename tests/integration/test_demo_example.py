"""`examples/demo.py` as a process: each tab answers, a user's error is shown, and only this machine is served."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mmldlm
from tests.helpers.paths import ROOT
from tests.helpers.ports import free_port
from tests.helpers.waiting import TEST_TIMEOUT_S

gradio_client = pytest.importorskip("gradio_client", reason="needs the extra demo")
TEXT, OTHER = "The rose of soil and water.", "The wave."


@pytest.fixture(scope="module")
def port(short_run_dir: Path) -> Iterator[int]:
    """Of the page, which calls nothing else, by the proxies of its environment, and which Ctrl-C ends."""
    number = free_port()
    command = [sys.executable, "examples/demo.py", str(short_run_dir), "--port", str(number)]
    proxy = socket.create_server(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"), address)
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, **proxies})
    try:
        assert server.stdout is not None
        assert f"open http://127.0.0.1:{number}" in server.stdout.readline()
        yield number
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=TEST_TIMEOUT_S) == 0
        proxy.setblocking(False)
        with pytest.raises(BlockingIOError):
            proxy.accept()
    finally:
        server.kill()
        server.wait()
        proxy.close()


@pytest.fixture(scope="module")
def client(port: int) -> Any:
    return gradio_client.Client(f"http://127.0.0.1:{port}", verbose=False)


def test_texts_are_those_of_sample(client: Any, short_run_dir: Path) -> None:
    rows = client.predict(TEXT, "", 2, 3, 0.5, 4, api_name="/to_text")["data"]
    model = mmldlm.load(short_run_dir)
    expected = model.sample(latents=model.encode([TEXT]), count=2, steps=3, temperature=0.5, seed=4)
    assert [text for _, text in rows] == expected.texts
    assert len(client.predict(TEXT, "", *[None] * 4, api_name="/to_text")["data"]) == 1, "empty numbers"
    rows = client.predict("", 2, 3, None, 1, api_name="/joint")["data"]
    assert [text for _, text in rows] == model.sample(mode="joint", count=2, steps=3, seed=1).texts


def test_a_latent_is_compared_and_texts_lie_between(client: Any) -> None:
    rows = client.predict(TEXT, f"{OTHER}\n\nzzz", "", None, 0, api_name="/to_latent")["data"]
    assert [text for _, text in rows] == [TEXT, OTHER, "zzz"]
    assert -1 <= rows[0][0] <= 1 and rows[2][0] is None, "the encoder has no latent for zzz"
    rows = client.predict(TEXT, OTHER, 3, 2, None, 0, api_name="/between")["data"]
    assert [way for way, _ in rows] == [0, 0.5, 1]


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("/to_text", ("zzz qqq", "", 1, None, None, 0), "no latent for &#x27;zzz qqq&#x27;"),
        ("/to_text", (TEXT, "", 17, None, None, 0), "17 is greater than maximum value 16"),
        ("/to_latent", ("rose " * 100, "", "", None, 0), "expected 1 to 32 tokens"),
        ("/joint", ("why?", 1, None, None, 0), "prefix: expected a run on data with prefixes"),
    ],
)
def test_an_error_of_the_user_is_shown(client: Any, name: str, values: tuple[Any, ...], expected: str) -> None:
    with pytest.raises(gradio_client.exceptions.AppError, match=expected) as error:
        client.predict(*values, api_name=name)
    assert "\n" not in str(error.value)


def test_only_this_machine_is_served_by_its_own_name(port: int) -> None:
    for host, status in (("localhost", 200), ("evil.example", 400), (f"evil.example:{port}", 400)):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TEST_TIMEOUT_S)
        connection.request("GET", "/config", headers={"Host": host})
        assert connection.getresponse().status == status
        connection.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=TEST_TIMEOUT_S)
