"""`mmldlm doctor [CONFIG.yaml] [key.sub=value ...]`: check this machine, the run, and all nodes together."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # we say in our own words who is not there; read by torch once

import torch

from mmldlm.config import split_arguments
from mmldlm.errors import UsageError, run_command
from mmldlm.tools.doctor.findings import Finding, exit_code, report
from mmldlm.tools.doctor.machine import check_machine, device_type
from mmldlm.tools.doctor.master import check_master
from mmldlm.tools.doctor.nodes import check_nodes
from mmldlm.tools.doctor.place import Place
from mmldlm.tools.doctor.run import check_config, check_disk, check_folder, check_store
from mmldlm.trainer.consistency import config_fingerprint, data_fingerprint, version_fingerprint


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mmldlm doctor",
        usage="%(prog)s [CONFIG.yaml] [key.sub=value ...] [options]",
        description="Check what would stop or slow a run: this machine, and with CONFIG.yaml the run. With NNODES, "
        "NODE_RANK, MASTER_ADDR and MASTER_PORT set as for scripts/launch_node.sh, one doctor on each node, started "
        "at about the same time, also check all nodes together. Exit code 0: ready; 64: something failed; 65: data.",
    )
    parser.add_argument("arguments", nargs="*", metavar="CONFIG.yaml | key.sub=value")
    parser.add_argument("--json", action="store_true", help="one JSON object {ok, node, findings} on stdout")
    parser.add_argument("--processes", type=int, help="processes on each node; default: NPROC_PER_NODE, or the GPUs")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")
    parser.add_argument("--min-free-gib", type=float, default=1.0, help="at run.dir, in GiB; default: %(default)s")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for nodes; default: %(default)g")
    options = parser.parse_intermixed_args(argv)
    if options.processes is not None and options.processes < 1:
        parser.error(f"--processes: expected at least 1, found {options.processes}")
    if not 0 < options.timeout <= 86_400:
        parser.error(f"--timeout: expected seconds above 0, at most a day, found {options.timeout:g}")
    return options


def examine(options: argparse.Namespace, place: Place, clock: Callable[[], float] = time.time) -> list[Finding]:
    """All findings of this node; with several nodes, also those between them."""
    files, overrides = split_arguments(options.arguments)
    if len(files) > 1 or (overrides and not files):
        raise UsageError(f"expected one config file, found {len(files)}: {' '.join(files) or 'none'}")
    device = device_type(options.device)
    found = check_machine(options.device, place.processes)
    launch = {"device": device, "processes": str(place.processes)}
    groups = {"launch": launch, "versions": version_fingerprint()}
    run_dir = None
    if files:
        config, finding = check_config(files[0], overrides)
        found.append(finding)
        if config is not None:
            run_dir, groups["config"] = config.run.dir, config_fingerprint(config)
            store, finding = check_store(config)
            found.append(finding)
            if store is not None:
                groups["data"] = data_fingerprint(store)
            found.append(check_disk(config, store, options.min_free_gib))
    if place.nodes > 1:
        first = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
        return found + check_nodes(place, found, first, groups, run_dir, options.timeout, clock)
    if run_dir:
        found.append(check_folder(Path(run_dir)))
    return found + (check_master(place, options.timeout) if place.processes > 1 else [])


def run(argv: list[str] | None = None, clock: Callable[[], float] = time.time) -> int:
    options = parse(argv)
    devices = torch.cuda.device_count() if device_type(options.device) == "cuda" else 1
    place = Place.from_environment(os.environ, options.processes, max(1, devices))
    if not options.json:
        print(f"mmldlm doctor: {place}", flush=True)
    findings = examine(options, place, clock)
    code = exit_code(findings)
    if options.json:
        print(json.dumps({"ok": code == 0, "node": place.node, "findings": [asdict(found) for found in findings]}))
    else:
        print(report(findings))
    return code


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: run(argv))
