"""What a rank holds, exchanges and computes on the host in runs of up to 1,024 ranks, on one machine.

    python -m benchmarks scale [--parts step host heartbeats] [--jobs 2] [--quick]

- `step`: one rank's optimizer step on a simulated process group (`common/fake_ranks.py`): bytes and number of its
  collectives, and its state, beside the closed form of `mmldlm/trainer/engine_costs.py`. FSDP2 with large networks, DDP
  and ZeRO with small ones. Exit code 1 if one is off by more than 2 %.
- `host`: seconds of what a rank computes in Python at the start and in each step, for 1 and for 1,024 ranks.
- `heartbeats`: the watchdogs of 1,024 ranks, each with a connection of its own, on one store for a minute. They run in
  a few processes and without their threads, which call in turn what the threads would.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import product
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch.distributed as dist

from benchmarks.common.fake_ranks import Network, Step, simulate
from benchmarks.common.report import RESULTS, Row, circumstances, markdown, plain_parser, positive, write_json
from benchmarks.common.task import device
from mmldlm.config import RunConfig
from mmldlm.data.batch_schedule import TrainConfig
from mmldlm.data.loader import assign_slots
from mmldlm.data.sampler import SampleOrder
from mmldlm.distributed.collectives import Collectives
from mmldlm.distributed.exit_files import ProcessInfo
from mmldlm.distributed.hang_diagnosis import Heartbeat
from mmldlm.distributed.launcher import FSDP2
from mmldlm.distributed.watchdog import Watchdog
from mmldlm.trainer.consistency import config_fingerprint, disagreements, version_fingerprint
from mmldlm.trainer.engine_costs import Sharding, state_bytes, step_traffic
from mmldlm.utils.partition import partition_by_size

BOUND = 0.02
PARTS = ("step", "host", "heartbeats")
WORLDS = (8, 64, 512, 1024)
SMALL = Network(4, 128)
LARGE = {"386M": Network(24, 1024), "1.9B": Network(32, 2048), "7.5B": Network(32, 4096)}
NODE = 8  # ranks of a hybrid sharding's group
INTERVAL_S = 0.5  # of the watchdog


def main(argv: Sequence[str] | None = None) -> int:
    parser = plain_parser("scale", __doc__)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--jobs", type=positive, default=1, help="simulations at a time")
    parser.add_argument("--seconds", type=positive, default=60, help="of heartbeats")
    parser.add_argument("--clients", type=positive, default=1024, help="of the store")
    parser.add_argument("--quick", action="store_true", help="small networks, few ranks, 3 seconds")
    options = parser.parse_args(argv)
    if options.quick:
        options.seconds, options.clients = 3, 32
    parts: dict[str, Callable[[], list[Row]]] = {
        "step": lambda: simulated_steps(options.quick, options.jobs),
        "host": host_costs,
        "heartbeats": lambda: [heartbeats(options.clients, options.seconds)],
    }
    wrong = []
    for part in options.parts:
        rows = parts[part]()
        print(f"{part}\n\n{markdown(rows)}\n", flush=True)
        if not options.quick:
            write_json({"benchmark": "scale", **circumstances(device()), "rows": rows}, RESULTS, f"scale-{part}")
        wrong += [row for row in rows if part == "step" and abs(row["off by"]) > BOUND]
    for row in wrong:
        print(f"{row['model']}, {row['engine']}, {row['ranks']} ranks: off by {row['off by']:.1%}")
    return 1 if wrong else 0


# --- steps ----------------------------------------------------------------------------------------


def cases(quick: bool) -> Iterator[tuple[str, Network, Sharding]]:
    """Yield (name of the network, network, sharding) of the simulations."""
    for engine, world in product(("ddp", "zero1", "zero2", "zero3"), WORLDS[:1] if quick else WORLDS):
        yield "small", SMALL, Sharding(engine, "bf16", world)
    networks = {"small": SMALL} if quick else LARGE
    for (name, network), world in product(networks.items(), WORLDS[:1] if quick else WORLDS):
        yield name, network, Sharding(FSDP2, "bf16", world)
        yield name, network, Sharding(FSDP2, "bf16", world, replicas=2 if world == NODE else world // NODE)


def simulated_steps(quick: bool, jobs: int) -> list[Row]:
    def row(case: tuple[str, Network, Sharding]) -> Row:
        name, network, sharding = case
        return compared(name, sharding, in_fork(simulate, network, sharding))

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(row, cases(quick)))


def in_fork(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result from a forked process: a process group cannot be replaced, and imports take seconds."""
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        return pool.apply(function, arguments)


def compared(name: str, sharding: Sharding, step: Step) -> Row:
    """Return the row of a step: measured values, and the largest relative deviation from the closed form."""
    parameters = step.parameters
    once = parameters - step.in_blocks if sharding.engine == FSDP2 else 0
    if sharding.engine == "zero3":
        once = parameters  # the small network stays gathered from forward to backward
    expected = step_traffic(sharding, parameters, once)
    payload = step.collectives.payload
    pairs = [(payload[key], expected.get(key, 0.0)) for key in {*payload, *expected}]
    if step.state_bytes is not None:
        pairs.append((step.state_bytes, state_bytes(sharding).device * parameters))
    return {
        "model": name,
        "parameters": parameters,
        "engine": "hsdp" if sharding.replicas > 1 else sharding.engine,
        "ranks": sharding.world_size,
        "replicas": sharding.replicas,
        "state, MiB": None if step.state_bytes is None else step.state_bytes / 2**20,
        "traffic, MB": sum(payload.values()) / 1e6,
        "collectives": ", ".join(
            f"{count} {kind} of {ranks}" for (kind, ranks), count in sorted(step.collectives.calls.items())
        ),
        "off by": max((measured / value - 1 if value else 1.0 for measured, value in pairs), key=abs),
        "payload": {f"{kind} of {ranks}": size for (kind, ranks), size in payload.items()},
        "small": dict(step.collectives.small),
    }


# --- the host -------------------------------------------------------------------------------------


def host_costs() -> list[Row]:
    """Return milliseconds of a rank's work on the host by number of ranks, with 8 samples per rank and step."""
    lengths = np.random.default_rng(0).integers(8, 512, 1_000_000).astype(np.int32)
    sizes = {f"blocks.{index}.weight": 1024 * (1 + index % 7) for index in range(606)}
    fingerprint = {**config_fingerprint(RunConfig()), **version_fingerprint(), "data.manifest": "0" * 64}
    beat = json.dumps(asdict(Heartbeat(0, ProcessInfo.current())))

    def work(world: int) -> dict[str, Callable[[], Any]]:
        config = TrainConfig(global_batch_size=8 * world, micro_batch_size=8)
        order, positions = SampleOrder(lengths, seed=0), iter(range(0, 2**62, 8 * world))
        facts = [json.dumps(fingerprint)] * world
        fingerprints = [fingerprint] * world
        processes = Collectives(0, world)
        return {
            "order and slots of a step": lambda: assign_slots(
                order.take_with_lengths(next(positions), 8 * world)[1], 8, 0, world
            ),
            "batch sizes of a step": lambda: config.batch_at(1, world),
            "check of the batch sizes": lambda: config.check_batches(world),
            "files of a checkpoint by rank": lambda: partition_by_size(sizes, world),
            "validation's share of 1,024 samples": lambda: list(processes.local_items(range(1024))),
            "parsing what a start gathers": lambda: [json.loads(text) for text in facts],
            "comparison of the ranks' settings": lambda: disagreements(fingerprints),
            "reading all heartbeats (after a hang)": lambda: [Heartbeat.parse(beat.encode()) for _ in range(world)],
        }

    one, many = ({what: _median_ms(function) for what, function in work(world).items()} for world in (1, 1024))
    return [{"work": what, "1 rank, ms": one[what], "1,024 ranks, ms": many[what]} for what in one]


def _median_ms(function: Callable[[], Any], repeats: int = 21) -> float:
    function()
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        seconds.append(time.process_time() - start)
    return 1e3 * float(np.median(seconds))


# --- heartbeats -----------------------------------------------------------------------------------


def heartbeats(clients: int, seconds: int, processes: int = 4) -> Row:
    """Let the watchdogs of `clients` ranks publish heartbeats on one store, and count them there."""
    context = multiprocessing.get_context("fork")
    pipe, child = context.Pipe()
    server = context.Process(target=_serve, args=(child, clients), daemon=True)
    server.start()
    port = pipe.recv()
    shares = [range(first, clients, processes) for first in range(processes)]
    with context.Pool(processes) as pool:
        results = pool.starmap_async(_beat, [(port, share, clients, seconds) for share in shares], chunksize=1)
        sent, delays = zip(*results.get(), strict=True)
    pipe.send("done")
    counts, cpu_s, wall_s = pipe.recv()
    server.join()
    expected = {rank: count for part in sent for rank, count in part.items()}
    all_delays = np.concatenate(delays)
    return {
        "clients": clients,
        "seconds": wall_s,
        "heartbeats": sum(expected.values()),
        "lost": sum(expected[rank] - counts[rank] for rank in expected),
        "store's CPU": cpu_s / wall_s,
        "latency, median ms": 1e3 * float(np.median(all_delays)),
        "latency, 99 % ms": 1e3 * float(np.quantile(all_delays, 0.99)),
        "latency, longest ms": 1e3 * float(all_delays.max()),
        "load of the machine": os.getloadavg()[0],
    }


def _serve(pipe: Connection, clients: int) -> None:
    """Host the store as rank 0 does, and report the last heartbeat of each client and this process's load."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    wall, cpu = time.monotonic(), time.process_time()
    pipe.recv()
    used, passed = time.process_time() - cpu, time.monotonic() - wall
    texts = dist.PrefixStore("watchdog", store).multi_get([f"beat/{rank}" for rank in range(clients)])
    pipe.send(({beat.rank: beat.count for beat in map(Heartbeat.parse, texts)}, used, passed))


def _beat(port: int, ranks: Sequence[int], world_size: int, seconds: int) -> tuple[dict[int, int], np.ndarray]:
    """Publish heartbeats of `ranks` every `INTERVAL_S`; return their numbers, and the seconds that each took."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    watchdogs = {rank: Watchdog(store, rank, world_size, 600.0, INTERVAL_S) for rank in ranks}
    for key in ("failed", "beat/0"):  # as `Watchdog.start` does, which would also start two threads for each
        dist.PrefixStore("watchdog", store).compare_set(key, "", "")
    delays, start = [], time.monotonic()
    for turn in range(int(seconds / INTERVAL_S)):
        for number, watchdog in enumerate(watchdogs.values()):
            due = start + (turn + number / len(watchdogs)) * INTERVAL_S  # spread over the interval, as ranks are
            time.sleep(max(0.0, due - time.monotonic()))
            called = time.monotonic()
            watchdog._sync_with_store()
            delays.append(time.monotonic() - called)
    return {rank: watchdog._heartbeat.count for rank, watchdog in watchdogs.items()}, np.array(delays)
