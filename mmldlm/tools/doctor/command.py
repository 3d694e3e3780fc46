"""`mmldlm doctor [CONFIG.yaml] [key.sub=value ...]`: check this machine, the run, and all nodes together."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the findings name missing nodes; torch reads this once

import torch

from mmldlm.config import split_arguments
from mmldlm.errors import UsageError
from mmldlm.tools.doctor.checks import (
    Finding,
    check_attention,
    check_config,
    check_disk,
    check_folder,
    check_init,
    check_machine,
    check_store,
    device_type,
    exit_code,
    format_report,
    warn,
)
from mmldlm.tools.doctor.nodes import NodeEnv, check_master, check_nodes
from mmldlm.trainer.consistency import config_fingerprint, data_fingerprint, version_fingerprint
from mmldlm.utils.printable import printable


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line and check the values of its options."""
    parser = argparse.ArgumentParser(
        prog="mmldlm doctor",
        usage="%(prog)s [CONFIG.yaml] [key.sub=value ...] [options]",
        description="Check what would stop or slow a run: this machine, and with CONFIG.yaml the run. With NNODES, "
        "NODE_RANK, MASTER_ADDR and MASTER_PORT set as for scripts/launch_node.sh, one doctor on each node, started "
        "at about the same time, also check all nodes together. Exit code 0: ready; 64: something failed; 65: data.",
    )
    parser.add_argument("arguments", nargs="*", metavar="CONFIG.yaml | key.sub=value")
    parser.add_argument("--json", action="store_true", help="one JSON object {ok, node, findings} on stdout")
    parser.add_argument(
        "--processes", type=int, help="processes per node; default: NPROC_PER_NODE, or the number of GPUs"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")
    parser.add_argument(
        "--min-free-gib", type=float, default=1.0, help="free space at run.dir, in GiB; default: %(default)s"
    )
    parser.add_argument(
        "--timeout", type=float, default=60.0, help="seconds to wait for other nodes; default: %(default)g"
    )
    options = parser.parse_intermixed_args(argv)
    if options.processes is not None and options.processes < 1:
        parser.error(f"--processes: expected at least 1, found {options.processes}")
    if not 0 < options.timeout <= 86_400:
        parser.error(f"--timeout: expected seconds above 0, at most a day, found {options.timeout:g}")
    return options


def run_checks(options: argparse.Namespace, node_env: NodeEnv, clock: Callable[[], float] = time.time) -> list[Finding]:
    """Run all checks on this node and, with several nodes, between them; return the findings."""
    files, overrides = split_arguments(options.arguments)
    if len(files) > 1 or (overrides and not files):
        raise UsageError(f"expected one config file, found {len(files)}: {' '.join(files) or 'none'}")
    device = device_type(options.device)
    findings = check_machine(options.device, node_env.processes)
    launch = {"device": device, "processes": str(node_env.processes)}
    groups = {"launch": launch, "versions": version_fingerprint()}
    run_dir = None
    if files:
        config, finding = check_config(files[0], overrides)
        findings.append(finding)
        if config is not None:
            run_dir, groups["config"] = config.run.dir, config_fingerprint(config)
            findings.append(check_attention(config, device))
            store, finding = check_store(config)
            findings.append(finding)
            if store is not None:
                groups["data"] = data_fingerprint(store)
                findings += check_init(config, store)
            findings.append(check_disk(config, store, options.min_free_gib))
    if node_env.nodes > 1 and node_env.processes == 1:
        # The start refuses it, and the doctor does not know the engine.
        found, remedy = "one process a node: fsdp2_hsdp cannot shard within a node", "another engine, such as fsdp2"
        findings.append(warn("launch", found, remedy))
    if node_env.nodes > 1:
        first_device = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
        return findings + check_nodes(node_env, findings, first_device, groups, run_dir, options.timeout, clock)
    if run_dir:
        findings.append(check_folder(Path(run_dir)))
    return findings + (check_master(node_env, options.timeout) if node_env.processes > 1 else [])


def main(argv: list[str] | None = None, clock: Callable[[], float] = time.time) -> int:
    """Run `mmldlm doctor`; an `MmldlmError` propagates. Tests pass another `clock`."""
    options = parse_arguments(argv)
    devices = torch.cuda.device_count() if device_type(options.device) == "cuda" else 1
    node_env = NodeEnv.from_environment(os.environ, options.processes, max(1, devices))
    if not options.json:
        print(f"mmldlm doctor: {node_env}", flush=True)
    findings = run_checks(options, node_env, clock)
    code = exit_code(findings)
    if options.json:
        print(
            json.dumps({"ok": code == 0, "node": node_env.node, "findings": [asdict(finding) for finding in findings]})
        )
    else:
        print(*map(printable, format_report(findings).split("\n")), sep="\n")
    return code
