"""Checks between the doctors of all nodes: what must be equal, one run folder, clocks, an all-reduce."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mmldlm.distributed.comm_benchmark import NodeRendezvous, all_reduce_speed, backend_of
from mmldlm.distributed.exit_files import machine_id
from mmldlm.distributed.network import is_loopback, resolve
from mmldlm.errors import ExitCode, PeerLostError
from mmldlm.tools.doctor.findings import Finding, fail, ok, warn
from mmldlm.tools.doctor.master import check_master
from mmldlm.tools.doctor.place import Place
from mmldlm.tools.doctor.run import folder_for_now
from mmldlm.trainer.consistency import disagreements
from mmldlm.utils.files import token, wait_until_visible

CLOCK_S = 2.0  # logs and files of different nodes are compared by their times
SLOW_GB_PER_S = 0.1  # less than a gigabit a second
TOKEN_S = 5.0  # a network file system may show a new file late
SHOWN = 5  # differences that a line lists
REMEDIES = {
    "launch": "NPROC_PER_NODE and --device must be the same on all nodes",
    "versions": "install the same on all nodes: constraints.txt pins the versions",
    "config": "give every node the same config file and settings",
    "data": "copy one data store to all nodes",
}

Groups = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Facts:
    """What a node tells the others; `groups` must be equal on all, `run_dir` is None without a config."""

    machine: str
    usable: bool  # its device is there
    loopback: bool  # MASTER_ADDR is this node itself, seen from this node
    clock: float
    run_dir: str | None
    groups: Groups


def check_nodes(
    place: Place,
    local: Sequence[Finding],
    device: torch.device,
    groups: Groups,
    run_dir: str | None,
    timeout_s: float,
    clock: Callable[[], float] = time.time,
) -> list[Finding]:
    """Meet the doctors of the other nodes and compare; `local` is what this node found before.

    Every node ends with a failure where any node has one, so that none starts to train without the others.
    """
    found = check_master(place, timeout_s)
    if any(finding.status == "fail" for finding in found):
        return found
    address = resolve(place.host)
    loopback = address is not None and is_loopback(address)
    try:
        meeting = NodeRendezvous(place.host, place.port, place.node, place.nodes, timeout_s)
    except PeerLostError as error:
        return [*found, fail("nodes", str(error), "give all nodes the same MASTER_ADDR and a free MASTER_PORT")]
    try:
        meeting.exchange("here", True)  # they return together: the clocks are read at one moment
        now = clock()
        usable = device.type == "cpu" or torch.cuda.is_available()
        mine = Facts(machine_id("net"), usable, loopback, now, run_dir, groups)
        facts = [Facts(**given) for given in meeting.exchange("facts", asdict(mine))]
        found += [check_machines(place, facts), check_clocks([each.clock for each in facts])]
        found += check_equal([each.groups for each in facts])
        if run_dir and all(each.run_dir for each in facts):
            found.append(check_one_folder(meeting, Path(run_dir)))
        if all(each.usable for each in facts) and len({each.groups["launch"]["device"] for each in facts}) == 1:
            found.append(check_all_reduce(meeting, device))
        failed = [asdict(finding) for finding in [*local, *found] if finding.status == "fail"]
        found += failures_elsewhere(place.node, meeting.exchange("failed", failed))
    except PeerLostError as error:
        remedy = "start all nodes within --timeout of each other, with the same NNODES, MASTER_ADDR and MASTER_PORT"
        if loopback and place.node == 0:
            which = "" if address == place.host else f", which is {address} here,"
            remedy = f"by {place.host}{which} no other machine finds this one: use its address on the network"
        found.append(fail("nodes", str(error), remedy))
    finally:
        meeting.close()
    return found


def check_machines(place: Place, facts: Sequence[Facts]) -> Finding:
    if len({each.machine for each in facts}) == 1:
        return warn("nodes", f"{len(facts)} met, all on one machine", "right for a trial alone")
    inward = [str(node) for node, each in enumerate(facts) if each.loopback]
    if inward:
        remedy = "name node 0 by its address on the network: gloo and NCCL would use the loopback interface"
        return fail("nodes", f"{place.host} is a loopback address on node {', '.join(inward)}", remedy)
    return ok("nodes", f"{len(facts)} met")


def check_clocks(clocks: Sequence[float]) -> Finding:
    """`clocks`: seconds, read on all nodes at one moment."""
    first, last = clocks.index(min(clocks)), clocks.index(max(clocks))
    apart = clocks[last] - clocks[first]
    if apart > CLOCK_S:
        found = f"node {last} is {apart:,.1f} s ahead of node {first}"
        return warn("clocks", found, "synchronize them: timedatectl set-ntp true")
    return ok("clocks", f"at most {apart:.3f} s apart")


def check_equal(nodes: Sequence[Groups]) -> list[Finding]:
    """A finding for each group of values that at least one node has."""
    found = []
    for name, remedy in REMEDIES.items():
        given = [groups[name] for groups in nodes if name in groups]
        if not given:
            continue
        if len(given) < len(nodes):
            without = ", ".join(str(node) for node, groups in enumerate(nodes) if name not in groups)
            found.append(warn(f"{name} equal", f"not compared: node {without} has none", "give all nodes a config"))
            continue
        if any(values.get("git") == "" for values in given):  # no git there: nothing to compare
            given = [{key: value for key, value in values.items() if key != "git"} for values in given]
        lines = disagreements(given, who="node")
        if not lines:
            found.append(ok(f"{name} equal", "on all nodes"))
            continue
        more = f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
        code = ExitCode.DATA if name == "data" else ExitCode.CONFIG
        found.append(fail(f"{name} equal", "; ".join(lines[:SHOWN]) + more, remedy, code))
    return found


def check_one_folder(meeting: NodeRendezvous, run_dir: Path) -> Finding:
    """Node 0 puts a file into its run.dir; all others must see it in theirs, and be able to write beside it."""
    problem, name = None, None
    with ExitStack() as stack:
        if meeting.node == 0:
            try:
                stack.enter_context(folder_for_now(run_dir))
                name = stack.enter_context(token(run_dir))
            except OSError as error:
                problem = f"cannot write {run_dir.resolve()}: {error.strerror}"
        name = meeting.exchange("token", name)[0]
        if meeting.node and name:
            problem = _problem_beside(run_dir, name)
        problems = meeting.exchange("folder", problem)
    lines = [f"node {node}: {problem}" for node, problem in enumerate(problems) if problem]
    if lines:
        return fail("run.dir", "; ".join(lines), "run.dir must be one writable folder on a disk that all nodes share")
    return ok("run.dir", f"{run_dir.resolve()}, one folder for all nodes")


def _problem_beside(run_dir: Path, name: str) -> str | None:
    if not wait_until_visible(run_dir / name, TOKEN_S):
        return f"{run_dir.resolve()} is not the folder of node 0"
    try:
        with token(run_dir):
            return None
    except OSError as error:
        return f"cannot write {run_dir.resolve()}: {error.strerror}"


def check_all_reduce(meeting: NodeRendezvous, device: torch.device) -> Finding:
    name = f"all-reduce, {backend_of(device.type)}"
    try:
        speed = all_reduce_speed(meeting, device)
    except PeerLostError as error:
        remedy = "let the nodes reach each other on all ports; set the interface by GLOO_/NCCL_SOCKET_IFNAME"
        return fail(name, str(error), f"{remedy}; NCCL_DEBUG=INFO says more" if device.type == "cuda" else remedy)
    found = f"{speed.latency_us:,.0f} us for 4 bytes, {speed.gigabytes_per_s:.2f} GB/s"
    if speed.gigabytes_per_s < SLOW_GB_PER_S:
        return warn(name, found, "slower than gigabit Ethernet: is this the right interface?")
    return ok(name, found)


def failures_elsewhere(node: int, failed: Sequence[Sequence[Mapping[str, Any]]]) -> list[Finding]:
    """What other nodes failed at and this one, `node`, did not; `failed` holds the findings of each node."""
    known = {(finding["name"], finding["found"]) for finding in failed[node]}
    return [
        fail(f"node {other}", f"{finding['name']}: {finding['found']}", finding["remedy"], finding["exit_code"])
        for other, findings in enumerate(failed)
        for finding in findings
        if (finding["name"], finding["found"]) not in known
    ]
