"""Two nodes on one machine: network namespaces with an address each, joined by a wire that can be cut.

As a command, for trying a run by hand (needs root and iproute2):

    python -m tests.helpers.two_nodes ENGINE CONFIG.yaml [key.sub=value ...]
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from tests.helpers.paths import ROOT
from tests.helpers.ports import free_port
from tests.helpers.waiting import TEST_TIMEOUT_S

LAUNCH = ["bash", str(ROOT / "scripts" / "launch_node.sh")]
PORT = 29500  # free in a new network


def environment(logs: Path, **variables: object) -> dict[str, str]:
    """Return the environment of a node's launch script, without variables of this machine about nodes or interfaces."""
    foreign = ("NNODES", "NODE_RANK", "NPROC_", "MASTER_", "GLOO_", "NCCL_", "SLURM_", "NODE_CHECK", "MAX_RESTARTS")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    own = {"PYTHON": sys.executable, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "LOG_DIR": str(logs)}
    return {**inherited, **own, **{name: str(value) for name, value in variables.items()}}


def unavailable() -> str | None:
    """Return why namespaces cannot be created here, or None."""
    for command, package in (("ip", "iproute2"), ("unshare", "util-linux"), ("nsenter", "util-linux")):
        if shutil.which(command) is None:
            return f"the command {command} ({package}) is not installed"
    try:
        with TwoNodes(Path(tempfile.gettempdir())):
            return None
    except subprocess.CalledProcessError as error:
        return f"namespaces are not permitted: {error.stderr.strip()}"


class TwoNodes:
    """Context manager: two machines as far as programs can see, made on entry; removed with all that runs in them.

    Each has its own network, process numbers and host name, which no name service knows; the disk is shared.
    """

    addresses = ("10.77.0.1", "10.77.0.2")

    def __init__(self, logs: Path):
        self.logs = logs
        self.names = tuple(f"mmldlm-{os.getpid()}-{node}" for node in range(2))
        self.machines: list[psutil.Process] = []  # a sleeping first process of each node, which keeps it there
        self.started: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> TwoNodes:
        try:
            for node, name in enumerate(self.names):
                _ip("netns", "add", name)
                self.machines.append(self._machine(node))
            first, second = self.names
            _ip("link", "add", "wire", "netns", first, "type", "veth", "peer", "name", "wire", "netns", second)
            for name, address in zip(self.names, self.addresses, strict=True):
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", "wire")
                _ip("-n", name, "link", "set", "lo", "up")
                _ip("-n", name, "link", "set", "wire", "up")
        except BaseException:
            self.close()
            raise
        return self

    def _machine(self, node: int) -> psutil.Process:
        command = ["ip", "netns", "exec", self.names[node], "unshare", "--pid", "--fork", "--mount-proc", "--uts"]
        command += ["sh", "-c", f"echo node{node} > /proc/sys/kernel/hostname && exec sleep infinity"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.started.append(process)
        while process.poll() is None:
            for child in psutil.Process(process.pid).children():
                if child.name() == "sleep":
                    return child
            time.sleep(0.01)
        assert process.stderr is not None
        raise subprocess.CalledProcessError(process.returncode, command, stderr=process.stderr.read())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for machine in self.machines:
            machine.kill()  # the kernel takes with it all that was started there
        for process in self.started:
            process.wait(TEST_TIMEOUT_S)
        for name in self.names:
            if Path("/run/netns", name).exists():
                _ip("netns", "delete", name)

    def launch(self, *arguments: object, **variables: object) -> list[subprocess.Popen[bytes]]:
        """scripts/launch_node.sh on both nodes, a process on each; `variables` are of its environment."""
        place = {"NNODES": 2, "NPROC_PER_NODE": 1, "MASTER_ADDR": self.addresses[0], "MASTER_PORT": PORT, **variables}
        result = [
            subprocess.Popen(
                [*_enter(machine), *LAUNCH, *map(str, arguments)],
                env=environment(self.logs, NODE_RANK=node, **place),
                cwd=ROOT,
                stdout=subprocess.DEVNULL,  # the log has it all
                stderr=subprocess.DEVNULL,
            )
            for node, machine in enumerate(self.machines)
        ]
        self.started += result
        return result

    def cut(self) -> None:
        _ip("-n", self.names[1], "link", "set", "wire", "down")

    def mend(self) -> None:
        _ip("-n", self.names[1], "link", "set", "wire", "up")

    def processes(self, node: int) -> list[psutil.Process]:
        """Return the processes on a node, except the one that keeps its namespaces alive."""
        keeper = {self.machines[node].pid, self.machines[node].ppid()}
        pids = {int(pid) for pid in _ip("netns", "pids", self.names[node]).split()} - keeper
        return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]

    def log(self) -> str:
        return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in self.logs.glob("node*.log"))


def one_node(logs: Path, *arguments: object, processes: int = 2, **variables: object) -> int:
    """scripts/launch_node.sh on this machine as one node; its exit code."""
    place = {"NPROC_PER_NODE": processes, "NODE_CHECK": "skip", "MASTER_PORT": free_port(), **variables}
    command = [*LAUNCH, *map(str, arguments)]
    return subprocess.run(
        command, env=environment(logs, **place), cwd=ROOT, capture_output=True, timeout=TEST_TIMEOUT_S
    ).returncode


def _enter(machine: psutil.Process) -> list[str]:
    return ["nsenter", "--target", str(machine.pid), "--net", "--pid", "--mount", "--uts", f"--wdns={ROOT}"]


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def main(arguments: Sequence[str], variables: Mapping[str, str] = os.environ) -> int:
    with tempfile.TemporaryDirectory() as logs, TwoNodes(Path(logs)) as nodes:
        codes = [process.wait() for process in nodes.launch(*arguments, NODE_CHECK=variables.get("NODE_CHECK", ""))]
        print(nodes.log())
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
