"""Checks of the way to node 0: its port, its address, the interface that leads there."""

from __future__ import annotations

import os

from mmldlm.distributed.network import bind_problem, is_loopback, obstacle, resolve, use_interface_towards
from mmldlm.tools.doctor.findings import Finding, fail, ok, warn
from mmldlm.tools.doctor.place import Place

REMEDIES = {
    "refused": "nobody listens there: start node 0 within --timeout; if it runs, a firewall rejects the port",
    "timed out": "nothing comes back: a firewall drops the port, or no machine has this address",
    "name not resolved": "give MASTER_ADDR as an IP address, or add the name to DNS or /etc/hosts",
    "no route": "no network of this node leads there: compare MASTER_ADDR with `ip route`, and look at its firewall",
}


def check_master(place: Place, timeout_s: float) -> list[Finding]:
    """Whether node 0 can listen at the address, or this node reach it there, and by which interface."""
    way = check_port(place) if place.node == 0 else check_reach(place, timeout_s)
    return [way] if place.nodes == 1 else [way, check_interface(place.host)]


def check_port(place: Place) -> Finding:
    """Node 0: nobody else may listen on the port."""
    problem = bind_problem(place.port)
    if problem is None:
        return ok("port", f"{place.port} is free")
    if place.nodes == 1:  # accelerate launch then takes another port by itself
        return warn("port", f"{place.port}: {problem}", "torchrun and deepspeed need another MASTER_PORT")
    return fail("port", f"{place.port}: {problem}", "end it, or give all nodes another MASTER_PORT")


def check_reach(place: Place, timeout_s: float) -> Finding:
    """Any other node: a connection to node 0 opens within the time."""
    problem, address = obstacle(place.host, place.port, timeout_s), resolve(place.host)
    where = f"{place.host}:{place.port}" + (f", which is {address}," if address not in (None, place.host) else "")
    if problem is None:
        return ok("master", f"{where} answers")
    remedy = REMEDIES[problem]
    if address is not None and is_loopback(address):
        remedy = "that address is this node itself: MASTER_ADDR must be node 0's on the network (see /etc/hosts)"
    return fail("master", f"{where} {problem}", remedy)


def check_interface(host: str) -> Finding:
    """The interface that leads to `host`; this process uses it from now on, unless the environment names one."""
    interface = use_interface_towards(host)
    if interface is None:
        problem = "no route" if resolve(host) else "name not resolved"
        return fail("interface", f"none leads to {host}: {problem}", REMEDIES[problem])
    chosen = {name: os.environ[name] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    others = [f"{name}={value}" for name, value in chosen.items() if value.lstrip("=") != interface]
    return ok("interface", f"{interface} leads to {host}" + "".join(f", but {other} is set" for other in others))
