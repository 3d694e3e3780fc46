"""Randomness of training and generation, with a separate random stream for each sample.

In training the random numbers are a function of (seed, step, slot in the global batch). They do not depend on rank,
world size, micro-batches or loader workers, so a run resumes and re-partitions exactly. We draw everything on the host:
it is little data, and the host then knows the positions of masked tokens without waiting for a device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from mmldlm.batch import Batch
from mmldlm.diffusion.noise_schedule import UNIFORM, UNIFORM_TEXT, TimeSampler, stratified_times
from mmldlm.utils.random_stream import random_stream, random_streams

Mode = Literal["l2t", "t2l", "joint"]
MODES: tuple[Mode, ...] = ("l2t", "t2l", "joint")
ModeShares = Mode | dict[str, float]  # a mode, or several with their weights


@dataclass(frozen=True)
class Noise:
    """Modes, noise times and noise of one micro-batch, on the host."""

    mode: Tensor  # int64 [B]: index into MODES
    t_text: Tensor  # float32 [B]
    t_latent: Tensor  # float32 [B]
    uniforms: Tensor  # float32 [N]: a token is masked if its number is below its sample's 1 - alpha(t_text)
    epsilon: Tensor  # float32 [B, M, C]
    importance: Tensor  # float32 [B]: 1 / density of t_text


def mode_weights(mode: str | Mapping[str, float]) -> dict[Mode, float]:
    """Return each mode's probability, from a mode's name or weights by mode. Raise `ValueError` if they are invalid."""
    weights = {mode: 1.0} if isinstance(mode, str) else dict(mode)
    unknown = set(weights) - set(MODES)
    if unknown:
        raise ValueError(f"unknown mode {sorted(unknown)[0]!r}, expected {', '.join(MODES)}")
    total = sum(weights.values())
    if any(weight < 0 for weight in weights.values()) or not 0 < total < float("inf"):
        raise ValueError(f"weights must be at least 0 and not all 0, found {weights}")
    return {name: weights.get(name, 0.0) / total for name in MODES}


def mode_stages(mode: ModeShares, mode_schedule: Mapping[int, ModeShares]) -> dict[int, dict[Mode, float]]:
    """Return the mode probabilities by the step from which they apply, in ascending order. The first step is 0.

    Raises:
        ValueError: A step is below 0, a mode is unknown, or weights are invalid. The message names the key.
    """
    stages: dict[int, dict[Mode, float]] = {}
    scheduled = ((f"mode_schedule.{step}", step, mode_schedule[step]) for step in sorted(mode_schedule))
    for key, step, shares in [("mode", 0, mode), *scheduled]:
        if step < 0:
            raise ValueError(f"{key}: expected an optimizer step, at least 0, found {step}")
        try:
            stages[step] = mode_weights(shares)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None
    return stages


def mode_weights_at(step: int, mode: ModeShares, mode_schedule: Mapping[int, ModeShares]) -> dict[Mode, float]:
    """Return the mode probabilities of optimizer step `step`, counted from 0."""
    stages = mode_stages(mode, mode_schedule)
    return stages[max(start for start in stages if start <= step)]


def trained_modes(mode: ModeShares, mode_schedule: Mapping[int, ModeShares]) -> tuple[Mode, ...]:
    """Return the modes with a probability above 0 at some step. An entry for step 0 replaces `mode`."""
    stages = mode_stages(mode, mode_schedule)
    return tuple(name for name in MODES if any(weights[name] for weights in stages.values()))


def draw_noise(
    batch: Batch,
    seed: int,
    step: int,
    global_batch_size: int,
    weights: Mapping[Mode, float],
    text: TimeSampler = UNIFORM_TEXT,
    latent: TimeSampler = UNIFORM,
) -> Noise:
    """Draw modes, noise times, token uniforms and latent noise of the samples in `batch.slots`.

    Modes and times come from low-discrepancy grids over the global batch. A random permutation for each grid assigns
    its points to slots, so that modes, times and text lengths are uncorrelated. Times that are not stratified are drawn
    independently. l2t pins t_latent to 0, t2l pins t_text to 0. `text` and `latent` are the distributions of t_text and
    t_latent, except for the share of joint's samples whose t_latent is 1.
    """
    # Every rank draws the grids of the whole global batch and takes the entries of its slots.
    shared = random_stream(seed, purpose=0, step=step)
    offsets = shared.random(3)
    places = batch.slots % global_batch_size  # changes no slot of training: they are below the global batch size
    local_strata = [torch.from_numpy(shared.permutation(global_batch_size))[places] for _ in offsets]
    t_mode, u_text, u_latent = (
        stratified_times(float(offset), strata, global_batch_size)
        for offset, strata in zip(offsets, local_strata, strict=True)
    )
    if not (text.stratified and latent.stratified):
        # We draw these numbers last from the shared stream, so that `stratified` changes no other number.
        free_text, free_latent = torch.from_numpy(shared.random((2, global_batch_size)))[:, places]
        u_text, u_latent = u_text if text.stratified else free_text, u_latent if latent.stratified else free_latent
    cumulative = torch.tensor([weights[name] for name in MODES], dtype=torch.float64).cumsum(0)
    # right=True: a mode with weight 0 has an empty interval, and no number falls into it.
    mode = torch.searchsorted(cumulative, t_mode, right=True).clamp_max(len(MODES) - 1)
    # A given text has t = 0 exactly, so that no token is masked.
    t_text = text.times(u_text).masked_fill(mode == MODES.index("t2l"), 0.0)
    t_latent = latent.times(u_latent).masked_fill(mode == MODES.index("l2t"), 0.0)
    # The grid of the modes also decides which samples of joint have noise in place of a latent.
    is_joint, in_joint = mode == MODES.index("joint"), t_mode - cumulative[-2]
    t_latent = t_latent.masked_fill(is_joint & (in_joint < latent.pure_noise * weights["joint"]), 1.0)
    uniforms, epsilon = sample_noise(batch, seed, step)
    return Noise(mode, t_text.float(), t_latent.float(), uniforms, epsilon, text.importance(u_text).float())


def sample_noise(batch: Batch, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Draw token uniforms [N] and latent noise [B, M, C] from each sample's stream, independent of other samples."""
    uniforms = np.empty(sum(batch.lengths), np.float32)
    epsilon = np.empty(tuple(batch.latents.shape), np.float32)
    start = 0
    streams = random_streams(seed, purpose=1, step=step, slots=batch.slots.tolist())
    for sample, (stream, length) in enumerate(zip(streams, batch.lengths, strict=True)):
        stream.standard_normal(dtype=np.float32, out=epsilon[sample])
        stream.random(dtype=np.float32, out=uniforms[start : start + length])
        start += length
    return torch.from_numpy(uniforms), torch.from_numpy(epsilon)


class SampleStreams:
    """Random numbers of one generation, from one stream per sample: a function of (seed, kind, slot).

    A sample's result depends on neither its batch nor the ranks. Generations of different kinds are independent.
    """

    def __init__(self, seed: int, kind: int, slots: Tensor):
        self._key = seed, kind, slots
        self._streams = [random_stream(seed, purpose=2, step=kind, slot=slot) for slot in slots.tolist()]

    def repeat(self, times: int) -> SampleStreams:
        """Return `times` streams for each sample, with the streams of one sample next to each other."""
        seed, kind, slots = self._key
        return SampleStreams(seed, kind, (slots[:, None] * times + torch.arange(times)).flatten())

    def take(self, rows: Sequence[int]) -> SampleStreams:
        """Return the streams of some samples. Both objects share them, so a draw from one advances the other."""
        seed, kind, slots = self._key
        taken = SampleStreams(seed, kind, slots[:0])
        taken._key, taken._streams = (seed, kind, slots[list(rows)]), [self._streams[row] for row in rows]
        return taken

    def normal(self, shape: Sequence[int]) -> Tensor:
        """Return standard normal numbers, float32 of `shape` [B, ...]."""
        return torch.from_numpy(np.stack([s.standard_normal(shape[1:], dtype=np.float32) for s in self._streams]))

    def uniform(self, steps: int, lengths: Sequence[int]) -> Tensor:
        """Return numbers in [0, 1), float64 [steps, N], for N tokens of samples of the given lengths."""
        parts = [stream.random((steps, length)) for stream, length in zip(self._streams, lengths, strict=True)]
        return torch.from_numpy(np.concatenate(parts, axis=1))


RandomSource = torch.Generator | SampleStreams  # on the host, so that a generation is the same for any device


def draw_normal(source: RandomSource, shape: Sequence[int]) -> Tensor:
    """Return standard normal numbers, float32 of `shape` [B, ...], on the host."""
    return source.normal(shape) if isinstance(source, SampleStreams) else torch.randn(tuple(shape), generator=source)


def draw_uniform(source: RandomSource, steps: int, lengths: Sequence[int]) -> Tensor:
    """Return numbers in [0, 1), float64 [steps, N] on the host, for N tokens of samples of the given lengths."""
    if isinstance(source, SampleStreams):
        return source.uniform(steps, lengths)
    return torch.rand(steps, sum(lengths), generator=source, dtype=torch.float64)
