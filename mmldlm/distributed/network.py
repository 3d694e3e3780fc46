"""The way to the other nodes: interfaces, names, ports, and what is in the way."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import time
from collections.abc import MutableMapping
from typing import Literal

import psutil

Obstacle = Literal["refused", "timed out", "name not resolved", "no route"]
_RETRY_S = 0.2


def resolve(host: str) -> str | None:
    """The first address of `host`, which may be an address itself; None where the name is not resolved."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)[0][4][0])
    except OSError:
        return None


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def interface_towards(address: str) -> str | None:
    """Name of the interface by which this machine reaches host or address `address`.

    For an address of this machine it is the interface that carries it, not `lo`: the one by which the others
    come. None where the name is not resolved, there is no route, or no interface has the source address.
    """
    target = resolve(address)
    if target is None:
        return None
    with socket.socket(socket.AF_INET6 if ":" in target else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))  # of a datagram socket: sends nothing, chooses the source address
        except OSError:
            return None
        source = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == source for entry in addresses):
            return name
    return None


def use_interface_towards(address: str, environment: MutableMapping[str, str] = os.environ) -> str | None:
    """Have gloo and NCCL use that interface, unless the user has named another; the interface, or None.

    Otherwise gloo takes the one that the host's own name resolves to, which is often loopback, and NCCL guesses.
    """
    interface = interface_towards(address)
    if interface is not None:
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
        environment.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # `=`: this very name, not those it begins
    return interface


def obstacle(host: str, port: int, timeout_s: float) -> Obstacle | None:
    """What keeps a connection to `host:port` from opening for all of `timeout_s`; None as soon as one opens."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = _attempt(host, port, max(0.1, min(3.0, deadline - time.monotonic())))
        if found is None or time.monotonic() + _RETRY_S > deadline:
            return found
        time.sleep(_RETRY_S)


def _attempt(host: str, port: int, timeout_s: float) -> Obstacle | None:
    try:
        socket.create_connection((host, port), timeout_s).close()
    except socket.gaierror:
        return "name not resolved"
    except ConnectionRefusedError:
        return "refused"
    except TimeoutError:
        return "timed out"
    except OSError:  # unreachable, down, not permitted: this machine does not let it out
        return "no route"
    return None


def bind_problem(port: int) -> str | None:
    """Why this machine cannot listen on `port` right now, naming who does where it may be known; None if it can."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch does: past connections do not count
        try:
            listener.bind(("", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return error.strerror or str(error)
            return f"in use by {_listener(port)}"
    return None


def _listener(port: int) -> str:
    try:
        connections = psutil.net_connections("tcp")
        pids = {c.pid for c in connections if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port}
        (pid,) = pids - {None}
        process = psutil.Process(pid)
        command = " ".join(" ".join(process.cmdline()).split())  # one line, whatever the arguments
        return f"process {process.pid}: {command or process.name()}"[:120]
    except (psutil.Error, OSError, ValueError):
        return "another process"
