"""The hang diagnosis names the rank at fault, given the heartbeats of all ranks."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from mmldlm.distributed.exit_files import ProcessInfo
from mmldlm.distributed.hang_diagnosis import (
    Failure,
    Heartbeat,
    PeerHeartbeat,
    PendingCollective,
    diagnose,
    is_conclusive,
)

pytestmark = pytest.mark.quick
SUM, BARRIER, NCCL = "all-reduce", "barrier", "nccl:all_reduce number 42"
WAIT = PendingCollective(0, 7, SUM, "", 5.0, is_long=True)


def seen(
    rank: int, phase: str = SUM, step: int = 7, silent_s: float = 0.2, for_s: float = 5.0, done: bool = False
) -> PeerHeartbeat:
    beat = Heartbeat(rank, ProcessInfo("far", "another machine", 100 + rank, 1), 10, step, phase, for_s, done)
    return PeerHeartbeat(beat, 50.0, 50.0 + silent_s)


def diagnose_with(
    *peers: PeerHeartbeat, wait: PendingCollective = WAIT, world_size: int | None = None, store_unreachable: str = ""
) -> Failure:
    by_rank = {peer.heartbeat.rank: peer for peer in peers}
    return diagnose(wait, world_size or len(peers) + 1, by_rank, window=1.5, store_unreachable=store_unreachable)


def test_silent_rank_is_named_before_stuck_ranks() -> None:
    result = diagnose_with(seen(1, ""), seen(2, silent_s=4.0), seen(3, "", silent_s=6.0))
    assert [process.pid for process in result.silent] == [102, 103]
    assert result.cause == (
        "rank 2 (host far, pid 102) is not responding (no heartbeat for at least 4.0 s), last seen at step 7, "
        "in all-reduce (also ranks 3); rank 0 waited 5.0 s in all-reduce at step 7"
    )


def test_no_more_than_nine_ranks_are_named() -> None:
    text = "(also ranks 2, 3, 4, 5, 6, 7, 8, 9{})"
    assert text.format("") in diagnose_with(*(seen(rank, "") for rank in range(1, 10))).cause
    assert text.format(" ...") in diagnose_with(*(seen(rank, "") for rank in range(1, 12))).cause


def test_rank_longest_out_of_collectives_is_stuck() -> None:
    result = diagnose_with(seen(1), seen(2, "", for_s=5.2), seen(3, "", for_s=9.0))
    assert result.silent == ()
    assert "rank 3 (host far, pid 103) has been stuck outside of any collective for 9.0 s (step 7)" in result.cause


@pytest.mark.parametrize(
    ("peers", "text"),
    [
        ([seen(1), seen(2, step=6)], "rank 2 (host far, pid 102) has been at step 6, in all-reduce for 5.0 s"),
        (
            [seen(1, step=8), seen(2, step=6)],
            "rank 2 (host far, pid 102) has been at step 6, in all-reduce for 5.0 s (also ranks 1)",
        ),
        ([seen(1), seen(2, BARRIER)], "rank 2 (host far, pid 102) has been at step 7, in barrier for 5.0 s"),
        ([seen(1), seen(2, "", done=True, silent_s=9)], "rank 2 (host far, pid 102) has finished after step 7"),
        ([seen(1), seen(2)], "the ranks called different collectives: all 3 ranks respond"),
    ],
)
def test_ranks_in_different_collectives(peers: list[PeerHeartbeat], text: str) -> None:
    assert text in diagnose_with(*peers).cause


@pytest.mark.parametrize(
    ("peers", "text"),
    [
        # The host of a rank may be a step ahead of its GPU.
        ([seen(1, NCCL), seen(2, NCCL, step=8)], "a GPU or the network between GPUs hangs: all 3 ranks respond, and"),
        ([seen(1, NCCL), seen(2, "nccl:all_reduce number 41")], "rank 2 (host far, pid 102) has been at step 7, in"),
        ([seen(1, NCCL), seen(2, "")], "rank 2 (host far, pid 102) has been stuck outside of any collective for 5.0 s"),
        ([seen(1, NCCL), seen(2, NCCL, silent_s=4.0)], "rank 2 (host far, pid 102) is not responding"),
    ],
)
def test_ranks_whose_gpus_wait(peers: list[PeerHeartbeat], text: str) -> None:
    cause = diagnose_with(*peers, wait=WAIT._replace(collective=NCCL)).cause
    assert cause.startswith(text) and cause.endswith("; rank 0 waited 5.0 s in nccl:all_reduce number 42 at step 7")


def test_broken_connection_does_not_blame_working_ranks() -> None:
    broken = WAIT._replace(is_long=False, error="Connection closed by peer [10.0.0.7]:4242")
    cause = diagnose_with(seen(1, "", for_s=0.1), wait=broken).cause
    assert cause.startswith("the connection broke (Connection closed by peer [10.0.0.7]:4242), or the ranks ")


def test_rank_that_never_started() -> None:
    assert "rank 2 never connected, nor did ranks [3]" in diagnose_with(seen(1), world_size=4).cause


def test_unreachable_store_blames_no_rank() -> None:
    result = diagnose_with(seen(1, ""), store_unreachable="the store at a:1")
    assert result.cause.startswith("the store at a:1 does not respond; rank 0 or the launcher hosts it")


def test_heartbeats_are_read_until_conclusive() -> None:
    peers = {1: seen(1), 2: seen(2)}
    assert not is_conclusive(peers, {}, 1.5)
    assert not is_conclusive(peers, {1: 9, 2: 10}, 1.5)
    assert not is_conclusive(peers, {1: 9}, 1.5)
    assert is_conclusive(peers, {1: 9, 2: 9}, 1.5)
    assert is_conclusive({**peers, 2: seen(2, silent_s=2)}, {}, 1.5)
    assert not is_conclusive({**peers, 2: seen(2, silent_s=2, done=True)}, {}, 1.5)


def test_heartbeat_round_trip() -> None:
    failure = diagnose_with(seen(1, silent_s=4.0))
    assert Failure.parse(json.dumps(asdict(failure)).encode()) == failure
    beat = seen(1).heartbeat
    assert Heartbeat.parse(json.dumps(asdict(beat)).encode()) == beat
