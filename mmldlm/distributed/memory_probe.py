"""A forward and backward pass that leaves nothing behind but the answer whether it fits into memory."""

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

LONGEST_END_S = 10.0


def fits_in_memory(
    model: nn.Module,
    loss_of: Callable[[Callable[..., Any]], Tensor],
    device: torch.device,
    accumulating: bool,
    exchange_bytes: int = 0,
) -> bool:
    """Whether this rank has the memory for the loss and its gradients; no other rank takes part.

    `loss_of` gets the network: `model`, whose forward pass must not be collective. `accumulating`: gradients of other
    micro-batches lie beside, and so do `exchange_bytes` of the engine. Weights, gradients, random numbers and what
    engines have hooked to them stay as they are.
    """
    fits = True
    try:
        # A backward pass that fails leaves what it had yet to do in a queue of its thread, and memory with it.
        with _thread() as thread:
            thread.submit(_pass, model, loss_of, device, accumulating, exchange_bytes).result()
    except (RuntimeError, MemoryError) as error:
        if not (isinstance(error, MemoryError) or should_reduce_batch_size(error)):
            raise
        fits = False
    # Not before here, where the error is gone, and with it what its traceback holds.
    if not fits:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return fits


@contextmanager
def _thread() -> Iterator[ThreadPoolExecutor]:
    """One thread, gone at the end: Python calls it ended before the system has cleared what C++ keeps for it."""
    pool = ThreadPoolExecutor(1)
    task = Path(f"/proc/self/task/{pool.submit(threading.get_native_id).result()}")  # on Linux
    try:
        yield pool
    finally:
        pool.shutdown()
        deadline = time.monotonic() + LONGEST_END_S
        while task.exists() and time.monotonic() < deadline:
            time.sleep(0.001)


def _pass(
    model: nn.Module,
    loss_of: Callable[[Callable[..., Any]], Tensor],
    device: torch.device,
    accumulating: bool,
    exchange_bytes: int,
) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)  # a matter of the thread
    # The same memory by other names: DDP's and DeepSpeed's hooks are at the model's own and see nothing of it.
    weights: dict[str, Tensor] = {
        name: nn.Parameter(parameter.detach(), parameter.requires_grad) for name, parameter in model.named_parameters()
    }
    if accumulating:
        for weight in weights.values():
            weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        beside = torch.empty(exchange_bytes, dtype=torch.uint8, device=device)
        loss_of(lambda *inputs: functional_call(model, weights, inputs)).backward()
        del beside
