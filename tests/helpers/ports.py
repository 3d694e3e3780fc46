"""TCP ports for the servers that tests start."""

from __future__ import annotations

import random
import socket

# Below the ports that Linux gives to outgoing connections: another process would take one of these at any moment.
PORTS = range(10_000, 32_000)


def free_port() -> int:
    """Return a port on which nothing listens, on any address."""
    while True:
        port = random.SystemRandom().choice(PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
