"""Variants that step in turns: each in a process of its own, or all in this one.

On a CPU each has its own process: the allocator's heap is as that variant alone leaves it, and a setting of one, such
as `memory.keep_freed`, is none of the others. All are kept on one core, since cores of a shared machine are not alike.
On a GPU they share a process, so that one caching allocator serves all; memory would not suffice otherwise.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from benchmarks.measure import timed
from benchmarks.task import Task, device
from benchmarks.variants import Open, Variant, opened

T = TypeVar("T")


class Turn(Protocol):
    """A variant that waits for its turn."""

    def step(self, number: int) -> float:
        """Seconds of this step."""

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """`function(run, *arguments)`, wherever the run is."""


class Here:
    """In this process."""

    def __init__(self, run: Open):
        self._run = run

    def step(self, number: int) -> float:
        return timed(self._run, number)

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        return function(self._run, *arguments)


class Apart:
    """In a process of its own; `function` has to be found there by its name. Use as a context manager."""

    def __init__(self, variant: Variant, task: Task, rows: list[np.ndarray], folder: Path):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.variants"])
        self._name = variant.name
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, variant, task, rows, folder, torch.get_num_threads())
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Apart:
        self._answer()
        return self

    def __exit__(self, *error: object) -> None:
        self._pipe.close()  # upon which it ends
        self._process.join(10)
        self._process.kill()

    def step(self, number: int) -> float:
        return self.call(timed, number)

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        self._pipe.send((function, arguments))
        return self._answer()

    def _answer(self) -> Any:
        try:
            found, error = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"{self._name}: its process has ended; out of memory?") from None
        if error is not None:
            raise error
        return found


def _serve(pipe: Connection, variant: Variant, task: Task, rows: list[np.ndarray], folder: Path, threads: int) -> None:
    torch.set_num_threads(threads)
    with ExitStack() as stack:
        try:
            run = stack.enter_context(opened(variant, task, rows, folder))
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
def in_turns(variants: list[Variant], task: Task, rows: list[np.ndarray], folder: Path) -> Iterator[dict[str, Turn]]:
    """All variants over the micro-batches `rows`, by name, open."""
    on_cpu = device().type == "cpu"
    with ExitStack() as stack:
        if on_cpu and torch.get_num_threads() == 1 and hasattr(os, "sched_setaffinity"):
            cores = os.sched_getaffinity(0)
            os.sched_setaffinity(0, {max(cores)})
            stack.callback(os.sched_setaffinity, 0, cores)
        runs: dict[str, Turn] = {}
        for variant in variants:
            own = folder / variant.name
            if on_cpu:
                runs[variant.name] = stack.enter_context(Apart(variant, task, rows, own))
            else:
                runs[variant.name] = Here(stack.enter_context(opened(variant, task, rows, own)))
        yield runs


def parameters_of(run: Open) -> int:
    return run.parameters


def steps_of(run: Open) -> int:
    """How many steps it has taken."""
    return run.steps


def freeze(run: Open) -> None:
    """What is there now is left out of garbage collection, which costs the variant that it happens to fall into."""
    gc.collect()
    gc.freeze()
