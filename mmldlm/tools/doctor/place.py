"""`NodeEnv`: this node among all nodes, from the environment variables of scripts/launch_node.sh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mmldlm.errors import UsageError


@dataclass(frozen=True)
class NodeEnv:
    """Node `node` of `nodes`, with `processes` on each; node 0 listens at `host:port`."""

    node: int = 0
    nodes: int = 1
    processes: int = 1
    host: str = "127.0.0.1"
    port: int = 29500

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], processes: int | None, devices: int) -> NodeEnv:
        """Read NNODES, NODE_RANK, NPROC_PER_NODE, MASTER_ADDR and MASTER_PORT.

        Args:
            environment: Environment variables.
            processes: Processes per node; overrides NPROC_PER_NODE.
            devices: Processes per node if neither is given.

        Raises:
            UsageError: A variable is missing or has an invalid value.
        """
        nodes = _read_int(environment, "NNODES", 1, 10**6, 1)
        host = environment.get("MASTER_ADDR", "")
        if nodes > 1 and not host:
            raise UsageError("MASTER_ADDR: expected the address of node 0, since NNODES is above 1; found nothing")
        return cls(
            node=_read_int(environment, "NODE_RANK", 0, nodes - 1, None if nodes > 1 else 0),
            nodes=nodes,
            processes=processes or _read_int(environment, "NPROC_PER_NODE", 1, 10**6, devices),
            host=host or cls.host,
            port=_read_int(environment, "MASTER_PORT", 1, 65535, cls.port),
        )

    def __str__(self) -> str:
        processes = f"{self.processes} process{'es' * (self.processes > 1)}"
        if self.nodes == 1:
            return f"one node, {processes}"
        return f"node {self.node} of {self.nodes}, {processes} on each, node 0 at {self.host}:{self.port}"


def _read_int(environment: Mapping[str, str], name: str, minimum: int, maximum: int, default: int | None) -> int:
    text = environment.get(name) or ("" if default is None else str(default))
    if not (text.isascii() and text.isdigit()) or not minimum <= int(text) <= maximum:
        raise UsageError(f"{name}: expected a whole number from {minimum} to {maximum}, found {text or 'nothing'}")
    return int(text)
