"""Start `mmldlm doctor --json` as real processes, one for each node, and read their reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.paths import ROOT
from tests.helpers.ports import free_port
from tests.helpers.waiting import TEST_TIMEOUT_S


@dataclass(frozen=True)
class Report:
    code: int
    node: int
    findings: dict[str, dict[str, str]]
    errors: str

    @property
    def failed(self) -> dict[str, str]:
        return {name: finding["found"] for name, finding in self.findings.items() if finding["status"] == "fail"}


@dataclass(frozen=True)
class Node:
    """The arguments and environment of one node."""

    arguments: Sequence[object] = ()
    environment: Mapping[str, str] | None = None
    cwd: Path = ROOT
    code: str = ""  # Python that stands in for `python -m mmldlm.cli doctor`


def start(node: Node, place: Mapping[str, object]) -> subprocess.Popen[str]:
    command = ["-c", node.code] if node.code else ["-m", "mmldlm.cli", "doctor"]
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("NNODES", "NODE_", "MASTER_"))}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, *command, "--json", *map(str, node.arguments)],
        cwd=node.cwd,
        env={
            **inherited,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": path,
            **{key: str(value) for key, value in place.items()},
            **(node.environment or {}),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> Report:
    """The report of a doctor, whose stdout must be one JSON object and whose stderr no traceback."""
    try:
        out, errors = process.communicate(timeout=TEST_TIMEOUT_S)
    finally:
        process.kill()
    assert "Traceback" not in errors, errors
    assert out, errors
    result = json.loads(out)
    assert result["ok"] == (process.returncode == 0)
    findings = {finding["name"]: finding for finding in result["findings"]}
    assert all(bool(f["remedy"]) == (f["status"] != "ok") for f in findings.values()), findings
    return Report(process.returncode, result["node"], findings, errors)


def one(*arguments: object, **place: object) -> Report:
    return finish(start(Node(arguments), place))


def together(*nodes: Node, host: str = "127.0.0.1", port: int | None = None) -> list[Report]:
    """The reports of doctors that run at the same time, as many as there are nodes."""
    place = {"NNODES": len(nodes), "MASTER_ADDR": host, "MASTER_PORT": port or free_port()}
    started = [start(node, {**place, "NODE_RANK": rank}) for rank, node in enumerate(nodes)]
    return [finish(process) for process in started]
