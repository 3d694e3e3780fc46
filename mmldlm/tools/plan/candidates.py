"""Candidates of a plan: engine x micro-batch x activation checkpointing, their memory and step time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Literal

from mmldlm.config import RunConfig
from mmldlm.data.batch_schedule import TrainConfig
from mmldlm.data.store import Store
from mmldlm.distributed.capabilities import supports
from mmldlm.distributed.launcher import DDP, FSDP2, SINGLE
from mmldlm.tools.plan.costs import HSDP, StepCosts, step_costs
from mmldlm.tools.plan.kernels import Rates
from mmldlm.trainer.memory_plan import USABLE_SHARE
from mmldlm.trainer.setup import requested_features
from mmldlm.utils.progress import Progress

ENGINES = (DDP, "zero1", "zero2", FSDP2, HSDP, "zero3")  # of several processes, the simplest first
CHECKPOINTING: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
ROOMY = 2  # micro-batches that fit under all engines, after which smaller ones are not tried: they are not faster
TIE = 1.02  # ratio of step times that no prediction tells apart
# Hours of a GPU between unexpected interruptions: 419 in 54 days on 16,384 GPUs (Llama 3, arXiv 2407.21783).
GPU_HOURS_BETWEEN_FAILURES = 54 * 24 * 16_384 / 419

Prediction = tuple[float, float, float]  # value, and the ends of its interval
Predict = Callable[[str, StepCosts], Prediction]


@dataclass(frozen=True)
class Candidate:
    """A way to train the config, and what it takes on a rank."""

    engine: str
    checkpointing: str
    train: TrainConfig  # with its micro-batch
    micro_batch_text_tokens: float  # mean
    memory_mib: Prediction
    seconds: Prediction  # of a step
    capacity_mib: float

    @property
    def fits(self) -> bool:
        """Return whether it fits even at the upper end of the interval."""
        return self.excess_mib <= 0

    @property
    def excess_mib(self) -> float:
        """Memory by which the upper end of the interval exceeds the device's."""
        return self.memory_mib[2] - self.capacity_mib

    def is_close_to(self, best: Candidate) -> bool:
        """Return whether its interval of the step time overlaps that of the fastest one."""
        return self.seconds[1] <= best.seconds[2]


def choose(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the fastest that fits, or a simpler engine within `TIE` of it; None if none fits."""
    fitting = [candidate for candidate in candidates if candidate.fits]
    limit = TIE * min((candidate.seconds[0] for candidate in fitting), default=0.0)
    tied = [candidate for candidate in fitting if candidate.seconds[0] <= limit]
    order = (SINGLE, *ENGINES)
    return min(tied, key=lambda candidate: (order.index(candidate.engine), candidate.seconds[0]), default=None)


def engines_for(config: RunConfig, world_size: int, nodes: int = 1) -> list[str]:
    """Return the engines that run the settings of the config; `HSDP` needs several nodes, and processes in each."""
    engines = ENGINES if world_size > 1 else (SINGLE,)
    hybrid = 1 < nodes < world_size
    settings = requested_features(config)
    return [
        name
        for name in engines
        if (name != HSDP or hybrid) and all(supports(setting, FSDP2 if name == HSDP else name) for setting in settings)
    ]


def search(
    config: RunConfig,
    store: Store,
    world_size: int,
    engines: Sequence[str],
    capacity_mib: float,
    device: str,
    rates: Rates | None,
    predict: Predict,
    nodes: int = 1,
) -> tuple[list[Candidate], StepCosts]:
    """Return the candidates by step time, and the costs of the last one that was tried.

    Micro-batches become smaller until some fit under all engines. If the largest one does without activation
    checkpointing, nothing is tried with it.
    """
    found: list[Candidate] = []
    with Progress() as progress:
        for checkpointing in CHECKPOINTING:
            roomy = 0
            for number, train in enumerate(_micro_batches(config.train, store, world_size)):
                batch = train.batch_at(0, world_size)
                progress.phase(f"estimating {batch.micro_batch}, activation checkpointing {checkpointing}")
                memory = replace(config.memory, activation_checkpointing=checkpointing)
                costs = step_costs(replace(config, train=train, memory=memory), store, world_size, device, rates, nodes)
                tokens = costs.estimate.tokens_per_step / world_size / costs.micro_batches
                candidates = [
                    Candidate(
                        engine, checkpointing, train, tokens, memory_interval(costs.memory_mib(engine)),
                        predict(engine, costs), capacity_mib,
                    )
                    for engine in engines
                ]  # fmt: skip
                found += candidates
                roomy += all(candidate.fits for candidate in candidates)
                if roomy == ROOMY:
                    break
                if roomy and not number and checkpointing == CHECKPOINTING[0]:
                    return _sorted(found), costs
    return _sorted(found), costs


def memory_interval(mib: float) -> Prediction:
    """Return an estimate of memory with the interval that a plan allows it, see `USABLE_SHARE`."""
    return mib, mib * USABLE_SHARE, mib / USABLE_SHARE


def _sorted(candidates: Sequence[Candidate]) -> list[Candidate]:
    return sorted(candidates, key=lambda candidate: candidate.seconds[0])


def _micro_batches(train: TrainConfig, store: Store, world_size: int) -> Iterator[TrainConfig]:
    """Yield the settings with each micro-batch to try, largest first: tokens if the config has a budget of them."""
    train.check_batches(world_size)
    if train.micro_batch_tokens:
        budget = 4 * train.micro_batch_tokens
        while budget >= store.split("train").mean_length:
            yield replace(train, micro_batch_tokens=budget)
            budget //= 2
        return
    size = share = train.global_batch_size // world_size
    while size:
        if share % size == 0:
            yield replace(train, micro_batch_size=size)
        size //= 2


def save_interval(save_s: float, failure_s: float) -> float:
    """Return the seconds between checkpoints that lose least time, sqrt(2 x save x mean time between failures).

    Young 1974 (doi 10.1145/361147.361115); for saves much shorter than the time between failures also the first order
    of Daly 2006 (doi 10.1016/j.future.2004.11.016).
    """
    return sqrt(2 * save_s * failure_s)
