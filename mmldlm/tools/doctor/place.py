"""Where this doctor stands among the nodes, as scripts/launch_node.sh is told it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mmldlm.errors import UsageError


@dataclass(frozen=True)
class Place:
    """Node `node` of `nodes`, with `processes` on each; node 0 listens at `host:port`."""

    node: int = 0
    nodes: int = 1
    processes: int = 1
    host: str = "127.0.0.1"
    port: int = 29500

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], processes: int | None, devices: int) -> Place:
        """By NNODES, NODE_RANK, NPROC_PER_NODE, MASTER_ADDR and MASTER_PORT; UsageError naming what is amiss.

        `processes` stands above NPROC_PER_NODE; without either there are as many as `devices`.
        """
        nodes = _number(environment, "NNODES", 1, 10**6, 1)
        host = environment.get("MASTER_ADDR", "")
        if nodes > 1 and not host:
            raise UsageError("MASTER_ADDR: expected the address of node 0, since NNODES is above 1; found nothing")
        return cls(
            node=_number(environment, "NODE_RANK", 0, nodes - 1, None if nodes > 1 else 0),
            nodes=nodes,
            processes=processes or _number(environment, "NPROC_PER_NODE", 1, 10**6, devices),
            host=host or cls.host,
            port=_number(environment, "MASTER_PORT", 1, 65535, cls.port),
        )

    def __str__(self) -> str:
        processes = f"{self.processes} process{'es' * (self.processes > 1)}"
        if self.nodes == 1:
            return f"one node, {processes}"
        return f"node {self.node} of {self.nodes}, {processes} on each, node 0 at {self.host}:{self.port}"


def _number(environment: Mapping[str, str], name: str, least: int, most: int, default: int | None) -> int:
    text = environment.get(name) or ("" if default is None else str(default))
    if not (text.isascii() and text.isdigit()) or not least <= int(text) <= most:
        raise UsageError(f"{name}: expected a whole number from {least} to {most}, found {text or 'nothing'}")
    return int(text)
