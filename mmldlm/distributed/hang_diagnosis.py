"""Which rank is at fault when a collective fails or takes too long, from what the ranks said of themselves.

Clocks of two hosts are never compared: a rank is silent when its counter stands still between two of our readings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mmldlm.distributed.exit_files import Process


@dataclass(frozen=True)
class Heartbeat:
    """What a rank says of itself every interval."""

    rank: int
    process: Process
    count: int = 0
    step: int = 0
    phase: str = ""  # the collective that its main thread is in
    for_s: float = 0.0
    done: bool = False

    @classmethod
    def parse(cls, text: bytes) -> Heartbeat:
        fields = json.loads(text)
        return cls(**{**fields, "process": Process(**fields["process"])})

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.process.host}, pid {self.process.pid})"

    @property
    def place(self) -> str:
        return f"at step {self.step}, {f'in {self.phase}' if self.phase else 'outside of any collective'}"


class Seen(NamedTuple):
    """A peer's beat, and when by our clock it was first and last read with this counter."""

    beat: Heartbeat
    first: float
    last: float

    def fault(self, window: float) -> str:
        """ "gone", "stopped" or "silent"; "" while it answers."""
        if self.beat.done:
            return ""
        state = self.beat.process.state()
        if state in ("gone", "stopped"):
            return state
        return "silent" if self.last - self.first >= window else ""


class PendingCollective(NamedTuple):
    """What the accusing rank waited for."""

    rank: int
    step: int
    collective: str  # "" outside of any
    detail: str
    seconds: float
    is_long: bool


@dataclass(frozen=True)
class Failure:
    """Why the run ends: `cause`, as rank `by` found; `silent` are processes that may not end by themselves."""

    cause: str
    by: int
    rank: int | None = None  # the one at fault, if it is one
    silent: tuple[Process, ...] = ()

    @classmethod
    def parse(cls, text: bytes) -> Failure:
        fields: dict[str, Any] = json.loads(text)
        return cls(**{**fields, "silent": tuple(Process(**process) for process in fields["silent"])})


def is_conclusive(peers: Mapping[int, Seen], counts: Mapping[int, int], window: float) -> bool:
    """Whether more readings would show nothing new: a fault, or that all moved on from `counts`."""
    if any(seen.fault(window) for seen in peers.values()):
        return True
    return bool(counts) and all(
        seen.beat.done or seen.beat.count != counts.get(rank, seen.beat.count) for rank, seen in peers.items()
    )


def diagnose(
    wait: PendingCollective, world_size: int, peers: Mapping[int, Seen], window: float, store_unreachable: str
) -> Failure:
    """Return the failure of the run. `store_unreachable` is the store if it did not answer: `peers` are then old news."""
    faults = {kind: [s for s in peers.values() if s.fault(window) == kind] for kind in ("gone", "stopped", "silent")}
    unable = tuple(seen.beat.process for kind in ("stopped", "silent") for seen in faults[kind])
    working = [seen.beat for seen in peers.values() if not seen.beat.done]
    outside = sorted((beat for beat in working if not beat.phase), key=lambda beat: -beat.for_s)
    elsewhere = [beat for beat in working if (beat.step, beat.phase) != (wait.step, wait.collective)]
    absent = [rank for rank in range(world_size) if rank not in peers and rank != wait.rank]
    done = [seen.beat for seen in peers.values() if seen.beat.done]
    rank: int | None
    if faults["gone"]:
        found = [seen.beat for seen in faults["gone"]]
        rank, text = found[0].rank, f"{found[0]} died without a word, last seen {found[0].place}{_more(found)}"
    elif unable:
        seen = (faults["stopped"] + faults["silent"])[0]
        found = [s.beat for s in faults["stopped"] + faults["silent"]]
        heard = f"no heartbeat for at least {seen.last - seen.first:.1f} s"
        why = "its process is stopped" if faults["stopped"] else heard
        rank, text = seen.beat.rank, f"{seen.beat} is not answering ({why}), last seen {seen.beat.place}{_more(found)}"
    elif store_unreachable:
        host = f"{peers[0].beat}, last seen {peers[0].beat.place}," if 0 in peers else "rank 0"
        rank, text = None, f"{store_unreachable} does not answer; {host} or the launcher keeps it"
    elif absent:
        rank, text = absent[0], f"rank {absent[0]} never came" + (f", nor ranks {absent[1:]}" if absent[1:] else "")
    elif wait.is_long and outside:
        beat = outside[0]
        rank = beat.rank
        text = f"{beat} is stuck outside of any collective since {beat.for_s:.1f} s (step {beat.step}){_more(outside)}"
    elif done:
        rank, text = done[0].rank, f"{done[0]} has finished after step {done[0].step}{_more(done)}"
    elif wait.is_long and elsewhere:
        beat = min(elsewhere, key=lambda beat: beat.step)
        rank, text = beat.rank, f"{beat} is {beat.place} since {beat.for_s:.1f} s{_more(elsewhere)}"
    else:
        rank, text = None, f"the connection broke, or the ranks' collectives differ: all {world_size} ranks answer"
    return Failure(f"{text}; {_waited(wait)}", wait.rank, rank, unable)


def _more(beats: list[Heartbeat]) -> str:
    others = [beat.rank for beat in beats[1:]]
    return f", and ranks {', '.join(map(str, others[:8]))}{' ...' if others[8:] else ''} likewise" if others else ""


def _waited(wait: PendingCollective) -> str:
    if not wait.collective:
        return f"found by rank {wait.rank} at step {wait.step}"
    detail = f" ({wait.detail})" if wait.detail else ""
    return f"rank {wait.rank} waited {wait.seconds:.1f} s in {wait.collective}{detail} at step {wait.step}"
