"""`mmldlm plan --device this` against steps that are really run: their time, memory, and the engine that it chooses.

    python -m benchmarks plan

Calibrates the planner from nothing, then trains networks of other sizes under four engines with 1, 2 and 4 processes,
all in one launch for each engine and number of processes, twice, with the engines in turns; the memory is that of
larger networks in another launch, which save each step. Each network comes with two ways of computing the same global
batch, so that a choice is one of eight. Takes some 50 minutes on two quiet cores, with one thread for each process.

OUT/plan-measured.json is written after each launch, and OUT/plan-calibration.json is the planner's: the same command
continues with both. Delete them to begin anew.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from statistics import mean, median
from typing import Any

import torch

from benchmarks.common.report import circumstances, markdown, parse, parser, print_status, work_dir, write_json
from benchmarks.memory import ENVIRONMENT
from benchmarks.paired import write_store
from mmldlm.config import load_config
from mmldlm.data.batch_schedule import TrainConfig
from mmldlm.data.mixture import open_data
from mmldlm.data.store import Store
from mmldlm.distributed.launcher import DDP, FSDP2, SINGLE
from mmldlm.tools.plan.calibration import NETWORKS, ROUNDS, Calibration, Network, jobs_of, name_of, timed
from mmldlm.tools.plan.candidates import Candidate, choose
from mmldlm.tools.plan.costs import StepCosts, step_costs

WORLDS = (1, 2, 4)
SHARDING = (FSDP2, "zero1", "zero3")
# Width, depth, tokens of a step on a rank, micro-batches, activation checkpointing; two ways for each network.
SIZES = (
    (96, 3, 256),
    (96, 6, 512),
    (128, 4, 384),
    (128, 5, 1024),
    (160, 3, 512),
    (160, 6, 256),
    (192, 3, 384),
    (192, 4, 768),
    (224, 3, 512),
    (256, 4, 384),
)
WAYS = ((1, "none"), (2, "none"), (1, "selective"), (1, "full"))  # the first, and one of the others in turn
CONFIGS: Sequence[Network] = [
    (*size, *WAYS[way]) for number, size in enumerate(SIZES) for way in (0, 1 + number % (len(WAYS) - 1))
]
MEMORY_STEPS = ("train.steps=3",)
# Larger ones, of which only the memory is measured: beside it, what libraries take at random is small.
LARGER: Sequence[Network] = (
    (320, 3, 1024, 1, "none"),
    (288, 5, 1536, 2, "none"),
    (384, 4, 1024, 1, "full"),
)


@dataclass(frozen=True)
class Case:
    """A network under an engine: (predicted, low, high) and measured seconds of a step."""

    engine: str
    world_size: int
    network: Network
    predicted: tuple[float, float, float]
    seconds: float

    @property
    def error(self) -> float:
        return abs(self.predicted[0] / self.seconds - 1)

    @property
    def is_inside(self) -> bool:
        return self.predicted[1] <= self.seconds <= self.predicted[2]


@dataclass(frozen=True)
class MemoryCase:
    """A larger network under an engine, and the memory of rank 0 above that before the run."""

    engine: str
    world_size: int
    network: Network
    predicted_mib: float
    mib: float

    @property
    def error(self) -> float:
        return self.predicted_mib / self.mib - 1


def engines_of(world_size: int) -> list[str]:
    return [SINGLE if world_size == 1 else DDP, *SHARDING]


def excess_of_choices(cases: Sequence[Case]) -> Iterator[float]:
    """Yield, by world size and size of the network, how much slower the predicted best is than the best of all run."""
    groups: dict[tuple[Any, ...], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.world_size, *case.network[:3]), []).append(case)
    for group in groups.values():
        candidates = [
            Candidate(case.engine, case.network[4], TrainConfig(), 0.0, (0.0, 0.0, 0.0), case.predicted, 0.0)
            for case in group
        ]
        best = choose(candidates)
        assert best is not None
        yield group[candidates.index(best)].seconds / min(case.seconds for case in group) - 1


def summary(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Return a row for each engine and number of processes, and one for all."""
    groups = {(case.engine, case.world_size): 0 for case in cases}
    rows = []
    for engine, world in [*groups, ("all", None)]:
        of = [case for case in cases if engine == "all" or (case.engine, case.world_size) == (engine, world)]
        rows.append(
            {
                "engine": engine,
                "processes": world,
                "configs": len(of),
                "median error of the step time %": 100 * median(case.error for case in of),
                "largest %": 100 * max(case.error for case in of),
                "inside the interval %": 100 * mean(case.is_inside for case in of),
                "interval, high / low": median(case.predicted[2] / case.predicted[1] for case in of),
            }
        )
    return rows


def memory_rows(cases: Sequence[MemoryCase]) -> list[dict[str, Any]]:
    """Return a row for each engine, and one for all."""
    rows = []
    for engine in (*dict.fromkeys(case.engine for case in cases), "all"):
        errors = [case.error for case in cases if engine in (case.engine, "all")]
        rows.append(
            {
                "engine": engine,
                "runs": len(errors),
                "median error of memory %": 100 * median(map(abs, errors)),
                "within 5 %": 100 * mean(abs(error) <= 0.05 for error in errors),
                "most below %": 100 * min(errors),
                "most above %": 100 * max(errors),
            }
        )
    return rows


def choices(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Return a row for each number of processes: how far the planner's choices are from the best of all run."""
    rows = []
    for world in dict.fromkeys(case.world_size for case in cases):
        excess = list(excess_of_choices([case for case in cases if case.world_size == world]))
        rows.append(
            {
                "processes": world,
                "choices": len(excess),
                "the best one %": 100 * mean(value == 0 for value in excess),
                "at most 5 % slower %": 100 * mean(value <= 0.05 for value in excess),
                "slower, mean %": 100 * mean(excess),
                "slower, largest %": 100 * max(excess),
            }
        )
    return rows


def blocks(result: Mapping[str, Any]) -> dict[str, str]:
    """Return the tables of docs/trust.md."""
    return {f"plan-{name}": markdown(rows) for name, rows in result["tables"].items()}


def main(argv: Sequence[str] | None = None) -> int:
    options = parser("plan", "Step time, memory and choices of `mmldlm plan --device this` against runs.")
    options.set_defaults(name="plan", worlds=WORLDS, configs=CONFIGS, networks=NETWORKS, larger=LARGER)
    quick = {"worlds": (1,), "configs": CONFIGS[:2], "networks": NETWORKS[:6], "larger": LARGER[:2]}
    given = parse(options, argv, **quick, name="plan-quick")
    given.out.mkdir(parents=True, exist_ok=True)
    kept = given.out / f"{given.name}-measured.json"
    measured: dict[str, dict[str, Any]] = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    calibration = Calibration(given.out / f"{given.name}-calibration.json", given.networks)
    started, cases, memory = time.monotonic(), list[Case](), list[MemoryCase]()
    with work_dir(given) as folder:
        location = str(write_store(folder))
        store = open_data(location)
        for world in given.worlds:
            calibration.calibrate(location, engines_of(world), world)
            jobs, larger = (jobs_of(networks, location, store, world) for networks in (given.configs, given.larger))
            larger = [(job, [*settings, *MEMORY_STEPS]) for job, settings in larger]
            for number, engine in product(range(ROUNDS), engines_of(world)):
                minutes = (time.monotonic() - started) / 60
                print_status(f"{engine} with {world} processes, round {number + 1} of {ROUNDS}, {minutes:.1f} min")
                results = measured.setdefault(f"{engine} x{world}", {"seconds": []})
                if len(results["seconds"]) == number:
                    if not number:
                        results["mib"] = timed(engine, world, larger, memory=True, **ENVIRONMENT)
                    results["seconds"].append(timed(engine, world, jobs))
                    write_json(measured, given.out, kept.stem)
        for world in given.worlds:
            print_status(f"predicting {len(given.configs)} networks for {world} processes")
            for network, costs in _costs(given.configs, location, store, world):
                for engine in engines_of(world):
                    rounds = [of[name_of(network)] for of in measured[f"{engine} x{world}"]["seconds"]]
                    cases.append(
                        Case(engine, world, network, calibration.predict(engine, costs), median(chain(*rounds)))
                    )
            for network, costs in _costs(given.larger, location, store, world, *MEMORY_STEPS):
                for engine in engines_of(world):
                    mib = measured[f"{engine} x{world}"]["mib"][name_of(network)]
                    memory.append(MemoryCase(engine, world, network, costs.memory_mib(engine), mib))
    tables = {"steps": summary(cases), "memory": memory_rows(memory), "choices": choices(cases)}
    result = {**circumstances(torch.device("cpu")), "benchmark": "plan", "tables": tables}
    of = {"cases": [vars(case) for case in cases], "memory": [vars(case) for case in memory]}
    write_json({**result, **of}, given.out, given.name)
    for title, rows in tables.items():
        print(f"{title}\n\n{markdown(rows)}\n")
    return 0


def _costs(
    networks: Sequence[Network], location: str, store: Store, world: int, *settings: str
) -> Iterator[tuple[Network, StepCosts]]:
    for network, (_, given) in zip(networks, jobs_of(networks, location, store, world), strict=True):
        yield network, step_costs(load_config(None, [*given, *settings]), store, world, "cpu")
