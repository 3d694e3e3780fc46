"""Network interfaces and connection problems, with real sockets."""

from __future__ import annotations

import socket

import psutil
import pytest

from mmldlm.distributed.network import bind_problem, connect_problem, interface_for, is_loopback, use_interface_for

pytestmark = pytest.mark.quick


def test_loopback_uses_lo() -> None:
    assert interface_for("127.0.0.1") == "lo"
    assert interface_for("localhost") == "lo"
    assert is_loopback("127.0.1.1") and is_loopback("::1") and not is_loopback("10.0.0.1")


def test_own_address_uses_its_interface() -> None:
    own = [
        (name, entry.address)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET and not is_loopback(entry.address)
    ]
    if not own:
        pytest.skip("this machine has no network besides lo")
    assert [(interface_for(address), address) for _, address in own] == own


def test_unresolved_name_has_no_interface() -> None:
    environment: dict[str, str] = {}
    assert use_interface_for("node0.invalid", environment) is None and environment == {}


def test_interface_variables_are_set_unless_given() -> None:
    environment = {"NCCL_SOCKET_IFNAME": "ib0"}
    assert use_interface_for("127.0.0.1", environment) == "lo"
    assert environment == {"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "lo"}


def test_connect_problems() -> None:
    assert connect_problem("node0.invalid", 29500, 0.3) == "name not resolved"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert connect_problem("127.0.0.1", listener.getsockname()[1], 0.3) is None
        port = listener.getsockname()[1]
    assert connect_problem("127.0.0.1", port, 0.3) == "refused"


def test_no_answer_is_a_timeout() -> None:
    """A listener whose queue is full drops what comes, as a firewall does."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        address = listener.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for client in waiting:
            client.setblocking(False)
            client.connect_ex(address)
        try:
            assert connect_problem(*address, 0.5) == "timed out"
        finally:
            for client in waiting:
                client.close()


def test_port_can_be_bound_unless_taken() -> None:
    with socket.create_server(("", 0)) as listener:
        port = listener.getsockname()[1]
        assert "in use by process" in (bind_problem(port) or "")
        # A connection that was served and closed lingers, and must not count.
        client = socket.create_connection(("127.0.0.1", port))
        served, _ = listener.accept()
        served.close()
        client.close()
    assert bind_problem(port) is None
