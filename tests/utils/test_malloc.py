"""Freed memory stays with the process, unless environment variables say otherwise."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

pytestmark = [
    pytest.mark.quick,
    pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc"),
]

PROGRAM = """
import resource, sys
from mmldlm.utils.malloc import keep_freed_memory

done = None
if sys.argv[1] == "keep":
    done = keep_freed_memory()

def use():
    blocks = [bytearray(40 * 2**20), bytearray(2**20)]
    for block in blocks:
        block[::4096] = bytes(len(block) // 4096)

def faults():
    use()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        use()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1] == "train":
    from mmldlm.config import load_config
    from mmldlm.trainer.trainer import Trainer

    for setting in ("false", "true"):  # in this order: what is kept is kept from then on
        place = f"run.dir={sys.argv[3]}/{setting}"
        with Trainer(load_config(sys.argv[2], [place, f"memory.keep_freed={setting}"])):
            print("\\n" + setting, faults())
else:
    print(done, faults())
"""

ALL_PAGES = 10 * 40 * 2**20 // 4096  # of ten rounds


def faults(*arguments: object, **variables: str) -> dict[str, int]:
    """Return the page faults in ten rounds after the first, by the answer of `keep_freed_memory`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        env={**environment, **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    answers = re.findall(r"^(true|false|True|False|None) (\d+)$", done.stdout, re.MULTILINE)
    return {answer: int(count) for answer, count in answers}


def test_freed_pages_are_reused() -> None:
    assert faults("keep")["True"] < 500
    assert faults("leave")["None"] > ALL_PAGES * 0.9


def test_environment_variables_take_precedence() -> None:
    assert faults("keep", MALLOC_TRIM_THRESHOLD_="0")["False"] > ALL_PAGES * 0.9


@pytest.mark.setting("memory.keep_freed")
def test_keep_freed_setting(tiny_config: Path, tmp_path: Path) -> None:
    result = faults("train", tiny_config, tmp_path)
    assert result["true"] < 500 <= result["false"]
