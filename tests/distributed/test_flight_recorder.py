"""Both flight recorders are read, NCCL's pending collectives come first, and stalls are told from work in progress."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mmldlm.distributed.flight_recorder import (
    NCCLProgress,
    collectives,
    pending_collectives,
    records,
    set_trace_folder,
    write_records,
)
from tests.helpers.nccl_recorder import FakeNCCLRecorder, dump, entry

pytestmark = pytest.mark.quick
HEADERS = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d"
Record = Callable[..., None]


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Record:
    """Set what the recorders hold; None: the build has none."""

    def install(nccl: dict[str, Any] | None, gloo: dict[str, Any] | None) -> None:
        for name, content in (("_dump_nccl_trace_json", nccl), ("_dump_fr_trace_json", gloo)):
            if content is None:
                monkeypatch.delattr(torch._C._distributed_c10d, name, raising=False)
            else:
                text = json.dumps(content).encode()
                monkeypatch.setattr(torch._C._distributed_c10d, name, lambda *_, text=text: text, raising=False)

    return install


def test_pending_collectives_of_nccl_come_first(record: Record, tmp_path: Path) -> None:
    gloo = dump(entry("gloo:all_reduce", 3, retired=True), entry("gloo:all_gather", 4))
    done = entry("nccl:all_reduce", 8, "completed")
    record(dump(done, entry("nccl:all_reduce", 9), entry("nccl:barrier", 10), completed=8, enqueued=10), gloo)
    names = ["nccl:all_reduce number 9", "nccl:barrier number 10", "gloo:all_gather number 4"]
    assert pending_collectives() == [f"{name}, sizes [[1024]]" for name in names]
    write_records(tmp_path, 3)
    written = json.loads((tmp_path / "flight_recorder.rank3.json").read_text())
    assert list(written) == ["pending", "nccl", "gloo"] and written["pending"] == pending_collectives()
    assert {"nccl": written["nccl"], "gloo": written["gloo"]} == records()


def test_part_of_a_coalesced_collective_is_not_pending_once_a_later_one_has_completed(record: Record) -> None:
    part = entry("nccl:reduce_scatter_tensor_coalesced", 5)
    other_group = entry("nccl:all_reduce", 5, pg_id=1)
    record(dump(part, other_group, completed=6, enqueued=6), None)
    assert pending_collectives() == ["nccl:all_reduce number 5, sizes [[1024]]"]
    record(dump(part, completed=4, enqueued=5), None)
    assert pending_collectives() == ["nccl:reduce_scatter_tensor_coalesced number 5, sizes [[1024]]"]


def test_collectives_of_both_are_in_the_order_of_their_calls(record: Record) -> None:
    nccl = dump(entry("nccl:all_reduce", 1, time_created_ns=20), entry("nccl:all_reduce", 2, time_created_ns=40))
    gloo = dump(entry("gloo:all_reduce", 1, time_created_ns=30), entry("gloo:all_reduce", 2, time_created_ns=50))
    record(nccl, gloo)
    assert [each["time_created_ns"] for each in collectives()] == [20, 30, 40, 50]
    assert [each["profiling_name"] for each in collectives()[2:]] == ["nccl:all_reduce", "gloo:all_reduce"]


def test_latest_collective_after_an_error(record: Record) -> None:
    record(None, dump(entry("gloo:all_reduce", 1, retired=True), entry("gloo:barrier", 2, retired=True)))
    assert pending_collectives() == []
    assert pending_collectives(or_latest=True) == ["gloo:barrier number 2, sizes [[1024]]"]


def test_description_of_many_tensors_is_short(record: Record) -> None:
    record(None, dump(entry("gloo:all_reduce", 1, input_sizes=[[n] for n in range(500)])))
    assert len(pending_collectives()[0]) <= 200


@pytest.mark.parametrize("empty", [None, {}, {"entries": []}])
def test_without_recorders_nothing_is_pending(empty: dict[str, Any] | None, record: Record, tmp_path: Path) -> None:
    record(empty, empty)
    assert records() == {} and collectives() == pending_collectives(or_latest=True) == []
    assert NCCLProgress().stall(1.0) is None
    write_records(tmp_path, 0)
    assert list(tmp_path.iterdir()) == []


def test_stall_lasts_from_the_first_reading_without_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, progress = FakeNCCLRecorder(progresses=True), NCCLProgress()
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", recorder, raising=False)
    for now in (1.0, 2.0, 3.0):
        stall = progress.stall(now)
        assert stall is not None and stall.since == now, "a collective is pending, but others complete"
    recorder.progresses = False
    for now in (4.0, 5.0, 600.0):
        stall = progress.stall(now)
        assert stall is not None and (stall.completed, stall.since) == ("44", 3.0)
    recorder.completed += 1
    stall = progress.stall(700.0)
    assert stall is not None and stall.since == 700.0


def test_group_that_stalls_longest_counts(record: Record) -> None:
    def statuses(*completed: int) -> dict[str, Any]:
        counters = dict.fromkeys(("last_enqueued_collective", "last_started_collective"), "9")
        groups = {str(group): {**counters, "last_completed_collective": str(n)} for group, n in enumerate(completed)}
        return {"pg_status": groups}

    progress = NCCLProgress()
    for now, completed, expected in ((1.0, (3, 5, 9), 1.0), (2.0, (4, 5, 9), 1.0), (3.0, (4, 9, 9), 2.0)):
        record(statuses(*completed), None)
        stall = progress.stall(now)
        assert stall is not None and stall.since == expected
    record(statuses(9, 9, 9), None)
    assert progress.stall(4.0) is None


def test_keys_are_those_of_torch() -> None:
    """What the stand-in reports, and we read, has torch's names."""
    text = "".join((HEADERS / name).read_text() for name in ("FlightRecorder.hpp", "FlightRecorderDetail.hpp"))
    content = json.loads(FakeNCCLRecorder(progresses=False)(True, False))
    keys = {*content, *content["entries"][0], *content["pg_status"]["0"]}
    assert [key for key in sorted(keys) if f'"{key}"' not in text] == []
    for state in ("scheduled", "completed"):
        assert f'"{state}"' in text


def test_trace_of_nccls_watchdog_is_in_the_run_folder(tmp_path: Path) -> None:
    environment: dict[str, str] = {}
    set_trace_folder(tmp_path / "first", environment)
    set_trace_folder(tmp_path / "second", environment)
    names = {"TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"}
    assert environment == dict.fromkeys(names, str(tmp_path / "second" / "nccl_trace.rank"))
    libraries = list((Path(torch.__file__).parent / "lib").glob("libtorch_cpu*"))
    assert libraries and all(name.encode() in libraries[0].read_bytes() for name in names)
    given = {"TORCH_FR_DUMP_TEMP_FILE": "/scratch/trace"}
    set_trace_folder(tmp_path, given)
    assert given["TORCH_FR_DUMP_TEMP_FILE"] == "/scratch/trace"
