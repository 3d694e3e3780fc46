"""Values that a shell would execute, in every input of the launch scripts: none is executed, all are refused."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.slurm_commands import SCONTROL
from tests.helpers.two_nodes import LAUNCH, environment
from tests.helpers.waiting import TEST_TIMEOUT_S

# In the folder of the test, where all of them would leave a file.
HOSTILE = [
    "$(touch canary)", "`touch canary`", ";touch canary", "1; touch canary", "1 && touch canary", "1\ntouch canary",
    "a[$(touch canary)]", "x[`touch canary`]", "'; touch canary; '", '"; touch canary; "', "1|touch canary", "--help",
    "../../x", "1 2", "é", "\x1b[31m", "0x10", "1e3", "-1", " ", "*", "{1,2}", "~", "x" * 100_000,
]  # fmt: skip
NUMBERS = ["NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_PORT", "MAX_RESTARTS"]


SRUN = '#!/bin/bash\nwhile [[ "$1" == -* ]]; do shift; done\nSLURM_NODEID=0 exec "$@"\n'  # one node


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder to start in, with a Python that only writes down what it was called with."""
    (tmp_path / "config.yaml").write_text("")
    (tmp_path / "python").write_text(
        '#!/bin/bash\nif [ "$1" = - ]; then echo "$2"; fi\nprintf "%s\\0" "$@" >> arguments\n'
    )
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def run(place: Path, command: list[str], **variables: str) -> tuple[int, str]:
    """Exit code and what was printed; whatever it was, no canary sang."""
    job = {"NNODES": "2", "NODE_RANK": "0", "NPROC_PER_NODE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    job |= {"PYTHON": str(place / "python"), **variables}
    done = subprocess.run(
        command,
        cwd=place,
        env=environment(place / "logs", **job),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TEST_TIMEOUT_S,
    )
    assert not list(place.rglob("canary*")), (command[-3:], variables)
    return done.returncode, done.stdout


def refused(code: int, out: str, name: str) -> bool:
    return code == 2 and out.startswith(f"launch_node: error: {name}") and out.count("\n") == 1


def test_canary_detects_execution(place: Path) -> None:
    (place / "bad.sh").write_text('((N == 1)) || eval "echo $N"\n')
    with pytest.raises(AssertionError):
        run(place, ["bash", "bad.sh"], N="a[$(touch canary)]")


@pytest.mark.parametrize("name", [*NUMBERS, "MASTER_ADDR"])
def test_invalid_numbers_and_addresses(place: Path, name: str) -> None:
    for value in HOSTILE:
        if name != "MASTER_ADDR" or value not in ("0x10", "1e3"):  # host names as good as any
            code, out = run(place, [*LAUNCH, "ddp", "config.yaml"], **{name: value})
            assert refused(code, out, f"{name}: expected"), (value, out)
    assert not (place / "arguments").exists()


@pytest.mark.parametrize("address", ["node-1.cluster.local", "10.0.0.1", "fe80::1%eth0", "[::1]", "::1"])
def test_good_addresses_pass(place: Path, address: str) -> None:
    code, out = run(place, [*LAUNCH, "ddp", "config.yaml"], MASTER_ADDR=address)
    assert code == 0, out
    assert address in (place / "arguments").read_text().split("\0")


def test_unknown_engines_and_files(place: Path) -> None:
    for value in HOSTILE:
        assert refused(*run(place, [*LAUNCH, value, "config.yaml"]), "ENGINE: expected"), value
        assert refused(*run(place, [*LAUNCH, "ddp", value]), "CONFIG.yaml: no such file"), value
        if len(value) < 1000:
            assert refused(*run(place, [*LAUNCH, "ddp", "config.yaml"], PYTHON=value), "PYTHON: "), value
    assert not (place / "arguments").exists()


def test_arguments_are_passed_unchanged(place: Path) -> None:
    """Overrides and the folder of logs are the user's own: they only must not be run."""
    hostile = [value for value in HOSTILE if len(value) < 1000]
    code, out = run(place, [*LAUNCH, "ddp", "config.yaml", *hostile])
    assert code == 0, out
    check, launcher = (place / "arguments").read_text().split("mmldlm.train\0")[0], (place / "arguments").read_text()
    assert all(f"\0{value}\0" in check and launcher.count(f"\0{value}\0") == 2 for value in hostile)
    for value in hostile:
        (place / "arguments").unlink()
        run(place, [*LAUNCH, "ddp", "config.yaml"], LOG_DIR=value)


@pytest.mark.parametrize("script", ["train.sbatch", "train_one_node.sbatch"])
@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_GPUS_ON_NODE", "SLURM_JOB_NODELIST"])
def test_slurm(place: Path, script: str, name: str) -> None:
    for program, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (place / program).write_text(text)
        (place / program).chmod(0o755)
    (place / "scripts").symlink_to(ROOT / "scripts")
    job = {"SLURM_JOB_ID": "4321", "SLURM_JOB_NUM_NODES": "1", "SLURM_GPUS_ON_NODE": "1"}
    job |= {"SLURM_JOB_NODELIST": "node[0-1]", "PATH": f"{place}{os.pathsep}{os.environ['PATH']}"}
    for value in HOSTILE[:12]:
        variables = {**job, "NPROC_PER_NODE": "", "MASTER_ADDR": "", "MASTER_PORT": "", "NNODES": "", name: value}
        code, out = run(place, ["bash", f"scripts/slurm/{script}", "ddp", "config.yaml"], **variables)
        assert (code != 0 and "error: " in out) or "scontrol named no host" in out, (value, out)
