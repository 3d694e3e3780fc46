"""Measure single steps: the seconds of their parts, and counts that have no jitter.

We count operators, kernels, waits for the device, rows of logits, fill and FLOPs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.profiler_util import FunctionEvent
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.common.measure import clock
from benchmarks.common.task import Task, batch_of
from benchmarks.common.variants import Open
from mmldlm.data.store import Store
from mmldlm.diffusion.noise import draw_noise, mode_weights_at
from mmldlm.loading.factory import build_meta_model, build_objective
from mmldlm.model.flops import ModelFlops

METHODS = {  # part of the step, by method of the trainer
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


@contextmanager
def watched(run: Open, around: Callable[[str], AbstractContextManager[None]]) -> Iterator[None]:
    """Surround each of the trainer's `METHODS` and the wait for data with `around(part)`."""

    def wrap(method: Callable, part: str) -> Callable:
        def wrapped(*arguments: object) -> object:
            with around(part):
                return method(*arguments)

        return wrapped

    methods = [name for name in METHODS if hasattr(run.trainer, name)]
    for name in methods:
        setattr(run.trainer, name, wrap(getattr(run.trainer, name), METHODS[name]))
    run.feed.batch = wrap(run.feed.batch, WAIT)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for name in methods:
            delattr(run.trainer, name)
        del run.feed.batch


def parts_of(run: Open, steps: range) -> dict[str, float]:
    """Return the mean seconds of a step's parts. A GPU is synchronized around each part, so their sum is longer."""
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
    fill: float  # real tokens divided by computed token positions


class _Counter(TorchDispatchMode):
    """Counts dispatched operators.

    Without a GPU, all tensors except `on_host` count as the device's tensors once the batch is ready.
    """

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
            if kwargs.get("non_blocking"):
                return False
            # Autocast names the device even if it only changes the type.
            changes_type = self.device_type == "cpu" and kwargs.get("dtype", args[0].dtype) != args[0].dtype
            return "device" in kwargs and torch.device(kwargs["device"]).type == "cpu" and not changes_type
        if packet in (_ATEN.index, _ATEN.index_put, _ATEN.index_put_):
            return any(index is not None and index.dtype == torch.bool for index in args[1])
        return packet in _WAITS


def counts_of(run: Open, steps: range, vocab_size: int, device_type: str) -> Counts:
    """Count over `steps`, after one step in which the optimizer creates its state."""
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
    operators, syncs, rows = (count / len(steps) for count in (counter.operators, counter.syncs, counter.rows))
    return Counts(operators, syncs, rows, real / max(1, counter.positions))


def _step_counts(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the optimizer's tensors that stay on the host, where PyTorch reads them. A fused optimizer has none."""
    fused = any(group.get("fused") for group in optimizer.param_groups)
    return [] if fused else [state["step"] for state in optimizer.state.values() if "step" in state]


def kernels_of(run: Open, steps: range) -> tuple[float, float]:
    """Return means per step: the number of GPU kernels without copies and fills, and the seconds in which any runs."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for step in steps:
            run.step(step)
        torch.cuda.synchronize()
    kernels = [event for event in profiler.events() if is_kernel(event)]
    busy = covered((event.time_range.start, event.time_range.end) for event in kernels)
    return len(kernels) / len(steps), busy / 1e6 / len(steps)


def is_kernel(event: FunctionEvent) -> bool:
    """Return whether the event is a kernel on the GPU, and no copy, fill or named region of the program."""
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

    Call this before `counts_of`: PyTorch runs no compiled code under its counter, nor afterwards.
    """
    with torch.autograd.profiler.profile() as profiler:
        run.step(step)
    return sum(event.name.startswith("Torch-Compiled Region") for event in profiler.function_events)


def useful_flops(task: Task, rows: Sequence[np.ndarray]) -> float:
    """Return `ModelFlops` of the trainer's step, averaged over the micro-batches `rows`. All variants use it."""
    config, store = task.config(), Store.open(task.store)
    model_flops = ModelFlops.from_model(build_meta_model(config, store.manifest, "cpu"))
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
