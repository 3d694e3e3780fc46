"""What of a step can be counted and does not jitter: operators, waits for the device, rows, useful FLOPs, kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.profiler_util import FunctionEvent
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from benchmarks.measure import PARTS, WAIT, watched
from benchmarks.task import Task
from benchmarks.variants import Open
from benchmarks.workload import batch_of
from mmldlm.data.store import Store
from mmldlm.diffusion.noise import draw_noise, mode_weights_at
from mmldlm.model.flops import ModelFlops
from mmldlm.run.factory import build_model, build_objective

_ATEN = torch.ops.aten
_WAITS = (_ATEN._local_scalar_dense, _ATEN.nonzero, _ATEN.masked_select, _ATEN.equal, _ATEN.is_nonzero)
_PRODUCTS = (_ATEN.mm, _ATEN.addmm, _ATEN.linear)
_ON_HOST = (WAIT, PARTS["corrupt"])  # before anything is on the device


def _attention_flops(*args: Any, **kwargs: Any) -> int:
    return flop_registry[_ATEN._scaled_dot_product_flash_attention](*args, **kwargs)


_attention_flops._get_raw = True  # type: ignore[attr-defined]  # the registry's takes tensors, not shapes
_ON_CPU = {_ATEN._scaled_dot_product_flash_attention_for_cpu: _attention_flops}  # PyTorch has no formula for it


@dataclass(frozen=True)
class Counts:
    """Of one step, in the mean."""

    operators: float
    host_syncs: float
    logit_rows: float  # in the forward pass
    fill: float  # real tokens over the token positions that are computed


class _Counter(TorchDispatchMode):
    """Where there is no GPU, all tensors count as the device's once the batch is ready, but for those `on_host`."""

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
        if self.part == PARTS["forward"]:
            if func.overloadpacket in _PRODUCTS and out.shape[-1] == self.vocab_size:
                self.rows += out.shape[:-1].numel()
            if "linear_cross_entropy" in func.name():  # the products of PyTorch's own are not seen one by one
                self.rows += len(args[0])
            if func.overloadpacket is _ATEN.embedding and args[0].shape[0] == self.vocab_size:
                self.positions += args[1].numel()
        return out

    def _waits(self, packet: Any, args: Any, kwargs: Any) -> bool:
        if self.device_type == "cpu" and self.part in _ON_HOST:
            return False
        tensors = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
        if not any(each.device.type == self.device_type for each in tensors):
            return False
        if any(each.untyped_storage()._cdata in self.on_host for each in tensors):
            return False
        if packet is _ATEN._to_copy:
            # Autocast names the device, too, where it changes the type alone.
            changes_type = self.device_type == "cpu" and kwargs.get("dtype", args[0].dtype) != args[0].dtype
            return "device" in kwargs and torch.device(kwargs["device"]).type == "cpu" and not changes_type
        if packet in (_ATEN.index, _ATEN.index_put, _ATEN.index_put_):
            return any(each is not None and each.dtype == torch.bool for each in args[1])
        return packet in _WAITS


def counts_of(run: Open, steps: range, vocab_size: int, device_type: str) -> Counts:
    run.step(steps[0])  # an optimizer has its state after its first step
    run.verbs.defer_fetch = True  # as on a GPU: on a CPU reading costs nothing, and the trainer reads each step
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
    return Counts(*(each / len(steps) for each in counted), real / max(1, counter.positions))


def _step_counts(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Tensors that PyTorch's optimizer holds on the host and reads there, unless it is fused."""
    fused = any(group.get("fused") for group in optimizer.param_groups)
    return [] if fused else [state["step"] for state in optimizer.state.values() if "step" in state]


def kernels_of(run: Open, steps: range) -> tuple[float, float]:
    """(kernels that a step starts on the GPU, seconds in which any of them runs), in the mean; copies and fills are
    none."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for step in steps:
            run.step(step)
        torch.cuda.synchronize()
    kernels = [event for event in found.events() if is_kernel(event)]
    busy = covered((event.time_range.start, event.time_range.end) for event in kernels)
    return len(kernels) / len(steps), busy / 1e6 / len(steps)


def is_kernel(event: FunctionEvent) -> bool:
    """Of the GPU, and neither a copy, nor a fill, nor a name that a stretch of the program was given."""
    on_gpu = event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    return on_gpu and not event.name.startswith(("Memcpy", "Memset", "mmldlm"))


def covered(stretches: Iterable[tuple[float, float]]) -> float:
    """Length of what (start, end) cover together; what two cover counts once."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(stretches):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def compiled_regions_of(run: Open, step: int) -> int:
    """How many compiled regions a step enters: none behind `counts_of`, since PyTorch leaves compiled code aside under
    such a counter, and from then on."""
    with torch.autograd.profiler.profile() as found:
        run.step(step)
    return sum(event.name.startswith("Torch-Compiled Region") for event in found.function_events)


def useful_flops(task: Task, rows: Sequence[np.ndarray]) -> float:
    """`ModelFlops` of a step of the trainer, mean over the micro-batches `rows`; the same for every variant."""
    config, store = task.config("never-opened"), Store.open(task.store)
    with torch.device("meta"):
        of = ModelFlops.from_model(build_model(config, store.manifest, "cpu"))
    objective, weights = build_objective(config, store.manifest), mode_weights_at(0, config.mode, config.mode_schedule)
    total = 0.0
    for number, samples in enumerate(rows):
        batch = batch_of(store.split("train"), samples)
        noised = objective.corrupt(batch, draw_noise(batch, config.run.seed, number, task.batch, weights))
        layout = noised.layout
        total += of.step_flops(
            layout.num_tokens, len(noised.positions), layout.num_samples, layout.latent_tokens, layout.num_pairs
        )
    return total / len(rows)


def flops_of(run: Open, steps: range) -> float:
    """FLOPs of the matrix products and of the forward attention that a step does, padding and all, in the mean."""
    counter = FlopCounterMode(display=False, custom_mapping=_ON_CPU)
    with counter:
        for step in steps:
            run.step(step)
    return counter.get_total_flops() / len(steps)
