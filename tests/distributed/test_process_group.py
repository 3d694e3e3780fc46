"""The process group is started as device and network need it; a stub stands in for GPUs, which this only asks for."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from mmldlm.distributed.config import DistributedConfig
from mmldlm.distributed.launch import read_launcher_env
from mmldlm.distributed.process_group import NCCL_MARGIN_S, join_process_group, use_interface_for
from mmldlm.errors import ConfigError, PeerLostError

pytestmark = pytest.mark.quick


class Started(RuntimeError):
    pass


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Collect the arguments of `init_process_group`, which then fails."""
    given: dict[str, Any] = {}

    def record(backend: str, **options: Any) -> None:
        given.update(backend=backend, **options)
        raise Started("recorded")

    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(dist.HashStore(), 1, 2)]))
    monkeypatch.setattr(dist, "init_process_group", record)
    return given


def launch(local_rank: int) -> Any:
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    return replace(read_launcher_env({**variables, "MASTER_PORT": "1"}), local_rank=local_rank)


def test_nccl_is_bound_to_the_gpu_of_the_rank(arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    with pytest.raises(PeerLostError, match="recorded"):
        join_process_group(DistributedConfig(timeout_s=60), launch(1))
    assert arguments["backend"] == "cpu:gloo,cuda:nccl"
    assert arguments["device_id"] == torch.device("cuda", 1) and current == [torch.device("cuda", 1)]
    assert arguments["timeout"].total_seconds() == 60 + NCCL_MARGIN_S, "the watchdog comes before NCCL's own"
    with pytest.raises(ConfigError, match="launcher: 2 processes on this node, but 2 GPUs"):
        join_process_group(DistributedConfig(), launch(2))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has GPUs")
def test_gloo_is_bound_to_no_device(arguments: dict[str, Any]) -> None:
    with pytest.raises(PeerLostError, match="recorded"):
        join_process_group(DistributedConfig(timeout_s=60), launch(1))
    assert (arguments["backend"], arguments["device_id"]) == ("gloo", None)
    assert arguments["timeout"].total_seconds() == 60


def interface_for(address: str) -> str | None:
    variables: dict[str, str] = {}
    use_interface_for(address, variables)
    assert variables.get("NCCL_SOCKET_IFNAME", "=")[1:] == variables.get("GLOO_SOCKET_IFNAME", "")
    return variables.get("GLOO_SOCKET_IFNAME")


def test_an_address_is_reached_by_its_interface() -> None:
    assert interface_for("127.0.0.1") == interface_for("localhost") == "lo"
    assert interface_for("node0.invalid") is None
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family == socket.AF_INET and not entry.address.startswith("127."):
                assert interface_for(entry.address) == name, "of this machine"


def test_interfaces_of_the_user_stay() -> None:
    environment = {"NCCL_SOCKET_IFNAME": "ib0"}
    use_interface_for("127.0.0.1", environment)
    assert environment == {"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "lo"}
