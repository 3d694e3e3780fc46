"""`Loader`: this rank's micro-batches of every optimizer step, as a pure function of (seed, step).

Shape letters: G samples of a global batch, B samples of a micro-batch, N tokens of a micro-batch, M latent tokens of a
sample, C latent channels.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from mmldlm.batch import Batch, BatchSize
from mmldlm.data.batch_schedule import deal, largest_micro_batches, largest_possible
from mmldlm.data.sampler import make_sample_order
from mmldlm.data.store import Split, Store
from mmldlm.data.workers import ignore_signals_in_worker, read_batches
from mmldlm.errors import ConfigError, DataError
from mmldlm.settings.declaration import setting
from mmldlm.utils.short_repr import display_name

Corrupt = Callable[[int, Sequence[Batch]], list[Any]]

SEARCHED_SAMPLES = 1 << 16  # looked at together by `largest_step`


@dataclass(frozen=True)
class DataConfig:
    """The `data` section of a run config."""

    path: str = setting("", "folder of the store that `mmldlm prepare` wrote; or set `mixture`")
    mixture: dict[str, float] = setting(
        factory=dict,
        doc="folders of several stores instead of `path`, each with its proportion of the samples, for example "
        "{data/own: 7, data/web: 3}. They need the same tokenizer, encoder and latent shape",
    )
    num_workers: int | None = setting(
        None,
        "loader processes per rank; null: 0 on CPU, else min(8, CPUs / processes on the machine)",
        at_least=0,
        advice="Raise it if speed/data_wait_s is not near 0; 0 helps to debug errors in loading",
    )
    prefetch_factor: int = setting(4, "steps that each worker reads ahead", at_least=1)
    persistent_workers: bool = setting(True, "keep workers alive when reading restarts at another step")
    pin_memory: bool = setting(True, "copy batches to the GPU from page-locked memory")
    window: int = setting(
        4096,
        "sort this many samples by length at a time: larger windows balance work better, smaller ones are more random",
        at_least=1,
        advice="Lower it for a small store, where samples of similar length would meet again in every epoch",
    )
    verify: Literal["full", "sizes"] = setting(
        "full",
        "checks at start. full: hash all files and check all samples, shared by the ranks; sizes: file sizes only",
        advice="sizes if a large store on a slow disk is opened often and was verified once",
    )
    max_bad_samples: int = setting(
        0, "leave out up to this many bad samples (unknown token, non-finite latent); more refuse the run", at_least=0
    )
    skip_samples: list[str] = setting(
        factory=list,
        doc="training samples to leave out, as STORE:INDEX, for example [own:17] for sample 17 of data/own. The next "
        "sample of the store takes the place of each, and all others keep their place, times, masks and noise",
        advice="Samples that `mmldlm explain` names. `mmldlm rewind` adds to them",
    )
    worker_timeout_s: float = setting(300.0, "seconds to wait for a step from the workers before the run ends", above=0)

    def __post_init__(self) -> None:
        if self.path and self.mixture:
            raise ValueError(
                f"mixture: expected this or data.path, found both (data.path is {display_name(self.path)})"
            )
        for path, weight in self.mixture.items():
            if not weight > 0:
                raise ValueError(f"mixture.{display_name(path)}: must be above 0, found {weight:g}")
        if self.max_bad_samples and self.verify != "full":
            raise ValueError(f"max_bad_samples: {self.max_bad_samples} needs data.verify: full, found {self.verify}")

    @property
    def location(self) -> str | dict[str, float]:
        """Path or mixture, the argument of `open_data`."""
        return self.mixture or self.path


class Loader:
    """Micro-batches of one rank.

    The samples of a step are `order.take(position, G)`, and a sample's position in that array is its slot, whatever the
    number of ranks and workers. Each step advances the position by its own G. `deal` assigns slots to ranks and
    micro-batches by the lengths of all samples of the step, which every rank knows.
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
        corrupt: Corrupt | None = None,
    ):
        """Create a loader.

        Args:
            seed: Key of the sample order.
            batch_at: Returns the batch sizes of a step, which `TrainConfig.check_batches` accepts.
            device_type: Decides about the default number of workers and pinned memory.
            corrupt: Returns a step's micro-batches in their corrupted form, given the number of steps done before. The
                loader calls it if it has workers, or if batches go to a GPU. A CPU run without workers would gain
                nothing, so there `steps` yields each micro-batch as a `Batch`.
        """
        assert 0 <= rank < world_size
        self.batch_at = batch_at
        self._check_files = store.check_files
        self.num_workers = _auto_workers(device_type) if config.num_workers is None else config.num_workers
        in_loader = self.num_workers > 0 or device_type == "cuda"
        self._sampler = _StepSampler()
        self._dataset = _StepDataset(store.split(split), config, seed, rank, world_size, corrupt if in_loader else None)
        self.order = self._dataset.order
        self._loader = DataLoader(
            self._dataset,
            sampler=self._sampler,
            # One item of the sampler is a whole step, so torch must not batch.
            batch_size=None,
            num_workers=self.num_workers,
            worker_init_fn=ignore_signals_in_worker,
            pin_memory=config.pin_memory and device_type == "cuda",
            prefetch_factor=config.prefetch_factor if self.num_workers else None,
            persistent_workers=config.persistent_workers and self.num_workers > 0,
            timeout=config.worker_timeout_s if self.num_workers else 0,
        )

    def steps(
        self, start_step: int, stop_step: int, start_sample: int | None = None
    ) -> Iterator[tuple[int, list[Any]]]:
        """Yield (step, this rank's micro-batches) for steps [start_step, stop_step), counted from 0.

        Only one such iterator can be active: the next call ends it and keeps the workers. `start_sample` is the
        position of the first step in the sample order, by default as if all earlier steps had these batch sizes.

        Raises:
            DataError: A sample is malformed, or a worker died, hung or raised. All workers are killed first.
        """
        if start_sample is None:
            start_sample = sum(self.batch_at(step).global_batch_size for step in range(start_step))
        self._sampler.begin(start_step, stop_step, start_sample, self.batch_at)
        batches_of_steps = read_batches(self._loader, self._check_files)
        for step in range(start_step, stop_step):
            try:
                batches = next(batches_of_steps)
            except DataError as error:
                # The workers know a position, not the step.
                raise DataError(f"step {step}: {error}") from error
            yield step, batches

    def read(self, position: int, size: BatchSize, rank: int) -> list[Batch]:
        """Read one rank's micro-batches of the step at `position` in this process, without corruption."""
        return self._dataset.read(position, size, rank)

    def read_slots(self, position: int, size: BatchSize, slots: np.ndarray) -> list[Batch]:
        """Read some slots of the step at `position` in micro-batches, without corruption."""
        samples, _ = self._dataset.take(position, size.global_batch_size)
        parts = np.array_split(slots, -(-len(slots) // size.micro_batch_size))
        return [collate(self._dataset.split, samples[part], part, weighted=True) for part in parts]

    def micro_batch_tokens(self, position: int, size: BatchSize) -> np.ndarray:
        """Return the text and latent tokens of all ranks' micro-batches of a step, int64 [world_size, micro-batches].

        This reads only lengths, and needs no communication since every rank knows the sample order.
        """
        dataset = self._dataset
        _, lengths = dataset.take(position, size.global_batch_size)
        tokens = lengths.astype(np.int64) + dataset.latent_tokens
        slots_of_micro_batches = deal(lengths, size, dataset.world_size, dataset.latent_tokens)
        return np.stack([tokens[slots].sum(axis=0) for slots in slots_of_micro_batches], axis=1)

    def largest_step(self, steps: range, position: int, size: BatchSize) -> tuple[int, int]:
        """Find the largest micro-batch of any rank: return its text and latent tokens, and the first step that has it.

        The first step begins at `position`, and all `steps` have the batch sizes `size`. The search takes some
        microseconds per sample. It ends early at a micro-batch that cannot be exceeded.
        """
        dataset, samples = self._dataset, size.global_batch_size
        most = largest_possible(dataset.split.manifest.max_length + dataset.latent_tokens, size)
        largest, largest_step = 0, steps.start
        at_once = max(1, SEARCHED_SAMPLES // samples)
        for first in range(0, len(steps), at_once):
            count = min(at_once, len(steps) - first)
            _, lengths = dataset.take(position + first * samples, count * samples)
            tokens = lengths.reshape(count, samples).astype(np.int64) + dataset.latent_tokens
            by_step = largest_micro_batches(tokens, size, dataset.world_size)
            if by_step.max() > largest:
                largest, largest_step = int(by_step.max()), steps[first + int(by_step.argmax())]
            if largest == most:
                break
        return largest, largest_step


def fixed_batches(split: Split, indices: Sequence[int] | np.ndarray, micro_batch_size: int) -> Iterator[Batch]:
    """Yield the samples `indices` in order of length, in micro-batches of at most `micro_batch_size`.

    Slots are positions in `indices`, so a sample's noise does not depend on the other samples of its micro-batch.
    """
    samples = np.asarray(indices, np.int64)
    # Stable: equal lengths keep their order, so that micro-batches are the same on every platform.
    by_length = np.argsort(split.lengths[samples], kind="stable")
    for start in range(0, len(samples), micro_batch_size):
        slots = by_length[start : start + micro_batch_size]
        yield collate(split, samples[slots], slots)


def collate(split: Split, samples: np.ndarray, slots: np.ndarray, weighted: bool = False) -> Batch:
    """Read the samples with indices `samples`, int64 [B], into a micro-batch with standardized latents.

    Only training is `weighted`, if samples have weights.
    """
    tokens, lengths, latents = split.gather(samples)
    weights = split.weights(samples) if weighted else None
    return Batch(
        tokens=torch.from_numpy(tokens),
        latents=torch.from_numpy(split.manifest.latent.standardize(latents)),
        lengths=tuple(lengths.tolist()),
        sample_ids=torch.from_numpy(samples),
        slots=torch.from_numpy(slots),
        weights=None if weights is None else torch.from_numpy(weights),
    )


class _StepSampler:
    """Sampler of steps. The range of steps may change between iterations, so that persistent workers can be reused.

    An item is a step, the position of its first sample in the order, and its batch sizes.
    """

    def begin(self, start_step: int, stop_step: int, position: int, batch_at: Callable[[int], BatchSize]) -> None:
        self.steps, self.position, self.batch_at = range(start_step, stop_step), position, batch_at

    def __iter__(self) -> Iterator[tuple[int, int, BatchSize]]:
        position = self.position
        for step in self.steps:
            size = self.batch_at(step)
            yield step, position, size
            position += size.global_batch_size


class _StepDataset(Dataset):
    """Maps a step to this rank's micro-batches, or to a `DataError`, which torch would wrap in a traceback."""

    def __init__(
        self, split: Split, config: DataConfig, seed: int, rank: int, world_size: int, corrupt: Corrupt | None
    ):
        self.split, self.rank, self.world_size, self.corrupt = split, rank, world_size, corrupt
        self.order = make_sample_order(split, seed, config.window)
        self.latent_tokens = split.manifest.latent.tokens
        self._stand_ins = _stand_ins(split, config.skip_samples)

    def take(self, position: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return indices and lengths of `count` samples of the order, with a stand-in for each skipped sample."""
        samples, lengths = self.order.take_with_lengths(position, count)
        if self._stand_ins:
            places = np.flatnonzero(np.isin(samples, list(self._stand_ins)))
            samples[places] = [self._stand_ins[sample] for sample in samples[places].tolist()]
            lengths[places] = self.split.lengths[samples[places]]
        return samples, lengths

    def __getitem__(self, item: tuple[int, int, BatchSize]) -> list[Any] | DataError:
        step, position, size = item
        try:
            batches = self.read(position, size, self.rank)
        except DataError as error:
            return error
        return self.corrupt(step, batches) if self.corrupt else batches

    def read(self, position: int, size: BatchSize, rank: int) -> list[Batch]:
        try:
            samples, lengths = self.take(position, size.global_batch_size)
            micro_batches = deal(lengths, size, self.world_size, self.latent_tokens)
            slots_of_rank = [np.ascontiguousarray(slots[:, rank]) for slots in micro_batches]
            return [collate(self.split, samples[slots], slots, weighted=True) for slots in slots_of_rank]
        except OSError as error:
            raise DataError(f"{error.filename or 'the data'}: cannot be read: {error}") from None


def _stand_ins(split: Split, left_out: Sequence[str]) -> dict[int, int]:
    """Map each skipped sample to its replacement, the next sample of the same store, or raise `ConfigError`."""
    indices = [split.index_of(name) for name in left_out]
    absent, stand_ins = {*indices, *split.skipped.tolist()}, {}
    for index in indices:
        first, stop = next((first, stop) for _, first, stop in split.source_ranges() if first <= index < stop)
        others = (other for other in (*range(index + 1, stop), *range(first, index)) if other not in absent)
        if (stand_in := next(others, None)) is None:
            raise ConfigError(f"data.skip_samples: no sample is left in the store of {split.sample_name(index)}")
        stand_ins[index] = stand_in
    return stand_ins


def _auto_workers(device_type: str) -> int:
    """Return 0 on CPU, where workers would take cores from the model, else this rank's share of the cores, up to 8."""
    if device_type == "cpu":
        return 0
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, cpus // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
