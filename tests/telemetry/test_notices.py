"""Warnings are printed once, in one line each; memory of this process and of its host."""

from __future__ import annotations

import logging
import mmap
import warnings
from pathlib import Path

import pytest

from mmldlm.telemetry import resources
from mmldlm.telemetry.notices import Notices
from mmldlm.utils.progress import ProgressLine
from tests.helpers.terminal import Terminal

pytestmark = pytest.mark.quick


def heard(notices: Notices) -> list[str]:
    lines: list[str] = []
    notices.write = lines.append
    return lines


def warn_in_each_step(steps: int) -> None:
    for step in range(steps):
        with warnings.catch_warnings():  # which has Python forget what it has said
            warnings.simplefilter("always")
            warnings.warn("an old\nname", FutureWarning, stacklevel=1)
        logging.getLogger("some.library").warning("odd shape %d", 3)
        logging.getLogger("mmldlm.data").warning("shard %d is slow", step % 2)


def test_each_warning_once_in_one_line() -> None:
    before = warnings.showwarning
    with Notices(log_library_warnings=True) as notices:
        lines = heard(notices)
        warn_in_each_step(4)
    assert lines == [
        f"warning: {__file__}:30: FutureWarning: an old name",
        "warning: odd shape 3",
        "warning: shard 0 is slow",
        "warning: shard 1 is slow",
    ]
    assert warnings.showwarning is before and notices not in logging.getLogger().handlers


def test_other_ranks_report_only_their_own_warnings() -> None:
    with Notices(log_library_warnings=False) as notices:
        lines = heard(notices)
        warn_in_each_step(2)
    assert lines == ["warning: shard 0 is slow", "warning: shard 1 is slow"]


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    ProgressLine(10, 0, stream).update(1, {})
    assert stream.getvalue().endswith("\n") and "\r" not in stream.getvalue()


def test_memory_of_the_host_and_of_a_control_group(tmp_path: Path) -> None:
    limit, free = resources.host_memory_mib()
    assert 0 < free < limit
    (tmp_path / "memory.current").write_text(f"{60 * 2**20}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {20 * 2**20}\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert list(resources._cgroup_memory(tmp_path)) == []
    (tmp_path / "memory.max").write_text(f"{100 * 2**20}\n")
    assert list(resources._cgroup_memory(tmp_path)) == [(100.0, 60.0)], "caches of files can be had back"


def test_resident_memory_grows_with_what_is_held() -> None:
    before = resources.memory_metrics()["memory/resident_mib"]
    block = mmap.mmap(-1, 64 * 2**20)  # past the C library, which may have some left of what others freed
    block[:: mmap.PAGESIZE] = bytes(len(range(0, len(block), mmap.PAGESIZE)))  # each page is written to
    assert 50 < resources.memory_metrics()["memory/resident_mib"] - before < 120
    block.close()
