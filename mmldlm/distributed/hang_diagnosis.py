"""Find the rank at fault, from the ranks' heartbeats, when a collective fails or takes too long.

We never compare clocks of different hosts. A rank is silent if the counter of its heartbeat does not change between two
of our readings.
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
    """State that a rank publishes in every interval."""

    rank: int
    process: ProcessInfo
    count: int = 0
    step: int = 0
    phase: str = ""  # the collective in which its main thread waits, or for long its GPU
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
    """A peer's latest heartbeat, with the times (our clock) when we first and last read this count."""

    heartbeat: Heartbeat
    first_read: float
    last_read: float

    def status(self, window: float) -> str:
        """Return "gone", "stopped" or "silent" (for `window` seconds), or "" for a rank that responds or is done."""
        if self.heartbeat.done:
            return ""
        state = self.heartbeat.process.state()
        if state in ("gone", "stopped"):
            return state
        return "silent" if self.last_read - self.first_read >= window else ""


class PendingCollective(NamedTuple):
    """The collective in which the diagnosing rank waited."""

    rank: int
    step: int
    collective: str  # "" outside of any collective
    detail: str  # from the flight recorder, "" if unknown
    seconds: float
    is_long: bool  # more than half of the timeout
    error: str = ""  # message of gloo, NCCL or the store


@dataclass(frozen=True)
class Failure:
    """Why the run ends. Processes in `silent` may not end on their own."""

    cause: str
    silent: tuple[ProcessInfo, ...] = ()

    @classmethod
    def parse(cls, text: bytes) -> Failure:
        fields: dict[str, Any] = json.loads(text)
        return cls(**{**fields, "silent": tuple(ProcessInfo(**process) for process in fields["silent"])})


def is_conclusive(peers: Mapping[int, PeerHeartbeat], counts: Mapping[int, int], window: float) -> bool:
    """Return whether the diagnosis is final: a peer is at fault, or all peers have advanced.

    `counts` are earlier heartbeat counts by rank, or empty. `window` is in seconds, see `PeerHeartbeat.status`.
    """
    if any(peer.status(window) for peer in peers.values()):
        return True
    # A rank without an earlier count has not advanced.
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
    """Return the failure of the run, judged by the most direct evidence.

    `wait` belongs to this rank. `window` is in seconds, see `PeerHeartbeat.status`. `store_unreachable` names the store
    if it does not respond (otherwise ""). In that case the heartbeats of `peers` are out of date.
    """
    statuses = {
        kind: [peer for peer in peers.values() if peer.status(window) == kind] for kind in ("gone", "stopped", "silent")
    }
    # Processes that are gone need no kill. Stopped and silent ones may never end by themselves.
    unable = tuple(peer.heartbeat.process for kind in ("stopped", "silent") for peer in statuses[kind])
    working = [peer.heartbeat for peer in peers.values() if not peer.heartbeat.done]
    # The rank that is longest outside of collectives comes first: the others may be waiting for it.
    outside = sorted((heartbeat for heartbeat in working if not heartbeat.phase), key=lambda h: -h.for_s)
    # The host runs ahead of NCCL's collectives, so its step says nothing. Their names include a number.
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
    # From here on we judge by the heartbeats, which are current only while the store responds.
    elif store_unreachable:
        host = f"{peers[0].heartbeat}, last seen {peers[0].heartbeat.location}," if 0 in peers else "rank 0"
        text = f"{store_unreachable} does not respond; {host} or the launcher hosts it"
    elif absent:
        more = f", nor did ranks {absent[1:]}" if absent[1:] else ""
        text = f"rank {absent[0]} never connected{more}"
    # After a short wait, for example when a connection breaks, peers outside of collectives are just computing.
    elif wait.is_long and outside:
        stuck = outside[0]
        text = (
            f"{stuck} has been stuck outside of any collective for {stuck.for_s:.1f} s (step {stuck.step})"
            f"{_others(outside)}"
        )
    elif done:
        text = f"{done[0]} has finished after step {done[0].step}{_others(done)}"
    # All ranks are in collectives, but in different ones. We name the rank that is behind in steps.
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
