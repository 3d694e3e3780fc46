"""`Loader`: for every optimizer step this rank's micro-batches, a pure function of (seed, step).

Letters: G samples of a global batch, B of a micro-batch, N its tokens, M latent tokens, C latent channels.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from mmldlm.batch import Batch
from mmldlm.data.order import SampleOrder, permute
from mmldlm.data.shards import Split, Store
from mmldlm.errors import ConfigError, DataError
from mmldlm.schema import setting

__all__ = ["DataConfig", "Loader", "SampleOrder", "fixed_batches", "permute"]


@dataclass(frozen=True)
class DataConfig:
    """The `data` part of a run config."""

    path: str = setting("", "folder of the store that `mmldlm prepare` wrote")
    num_workers: int | None = setting(
        None,
        "loader processes per rank; null: 0 on CPU, else min(8, CPUs / processes of the machine)",
        at_least=0,
    )
    prefetch_factor: int = setting(4, "steps that each worker prepares ahead", at_least=1)
    persistent_workers: bool = setting(True, "keep workers alive between calls that read on at another step")
    pin_memory: bool = setting(True, "copy batches to the GPU from page-locked memory")
    window: int = setting(4096, "samples sorted by length together; more: evener work, less random order", at_least=1)


class Loader:
    """Micro-batches of one rank.

    The samples of step s are `order.take(s * G, G)`, and a sample's place in there is its slot, whatever
    the number of ranks and workers. They are dealt in order of length, so that all ranks get nearly
    equal numbers of tokens at every micro-step and neighbours in a micro-batch have similar lengths.
    """

    def __init__(
        self,
        store: Store,
        split: str,
        config: DataConfig,
        seed: int,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        device_type: str = "cpu",
    ):
        """ConfigError where `global_batch_size` is no multiple of `micro_batch_size * world_size` or a value is off."""
        check_batch(config, global_batch_size, micro_batch_size, world_size)
        assert 0 <= rank < world_size
        samples = store.split(split)
        self.order = SampleOrder(samples.lengths, seed, config.window)
        self.num_workers = _auto_workers(device_type) if config.num_workers is None else config.num_workers
        steps = _Steps(samples, self.order, global_batch_size, micro_batch_size, rank, world_size)
        self._range = _StepRange()
        self._loader = DataLoader(
            steps,
            sampler=self._range,
            batch_size=None,
            num_workers=self.num_workers,
            collate_fn=_as_is,
            worker_init_fn=_leave_interrupts_to_the_parent,
            pin_memory=config.pin_memory and device_type == "cuda",
            prefetch_factor=config.prefetch_factor if self.num_workers else None,
            persistent_workers=config.persistent_workers and self.num_workers > 0,
        )

    def steps(self, start_step: int, stop_step: int) -> Iterator[tuple[int, list[Batch]]]:
        """Pairs of step and this rank's micro-batches for steps [start_step, stop_step).

        One such iterator at a time. DataError where a sample is malformed or a worker died.
        """
        self._range.steps = range(start_step, stop_step)
        batches = iter(self._loader)
        for step in range(start_step, stop_step):
            try:
                found = next(batches)
            except RuntimeError as error:
                if "DataLoader worker" not in str(error):
                    raise
                reason = str(error).splitlines()[0]
                raise DataError(f"step {step}: a data loader worker died ({reason}); try data.num_workers=0") from error
            if isinstance(found, DataError):
                raise found
            yield step, found


def fixed_batches(split: Split, indices: Sequence[int] | np.ndarray, micro_batch_size: int) -> Iterator[Batch]:
    """The given samples in order of length, in micro-batches of at most `micro_batch_size`.

    Slots are positions in `indices`, so a sample's noise does not depend on its company.
    """
    chosen = np.asarray(indices, np.int64)
    by_length = np.argsort(split.lengths[chosen], kind="stable")
    for start in range(0, len(chosen), micro_batch_size):
        slots = by_length[start : start + micro_batch_size]
        yield collate(split, chosen[slots], slots)


def collate(split: Split, samples: np.ndarray, slots: np.ndarray) -> Batch:
    """One micro-batch of the rows `samples` int64 [B] of `split`, with latents standardised."""
    tokens, lengths, latents = split.gather(samples)
    return Batch(
        tokens=torch.from_numpy(tokens),
        latents=torch.from_numpy(split.manifest.latent.standardise(latents)),
        lengths=tuple(lengths.tolist()),
        sample_ids=torch.from_numpy(samples),
        slots=torch.from_numpy(slots),
    )


def deal(lengths: np.ndarray, micro_batch_size: int, rank: int, world_size: int) -> np.ndarray:
    """int64 [micro-batches, micro_batch_size]: the slots of `rank`, given the lengths [G] of a global batch.

    Samples sorted by length are dealt to the ranks like cards, each round in the direction opposite to
    the last, so that no rank always gets the longest; consecutive rounds make up a micro-batch.
    """
    rounds = np.argsort(lengths, kind="stable").reshape(-1, world_size)
    rounds[1::2] = rounds[1::2, ::-1]
    return np.ascontiguousarray(rounds[:, rank]).reshape(-1, micro_batch_size)


class _Steps(Dataset):
    """Map from step to micro-batches. A `DataError` is returned, not raised: torch would bury it in a traceback."""

    def __init__(
        self,
        split: Split,
        order: SampleOrder,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int,
        world_size: int,
    ):
        self.split, self.order = split, order
        self.global_batch_size, self.micro_batch_size = global_batch_size, micro_batch_size
        self.rank, self.world_size = rank, world_size

    def __getitem__(self, step: int) -> list[Batch] | DataError:
        samples = self.order.take(step * self.global_batch_size, self.global_batch_size)
        slots = deal(self.split.lengths[samples], self.micro_batch_size, self.rank, self.world_size)
        try:
            return [collate(self.split, samples[micro_batch], micro_batch) for micro_batch in slots]
        except DataError as error:
            return error


class _StepRange:
    """A sampler whose range may change between iterations, so that persistent workers can be used again."""

    def __init__(self) -> None:
        self.steps = range(0)

    def __iter__(self) -> Iterator[int]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)


def _as_is(batches: list[Batch] | DataError) -> list[Batch] | DataError:
    return batches


def _leave_interrupts_to_the_parent(_worker: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _auto_workers(device_type: str) -> int:
    """None on CPU, where workers only take the cores of the model; else this rank's share of the cores, up to 8."""
    if device_type == "cpu":
        return 0
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, cpus // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def check_batch(config: DataConfig, global_batch_size: int, micro_batch_size: int, world_size: int) -> None:
    """ConfigError for a loader setting out of bounds, or a global batch that the ranks cannot share evenly."""
    for key, value, least in (
        ("data.num_workers", config.num_workers, 0),
        ("data.prefetch_factor", config.prefetch_factor, 1),
        ("data.window", config.window, 1),
        ("train.micro_batch_size", micro_batch_size, 1),
        ("train.global_batch_size", global_batch_size, 1),
    ):
        if value is not None and value < least:
            raise ConfigError(f"{key} is {value}, expected at least {least}")
    unit = micro_batch_size * world_size
    if global_batch_size % unit:
        below = global_batch_size // unit * unit
        fitting = f"{below} or {below + unit}" if below else f"{unit} or {2 * unit}"
        raise ConfigError(
            f"train.global_batch_size is {global_batch_size}, expected a multiple of micro_batch_size x processes "
            f"({micro_batch_size} x {world_size} = {unit}), such as {fitting}"
        )
