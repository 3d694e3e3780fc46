"""TCP ports for the servers that tests start."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Return a port on which nothing listens, on any address."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
