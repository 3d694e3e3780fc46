"""What a rank holds, exchanges and computes on the host in runs of up to 1,024 ranks, on one machine.

    python -m benchmarks scale [--parts step host heartbeats] [--networks 386M] [--engines zero2] [--ranks 8 1024]
        [--blocks 2] [--jobs 2]

- `step`: one rank's optimizer step on a simulated process group (`common/fake_ranks.py`): bytes and number of its
  collectives, and its state, beside the closed form of `mmldlm/trainer/engine_costs.py`. A cell of the table takes
  minutes, so those that are not chosen keep their last result. Exit code 1 if one is off by more than 2 %.
- `host`: seconds of what a rank computes in Python at the start and in each step, for 1 and for 1,024 ranks.
- `heartbeats`: the watchdogs of 1,024 ranks, each with a connection of its own, on one store for a minute. They run in
  a few processes and without their threads, which call in turn what the threads would.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.common.fake_ranks import Network, Step, simulate
from benchmarks.common.report import RESULTS, Row, circumstances, plain_parser, positive, print_status, write_json
from benchmarks.common.task import device
from mmldlm.config import RunConfig
from mmldlm.data.batch_schedule import BatchSize, TrainConfig
from mmldlm.data.micro_batches import deal
from mmldlm.data.sampler import SampleOrder
from mmldlm.distributed.collectives import Collectives
from mmldlm.distributed.exit_files import ProcessInfo
from mmldlm.distributed.hang_diagnosis import Heartbeat
from mmldlm.distributed.launcher import DDP, FSDP2
from mmldlm.distributed.watchdog import Watchdog
from mmldlm.telemetry.rank_times import RankTimes
from mmldlm.trainer.consistency import config_fingerprint, disagreements, version_fingerprint
from mmldlm.trainer.engine_costs import Sharding, padded_parameters, state_bytes, step_traffic
from mmldlm.utils.partition import partition_by_size

BOUND = 0.02
PARTS = ("step", "host", "heartbeats")
WORLDS = (8, 64, 512, 1024)
HSDP = "hsdp"
ENGINES = (DDP, FSDP2, HSDP, "zero2", "zero3")
LARGE = {"386M": Network(24, 1024), "1.9B": Network(32, 2048), "7.5B": Network(32, 4096)}
NODE = 8  # ranks of a hybrid sharding's group
MAX_LIVE_PARAMETERS = 500_000_000  # `stage3_max_live_parameters` of ds_configs/zero3.json
INTERVAL_S = 0.5  # of the watchdog


def main(argv: Sequence[str] | None = None) -> int:
    parser = plain_parser("scale", __doc__)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--jobs", type=positive, default=1, help="simulations at a time")
    parser.add_argument("--networks", nargs="*", choices=LARGE, default=tuple(LARGE))
    parser.add_argument("--engines", nargs="*", default=ENGINES, help=", ".join(ENGINES))
    parser.add_argument("--ranks", nargs="*", type=positive, default=WORLDS)
    parser.add_argument("--blocks", type=positive, help="of the networks, in place of all")
    parser.add_argument("--seconds", type=positive, default=60, help="of heartbeats")
    parser.add_argument("--clients", type=positive, default=1024, help="of the store")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results (%(default)s)")
    options = parser.parse_args(argv)
    parts: dict[str, Callable[[], list[Row]]] = {
        "step": lambda: simulated_steps(options),
        "host": host_costs,
        "heartbeats": lambda: [heartbeats(options.clients, options.seconds)],
    }
    wrong = []
    for part in options.parts:
        rows = parts[part]()
        _write(options, part, rows)
        wrong += [row for row in rows if part == "step" and row["simulated"] and abs(deviation(row)) > BOUND]
    for row in wrong:
        print(f"{row['model']}, {row['engine']}, {row['ranks']} ranks: off by {deviation(row):.1%}")
    return 1 if wrong else 0


def _write(options: argparse.Namespace, part: str, rows: Sequence[Row]) -> None:
    write_json({"benchmark": "scale", **circumstances(device()), "rows": rows}, options.out, f"scale-{part}")


# --- steps ----------------------------------------------------------------------------------------


Key = tuple[str, str, int]  # network, engine, ranks


def cells() -> dict[Key, Sharding]:
    """Return the cells of the table."""
    shardings = {}
    for name, engine, world in product(LARGE, ENGINES, WORLDS):
        replicas = (2 if world == NODE else world // NODE) if engine == HSDP else 1
        shardings[name, engine, world] = Sharding(FSDP2 if engine == HSDP else engine, "bf16", world, replicas)
    return shardings


def simulated_steps(options: argparse.Namespace) -> list[Row]:
    """Simulate the cells that were chosen, and return the rows of all; others keep their last result."""
    path, shardings = options.out / "scale-step.json", cells()
    rows = {key: expected(key[0], LARGE[key[0]], sharding) for key, sharding in shardings.items()}
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []:
        if row["simulated"]:
            rows[_key(row)] |= {"simulated": row["simulated"]}
    chosen = [key for key in product(options.networks, options.engines, options.ranks) if key in rows]
    arguments = [(_network(key[0], options.blocks), shardings[key]) for key in chosen]
    # A process for each, since a process group cannot be replaced; forked, since imports take seconds.
    with multiprocessing.get_context("fork").Pool(options.jobs, maxtasksperchild=1) as pool:
        for key, step in zip(chosen, pool.imap(_simulate, arguments), strict=True):
            rows[key] |= {"simulated": {"blocks": options.blocks or LARGE[key[0]].depth, **measured(step)}}
            print_status(f"{key}: off by {deviation(rows[key]):.2%}")
            _write(options, "step", list(rows.values()))
    return list(rows.values())


def _network(name: str, blocks: int | None) -> Network:
    return replace(LARGE[name], depth=blocks or LARGE[name].depth)


def _simulate(arguments: tuple[Network, Sharding]) -> Step:
    torch.set_num_threads(1)
    return simulate(*arguments)


def _key(row: Row) -> Key:
    return row["model"], row["engine"], row["ranks"]


def expected(name: str, network: Network, sharding: Sharding) -> dict[str, Any]:
    """Return the row of a step by the closed form."""
    blocks, others = (padded_parameters(sharding, shapes) for shapes in network.shapes())
    parameters = sum(prod(shape) for shapes in network.shapes() for shape in shapes)
    once = 0
    if sharding.engine == FSDP2:
        once = others
    elif sharding.engine == "zero3" and parameters < MAX_LIVE_PARAMETERS:
        once = parameters  # the network stays gathered from forward to backward
    traffic = step_traffic(sharding, blocks + others, once)
    return {
        "model": name,
        "parameters": parameters,
        "engine": HSDP if sharding.replicas > 1 else sharding.engine,
        "ranks": sharding.world_size,
        "replicas": sharding.replicas,
        "padded": (blocks + others) / parameters - 1,
        "state, MB": state_bytes(sharding).device * (blocks + others) / 1e6,
        "payload, MB": {f"{kind} of {ranks}": size / 1e6 for (kind, ranks), size in sorted(traffic.items())},
        "simulated": None,
    }


def measured(step: Step) -> dict[str, Any]:
    """Return what was simulated as a part of a row."""
    calls, payload = (
        {f"{kind} of {ranks}": value for (kind, ranks), value in sorted(counter.items())}
        for counter in (step.collectives.calls, step.collectives.payload)
    )
    return {
        "state, MB": step.state_bytes / 1e6,
        "payload, MB": {kind: size / 1e6 for kind, size in payload.items()},
        "calls": calls,
        "small": dict(step.collectives.small),
    }


def deviation(row: Row) -> float:
    """Return the largest relative deviation of what was simulated from the closed form for as many blocks."""
    simulated, network = row["simulated"], _network(row["model"], row["simulated"]["blocks"])
    return largest_deviation(expected(row["model"], network, cells()[_key(row)]), simulated)


def largest_deviation(form: Row, simulated: Row) -> float:
    """Return the largest relative deviation of a state or payload from the closed form."""
    payloads = form["payload, MB"], simulated["payload, MB"]
    pairs = [tuple(payload.get(kind, 0.0) for payload in payloads) for kind in {**payloads[0], **payloads[1]}]
    pairs.append((form["state, MB"], simulated["state, MB"]))
    return max((value / by_form - 1 if by_form else 1.0 for by_form, value in pairs), key=abs)


def _table(lines: Sequence[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def step_blocks(result: Mapping[str, Any]) -> dict[str, str]:
    """Return the tables of docs/scale.md about steps."""
    rows = {_key(row): row for row in result["rows"]}

    def is_whole(row: Row) -> bool:
        return bool(row["simulated"]["blocks"] == LARGE[row["model"]].depth)

    def table(cell: Callable[[Row], str]) -> str:
        head = ("network", "engine", *(f"{world:,} ranks" for world in WORLDS))
        lines = [head, ("---",) * len(head)]
        for name, engine in product(LARGE, ENGINES):
            lines.append((name, engine, *(cell(rows[name, engine, world]) for world in WORLDS)))
        return _table(lines)

    def number(row: Row, key: str) -> str:
        megabytes = sum(row[key].values()) if isinstance(row[key], Mapping) else row[key]
        text = f"{megabytes / 1e3:.2g} GB" if megabytes < 9_950 else f"{megabytes / 1e3:.0f} GB"
        if megabytes < 995:
            text = f"{megabytes:.2g} MB" if megabytes < 99.5 else f"{megabytes:.0f} MB"
        if not row["simulated"]:
            return text
        return f"**{text}**" if is_whole(row) else f"*{text}*"

    def collectives(row: Row) -> str:
        if not row["simulated"]:
            return "-"
        calls = ", ".join(f"{count} {key.split()[0]}" for key, count in row["simulated"]["calls"].items())
        return calls if is_whole(row) else f"{calls} ({row['simulated']['blocks']} blocks)"

    done = [row for row in rows.values() if row["simulated"]]
    whole = list(filter(is_whole, done))
    worst = max(done, key=lambda row: abs(deviation(row)))
    summary = (
        f"{len(done)} of {len(rows)} cells were simulated: {len(whole)} with all blocks (bold), the others with "
        f"{' or '.join(sorted({str(row['simulated']['blocks']) for row in done if row not in whole}))} blocks of that "
        f"width (italic). The largest deviation from the closed form is {abs(deviation(worst)):.2%}: "
        f"{worst['model']} under {worst['engine']} at {worst['ranks']:,} ranks."
    )
    return {
        "scale-summary": summary,
        "scale-state": table(lambda row: number(row, "state, MB")),
        "scale-payload": table(lambda row: number(row, "payload, MB")),
        "scale-collectives": table(collectives),
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
        processes, rank_times = Collectives(0, world), RankTimes(world)
        return {
            "order and slots of a step": lambda: deal(
                order.take_with_lengths(next(positions), 8 * world)[1], BatchSize(8 * world, 8), world, 1
            ),
            "batch sizes of a step": lambda: config.batch_at(1, world),
            "check of the batch sizes": lambda: config.check_batches(world),
            "search for slow ranks in a step (rank 0)": lambda: rank_times.add(np.ones((2, world))),
            "files of a checkpoint by rank": lambda: partition_by_size(sizes, world),
            "validation's share of 1,024 samples": lambda: list(processes.local_items(range(1024))),
            "parsing what a start gathers": lambda: [json.loads(text) for text in facts],
            "comparison of the ranks' settings": lambda: disagreements(fingerprints),
            "reading all heartbeats (after a hang)": lambda: [Heartbeat.parse(beat.encode()) for _ in range(world)],
        }

    one, many = ({what: _median_ms(function) for what, function in work(world).items()} for world in (1, 1024))
    return [{"work": what, "1 rank, ms": one[what], "1,024 ranks, ms": many[what]} for what in one]


def host_blocks(result: Mapping[str, Any]) -> dict[str, str]:
    """Return the table of docs/scale.md about the host."""
    lines = [("work", "1 rank", "1,024 ranks"), ("---",) * 3]
    lines += [(row["work"], *(f"{row[key]:.2g}" for key in row if key != "work")) for row in result["rows"]]
    return {"scale-host": _table(lines)}


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
    counts, cpu_s = pipe.recv()
    server.join()
    expected = {rank: count for part in sent for rank, count in part.items()}
    all_delays = np.concatenate(delays)
    return {
        "clients": clients,
        "seconds": seconds,
        "heartbeats": sum(expected.values()),
        "lost": sum(expected[rank] - counts[rank] for rank in expected),
        "heartbeats/s": sum(expected.values()) / seconds,
        "CPU of the store": cpu_s / seconds,
        "latency, median ms": 1e3 * float(np.median(all_delays)),
        "latency, 99 % ms": 1e3 * float(np.quantile(all_delays, 0.99)),
        "latency, longest ms": 1e3 * float(all_delays.max()),
        "load of the machine": os.getloadavg()[0],
    }


def heartbeat_blocks(result: Mapping[str, Any]) -> dict[str, str]:
    """Return the sentence of docs/scale.md about heartbeats."""
    (row,) = result["rows"]
    text = (
        f"{row['clients']:,} clients published {row['heartbeats']:,} heartbeats in {row['seconds']:.0f} s, "
        f"{row['heartbeats/s']:,.0f} a second, on a machine with a load of {row['load of the machine']:.0f}: "
        f"{row['lost'] or 'none'} lost. The store's process used {row['CPU of the store']:.1%} of a core. A heartbeat "
        f"took {row['latency, median ms']:.1f} ms (median), {row['latency, 99 % ms']:.0f} ms (99 %), "
        f"{row['latency, longest ms']:.0f} ms at most."
    )
    return {"scale-heartbeats": text}


def _serve(pipe: Connection, clients: int) -> None:
    """Host the store as rank 0 does, and report the last heartbeat of each client and this process's load."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    cpu = time.process_time()
    pipe.recv()
    used = time.process_time() - cpu
    texts = dist.PrefixStore("watchdog", store).multi_get([f"beat/{rank}" for rank in range(clients)])
    pipe.send(({beat.rank: beat.count for beat in map(Heartbeat.parse, texts)}, used))


def _beat(port: int, ranks: Sequence[int], world_size: int, seconds: int) -> tuple[dict[int, int], np.ndarray]:
    """Publish heartbeats of `ranks` every `INTERVAL_S`; return their numbers, and the seconds that each took."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    watchdogs = {rank: Watchdog(store, rank, world_size, 600.0, INTERVAL_S) for rank in ranks}
    for key in ("failed", "beat/0"):  # as `Watchdog.start` does, which would also start two threads for each
        dist.PrefixStore("watchdog", store).compare_set(key, "", "")
    delays, start, turn = [], time.monotonic(), 0
    while time.monotonic() < start + seconds:
        for number, watchdog in enumerate(watchdogs.values()):
            due = start + (turn + number / len(watchdogs)) * INTERVAL_S  # spread over the interval, as ranks are
            time.sleep(max(0.0, due - time.monotonic()))
            called = time.monotonic()
            watchdog._sync_with_store()
            delays.append(time.monotonic() - called)
        turn += 1
    return {rank: watchdog._heartbeat.count for rank, watchdog in watchdogs.items()}, np.array(delays)
