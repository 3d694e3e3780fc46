"""Network checks of a node: interfaces, names and ports, and what prevents a connection."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import time
from collections.abc import MutableMapping
from typing import Literal

import psutil

ConnectProblem = Literal["refused", "timed out", "name not resolved", "no route"]
_RETRY_S = 0.2


def resolve(host: str) -> str | None:
    """Return the first address of `host`, a name or an address; None if the name is not resolved."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)[0][4][0])
    except OSError:
        return None


def is_loopback(address: str) -> bool:
    """Return whether an address, with or without a zone (`fe80::1%eth0`), is a loopback address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def interface_for(address: str) -> str | None:
    """Return the name of the interface by which this machine reaches host or address `address`.

    For an address of this machine it is the interface that has the address, not `lo`: the one that the other nodes
    use. None if the name is not resolved, there is no route, or no interface has the source address.
    """
    target = resolve(address)
    if target is None:
        return None
    with socket.socket(socket.AF_INET6 if ":" in target else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))  # on a datagram socket this sends nothing and chooses the source address
        except OSError:
            return None
        source = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == source for entry in addresses):
            return name
    return None


def use_interface_for(address: str, environment: MutableMapping[str, str] = os.environ) -> str | None:
    """Make gloo and NCCL use `interface_for(address)`, unless the user has set another; return it, or None.

    By default gloo uses the interface that the host's own name resolves to, often loopback, and NCCL guesses.
    """
    interface = interface_for(address)
    if interface is not None:
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
        environment.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # `=`: an exact name, not a prefix
    return interface


def connect_problem(host: str, port: int, timeout_s: float) -> ConnectProblem | None:
    """Return what prevented a connection to `host:port` during all of `timeout_s`; None as soon as one opens."""
    deadline = time.monotonic() + timeout_s
    while True:
        problem = _try_to_connect(host, port, max(0.1, min(3.0, deadline - time.monotonic())))
        if problem is None or time.monotonic() + _RETRY_S > deadline:
            return problem
        time.sleep(_RETRY_S)


def _try_to_connect(host: str, port: int, timeout_s: float) -> ConnectProblem | None:
    try:
        socket.create_connection((host, port), timeout_s).close()
    except socket.gaierror:
        return "name not resolved"
    except ConnectionRefusedError:
        return "refused"
    except TimeoutError:
        return "timed out"
    except OSError:  # unreachable, down or not permitted
        return "no route"
    return None


def bind_problem(port: int) -> str | None:
    """Return why this machine cannot listen on `port`, with the process that does if known; None if it can."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch does: ignores past connections
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
        # A ValueError unless exactly one pid is known; psutil has none for processes that we may not inspect.
        (pid,) = pids - {None}
        process = psutil.Process(pid)
        command = " ".join(" ".join(process.cmdline()).split())  # one line, whatever the arguments
        return f"process {process.pid}: {command or process.name()}"[:120]
    except (psutil.Error, OSError, ValueError):
        return "another process"
