"""Freed memory stays with the process, unless the environment says otherwise."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.quick,
    pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc"),
]

PROGRAM = """
import resource, sys
from mmldlm.runtime.allocator import keep_freed_memory

done = None
if sys.argv[1] == "keep":
    done = keep_freed_memory()
if sys.argv[1] == "train":
    from mmldlm.config import load_config
    from mmldlm.training import Training

    training = Training(load_config(*sys.argv[2:3], sys.argv[3:])).__enter__()

def use():
    blocks = [bytearray(40 * 2**20), bytearray(2**20)]
    for block in blocks:
        block[::4096] = bytes(len(block) // 4096)

use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    use()
print()
print(done, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(*arguments: object, **variables: str) -> tuple[str, int]:
    """What was answered, and the pages that the system handed out in ten rounds after the first."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        env={**environment, **variables},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    answer, count = done.stdout.splitlines()[-1].split()
    return answer, int(count)


def test_no_page_is_asked_for_twice() -> None:
    answer, count = faults("keep")
    assert answer == "True" and count < 500
    assert faults("leave")[1] > 10 * 40 * 2**20 // 4096 * 0.9


def test_variables_of_the_environment_go_before() -> None:
    answer, count = faults("keep", MALLOC_TRIM_THRESHOLD_="0")
    assert answer == "False" and count > 10 * 40 * 2**20 // 4096 * 0.9


@pytest.mark.parametrize("keep", [True, False])
def test_a_run_does_what_the_setting_says(tiny_config: Path, keep: bool) -> None:
    count = faults("train", tiny_config, f"memory.keep_freed={str(keep).lower()}")[1]
    assert (count < 500) == keep
