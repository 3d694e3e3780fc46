"""`Corruption`: how the micro-batches of a step are noised, in the trainer or already in the workers of its loader."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from mmldlm.batch import Batch, PackedLayout
from mmldlm.diffusion.noise import ModeShares, TimeSampler, draw_noise, mode_weights_at
from mmldlm.diffusion.objective import ON_HOST, NoisedBatch, Objective
from mmldlm.utils.packed_tensors import PackedTensors

IGNORED = -100  # a target that `F.cross_entropy` ignores
OF_MASKED = ("positions", "targets", "token_weight", "trained_token_weight", "token_bin")  # have a row each


@dataclass(frozen=True)
class CorruptedBatch(Batch):
    """A micro-batch that the loader has corrupted already, for the step after `steps_done`."""

    steps_done: int
    noised: NoisedBatch

    def pin_memory(self) -> CorruptedBatch:
        """Return the micro-batch with its corrupted form, which goes to the device, in pinned memory."""
        return replace(self, noised=self.noised.pin_memory())

    def __reduce__(self) -> Any:
        # One buffer, since each tensor that a worker sends takes a file descriptor; the device's part comes first.
        own = {f"batch.{name}": getattr(self, name) for name in ("tokens", "latents", "slots")}
        on_host = {name: getattr(self.noised, name) for name in ON_HOST}
        packed = PackedTensors.pack({**self.noised.tensors(), **on_host, **own})
        return _received, (packed, self.lengths, self.noised.layout.lengths, self.steps_done)


def _received(packed: PackedTensors, lengths: tuple[int, ...], filled: tuple[int, ...], steps_done: int) -> Batch:
    """Return the micro-batch that a worker has sent."""
    *_, counts, sample_ids, tokens, latents, slots = packed.tensors().values()
    for_device = PackedTensors(packed.buffer[: packed.places["counts"].start], dict([*packed.places.items()][:-5]))
    layout = PackedLayout(filled, latents.shape[1], num_filler=len(filled) - len(lengths))
    noised = NoisedBatch.from_packed(for_device, layout, counts, sample_ids)
    return CorruptedBatch(tokens, latents, lengths, sample_ids, slots, steps_done, noised)


@dataclass(frozen=True)
class StaticSizes:
    """Sizes up to which the micro-batches of a step are filled, few, of samples of at most `max_length` tokens.

    Tokens and masked tokens are rounded up to multiples of 1/32 of the token budget, such as 1,024 of 32,768. Samples
    are those of the step's largest micro-batch, and as many more as its filler may need.
    """

    max_length: int

    def fill(self, noised: Sequence[NoisedBatch], micro_batch_tokens: int) -> list[NoisedBatch]:
        """Return a step's micro-batches, filled up with what no loss counts; the token budget is 0 for none."""
        multiple = max(128, round(micro_batch_tokens / 32 / 128) * 128) if micro_batch_tokens else 1024
        num_samples = max(len(batch.sample_ids) for batch in noised) - (1 - multiple) // self.max_length
        return [batch if batch.layout.num_filler else self._filled(batch, multiple, num_samples) for batch in noised]

    def _filled(self, batch: NoisedBatch, multiple: int, num_samples: int) -> NoisedBatch:
        layout, longest = batch.layout, self.max_length
        tokens, masked = -layout.num_tokens % multiple, -len(batch.positions) % multiple
        samples = num_samples - layout.num_samples
        # All tokens belong to samples, since kernels write no row behind the last one. The other samples have none.
        lengths = (min(longest, max(0, tokens - first)) for first in range(0, samples * longest, longest))
        layout = PackedLayout((*layout.lengths, *lengths), layout.latent_tokens, num_filler=samples)
        rows = {**dict.fromkeys(OF_MASKED, masked), **dict.fromkeys(ON_HOST, 0), "noised_tokens": tokens}
        values = {"positions": layout.num_tokens - 1, "t_text": 0.5, "t_latent": 0.5, "length_target": IGNORED}
        filled = {
            name: torch.cat([x, x.new_full((rows.get(name, samples), *x.shape[1:]), values.get(name, 0))])
            for name, x in vars(batch).items()
            if isinstance(x, Tensor)
        }
        return replace(batch, layout=layout, **filled)


class StepSizes(Protocol):
    """The batch sizes of a step that its corruption depends on, see `mmldlm.data.batch_schedule.BatchSize`."""

    @property
    def global_batch_size(self) -> int: ...

    @property
    def micro_batch_tokens(self) -> int: ...


@dataclass(frozen=True)
class Corruption:
    """All that decides about the noise of a step: it is a function of (seed, step, slot), and drawn on the host."""

    objective: Objective
    seed: int
    mode: ModeShares
    mode_schedule: Mapping[int, ModeShares]
    text_sampler: TimeSampler
    batch_at: Callable[[int], StepSizes]  # by the number of steps done before, as all of a step are found here
    sizes: StaticSizes | None = None  # up to which micro-batches are filled

    def __call__(self, steps_done: int, micro_batches: Sequence[Batch]) -> list[NoisedBatch]:
        """Return the micro-batches of a step noised; one that the loader has corrupted for this step as it is."""
        size, weights = self.batch_at(steps_done), mode_weights_at(steps_done, self.mode, self.mode_schedule)
        samplers = self.text_sampler, self.objective.latent.sampler
        noised = []
        for batch in micro_batches:
            if isinstance(batch, CorruptedBatch) and batch.steps_done == steps_done:
                noised.append(batch.noised)
            else:
                noise = draw_noise(batch, self.seed, steps_done, size.global_batch_size, weights, *samplers)
                noised.append(self.objective.corrupt(batch, noise))
        return noised if self.sizes is None else self.sizes.fill(noised, size.micro_batch_tokens)

    def in_loader(self, steps_done: int, micro_batches: Sequence[Batch]) -> list[Batch]:
        """Return the micro-batches of a step with their corrupted forms, see `Loader`."""
        return [
            CorruptedBatch(
                batch.tokens, batch.latents, batch.lengths, batch.sample_ids, batch.slots, steps_done, noised
            )
            for batch, noised in zip(micro_batches, self(steps_done, micro_batches), strict=True)
        ]
