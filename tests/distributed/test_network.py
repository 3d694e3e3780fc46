"""Network interfaces, with real sockets."""

from __future__ import annotations

import socket

import psutil
import pytest

from mmldlm.distributed.network import interface_for, use_interface_for

pytestmark = pytest.mark.quick


def test_loopback_uses_lo() -> None:
    assert interface_for("127.0.0.1") == "lo"
    assert interface_for("localhost") == "lo"


def test_own_address_uses_its_interface() -> None:
    own = [
        (name, entry.address)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET and not entry.address.startswith("127.")
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
