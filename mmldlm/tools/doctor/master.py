"""Checks of the connection to node 0: its port, its address, and the network interface of the route to it."""

from __future__ import annotations

import os

from mmldlm.distributed.network import bind_problem, connect_problem, is_loopback, resolve, use_interface_for
from mmldlm.tools.doctor.findings import Finding, fail, ok, warn
from mmldlm.tools.doctor.place import NodeEnv

REMEDIES = {
    "refused": "no process listens there: start node 0 within --timeout; if it runs, a firewall rejects the port",
    "timed out": "no answer: a firewall drops the packets, or no machine has this address",
    "name not resolved": "give MASTER_ADDR as an IP address, or add the name to DNS or /etc/hosts",
    "no route": "this node has no route to it: compare MASTER_ADDR with `ip route`, and check the firewall of node 0",
}


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
    remedy = REMEDIES[problem]
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
        return fail("interface", f"none leads to {host}: {problem}", REMEDIES[problem])
    variables = {name: os.environ[name] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    others = [f"{name}={value}" for name, value in variables.items() if value.lstrip("=") != interface]
    return ok("interface", f"{interface} leads to {host}" + "".join(f", but {other} is set" for other in others))
