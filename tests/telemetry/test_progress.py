"""The progress line in files and on terminals, its ETA, and the memory of this process."""

import io
import mmap

import pytest

from mmldlm.telemetry.progress import STATUS_INTERVAL_S, ProgressLine
from mmldlm.telemetry.resources import memory_metrics, resident_mib
from tests.helpers.terminal import Terminal

pytestmark = pytest.mark.quick


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


VALUES = {
    "loss/total": 3.25,
    "loss/text": 3.0,
    "loss/latent": 0.25,
    "optim/lr": 3e-4,
    "optim/grad_norm": 0.9,
    "speed/tokens_per_s": 12345.0,
    "health/skipped_steps": 2,
}


def test_plain_lines_in_a_file():
    stream, clock = io.StringIO(), Clock()
    progress = ProgressLine(1000, 0, stream, clock)
    for step in (10, 20):
        clock.now += 5
        progress.update(step, VALUES)
    progress.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2 and "\r" not in stream.getvalue()
    assert lines[1] == (
        "step 20/1,000 (2%)  loss 3.2500  12.3k tokens/s  ETA 8m 10s"
        "  text 3.0000  latent 0.2500  lr 3.00e-04  grad 0.90  skipped 2"
    )


def test_the_remaining_time_is_by_the_last_twenty_lines():
    stream, clock = io.StringIO(), Clock()
    progress = ProgressLine(1000, 0, stream, clock)
    for step, seconds in enumerate([100] * 10 + [1] * 19 + [21], start=1):
        clock.now += seconds
        progress.update(step, {})
    assert progress.eta_s() == 970 * 40 / 20


def test_one_line_in_place_on_a_terminal():
    stream = Terminal()
    progress = ProgressLine(10, 0, stream, Clock())
    progress.update(1, VALUES)
    progress.update(2, {})
    progress.message("checkpoint")
    progress.close()
    text = stream.getvalue()
    assert text.count("\n") == 2, "one to end the line in place, one after the message"
    drawn = text.split("\n")[0].split("\r")[1:]
    assert len(drawn) == 2 and {len(line) for line in drawn} == {79}, "cut and padded: nothing of the longer line stays"


def test_long_phases_are_logged():
    stream, clock = io.StringIO(), Clock()
    progress = ProgressLine(1000, 0, stream, clock)
    progress.update(10, {})
    progress.set_status(13)
    progress.print_status_if_due()
    clock.now += STATUS_INTERVAL_S
    progress.print_status_if_due()
    progress.print_status_if_due()
    progress.set_status(13, "validation")
    clock.now += 2 * STATUS_INTERVAL_S
    progress.print_status_if_due()
    assert stream.getvalue().splitlines()[1:] == [
        f"step 13/1,000  training ... {STATUS_INTERVAL_S:.0f}s",
        f"step 13/1,000  validation ... {2 * STATUS_INTERVAL_S:.0f}s",
    ]


def test_eta_follows_recent_steps_of_this_session():
    clock = Clock()
    progress = ProgressLine(1000, 500, io.StringIO(), clock)
    assert progress.eta_s() is None
    clock.now += 300  # a slow first step: compilation
    progress.update(501, {})
    for step in range(502, 540):
        clock.now += 2
        progress.update(step, {})
    assert progress.eta_s() == pytest.approx(2 * (1000 - 539))


def test_resident_memory_grows_with_what_is_held():
    before = resident_mib()
    block = mmap.mmap(-1, 64 * 2**20)  # past the C library, which may have some left of what others freed
    block[:: mmap.PAGESIZE] = bytes(len(range(0, len(block), mmap.PAGESIZE)))  # each page is written to
    assert 50 < memory_metrics()["memory/resident_mib"] - before < 120
    block.close()
