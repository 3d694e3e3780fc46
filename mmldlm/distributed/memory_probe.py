"""A trial forward and backward pass that tells whether a batch fits into memory, and changes nothing."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.memory import should_reduce_batch_size
from torch import Tensor, nn
from torch.func import functional_call

THREAD_EXIT_TIMEOUT_S = 10.0


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation on the device or the host failed."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, Exception) and should_reduce_batch_size(error)
    )


def fits_in_memory(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[[Callable[..., Any]], Tensor],
    device: torch.device,
    accumulates: bool,
    comm_buffer_bytes: int = 0,
) -> bool:
    """Return whether this rank has the memory for a loss, its gradients and the optimizer's state (not collective).

    Weights, gradients, random number generators and engine hooks stay unchanged. The forward pass of `model` must not
    be collective. During the trial, memory also holds the state that the optimizer allocates in its first step, the
    engine's buffers and, if the step `accumulates`, the gradients of other micro-batches.
    """

    def forward_backward() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # the current device is a setting of the thread
        # New parameters share the memory of the weights. Hooks of DDP and DeepSpeed on the original ones do not run.
        weights: dict[str, Tensor] = {
            name: nn.Parameter(weight.detach(), weight.requires_grad) for name, weight in model.named_parameters()
        }
        # In a real step, gradients of earlier micro-batches are in memory when the forward pass begins.
        if accumulates:
            for weight in weights.values():
                weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
        beside = [torch.empty(comm_buffer_bytes, dtype=torch.uint8, device=device)]
        if not optimizer.state:
            for group in optimizer.param_groups:  # Muon has one moment, AdamW two
                moments = 1 if "momentum" in group else 2
                beside += [torch.empty_like(weight) for weight in group["params"] for _ in range(moments)]
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            loss_fn(lambda *inputs: functional_call(model, weights, inputs)).backward()

    fits = True
    # A backward pass that fails leaves its remaining work in a queue of its thread, which keeps memory.
    with ThreadPoolExecutor(1) as pool:
        thread = Path(f"/proc/self/task/{pool.submit(threading.get_native_id).result()}")  # on Linux
        try:
            pool.submit(forward_backward).result()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            fits = False
    # Outside of the handler, because the error's traceback holds tensors.
    if not fits:
        # Python reports the end of a thread before C++ has freed its memory.
        deadline = time.monotonic() + THREAD_EXIT_TIMEOUT_S
        while thread.exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return fits
