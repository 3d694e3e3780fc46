"""The network interface by which a node reaches the others."""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping

import psutil


def interface_for(address: str) -> str | None:
    """Return the name of the interface by which this machine reaches host or address `address`.

    For an address of this machine it is the interface that has the address, not `lo`: the one that the other nodes
    use. None if the name is not resolved, there is no route, or no interface has the source address.
    """
    try:
        target = str(socket.getaddrinfo(address, None, type=socket.SOCK_DGRAM)[0][4][0])
    except OSError:
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
