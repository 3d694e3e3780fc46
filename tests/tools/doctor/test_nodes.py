"""Problems between two nodes, each a real process on this machine; both doctors must report them."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest
import torch

from mmldlm.tools.doctor.nodes import NodeEnv, NodeFacts, check_clocks, check_machines, failures_on_other_nodes
from tests.helpers.doctor_runs import Node, finish, start, together
from tests.helpers.paths import ROOT
from tests.helpers.ports import free_port


def test_two_good_nodes_are_ready_and_leave_nothing_behind(tiny_config: Path, tmp_path: Path) -> None:
    before, port = sorted(tmp_path.rglob("*")), free_port()
    reports = together(*[Node([tiny_config, "--timeout", 30])] * 2, port=port)
    with socket.socket() as training:  # binds as torch does
        training.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        training.bind(("", port))
    assert [(report.code, report.node, report.failed) for report in reports] == [(0, 0, {}), (0, 1, {})]
    assert sorted(tmp_path.rglob("*")) == before
    for report in reports:
        result = {name: finding["found"] for name, finding in report.findings.items()}
        assert result["nodes"] == "2 connected, all on one machine"
        assert "fsdp2_hsdp cannot" in result["launch"], "launch_node.sh would start it, and the start refuses it"
        assert result["interface"] == "lo leads to 127.0.0.1"
        equal = {name for name, value in result.items() if value == "on all nodes"}
        assert equal == {f"{what} equal" for what in ("launch", "versions", "config", "data")}
        assert result["run.dir"] == f"{tmp_path / 'run'}, one folder for all nodes"
        latency, speed = result["all-reduce, gloo"].split(" us for 4 bytes, ")
        assert float(latency.replace(",", "")) > 0 and float(speed.removesuffix(" GB/s")) > 0
    assert {"port"} <= set(reports[0].findings) and {"master"} <= set(reports[1].findings)


def test_another_version_on_a_node(tiny_config: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "accelerate-9.9.9.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: accelerate\nVersion: 9.9.9\n")
    reports = together(Node([tiny_config]), Node([tiny_config], {"PYTHONPATH": f"{other.parent}:{ROOT}"}))
    for report in reports:
        assert report.code == 64 and list(report.failed) == ["versions equal"]
        assert report.failed["versions equal"].startswith("node 1: version.accelerate is 9.9.9, ")
        assert report.failed["versions equal"].endswith(" on node 0")


def test_another_config_on_a_node(tiny_config: Path) -> None:
    for report in together(Node([tiny_config]), Node([tiny_config, "optim.lr=1e-3"])):
        assert report.code == 64
        assert report.failed == {"config equal": "node 1: config.optim.lr is 0.001, 0.003 on node 0"}


def test_other_data_on_a_node(tiny_config: Path, tiny_store: Path, tmp_path: Path) -> None:
    copy, other = tmp_path / "copy", tmp_path / "other"
    shutil.copytree(tiny_store, copy)
    shutil.copytree(tiny_store, other)
    manifest = other / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"created_by": "', '"created_by": "another '))
    nodes = [Node([tiny_config, f"data.path={path}"]) for path in (tiny_store, copy, other)]
    for report in together(*nodes):
        assert report.code == 65 and list(report.failed) == ["data equal"]
        assert report.failed["data equal"].startswith("node 2: data.manifest is ")
        assert report.failed["data equal"].endswith(" on nodes 0-1")


def test_a_missing_store_on_one_node_ends_both(tiny_config: Path, tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    first, second = together(Node([tiny_config]), Node([tiny_config, f"data.path={missing}"]))
    assert first.code == second.code == 65
    assert second.failed["data store"].startswith(f"{missing}: not a data store")
    assert first.failed == {"node 1": f"data store: {second.failed['data store']}"}
    assert first.findings["data equal"]["status"] == "warn"


def test_different_run_folders(tiny_config: Path, tmp_path: Path) -> None:
    """One relative path, two working folders: what a disk of each node's own looks like."""
    nodes = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        nodes.append(Node([tiny_config, "run.dir=run"], cwd=tmp_path / name))
    for report in together(*nodes):
        assert report.code == 64
        assert report.failed == {"run.dir": f"node 1: {tmp_path / 'b' / 'run'} is not the folder of node 0"}
    assert not list((tmp_path / "a").iterdir()) and not list((tmp_path / "b").iterdir())


def test_other_numbers_of_processes(tiny_config: Path) -> None:
    for report in together(Node(["--processes", 1]), Node(["--processes", 2])):
        assert report.code == 64 and report.failed == {"launch equal": "node 1: processes is 2, 1 on node 0"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has GPUs")
def test_missing_gpus_on_both_nodes() -> None:
    for report in together(*[Node(["--device", "cuda", "--processes", 1])] * 2):
        assert report.code == 64 and {"GPUs"} <= set(report.failed) <= {"GPUs", "backend"}
        assert not [name for name in report.findings if name.startswith("all-reduce")]


def test_clock_skew_is_a_warning(tiny_config: Path) -> None:
    ahead = (
        "import sys, time\nfrom mmldlm.errors import exit_process\nfrom mmldlm.tools.doctor.command import main\n"
        "exit_process(main(sys.argv[1:], clock=lambda: time.time() + 5))"
    )
    for report in together(Node([tiny_config]), Node([tiny_config], code=ahead)):
        clocks = report.findings["clocks"]
        assert report.code == 0 and clocks["status"] == "warn"
        seconds = clocks["found"].removeprefix("node 1 is ").removesuffix(" s ahead of node 0")
        assert 4.5 < float(seconds) < 5.5


def test_missing_node() -> None:
    place = {"NNODES": 3, "NODE_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    report = finish(start(Node(["--timeout", 1]), place))
    assert report.code == 64 and report.failed == {"nodes": "no response from nodes 1, 2 within 1 s"}
    assert "other machines cannot reach this one at 127.0.0.1" in report.findings["nodes"]["remedy"]


@pytest.mark.quick
def test_clocks_within_two_seconds_are_good() -> None:
    assert check_clocks([10.0, 11.9, 10.5]).status == "ok"
    assert check_clocks([10.0, 12.1, 9.9]).found == "node 1 is 2.2 s ahead of node 2"


@pytest.mark.quick
def test_loopback_address() -> None:
    facts = [NodeFacts(machine, True, node == 0, 0.0, None, {}) for node, machine in enumerate("ab")]
    result = check_machines(NodeEnv(nodes=2, host="node0"), facts)
    assert result.status == "fail" and result.found == "node0 is a loopback address on node 0"
    assert check_machines(NodeEnv(nodes=2), [facts[0], facts[0]]).status == "warn"
    assert check_machines(NodeEnv(nodes=2), [NodeFacts("c", True, False, 0.0, None, {}), facts[1]]).status == "ok"


@pytest.mark.quick
def test_common_failures_are_reported_once() -> None:
    shared = {"name": "config equal", "found": "x", "remedy": "r", "exit_code": 64}
    own = {"name": "disk", "found": "full", "remedy": "r", "exit_code": 64}
    assert failures_on_other_nodes(1, [[shared], [shared, own]]) == []
    (result,) = failures_on_other_nodes(0, [[shared], [shared, own]])
    assert (result.name, result.found, result.exit_code) == ("node 1", "disk: full", 64)
