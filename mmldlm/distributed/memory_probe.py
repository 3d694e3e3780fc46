"""A trial forward and backward pass that finds out whether a batch fits in memory and has no other effect."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.memory import should_reduce_batch_size
from torch import Tensor, nn
from torch.func import functional_call

THREAD_EXIT_TIMEOUT_S = 10.0


def fits_in_memory(
    model: nn.Module,
    loss_fn: Callable[[Callable[..., Any]], Tensor],
    device: torch.device,
    accumulating: bool,
    comm_buffer_bytes: int = 0,
) -> bool:
    """Return whether this rank has enough memory for the loss and its gradients; no other rank takes part.

    Weights, gradients, random number generators and the hooks of engines are not changed.

    Args:
        model: Network whose forward pass is not collective.
        loss_fn: Returns the loss, given the network.
        device: Device of the model.
        accumulating: Whether the gradients of other micro-batches are in memory at the same time.
        comm_buffer_bytes: Size of the engine's buffers during a backward pass.
    """
    fits = True
    try:
        # A backward pass that fails leaves its remaining work, and thereby memory, in a queue of its thread.
        with _single_thread() as thread:
            thread.submit(_forward_backward, model, loss_fn, device, accumulating, comm_buffer_bytes).result()
    except (RuntimeError, MemoryError) as error:
        if not (isinstance(error, MemoryError) or should_reduce_batch_size(error)):
            raise
        fits = False
    # Not in the handler, where the error's traceback still holds tensors.
    if not fits:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return fits


@contextmanager
def _single_thread() -> Iterator[ThreadPoolExecutor]:
    """Yield a pool of one thread and wait for its end in the kernel: Python reports it before C++ frees its memory."""
    pool = ThreadPoolExecutor(1)
    task = Path(f"/proc/self/task/{pool.submit(threading.get_native_id).result()}")  # on Linux
    try:
        yield pool
    finally:
        pool.shutdown()
        deadline = time.monotonic() + THREAD_EXIT_TIMEOUT_S
        while task.exists() and time.monotonic() < deadline:
            time.sleep(0.001)


def _forward_backward(
    model: nn.Module,
    loss_fn: Callable[[Callable[..., Any]], Tensor],
    device: torch.device,
    accumulating: bool,
    comm_buffer_bytes: int,
) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)  # per thread
    # New parameters that share the weights' memory: the hooks of DDP and DeepSpeed on the model's own do not run.
    weights: dict[str, Tensor] = {
        name: nn.Parameter(parameter.detach(), parameter.requires_grad) for name, parameter in model.named_parameters()
    }
    # In a real step the gradients of earlier micro-batches are in memory from the beginning of the forward pass.
    if accumulating:
        for weight in weights.values():
            weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        comm_buffer = torch.empty(comm_buffer_bytes, dtype=torch.uint8, device=device)
        loss_fn(lambda *inputs: functional_call(model, weights, inputs)).backward()
        del comm_buffer
