"""Diagnosis of a collective that fails or takes too long: which rank is at fault, from the ranks' heartbeats.

Clocks of different hosts are never compared: a rank is silent if its heartbeat's counter does not change between two of
our readings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mmldlm.distributed.exit_files import ProcessInfo
from mmldlm.distributed.flight_recorder import NCCL_PREFIX


@dataclass(frozen=True)
class Heartbeat:
    """State that a rank publishes every interval."""

    rank: int
    process: ProcessInfo
    count: int = 0
    step: int = 0
    phase: str = ""  # the collective that its main thread, or its GPU for long, waits in
    for_s: float = 0.0  # time in this phase
    done: bool = False

    @classmethod
    def parse(cls, text: bytes) -> Heartbeat:
        fields = json.loads(text)
        return cls(**{**fields, "process": ProcessInfo(**fields["process"])})

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.process.host}, pid {self.process.pid})"

    @property
    def location(self) -> str:
        return f"at step {self.step}, {f'in {self.phase}' if self.phase else 'outside of any collective'}"


class PeerHeartbeat(NamedTuple):
    """A peer's latest heartbeat, and the times by our clock when it was first and last read with this count."""

    heartbeat: Heartbeat
    first_read: float
    last_read: float

    def status(self, window: float) -> str:
        """Return "gone", "stopped" or "silent" (for `window` seconds); "" for a rank that responds or is done."""
        if self.heartbeat.done:
            return ""
        state = self.heartbeat.process.state()
        if state in ("gone", "stopped"):
            return state
        return "silent" if self.last_read - self.first_read >= window else ""


class PendingCollective(NamedTuple):
    """The collective that the diagnosing rank waited in."""

    rank: int
    step: int
    collective: str  # "" outside of any
    detail: str  # of the flight recorder; "" if unknown
    seconds: float
    is_long: bool  # more than half of the timeout
    error: str = ""  # that the collective raised, in the words of gloo, NCCL or the store


@dataclass(frozen=True)
class Failure:
    """Why the run ends; `silent` are processes that may not end on their own."""

    cause: str
    silent: tuple[ProcessInfo, ...] = ()

    @classmethod
    def parse(cls, text: bytes) -> Failure:
        fields: dict[str, Any] = json.loads(text)
        return cls(**{**fields, "silent": tuple(ProcessInfo(**process) for process in fields["silent"])})


def is_conclusive(peers: Mapping[int, PeerHeartbeat], counts: Mapping[int, int], window: float) -> bool:
    """Return whether more readings cannot change the diagnosis: a peer is at fault, or all have advanced.

    `counts` are earlier heartbeat counts by rank, or nothing; `window` is that of `PeerHeartbeat.status`.
    """
    if any(peer.status(window) for peer in peers.values()):
        return True
    # A rank that has no earlier count yet has not advanced, either.
    return bool(counts) and all(
        peer.heartbeat.done or peer.heartbeat.count != counts.get(rank, peer.heartbeat.count)
        for rank, peer in peers.items()
    )


def diagnose(
    wait: PendingCollective,
    world_size: int,
    peers: Mapping[int, PeerHeartbeat],
    window: float,
    store_unreachable: str,
) -> Failure:
    """Return the failure of the run: the most direct evidence decides.

    `wait` is this rank's, `window` that of `PeerHeartbeat.status`, and `store_unreachable` the name of the store if it
    does not respond, else "": then the heartbeats of `peers` are out of date.
    """
    statuses = {
        kind: [peer for peer in peers.values() if peer.status(window) == kind] for kind in ("gone", "stopped", "silent")
    }
    # Processes that are gone need no kill; stopped and silent ones may never end by themselves.
    unable = tuple(peer.heartbeat.process for kind in ("stopped", "silent") for peer in statuses[kind])
    working = [peer.heartbeat for peer in peers.values() if not peer.heartbeat.done]
    # The longest time outside of collectives first: the other ranks may be waiting for that rank.
    outside = sorted((heartbeat for heartbeat in working if not heartbeat.phase), key=lambda h: -h.for_s)
    # The host runs ahead of a collective of NCCL, whose name has its number: its step says nothing.
    on_gpu = wait.collective.startswith(NCCL_PREFIX)
    elsewhere = [h for h in working if h.phase != wait.collective or (h.step != wait.step and not on_gpu)]
    absent = [rank for rank in range(world_size) if rank not in peers and rank != wait.rank]
    done = [peer.heartbeat for peer in peers.values() if peer.heartbeat.done]
    if statuses["gone"]:
        gone = [peer.heartbeat for peer in statuses["gone"]]
        text = f"{gone[0]} exited without reporting an error, last seen {gone[0].location}{_others(gone)}"
    elif unable:
        first = (statuses["stopped"] + statuses["silent"])[0]
        heartbeats = [peer.heartbeat for peer in statuses["stopped"] + statuses["silent"]]
        silence = f"no heartbeat for at least {first.last_read - first.first_read:.1f} s"
        why = "its process is stopped" if statuses["stopped"] else silence
        text = f"{first.heartbeat} is not responding ({why}), last seen {first.heartbeat.location}{_others(heartbeats)}"
    # What follows judges by the heartbeats, which are current only while the store responds.
    elif store_unreachable:
        host = f"{peers[0].heartbeat}, last seen {peers[0].heartbeat.location}," if 0 in peers else "rank 0"
        text = f"{store_unreachable} does not respond; {host} or the launcher hosts it"
    elif absent:
        more = f", nor did ranks {absent[1:]}" if absent[1:] else ""
        text = f"rank {absent[0]} never connected{more}"
    # After a short wait, as when a connection breaks, peers outside of collectives are just computing.
    elif wait.is_long and outside:
        stuck = outside[0]
        text = (
            f"{stuck} has been stuck outside of any collective for {stuck.for_s:.1f} s (step {stuck.step})"
            f"{_others(outside)}"
        )
    elif done:
        text = f"{done[0]} has finished after step {done[0].step}{_others(done)}"
    # All are in collectives, but not in the same one: the rank that is behind in steps is named.
    elif wait.is_long and elsewhere:
        elsewhere.sort(key=lambda h: h.step)
        behind = elsewhere[0]
        text = f"{behind} has been {behind.location} for {behind.for_s:.1f} s{_others(elsewhere)}"
    elif on_gpu and wait.is_long:
        text = f"a GPU or the network between GPUs hangs: all {world_size} ranks respond, and wait in one collective"
    else:
        reason = f" ({wait.error})" if wait.error else ""
        text = (
            f"the connection broke{reason}, or the ranks called different collectives: all {world_size} ranks respond"
        )
    return Failure(f"{text}; {_describe_wait(wait)}", unable)


def _others(heartbeats: list[Heartbeat]) -> str:
    ranks = [heartbeat.rank for heartbeat in heartbeats[1:]]
    return f" (also ranks {', '.join(map(str, ranks[:8]))}{' ...' if ranks[8:] else ''})" if ranks else ""


def _describe_wait(wait: PendingCollective) -> str:
    if not wait.collective:
        return f"detected by rank {wait.rank} at step {wait.step}"
    detail = f" ({wait.detail})" if wait.detail else ""
    return f"rank {wait.rank} waited {wait.seconds:.1f} s in {wait.collective}{detail} at step {wait.step}"
