"""Break twenty rules of the package by one line each: do the quick tests notice?

    python tests/golden/faults.py [--only WORD] [--near]

Each fault is made in a worktree of HEAD, where the tests of its room run first and then, if they pass, the whole quick
subset (with --near they do not). Prints which faults survive; exit code 1 if more than two do. It takes a minute a
fault that dies near, and some minutes for one that survives.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from compare import worktree

ALLOWED = 2


class Fault(NamedTuple):
    """A line of a file of the package, what it becomes, and the tests that are nearest."""

    about: str
    file: str
    line: str
    becomes: str
    near: str


FAULTS = (
    Fault(
        "one checkpoint too many is kept",
        "checkpoint/retention.py",
        "*older[: self.last - 1]}",
        "*older[: self.last]}",
        "tests/checkpoint",
    ),
    Fault(
        "of equally good checkpoints the older one is kept",
        "checkpoint/retention.py",
        "sorted((loss, -step) for",
        "sorted((loss, step) for",
        "tests/checkpoint",
    ),
    Fault(
        "infinities in bf16 are saved",
        "checkpoint/tensors.py",
        "& 0x7FFF).max() < 0x7F80)",
        "& 0x7FFF).max() <= 0x7F80)",
        "tests/checkpoint",
    ),
    Fault(
        "a resume drops the record of its own step",
        "telemetry/metrics.py",
        'json.loads(line)["step"] <= step else',
        'json.loads(line)["step"] < step else',
        "tests/telemetry",
    ),
    Fault(
        "the ETA is of the last two records",
        "utils/progress.py",
        "ETA_WINDOW = 20 ",
        "ETA_WINDOW = 2 ",
        "tests/utils/test_progress.py",
    ),
    Fault(
        "the first step has a learning rate of 0",
        "optim/lr_schedule.py",
        "peak * (step + 1) / warmup",
        "peak * step / warmup",
        "tests/optim",
    ),
    Fault(
        "the EMA warms up by other numbers",
        "optim/ema.py",
        "(1 + step) / (10 + step)",
        "(1 + step) / (9 + step)",
        "tests/optim",
    ),
    Fault(
        "the limit of a weight is after its importance",
        "diffusion/masked.py",
        "per_token.clamp_max(limit) * importance",
        "(per_token * importance).clamp_max(limit)",
        "tests/diffusion",
    ),
    Fault(
        "an index may be permuted to the size",
        "data/sampler.py",
        "np.flatnonzero(images >= n)",
        "np.flatnonzero(images > n)",
        "tests/data",
    ),
    Fault(
        "a duplicate counts as found",
        "evaluation/statistics.py",
        "(~(similarity < similarity.diagonal()[:, None])).sum(1)",
        "(similarity > similarity.diagonal()[:, None]).sum(1) + 1",
        "tests/evaluation",
    ),
    Fault(
        "Wilson's interval is too wide",
        "evaluation/statistics.py",
        "/ count + z**2 / 4",
        "/ count + z**2 / 2",
        "tests/evaluation",
    ),
    Fault(
        "an overflow of fp16 counts as a skip in a row",
        "trainer/step_guard.py",
        'skipped_in_a_row += skip.reason != "overflow"',
        "skipped_in_a_row += 1",
        "tests/trainer/test_step_guard.py",
    ),
    Fault(
        "a median norm of 0 makes every step a spike",
        "trainer/step_guard.py",
        "statistics.median(norms) or math.inf",
        "statistics.median(norms)",
        "tests/trainer/test_step_guard.py",
    ),
    Fault(
        "a hang names the rank that is ahead",
        "distributed/hang_diagnosis.py",
        "behind = elsewhere[0]",
        "behind = elsewhere[-1]",
        "tests/distributed",
    ),
    Fault(
        "differences are relative to the second checkpoint",
        "tools/checkpoints.py",
        "(first.double().norm(), distance",
        "(second.double().norm(), distance",
        "tests/tools/test_checkpoints.py",
    ),
    Fault(
        "a long save counts as silence",
        "tools/monitor/snapshot.py",
        'if latest["kind"] == "heartbeat":',
        "if False:",
        "tests/tools/monitor",
    ),
    Fault(
        "the name of a run reaches the terminal raw",
        "tools/monitor/view.py",
        "return Text(printable(text), style,",
        "return Text(text, style,",
        "tests/tools/monitor",
    ),
    Fault(
        "a report counts the time between sessions",
        "tools/report/run_summary.py",
        'if b["kind"] not in ("start", "resume")',
        "if True",
        "tests/tools/report",
    ),
)


def is_noticed(root: Path, tests: str) -> bool:
    """Return whether a quick test fails in a checkout.

    Raises:
        SystemExit: The tests could not run.
    """
    variables = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "auto", "-p", "no:cacheprovider"]
    command += ["-m", "quick and not slow", tests]
    done = subprocess.run(command, cwd=root, env=variables, capture_output=True, text=True)
    if done.returncode not in (0, 1, 2, 5) or (done.returncode == 2 and " failed" not in done.stdout):
        raise SystemExit(f"{tests}: pytest ended with {done.returncode}\n{done.stdout[-2000:]}")
    return done.returncode in (1, 2)  # failed, stopped by -x under xdist


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORD", help="faults whose description or file has this word")
    parser.add_argument("--near", action="store_true", help="only the nearest tests")
    options = parser.parse_args()
    survived = []
    with tempfile.TemporaryDirectory() as temporary, worktree("HEAD", Path(temporary) / "faulty") as root:
        for fault in FAULTS:
            if options.only not in f"{fault.about} {fault.file}":
                continue
            path = root / "mmldlm" / fault.file
            text = path.read_text(encoding="utf-8")
            assert text.count(fault.line) == 1, f"{fault.file} has {text.count(fault.line)} times: {fault.line}"
            path.write_text(text.replace(fault.line, fault.becomes), encoding="utf-8")
            noticed = is_noticed(root, fault.near) or (not options.near and is_noticed(root, "tests"))
            path.write_text(text, encoding="utf-8")
            survived += [] if noticed else [fault.about]
            print(f"{'dies    ' if noticed else 'SURVIVES'} {fault.file}: {fault.about}", flush=True)
    print(f"{len(survived)} survive")
    return int(len(survived) > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
