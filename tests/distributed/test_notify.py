"""`log.notify`: a command or a server gets one JSON at the end of a run, and neither delays nor breaks the run."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from mmldlm import train
from mmldlm.distributed import notify
from mmldlm.errors import ExitCode
from tests.helpers.forked_runs import ForkedRuns
from tests.helpers.user_errors import assert_user_error

NAME = "MMLDLM_NOTIFY_TEST"
TOKEN = "T0KEN-of-a-webhook"
SET = f"log.notify=env:{NAME}"
DIVERGES = ("optim.lr=1e38", "optim.warmup_steps=0", "guard.nonfinite=stop", "validation.every=0")
OVERFITS = ("optim.lr=0.3", "optim.warmup_steps=0", "validation.every=1", "train.steps=4", "schedule.lr=constant")


class Server(HTTPServer):
    """A server on this machine. It keeps what it gets and answers with `status`, after `pause_s`."""

    status, pause_s = 200, 0.0

    def __init__(self) -> None:
        self.received: list[tuple[str, str, Any]] = []
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hooks/{TOKEN}?key={TOKEN}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append((self.path, self.headers["Content-Type"], json.loads(content)))
        time.sleep(self.server.pause_s)
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as result:
        thread = threading.Thread(target=result.serve_forever, daemon=True)
        thread.start()
        yield result
        result.shutdown()


@pytest.fixture
def inbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[dict[str, Any]]]:
    """What the command, a shell that appends its input and its variables to a file, has got so far."""
    path = tmp_path / "inbox"
    shell = f"cat >> {path}; echo >> {path}; printf '%s' \"$MMLDLM_EVENT|$MMLDLM_TEXT\" > {path}.variables"
    script = tmp_path / "notify.sh"
    script.write_text(f"{shell}\n")
    monkeypatch.setenv(NAME, f"sh {script}")
    return lambda: [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.setting("log.notify")
@pytest.mark.parametrize(
    ("settings", "event", "code", "says"),
    [
        ([], "finished", 0, "run finished after step 8"),
        (["--stop-at", "4"], "stopped", 75, "--stop-at 4"),
        (DIVERGES, "diverged", 70, "is not finite"),
        (OVERFITS, "overfitted", 0, "overfitting: validation/text is "),
        (["data.path=/nowhere"], "failed", 65, "/nowhere: not a data store"),
    ],
)
def test_each_end_is_told_once(
    settings: list[str],
    event: str,
    code: int,
    says: str,
    tiny_config: Path,
    tmp_path: Path,
    inbox: Callable[[], list[dict[str, Any]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train.main([str(tiny_config), SET, *settings]) == code
    (told,) = inbox()
    assert (told["run"], told["event"], told["code"]) == ("run", event, code) and says in told["text"], told
    assert "\n" not in told["text"] and "log.notify" not in capsys.readouterr().err
    assert (tmp_path / "inbox.variables").read_text() == f"{event}|{told['text']}"
    report = tmp_path / "run/startup.json"
    assert told["run_id"] == (json.loads(report.read_text())["run_id"] if report.exists() else None)
    if report.exists():
        assert told["step"] == json.loads((tmp_path / "run/exit.json").read_text())["step"]


def test_a_server_gets_it_and_nothing_else_has_the_url(
    server: Server,
    tiny_config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(NAME, server.url)
    assert train.main([str(tiny_config), SET, "log.tensorboard=true", "log.trackers=[tensorboard]"]) == 0
    ((path, kind, told),) = server.received
    assert path == f"/hooks/{TOKEN}?key={TOKEN}" and kind == "application/json" and told["event"] == "finished"
    printed = "".join(capfd.readouterr())
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) > 10 and f"notify: env:{NAME}" in (tmp_path / "run/config.yaml").read_text()
    assert not [file for file in files if TOKEN.encode() in file.read_bytes()] and TOKEN not in printed


@pytest.mark.parametrize("fault", ["answers 500", "ConnectionRefusedError", "no answer", "exit code 3", "FileNotFound"])
def test_a_failed_notification_is_one_warning(
    fault: str,
    server: Server,
    tiny_config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(notify, "TIMEOUT_S", 0.5)
    target = server.url
    if fault == "answers 500":
        server.status = 500
    elif fault == "no answer":
        server.pause_s = 4
    elif fault == "ConnectionRefusedError":
        target = f"http://127.0.0.1:1/{TOKEN}"
    elif fault == "exit code 3":
        target = f"sh -c 'exit 3' {TOKEN}"
    else:
        target = f"no-such-command-{TOKEN}"
    monkeypatch.setenv(NAME, target)
    assert train.main([str(tiny_config), SET, "validation.every=0", "train.steps=2"]) == 0
    ended = json.loads((tmp_path / "run/exit.json").read_text())
    assert ended["code"] == 0 and time.time() - ended["time"] < 3, "it waits no longer than the timeout"
    errors = capfd.readouterr().err
    expected = "TimeoutError" if fault == "no answer" else fault
    assert errors.count("log.notify") == 1 and expected in errors and TOKEN not in errors, errors


@pytest.mark.parametrize("event", ["raise", "hang"])
def test_ranks_tell_together_once(
    event: str,
    parity_config: Path,
    tmp_path: Path,
    two_ranks: Callable[..., list[int]],
    forked: ForkedRuns,
    inbox: Callable[[], list[dict[str, Any]]],
) -> None:
    fault = {"FAULT": event, "FAULT_STEP": "3", NAME: os.environ[NAME]}
    endless = ["distributed.timeout_s=5", "train.steps=100000", "validation.every=0", "checkpoint.every_steps=0"]
    given = [parity_config, f"run.dir={tmp_path / 'run'}", SET, *endless]
    forked.wait(two_ranks("ddp", *given, script="faulty_rank.py", **fault))
    (told,) = inbox()
    assert told["event"] == "peer_lost" and told["code"] == 76 and "rank 1" in told["text"], told


@pytest.mark.quick
@pytest.mark.parametrize(
    ("setting", "value", "must_name"),
    [
        (f"https://hooks.example.com/{TOKEN}", "", ("log.notify: expected env:NAME", "MMLDLM_NOTIFY")),
        (f"notify-send {TOKEN}", "", ("log.notify: expected env:NAME", "MMLDLM_NOTIFY")),
        ("env:SHELL", "", ("log.notify: expected env:NAME", "MMLDLM_NOTIFY")),
        (f"env:{NAME}", " ", (f"log.notify: env:{NAME}: the variable is not set",)),
    ],
)
def test_a_secret_or_no_target_is_refused(
    setting: str,
    value: str,
    must_name: tuple[str, ...],
    tiny_config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(NAME, value)
    result = train.main([str(tiny_config), f"log.notify={setting}"]), capsys.readouterr().err
    assert_user_error(result, ExitCode.CONFIG, *must_name)
    assert TOKEN not in result[1] and not (tmp_path / "run").exists()
