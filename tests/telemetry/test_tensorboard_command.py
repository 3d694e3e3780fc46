"""The TensorBoard command that the user is told shows what the run wrote."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from mmldlm.telemetry import Tracker

ROOT = Path(__file__).resolve().parents[2]


def told(path: Path) -> str:
    match = re.search(r"tensorboard --logdir runs (.*)", path.read_text(encoding="utf-8"))
    assert match, path
    return match[1]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_the_command_shows_every_step(tmp_path: Path) -> None:
    flags = told(ROOT / "README.md")
    assert flags == told(ROOT / "scripts" / "quickstart.sh")
    assert "--host 127.0.0.1" in flags
    steps = 3000  # more than TensorBoard keeps unasked
    with Tracker(tmp_path / "run", steps, 0, resumed=False, enabled=True) as tracker:
        tracker.start({"engine": "single"})
        for step in range(1, steps + 1):
            tracker.train(step, {"loss/total": 1 / step})
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "tensorboard.main", "--logdir", str(tmp_path), *flags.split(), "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}/data/plugin/scalars/scalars?run=run/tensorboard&tag=loss/total"
    try:
        deadline, found = time.monotonic() + 90, []
        while len(found) < steps and time.monotonic() < deadline:
            assert server.poll() is None, "TensorBoard ended"
            time.sleep(0.5)
            try:
                with urllib.request.urlopen(url, timeout=5) as answer:
                    found = json.load(answer)
            except OSError:
                continue
        assert [point[1] for point in found] == list(range(1, steps + 1))
    finally:
        server.terminate()
        server.wait(timeout=30)
