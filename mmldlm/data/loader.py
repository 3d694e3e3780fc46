"""`Loader`: for every optimizer step this rank's micro-batches, a pure function of (seed, step).

Letters: G samples of a global batch, B of a micro-batch, N its tokens, M latent tokens, C latent channels.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from mmldlm.batch import Batch
from mmldlm.data.batch_schedule import BatchSize
from mmldlm.data.mixture import order_of
from mmldlm.data.sampler import MixedOrder, SampleOrder, permute
from mmldlm.data.store import Split, Store
from mmldlm.data.workers import leave_it_to_the_parent, read
from mmldlm.errors import DataError
from mmldlm.settings.fields import setting
from mmldlm.utils.short_repr import named

__all__ = ["DataConfig", "Loader", "SampleOrder", "fixed_batches", "permute"]


@dataclass(frozen=True)
class DataConfig:
    """The `data` part of a run config."""

    path: str = setting("", "folder of the store that `mmldlm prepare` wrote; or `mixture`")
    mixture: dict[str, float] = setting(
        factory=dict,
        doc="folders of several stores in place of `path`, and in which proportion samples are drawn from them: "
        "{data/own: 7, data/web: 3}. Tokenizer, encoder and shape of the latents must be the same",
    )
    num_workers: int | None = setting(
        None,
        "loader processes per rank; null: 0 on CPU, else min(8, CPUs / processes of the machine)",
        at_least=0,
    )
    prefetch_factor: int = setting(4, "steps that each worker prepares ahead", at_least=1)
    persistent_workers: bool = setting(True, "keep workers alive between calls that read on at another step")
    pin_memory: bool = setting(True, "copy batches to the GPU from page-locked memory")
    window: int = setting(4096, "samples sorted by length together; more: evener work, less random order", at_least=1)
    verify: Literal["full", "sizes"] = setting(
        "full", "at start. full: hash every file and look at every sample, shared by the ranks; sizes: file sizes only"
    )
    max_bad_samples: int = setting(
        0, "bad samples (unknown token, latent not finite) to leave out before the run is refused", at_least=0
    )
    worker_timeout_s: float = setting(300.0, "seconds to wait for a step from the workers before the run ends", above=0)

    def __post_init__(self) -> None:
        if self.path and self.mixture:
            raise ValueError(f"mixture: expected this or data.path, found both (data.path is {named(self.path)})")
        for path, weight in self.mixture.items():
            if not weight > 0:
                raise ValueError(f"mixture.{named(path)}: must be above 0, found {weight:g}")
        if self.max_bad_samples and self.verify != "full":
            raise ValueError(f"max_bad_samples: {self.max_bad_samples} needs data.verify: full, found {self.verify}")

    @property
    def place(self) -> str | dict[str, float]:
        """What `open_data` opens."""
        return self.mixture or self.path


class Loader:
    """Micro-batches of one rank.

    The samples of a step are `order.take(position, G)`, and a sample's place in there is its slot, whatever
    the number of ranks and workers; the position rises by the step's own G. The samples are dealt in order of length,
    so that all ranks get nearly equal numbers of tokens at every micro-step and neighbors in a micro-batch have
    similar lengths.
    """

    def __init__(
        self,
        store: Store,
        split: str,
        config: DataConfig,
        seed: int,
        batch_at: Callable[[int], BatchSize],
        rank: int = 0,
        world_size: int = 1,
        device_type: str = "cpu",
    ):
        """`batch_at` has the sizes of a step; each global batch must be a multiple of micro-batch x `world_size`.

        It is asked ahead of the step, and what it says may be another thing whenever `steps` is called.
        """
        assert 0 <= rank < world_size
        self.batch_at = batch_at
        samples = store.split(split)
        self.order = order_of(samples, seed, config.window)
        self.num_workers = _auto_workers(device_type) if config.num_workers is None else config.num_workers
        self._asked = _Asked()
        self._check_files = store.check_files
        self._steps = _Steps(samples, self.order, rank, world_size)
        self._loader = DataLoader(
            self._steps,
            sampler=self._asked,
            batch_size=None,
            num_workers=self.num_workers,
            collate_fn=_as_is,
            worker_init_fn=leave_it_to_the_parent,
            pin_memory=config.pin_memory and device_type == "cuda",
            prefetch_factor=config.prefetch_factor if self.num_workers else None,
            persistent_workers=config.persistent_workers and self.num_workers > 0,
            timeout=config.worker_timeout_s if self.num_workers else 0,
        )

    def steps(
        self, start_step: int, stop_step: int, start_sample: int | None = None
    ) -> Iterator[tuple[int, list[Batch]]]:
        """Pairs of step and this rank's micro-batches for steps [start_step, stop_step).

        The first reads on at position `start_sample` of the order: where a run with these sizes from step 0 on would
        be, unless told. One such iterator at a time: the next ends it, keeps the workers and asks `batch_at` anew.
        DataError where a sample is malformed or a worker dies, hangs or raises; then the workers are gone.
        """
        if start_sample is None:
            start_sample = sum(self.batch_at(step).global_batch_size for step in range(start_step))
        self._asked.begin(start_step, stop_step, start_sample, self.batch_at)
        found = read(self._loader, self._check_files)
        for step in range(start_step, stop_step):
            try:
                batches = next(found)
            except DataError as error:
                raise DataError(f"step {step}: {error}") from error
            yield step, batches

    def tokens(self, position: int, size: BatchSize) -> np.ndarray:
        """int64 [world_size, micro-batches]: tokens of all ranks' micro-batches of the step that begins at `position`.

        A function of the order alone: only lengths are read, and no rank is asked.
        """
        _, lengths = self.order.take_sized(position, size.global_batch_size)
        local_items = lengths[_rounds(lengths, self._steps.world_size)]
        return local_items.reshape(-1, size.micro_batch_size, self._steps.world_size).sum(axis=1, dtype=np.int64).T


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
    """One micro-batch of the rows `samples` int64 [B] of `split`, with latents standardized."""
    tokens, lengths, latents = split.gather(samples)
    return Batch(
        tokens=torch.from_numpy(tokens),
        latents=torch.from_numpy(split.manifest.latent.standardize(latents)),
        lengths=tuple(lengths.tolist()),
        sample_ids=torch.from_numpy(samples),
        slots=torch.from_numpy(slots),
    )


def deal(lengths: np.ndarray, micro_batch_size: int, rank: int, world_size: int) -> np.ndarray:
    """int64 [micro-batches, micro_batch_size]: the slots of `rank`, given the lengths [G] of a global batch.

    Samples sorted by length are dealt to the ranks like cards, each round in the direction opposite to
    the last, so that no rank always gets the longest; consecutive rounds make up a micro-batch.
    """
    return np.ascontiguousarray(_rounds(lengths, world_size)[:, rank]).reshape(-1, micro_batch_size)


def _rounds(lengths: np.ndarray, world_size: int) -> np.ndarray:
    """int64 [G / world_size, world_size]: the slots that each rank gets in each round of `deal`."""
    rounds = np.argsort(lengths, kind="stable").reshape(-1, world_size)
    rounds[1::2] = rounds[1::2, ::-1]
    return rounds


@dataclass(frozen=True)
class _Step:
    """All that a worker must know of a step."""

    position: int  # in the order, of its first sample
    size: BatchSize


class _Steps(Dataset):
    """From a step to its micro-batches.

    A `DataError` is given, not raised: torch would bury it in a traceback.
    """

    def __init__(self, split: Split, order: SampleOrder | MixedOrder, rank: int, world_size: int):
        self.split, self.order = split, order
        self.rank, self.world_size = rank, world_size

    def __getitem__(self, step: _Step) -> list[Batch] | DataError:
        try:
            samples, lengths = self.order.take_sized(step.position, step.size.global_batch_size)
            slots = deal(lengths, step.size.micro_batch_size, self.rank, self.world_size)
            return [collate(self.split, samples[micro_batch], micro_batch) for micro_batch in slots]
        except DataError as error:
            return error
        except OSError as error:
            return DataError(f"{error.filename or 'the data'}: cannot be read: {error}")


class _Asked:
    """A sampler of steps that may change between iterations, so that persistent workers can be used again."""

    def begin(self, start_step: int, stop_step: int, position: int, batch_at: Callable[[int], BatchSize]) -> None:
        self.steps, self.position, self.batch_at = range(start_step, stop_step), position, batch_at

    def __iter__(self) -> Iterator[_Step]:
        position = self.position
        for step in self.steps:
            size = self.batch_at(step)
            yield _Step(position, size)
            position += size.global_batch_size


def _as_is(batches: list[Batch] | DataError) -> list[Batch] | DataError:
    return batches


def _auto_workers(device_type: str) -> int:
    """None on CPU, where workers only take the cores of the model; else this rank's share of the cores, up to 8."""
    if device_type == "cpu":
        return 0
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, cpus // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
