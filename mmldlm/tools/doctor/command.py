"""`mmldlm doctor [CONFIG.yaml] [key.sub=value ...]`: check this machine, and the run on it."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

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
)
from mmldlm.utils.printable import printable


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line, and find the number of processes."""
    parser = argparse.ArgumentParser(
        prog="mmldlm doctor",
        usage="%(prog)s [CONFIG.yaml] [key.sub=value ...] [options]",
        description="Check what would stop or slow a run: this machine, and with CONFIG.yaml the run on it; "
        "scripts/launch_node.sh ... --check checks all nodes. Exit code 0: ready; 64: something failed; 65: data.",
    )
    parser.add_argument("arguments", nargs="*", metavar="CONFIG.yaml | key.sub=value")
    parser.add_argument("--json", action="store_true", help="one JSON object {ok, findings} on stdout")
    parser.add_argument("--processes", type=int, help="processes on this node; default: the number of GPUs, or 1")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")
    parser.add_argument(
        "--min-free-gib", type=float, default=1.0, help="free space at run.dir, in GiB; default: %(default)s"
    )
    options = parser.parse_intermixed_args(argv)
    if options.processes is None:
        options.processes = max(1, torch.cuda.device_count() if device_type(options.device) == "cuda" else 1)
    if options.processes < 1:
        parser.error(f"--processes: expected at least 1, found {options.processes}")
    return options


def run_checks(options: argparse.Namespace) -> list[Finding]:
    """Check the machine and, if a config is given, the run; return the findings."""
    files, overrides = split_arguments(options.arguments)
    if len(files) > 1 or (overrides and not files):
        raise UsageError(f"expected one config file, found {len(files)}: {' '.join(files) or 'none'}")
    findings = check_machine(options.device, options.processes)
    if not files:
        return findings
    config, finding = check_config(files[0], overrides)
    findings.append(finding)
    if config is not None:
        findings.append(check_attention(config, device_type(options.device)))
        store, finding = check_store(config)
        findings.append(finding)
        if store is not None:
            findings += check_init(config, store)
        findings += [check_disk(config, store, options.min_free_gib), check_folder(Path(config.run.dir))]
    return findings


def main(argv: list[str] | None = None) -> int:
    """Run `mmldlm doctor`; an `MmldlmError` propagates."""
    options = parse_arguments(argv)
    findings = run_checks(options)
    code = exit_code(findings)
    if options.json:
        print(json.dumps({"ok": code == 0, "findings": [asdict(finding) for finding in findings]}))
    else:
        print(f"mmldlm doctor: {options.processes} process{'es' * (options.processes > 1)}")
        print(*map(printable, format_report(findings).split("\n")), sep="\n")
    return code
