"""`Corruption` noises the micro-batches of a step, either in the trainer or earlier, in the loader's workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmldlm.batch import Batch, BatchSize, PackedLayout
from mmldlm.diffusion.noise import ModeShares, TimeSampler, draw_noise, mode_weights_at
from mmldlm.diffusion.objective import ON_HOST, NoisedBatch, Objective

IGNORED = -100  # a target that `F.cross_entropy` ignores
OF_MASKED = ("positions", "targets", "token_weight", "trained_token_weight", "token_bin")  # a row per masked token


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

    def __call__(self, steps_done: int, micro_batches: Sequence[Batch | NoisedBatch]) -> list[NoisedBatch]:
        """Noise the micro-batches of a step, except those that the loader has already noised."""
        size, weights = self.batch_at(steps_done), mode_weights_at(steps_done, self.mode, self.mode_schedule)
        samplers = self.text_sampler, self.objective.latent.sampler
        noised = []
        for batch in micro_batches:
            if isinstance(batch, Batch):
                noise = draw_noise(batch, self.seed, steps_done, size.global_batch_size, weights, *samplers)
                batch = self.objective.corrupt(batch, noise)
            noised.append(batch)
        return noised if self.sizes is None else self.sizes.fill(noised, size.micro_batch_tokens)
