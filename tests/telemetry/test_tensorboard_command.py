"""The TensorBoard command that is printed for the user shows what the run wrote."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from mmldlm.telemetry.tracker import Tracker
from tests.helpers.paths import ROOT
from tests.helpers.ports import free_port
from tests.helpers.waiting import TEST_TIMEOUT_S


def documented_flags(path: Path) -> str:
    match = re.search(r"tensorboard --logdir runs (.*)", path.read_text(encoding="utf-8"))
    assert match, path
    return match[1]


def compared_runs(port: int) -> list[dict[str, float]]:
    """The metrics of each run on the page "HPARAMS"."""

    def ask(what: str, **question: object) -> dict[str, Any]:
        url = f"http://127.0.0.1:{port}/data/plugin/hparams/{what}"
        body = json.dumps({"experimentName": "", **question}).encode()
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=TEST_TIMEOUT_S) as answer:
            return json.load(answer)

    metrics = [{"metric": each["name"]} for each in ask("experiment")["metricInfos"]]
    assert [each["metric"]["tag"] for each in metrics][:2] == ["loss/total", "validation/total"]
    question = {"colParams": metrics, "sliceSize": 10, "startIndex": 0, "allowedStatuses": ["STATUS_SUCCESS"]}
    groups = ask("session_groups", **question)["sessionGroups"]
    assert [group["hparams"]["optim.lr"] for group in groups] == [3e-4]
    return [{each["name"]["tag"]: each["value"] for each in group["metricValues"]} for group in groups]


def test_the_command_shows_every_step(tmp_path: Path) -> None:
    flags = documented_flags(ROOT / "README.md")
    assert flags == documented_flags(ROOT / "scripts" / "quickstart.sh")
    assert "--host 127.0.0.1" in flags
    steps = 3000  # more than TensorBoard keeps unasked
    with Tracker(tmp_path / "run", steps, 0, resumed=False, enabled=True) as tracker:
        tracker.start({"engine": "single"}, {"optim": {"lr": 3e-4}})
        for step in range(1, steps + 1):
            tracker.train(step, {"loss/total": 1 / step})
        tracker.validation(steps, {"validation/total": 2.5})
        tracker.end(steps, {})
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "tensorboard.main", "--logdir", str(tmp_path), *flags.split(), "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}/data/plugin/scalars/scalars?run=run/tensorboard&tag=loss/total"
    try:
        deadline, result = time.monotonic() + TEST_TIMEOUT_S, []
        while len(result) < steps and time.monotonic() < deadline:
            assert server.poll() is None, "TensorBoard ended"
            time.sleep(0.5)
            try:
                with urllib.request.urlopen(url, timeout=5) as answer:
                    result = json.load(answer)
            except OSError:
                continue
        assert [point[1] for point in result] == list(range(1, steps + 1))
        assert compared_runs(port) == [{"loss/total": pytest.approx(1 / steps), "validation/total": 2.5}]
    finally:
        server.terminate()
        server.wait(timeout=TEST_TIMEOUT_S)
