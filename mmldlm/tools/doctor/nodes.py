"""Checks between nodes: the connection to node 0, equal inputs, one shared run folder, clocks, an all-reduce."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mmldlm.distributed.comm_benchmark import NodeRendezvous, all_reduce_speed, backend_of
from mmldlm.distributed.exit_files import machine_id
from mmldlm.distributed.network import bind_problem, connect_problem, is_loopback, resolve, use_interface_for
from mmldlm.errors import ExitCode, PeerLostError, UsageError
from mmldlm.tools.doctor.checks import Finding, fail, ok, temporary_folder, warn
from mmldlm.trainer.consistency import disagreements
from mmldlm.utils.files import probe_file, wait_until_visible

_MAX_CLOCK_DIFFERENCE_S = 2.0  # logs and files of different nodes are compared by their times
_MIN_GB_PER_S = 0.1  # less than a gigabit per second
_FILE_VISIBLE_TIMEOUT_S = 5.0  # a network file system may show a new file late
_MAX_DIFFERENCES = 5  # listed in a line
_GROUP_REMEDIES = {
    "launch": "NPROC_PER_NODE and --device must be the same on all nodes",
    "versions": "install the same on all nodes: constraints.txt pins the versions",
    "config": "give every node the same config file and settings",
    "data": "copy one data store to all nodes",
}
_CONNECTION_REMEDIES = {
    "refused": "no process listens there: start node 0 within --timeout; if it runs, a firewall rejects the port",
    "timed out": "no answer: a firewall drops the packets, or no machine has this address",
    "name not resolved": "give MASTER_ADDR as an IP address, or add the name to DNS or /etc/hosts",
    "no route": "this node has no route to it: compare MASTER_ADDR with `ip route`, and check the firewall of node 0",
}

Groups = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class NodeEnv:
    """Node `node` of `nodes`, with `processes` on each; node 0 listens at `host:port`."""

    node: int = 0
    nodes: int = 1
    processes: int = 1
    host: str = "127.0.0.1"
    port: int = 29500

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], processes: int | None, devices: int) -> NodeEnv:
        """Read NNODES, NODE_RANK, NPROC_PER_NODE, MASTER_ADDR and MASTER_PORT, or raise `UsageError`.

        Processes per node are `processes`, else those of NPROC_PER_NODE, else `devices`.
        """
        nodes = _read_int(environment, "NNODES", 1, 10**6, 1)
        host = environment.get("MASTER_ADDR", "")
        if nodes > 1 and not host:
            raise UsageError("MASTER_ADDR: expected the address of node 0, since NNODES is above 1; found nothing")
        return cls(
            node=_read_int(environment, "NODE_RANK", 0, nodes - 1, None if nodes > 1 else 0),
            nodes=nodes,
            processes=processes or _read_int(environment, "NPROC_PER_NODE", 1, 10**6, devices),
            host=host or cls.host,
            port=_read_int(environment, "MASTER_PORT", 1, 65535, cls.port),
        )

    def __str__(self) -> str:
        processes = f"{self.processes} process{'es' * (self.processes > 1)}"
        if self.nodes == 1:
            return f"one node, {processes}"
        return f"node {self.node} of {self.nodes}, {processes} on each, node 0 at {self.host}:{self.port}"


def _read_int(environment: Mapping[str, str], name: str, minimum: int, maximum: int, default: int | None) -> int:
    text = environment.get(name) or ("" if default is None else str(default))
    if not (text.isascii() and text.isdigit()) or not minimum <= int(text) <= maximum:
        raise UsageError(f"{name}: expected a whole number from {minimum} to {maximum}, found {text or 'nothing'}")
    return int(text)


@dataclass(frozen=True)
class NodeFacts:
    """Facts that a node sends to the others.

    Attributes:
        usable: Whether its device is available.
        loopback: Whether MASTER_ADDR resolves to a loopback address on this node.
        clock: Unix seconds, read on all nodes at the same moment.
        run_dir: `run.dir`; None without a config.
        groups: Groups of values that must be equal on all nodes.
    """

    machine: str
    usable: bool
    loopback: bool
    clock: float
    run_dir: str | None
    groups: Groups


# --- the connection to node 0 -----------------------------------------------------------------------------------


def check_master(node_env: NodeEnv, timeout_s: float) -> list[Finding]:
    """Check that node 0 can listen at its address and that other nodes reach it there, and by which interface."""
    finding = check_port(node_env) if node_env.node == 0 else check_master_reachable(node_env, timeout_s)
    return [finding] if node_env.nodes == 1 else [finding, check_interface(node_env.host)]


def check_port(node_env: NodeEnv) -> Finding:
    """Check on node 0 that the port is free."""
    problem = bind_problem(node_env.port)
    if problem is None:
        return ok("port", f"{node_env.port} is free")
    if node_env.nodes == 1:  # accelerate launch then chooses another port
        return warn("port", f"{node_env.port}: {problem}", "torchrun and deepspeed need another MASTER_PORT")
    return fail("port", f"{node_env.port}: {problem}", "end it, or give all nodes another MASTER_PORT")


def check_master_reachable(node_env: NodeEnv, timeout_s: float) -> Finding:
    """Check on any other node that a connection to node 0 opens within `timeout_s`."""
    problem, address = connect_problem(node_env.host, node_env.port, timeout_s), resolve(node_env.host)
    where = f"{node_env.host}:{node_env.port}" + (
        f", which is {address}," if address not in (None, node_env.host) else ""
    )
    if problem is None:
        return ok("master", f"{where} answers")
    remedy = _CONNECTION_REMEDIES[problem]
    if address is not None and is_loopback(address):
        remedy = "that address is this node itself: MASTER_ADDR must be node 0's on the network (see /etc/hosts)"
    return fail("master", f"{where} {problem}", remedy)


def check_interface(host: str) -> Finding:
    """Find the network interface of the route to `host`.

    This process uses it from now on, unless the environment names another.
    """
    interface = use_interface_for(host)
    if interface is None:
        problem = "no route" if resolve(host) else "name not resolved"
        return fail("interface", f"none leads to {host}: {problem}", _CONNECTION_REMEDIES[problem])
    variables = {name: os.environ[name] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    others = [f"{name}={value}" for name, value in variables.items() if value.lstrip("=") != interface]
    return ok("interface", f"{interface} leads to {host}" + "".join(f", but {other} is set" for other in others))


# --- all nodes --------------------------------------------------------------------------------------------------


def check_nodes(
    node_env: NodeEnv,
    local: Sequence[Finding],
    device: torch.device,
    groups: Groups,
    run_dir: str | None,
    timeout_s: float,
    clock: Callable[[], float] = time.time,
) -> list[Finding]:
    """Connect to the doctors of the other nodes and compare.

    If any node has a failure, all nodes report one, so that none starts to train without the others.

    Args:
        local: Findings of this node so far.
        groups: Groups of values that must be equal on all nodes.
        run_dir: `run.dir`; None without a config.
        clock: Returns Unix seconds.
    """
    findings = check_master(node_env, timeout_s)
    if any(finding.status == "fail" for finding in findings):
        return findings
    address = resolve(node_env.host)
    loopback = address is not None and is_loopback(address)
    try:
        rendezvous = NodeRendezvous(node_env.host, node_env.port, node_env.node, node_env.nodes, timeout_s)
    except PeerLostError as error:
        return [*findings, fail("nodes", str(error), "give all nodes the same MASTER_ADDR and a free MASTER_PORT")]
    try:
        rendezvous.exchange("here", True)  # returns on all nodes at once, so that the clocks are read at one moment
        now = clock()
        usable = device.type == "cpu" or torch.cuda.is_available()
        mine = NodeFacts(machine_id("net"), usable, loopback, now, run_dir, groups)
        facts = [NodeFacts(**values) for values in rendezvous.exchange("facts", asdict(mine))]
        findings += [check_machines(node_env, facts), check_clocks([node.clock for node in facts])]
        findings += check_agreement([node.groups for node in facts])
        # Both conditions hold on all nodes or on none: a check with an exchange needs every node.
        if run_dir and all(node.run_dir for node in facts):
            findings.append(check_shared_folder(rendezvous, Path(run_dir)))
        # Nodes without a usable device, or with different backends, cannot take part in one all-reduce.
        if all(node.usable for node in facts) and len({node.groups["launch"]["device"] for node in facts}) == 1:
            findings.append(check_all_reduce(rendezvous, device))
        failed = [asdict(finding) for finding in [*local, *findings] if finding.status == "fail"]
        findings += failures_on_other_nodes(node_env.node, rendezvous.exchange("failed", failed))
    except PeerLostError as error:
        remedy = "start all nodes within --timeout of each other, with the same NNODES, MASTER_ADDR and MASTER_PORT"
        if loopback and node_env.node == 0:
            resolved = "" if address == node_env.host else f" ({address} on this node)"
            remedy = f"other machines cannot reach this one at {node_env.host}{resolved}: use its network address"
        findings.append(fail("nodes", str(error), remedy))
    finally:
        rendezvous.close()
    return findings


def check_machines(node_env: NodeEnv, facts: Sequence[NodeFacts]) -> Finding:
    """Check that the nodes are different machines, and that MASTER_ADDR is not a loopback address."""
    if len({node.machine for node in facts}) == 1:
        return warn("nodes", f"{len(facts)} connected, all on one machine", "this is only right for a trial")
    loopback_nodes = [str(index) for index, node in enumerate(facts) if node.loopback]
    if loopback_nodes:
        remedy = "name node 0 by its address on the network: gloo and NCCL would use the loopback interface"
        return fail("nodes", f"{node_env.host} is a loopback address on node {', '.join(loopback_nodes)}", remedy)
    return ok("nodes", f"{len(facts)} connected")


def check_clocks(clocks: Sequence[float]) -> Finding:
    """Compare `clocks`, in Unix seconds, read on all nodes at one moment."""
    first, last = clocks.index(min(clocks)), clocks.index(max(clocks))
    difference = clocks[last] - clocks[first]
    if difference > _MAX_CLOCK_DIFFERENCE_S:
        result = f"node {last} is {difference:,.1f} s ahead of node {first}"
        return warn("clocks", result, "synchronize them: timedatectl set-ntp true")
    return ok("clocks", f"at most {difference:.3f} s apart")


def check_agreement(nodes: Sequence[Groups]) -> list[Finding]:
    """Compare each group of values that at least one node has; return one finding per group."""
    findings = []
    for name, remedy in _GROUP_REMEDIES.items():
        present = [groups[name] for groups in nodes if name in groups]
        if not present:
            continue
        if len(present) < len(nodes):
            missing = ", ".join(str(node) for node, groups in enumerate(nodes) if name not in groups)
            findings.append(warn(f"{name} equal", f"not compared: node {missing} has none", "give all nodes a config"))
            continue
        if any(values.get("git") == "" for values in present):  # a node without git cannot be compared
            present = [{key: value for key, value in values.items() if key != "git"} for values in present]
        differences = disagreements(present, who="node")
        if not differences:
            findings.append(ok(f"{name} equal", "on all nodes"))
            continue
        more = f"; and {len(differences) - _MAX_DIFFERENCES} more" if len(differences) > _MAX_DIFFERENCES else ""
        code = ExitCode.DATA if name == "data" else ExitCode.CONFIG
        findings.append(fail(f"{name} equal", "; ".join(differences[:_MAX_DIFFERENCES]) + more, remedy, code))
    return findings


def check_shared_folder(rendezvous: NodeRendezvous, run_dir: Path) -> Finding:
    """Check that node 0 can create a file in run.dir, and that all others see it in theirs and can write there too."""
    problem, name = None, None
    with ExitStack() as stack:
        if rendezvous.node == 0:
            try:
                stack.enter_context(temporary_folder(run_dir))
                name = stack.enter_context(probe_file(run_dir))
            except OSError as error:
                problem = f"cannot write {run_dir.resolve()}: {error.strerror}"
        name = rendezvous.exchange("token", name)[0]
        if rendezvous.node and name:
            problem = _folder_problem(run_dir, name)
        # Within the context: node 0 keeps its file until all nodes have looked for it.
        problems = rendezvous.exchange("folder", problem)
    lines = [f"node {node}: {problem}" for node, problem in enumerate(problems) if problem]
    if lines:
        return fail("run.dir", "; ".join(lines), "run.dir must be one writable folder on a disk that all nodes share")
    return ok("run.dir", f"{run_dir.resolve()}, one folder for all nodes")


def _folder_problem(run_dir: Path, name: str) -> str | None:
    if not wait_until_visible(run_dir / name, _FILE_VISIBLE_TIMEOUT_S):
        return f"{run_dir.resolve()} is not the folder of node 0"
    try:
        with probe_file(run_dir):
            return None
    except OSError as error:
        return f"cannot write {run_dir.resolve()}: {error.strerror}"


def check_all_reduce(rendezvous: NodeRendezvous, device: torch.device) -> Finding:
    """Measure an all-reduce between the nodes."""
    name = f"all-reduce, {backend_of(device.type)}"
    try:
        speed = all_reduce_speed(rendezvous, device)
    except PeerLostError as error:
        remedy = "let the nodes reach each other on all ports; set the interface by GLOO_/NCCL_SOCKET_IFNAME"
        return fail(name, str(error), f"{remedy}; NCCL_DEBUG=INFO says more" if device.type == "cuda" else remedy)
    result = f"{speed.latency_us:,.0f} us for 4 bytes, {speed.gigabytes_per_s:.2f} GB/s"
    if speed.gigabytes_per_s < _MIN_GB_PER_S:
        return warn(name, result, "slower than gigabit Ethernet: is this the right interface?")
    return ok(name, result)


def failures_on_other_nodes(node: int, failed: Sequence[Sequence[Mapping[str, Any]]]) -> list[Finding]:
    """Return the failures of other nodes that this one, `node`, does not have; `failed` has one list per node."""
    # Checks that compare nodes fail on all of them with one text, which is reported once.
    known = {(finding["name"], finding["found"]) for finding in failed[node]}
    return [
        fail(f"node {other}", f"{finding['name']}: {finding['found']}", finding["remedy"], finding["exit_code"])
        for other, findings in enumerate(failed)
        for finding in findings
        if (finding["name"], finding["found"]) not in known
    ]
