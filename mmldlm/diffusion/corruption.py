"""`Corruption` noises the micro-batches of a step, either in the trainer or earlier, in the loader's workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from mmldlm.batch import Batch, BatchSize, PackedLayout
from mmldlm.diffusion.noise import ModeShares, TimeSampler, draw_noise, mode_weights_at
from mmldlm.diffusion.objective import ON_HOST, NoisedBatch, Objective
from mmldlm.utils.packed_tensors import PackedTensors

IGNORED = -100  # a target that `F.cross_entropy` ignores
OF_MASKED = ("positions", "targets", "token_weight", "trained_token_weight", "token_bin")  # a row per masked token


@dataclass(frozen=True)
class CorruptedBatch(Batch):
    """A micro-batch that the loader has already corrupted, for the step that follows `steps_done` steps."""

    steps_done: int
    noised: NoisedBatch

    def pin_memory(self) -> CorruptedBatch:
        """Return the micro-batch with its corrupted form in pinned memory, ready to go to the device."""
        return replace(self, noised=self.noised.pin_memory())

    def __reduce__(self) -> Any:
        # One buffer, because each tensor that a worker sends takes a file descriptor. The device's part is first.
        names = ("tokens", "latents", "slots", "weights")
        own = {f"batch.{name}": x for name in names if (x := getattr(self, name)) is not None}
        on_host = {name: getattr(self.noised, name) for name in ON_HOST}
        packed = PackedTensors.pack({**self.noised.tensors(), **on_host, **own})
        return _received, (packed, self.lengths, self.noised.layout.lengths, self.steps_done)


def _received(packed: PackedTensors, lengths: tuple[int, ...], filled: tuple[int, ...], steps_done: int) -> Batch:
    """Rebuild a micro-batch that a worker has sent."""
    tensors, stop = packed.tensors(), packed.places["counts"].start
    own: Any = {name[len("batch.") :]: x for name, x in tensors.items() if name.startswith("batch.")}
    own |= {"lengths": lengths, "sample_ids": tensors["sample_ids"], "steps_done": steps_done}
    places = {name: place for name, place in packed.places.items() if place.start < stop}
    layout = PackedLayout(filled, own["latents"].shape[1], num_filler=len(filled) - len(lengths))
    on_device = PackedTensors(packed.buffer[:stop], places)
    noised = NoisedBatch.from_packed(on_device, layout, tensors["counts"], tensors["sample_ids"])
    return CorruptedBatch(**own, noised=noised)


@dataclass(frozen=True)
class StaticSizes:
    """Fills micro-batches up to few sizes, so that one CUDA graph fits many of them.

    Tokens and masked tokens are rounded up to multiples of 1/32 of the token budget, e.g. 1,024 of 32,768. Every
    micro-batch gets as many samples as the largest one of the step, plus the samples that the filler may need.
    """

    max_length: int  # tokens of the longest sample

    def fill(self, noised: Sequence[NoisedBatch], micro_batch_tokens: int) -> list[NoisedBatch]:
        """Return the micro-batches of a step, filled up with rows that no loss counts. A budget of 0 means none."""
        multiple = max(128, round(micro_batch_tokens / 32 / 128) * 128) if micro_batch_tokens else 1024
        num_samples = max(len(batch.sample_ids) for batch in noised) - (1 - multiple) // self.max_length
        return [batch if batch.layout.num_filler else self._filled(batch, multiple, num_samples) for batch in noised]

    def _filled(self, batch: NoisedBatch, multiple: int, num_samples: int) -> NoisedBatch:
        layout, longest = batch.layout, self.max_length
        tokens, masked = -layout.num_tokens % multiple, -len(batch.positions) % multiple
        samples = num_samples - layout.num_samples
        # Filler tokens belong to filler samples, because kernels write no row after the last sample. Some are empty.
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


@dataclass(frozen=True)
class Corruption:
    """Noises the micro-batches of a step on the host. The noise is a function of (seed, step, slot) alone."""

    objective: Objective
    seed: int
    mode: ModeShares
    mode_schedule: Mapping[int, ModeShares]
    text_sampler: TimeSampler
    batch_at: Callable[[int], BatchSize]  # given the number of steps done
    sizes: StaticSizes | None = None  # fills micro-batches up

    def __call__(self, steps_done: int, micro_batches: Sequence[Batch]) -> list[NoisedBatch]:
        """Noise the micro-batches of a step, except those that the loader has already corrupted for this step."""
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
        """Return the micro-batches of a step together with their noised form, for `Loader`."""
        return [
            CorruptedBatch(
                **{item.name: getattr(batch, item.name) for item in fields(Batch)}, steps_done=steps_done, noised=noised
            )
            for batch, noised in zip(micro_batches, self(steps_done, micro_batches), strict=True)
        ]
