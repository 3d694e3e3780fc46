"""Paired comparison: runs step in turns, and what is compared is the ratio of two runs' times in the same round.

- On a CPU each run has a process of its own: the allocator's heap is as that run alone leaves it, and a setting such
  as `memory.keep_freed` affects no other. All share one core, since the cores of a shared machine differ. On a GPU all
  runs share this process and one caching allocator; memory would not suffice otherwise.
- Time is the CPU time of one thread where there is no GPU; otherwise wall time between synchronizations.
- After each step the next run takes its turn, in a new random order each time, so that other work on the machine
  affects all runs alike. Next to each step a matrix product measures what the machine gives at that moment. A turn in
  which that was less than `STEADY` of the best is repeated, within `patience`.
- The first run is measured twice in each round. Where it differs from itself by more than `TRUSTED`, the machine was
  too busy for a conclusion.

Of single steps there are also the seconds of their parts, and what can be counted without jitter: operators, waits for
the device, FLOPs.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import fmean
from typing import Any, Protocol, TypeVar
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.autograd.profiler_util import FunctionEvent
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from benchmarks.common.task import Task, batch_of
from benchmarks.common.variants import Open
from mmldlm.data.store import Store
from mmldlm.diffusion.noise import draw_noise, mode_weights_at
from mmldlm.model.flops import ModelFlops
from mmldlm.run.factory import build_model, build_objective

CONTROL = "control"
STEADY = 0.9  # of the machine's best rate
TRUSTED = 0.05  # largest deviation of the first run from itself
PROBE_SIDE, PROBE_PRODUCTS = 512, 8

T = TypeVar("T")


class Run(Protocol):
    """What is compared."""

    def step(self, number: int) -> object:
        """Take the step of that number. A float that is returned counts as its seconds."""


Opener = Callable[[], AbstractContextManager[Run]]


def clock() -> float:
    """Return seconds: CPU time where one thread does all work, else wall time with the GPU's work done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def timed(run: Run, number: int) -> float:
    """Take a step and return its seconds."""
    start = clock()
    returned = run.step(number)
    return returned if isinstance(returned, float) else clock() - start


# --- processes ------------------------------------------------------------------------------------


class LocalRun:
    """A run in this process."""

    def __init__(self, run: Run):
        self._run = run

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return `function(run, *arguments)`."""
        return function(self._run, *arguments)


class ProcessRun:
    """A run in a process of its own; functions and openers reach it pickled. Use as a context manager."""

    def __init__(self, name: str, opener: Opener):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.common.variants"])
        self._name = name
        self._pipe, child_pipe = context.Pipe()
        self._process = context.Process(target=_serve, args=(child_pipe, opener, torch.get_num_threads()), daemon=True)
        self._process.start()
        child_pipe.close()

    def __enter__(self) -> ProcessRun:
        self._receive()
        return self

    def __exit__(self, *error: object) -> None:
        self._pipe.close()  # which ends the process
        self._process.join(10)
        self._process.kill()

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return `function(run, *arguments)`, called in the run's process."""
        self._pipe.send((function, arguments))
        return self._receive()

    def _receive(self) -> Any:
        try:
            result, error = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"{self._name}: its process has exited; out of memory?") from None
        if error is not None:
            raise error
        return result


def _serve(pipe: Connection, opener: Opener, threads: int) -> None:
    torch.set_num_threads(threads)
    with ExitStack() as stack:
        try:
            run = stack.enter_context(opener())
        except Exception as error:
            pipe.send((None, error))
            return
        pipe.send((None, None))
        while True:
            try:
                function, arguments = pipe.recv()
            except EOFError:
                return
            try:
                pipe.send((function(run, *arguments), None))
            except Exception as error:
                pipe.send((None, error))


@contextmanager
def open_runs(openers: Mapping[str, Opener]) -> Iterator[dict[str, LocalRun | ProcessRun]]:
    """Open all runs: on a CPU each in its own process, on a GPU all in this one."""
    with ExitStack() as stack:
        if torch.cuda.is_available():
            stack.callback(gc.unfreeze)
            yield {name: LocalRun(stack.enter_context(opener())) for name, opener in openers.items()}
            return
        if torch.get_num_threads() == 1 and hasattr(os, "sched_setaffinity"):
            cores = os.sched_getaffinity(0)
            os.sched_setaffinity(0, {max(cores)})
            stack.callback(os.sched_setaffinity, 0, cores)
        yield {name: stack.enter_context(ProcessRun(name, opener)) for name, opener in openers.items()}


def warm_up(runs: Mapping[str, LocalRun | ProcessRun], steps: int) -> None:
    """Take steps 0 to `steps`, then exclude what is alive from garbage collection, whose time hits runs at random."""
    for run in runs.values():
        for number in range(steps):
            run.call(timed, number)
        run.call(_freeze)


def _freeze(run: Run) -> None:
    gc.collect()
    gc.freeze()


def in_new_process(environment: Mapping[str, str], function: Callable[..., T], *arguments: Any) -> T:
    """Return `function(*arguments)` from a fresh interpreter with `environment`.

    Raises:
        BrokenProcessPool: The process was killed.
    """
    context = multiprocessing.get_context("spawn")
    with patch.dict(os.environ, environment), ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


# --- rounds ---------------------------------------------------------------------------------------


class Probe:
    """Rate of one thread of this machine at the moment, in FLOP/s of a matrix product. Always 1 on a GPU."""

    def __init__(self) -> None:
        self._on_cpu = not torch.cuda.is_available()
        self._factors = torch.ones(2, PROBE_SIDE, PROBE_SIDE) if self._on_cpu else torch.empty(0)

    def __call__(self) -> float:
        if not self._on_cpu:
            return 1.0
        start = clock()
        for _ in range(PROBE_PRODUCTS):
            self._factors[0] @ self._factors[1]
        return 2 * PROBE_SIDE**3 * PROBE_PRODUCTS / (clock() - start)


@dataclass(frozen=True)
class Ratio:
    """Median over rounds, with the bounds of its 95 % bootstrap interval."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
        """Summarize the ratios of two lists with one value per round."""
        return cls.over(np.array(numerators) / np.array(denominators))

    @classmethod
    def over(cls, values: Sequence[float] | np.ndarray) -> Ratio:
        """Summarize one value per round."""
        draws = np.random.default_rng(0).choice(np.asarray(values), (2000, len(values)))
        low, high = np.quantile(np.median(draws, axis=1), (0.025, 0.975))
        return cls(float(np.median(values)), float(low), float(high))

    def __str__(self) -> str:
        return f"{self.low:.3f} to {self.high:.3f}"


@dataclass(frozen=True)
class Steadiness:
    """How steady the machine was in the turns that count."""

    turns: int
    repeated: int  # turns taken beyond these
    disturbed: int  # turns that count and stayed below STEADY
    slowest: float  # the lowest rate of a turn that counts, relative to the best of all


@dataclass(frozen=True)
class Comparison:
    """Seconds of each round, by run and of the first run's `CONTROL`."""

    seconds: dict[str, list[float]]
    steadiness: Steadiness

    @property
    def base(self) -> str:
        """The first run, which the others are compared with."""
        return next(iter(self.seconds))

    def speed(self, name: str) -> Ratio:
        """Return how many times as fast as the first run `name` is."""
        return Ratio.of(self.seconds[self.base], self.seconds[name])

    @property
    def control(self) -> Ratio:
        """The first run against itself."""
        return self.speed(CONTROL)

    @property
    def trusted(self) -> bool:
        """Whether the first run agrees with itself."""
        return abs(self.control.median - 1) <= TRUSTED


@dataclass(frozen=True)
class _Turn:
    """One step of each run, and the mean rate of the probe next to them."""

    rate: float
    seconds: dict[str, float]


def compare(
    runs: Mapping[str, LocalRun | ProcessRun],
    rounds: int,
    steps: int,
    first: int,
    seed: int = 0,
    patience: float = 0.0,
    probe: Callable[[], float] | None = None,
) -> Comparison:
    """Time `steps` steps of each run in each round, in turns.

    Args:
        runs: The first is the base of the comparison.
        rounds: Number of measurements.
        steps: Steps of a round.
        first: Number of the first step. All runs take the same numbers, so the same samples and noise.
        seed: Seeds the order of turns.
        patience: Bounds the repeated turns, as a multiple of rounds * steps.
        probe: Returns the machine's rate; measured by default.
    """
    base = next(iter(runs))
    order = [*runs, CONTROL]
    draw, probe = random.Random(seed), probe or Probe()
    numbers = range(first, first + rounds * steps)
    turns: dict[int, _Turn] = {}
    missing, taken, best = list(numbers), 0, 0.0
    max_turns = int((1 + patience) * len(numbers))
    while missing and taken < max_turns:
        for number in missing[: max_turns - taken]:
            draw.shuffle(order)
            rates, seconds = [probe()], {}
            for name in order:
                seconds[name] = runs[base if name == CONTROL else name].call(timed, number)
                rates.append(probe())
            turn = _Turn(sum(rates) / len(rates), seconds)
            best, taken = max(best, turn.rate), taken + 1
            if number not in turns or turns[number].rate < turn.rate:
                turns[number] = turn
        missing = [number for number in numbers if turns[number].rate < STEADY * best]
    per_round = [[turns[number] for number in numbers[at * steps : (at + 1) * steps]] for at in range(rounds)]
    return Comparison(
        {name: [sum(turn.seconds[name] for turn in one_round) for one_round in per_round] for name in [*runs, CONTROL]},
        Steadiness(
            turns=len(numbers),
            repeated=taken - len(numbers),
            disturbed=len(missing),
            slowest=min(turn.rate for turn in turns.values()) / best,
        ),
    )


# --- parts and counts of a step -------------------------------------------------------------------

METHODS = {  # part of a step by the method of a run
    "corrupt": "corrupt, transfer",
    "sync": "corrupt, transfer",
    "accumulate": "corrupt, transfer",
    "loss": "forward",
    "backward": "backward",
    "update": "clip, optimizer",
    "end_step": "logging",
}
PARTS = tuple(dict.fromkeys(METHODS.values()))
WAIT, OTHER = "data wait", "other"

_ATEN = torch.ops.aten
_WAITS = (_ATEN._local_scalar_dense, _ATEN.nonzero, _ATEN.masked_select, _ATEN.equal, _ATEN.is_nonzero)
_PRODUCTS = (_ATEN.mm, _ATEN.addmm, _ATEN.linear)
_ON_HOST = (WAIT, METHODS["corrupt"])  # before anything is on the device


def _attention_flops(*args: Any, **kwargs: Any) -> int:
    return flop_registry[_ATEN._scaled_dot_product_flash_attention](*args, **kwargs)


_attention_flops._get_raw = True  # type: ignore[attr-defined]  # the registry's takes tensors, not shapes
_ON_CPU = {_ATEN._scaled_dot_product_flash_attention_for_cpu: _attention_flops}  # PyTorch has no formula for it


@contextmanager
def watched(run: Open, around: Callable[[str], AbstractContextManager[None]]) -> Iterator[None]:
    """Surround each of the run's `METHODS` and the wait for data with `around(part)`."""

    def wrap(method: Callable, part: str) -> Callable:
        def wrapped(*arguments: object) -> object:
            with around(part):
                return method(*arguments)

        return wrapped

    methods = [name for name in METHODS if hasattr(run.verbs, name)]
    for name in methods:
        setattr(run.verbs, name, wrap(getattr(run.verbs, name), METHODS[name]))
    run.feed.batch = wrap(run.feed.batch, WAIT)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for name in methods:
            delattr(run.verbs, name)
        del run.feed.batch


def parts_of(run: Open, steps: range) -> dict[str, float]:
    """Return the mean seconds of a step's parts. A GPU is synchronized around each, so their sum is longer."""
    seconds: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def timed(part: str) -> Iterator[None]:
        start = clock()
        yield
        step[part] += clock() - start

    with watched(run, timed):
        for number in steps:
            step: dict[str, float] = defaultdict(float)
            start = clock()
            run.step(number)
            total = clock() - start
            for part in (WAIT, *PARTS):
                seconds[part].append(step[part])
            seconds[OTHER].append(total - sum(step.values()))
    return {part: fmean(values) for part, values in seconds.items()}


@dataclass(frozen=True)
class Counts:
    """Means per step."""

    operators: float
    host_syncs: float
    logit_rows: float  # in the forward pass
    fill: float  # real tokens over the token positions that are computed


class _Counter(TorchDispatchMode):
    """Without a GPU, all tensors but those `on_host` count as the device's once the batch is ready."""

    def __init__(self, vocab_size: int, device_type: str, on_host: Iterable[Tensor]):
        super().__init__()
        self.vocab_size, self.device_type = vocab_size, device_type
        self.on_host = {tensor.untyped_storage()._cdata for tensor in on_host}
        self.part = ""
        self.operators = self.syncs = self.rows = self.positions = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.operators += 1
        self.syncs += self._waits(func.overloadpacket, args, kwargs)
        if self.part == METHODS["loss"]:
            if func.overloadpacket in _PRODUCTS and out.shape[-1] == self.vocab_size:
                self.rows += out.shape[:-1].numel()
            if "linear_cross_entropy" in func.name():  # its products are not dispatched one by one
                self.rows += len(args[0])
            if func.overloadpacket is _ATEN.embedding and args[0].shape[0] == self.vocab_size:
                self.positions += args[1].numel()
        return out

    def _waits(self, packet: Any, args: Any, kwargs: Any) -> bool:
        if self.device_type == "cpu" and self.part in _ON_HOST:
            return False
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        if not any(tensor.device.type == self.device_type for tensor in tensors):
            return False
        if any(tensor.untyped_storage()._cdata in self.on_host for tensor in tensors):
            return False
        if packet is _ATEN._to_copy:
            # Autocast names the device even where it changes only the type.
            changes_type = self.device_type == "cpu" and kwargs.get("dtype", args[0].dtype) != args[0].dtype
            return "device" in kwargs and torch.device(kwargs["device"]).type == "cpu" and not changes_type
        if packet in (_ATEN.index, _ATEN.index_put, _ATEN.index_put_):
            return any(index is not None and index.dtype == torch.bool for index in args[1])
        return packet in _WAITS


def counts_of(run: Open, steps: range, vocab_size: int, device_type: str) -> Counts:
    """Count over `steps`, after one step in which the optimizer makes its state."""
    run.step(steps[0])
    run.defer_fetch()  # as on a GPU: on a CPU reading costs nothing, and the trainer reads each step
    counter, real = _Counter(vocab_size, device_type, _step_counts(run.optimizer)), 0

    @contextmanager
    def inside(part: str) -> Iterator[None]:
        counter.part = part
        yield
        counter.part = ""

    for step in steps:
        run.feed.step = step
        real += sum(run.feed.batch().lengths)
        with watched(run, inside), counter:
            run.step(step)
    counted = (counter.operators, counter.syncs, counter.rows)
    return Counts(*(count / len(steps) for count in counted), real / max(1, counter.positions))


def _step_counts(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the tensors that PyTorch's optimizer holds on the host and reads there, unless it is fused."""
    fused = any(group.get("fused") for group in optimizer.param_groups)
    return [] if fused else [state["step"] for state in optimizer.state.values() if "step" in state]


def kernels_of(run: Open, steps: range) -> tuple[float, float]:
    """Return means per step: kernels that start on the GPU, without copies and fills, and seconds in which any runs."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for step in steps:
            run.step(step)
        torch.cuda.synchronize()
    kernels = [event for event in profiler.events() if is_kernel(event)]
    busy = covered((event.time_range.start, event.time_range.end) for event in kernels)
    return len(kernels) / len(steps), busy / 1e6 / len(steps)


def is_kernel(event: FunctionEvent) -> bool:
    """Return whether the event is the GPU's, and neither a copy, nor a fill, nor a named region of the program."""
    on_gpu = event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    return on_gpu and not event.name.startswith(("Memcpy", "Memset", "mmldlm"))


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals (start, end)."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def compiled_regions_of(run: Open, step: int) -> int:
    """Return how many compiled regions a step enters.

    None after `counts_of`: PyTorch does not run compiled code under such a counter, nor from then on.
    """
    with torch.autograd.profiler.profile() as profiler:
        run.step(step)
    return sum(event.name.startswith("Torch-Compiled Region") for event in profiler.function_events)


def useful_flops(task: Task, rows: Sequence[np.ndarray]) -> float:
    """Return `ModelFlops` of the trainer's step, mean over the micro-batches `rows`; it serves for every variant."""
    config, store = task.config(), Store.open(task.store)
    with torch.device("meta"):
        model_flops = ModelFlops.from_model(build_model(config, store.manifest, "cpu"))
    objective, weights = build_objective(config, store.manifest), mode_weights_at(0, config.mode, config.mode_schedule)
    total = 0.0
    for number, samples in enumerate(rows):
        batch = batch_of(store.split("train"), samples)
        noised = objective.corrupt(batch, draw_noise(batch, config.run.seed, number, task.batch, weights))
        layout = noised.layout
        total += model_flops.step_flops(
            layout.num_tokens, len(noised.positions), layout.num_samples, layout.latent_tokens, layout.num_pairs
        )
    return total / len(rows)


def flops_of(run: Open, steps: range) -> float:
    """Return mean FLOPs per step of matrix products and of forward attention, padding included."""
    counter = FlopCounterMode(display=False, custom_mapping=_ON_CPU)
    with counter:
        for step in steps:
            run.step(step)
    return counter.get_total_flops() / len(steps)
