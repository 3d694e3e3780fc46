"""All randomness of training: a function of (seed, step, place in the global batch), and of nothing else; and the same
for generation, where each sample has a stream of its own.

Rank, world size, micro-batches and loader workers do not enter, so a run resumes and re-partitions
exactly. A counter-based generator (Philox, SC 2011, "Parallel random numbers: as easy as 1, 2, 3") gives
each sample its own stream. Everything is drawn on the host: it is little, and the positions of masked
tokens are then known without waiting for a device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from mmldlm.batch import Batch
from mmldlm.diffusion.schedule import UNIFORM, LogLinear, TimeSampler, stratified_times

Mode = Literal["l2t", "t2l", "joint"]
MODES: tuple[Mode, ...] = ("l2t", "t2l", "joint")
ModeShares = Mode | dict[str, float]  # one mode, or the shares of several


@dataclass(frozen=True)
class Noise:
    """Of one micro-batch, on the host."""

    mode: Tensor  # int64 [B]: index into MODES
    t_text: Tensor  # float32 [B]
    t_latent: Tensor  # float32 [B]
    uniforms: Tensor  # float32 [N]: a token is masked where its number is below its sample's 1 - alpha(t_text)
    epsilon: Tensor  # float32 [B, M, C]
    importance: Tensor  # float32 [B]: one over the density that t_text was drawn with


def _philox(seed: int, purpose: int, step: int, slot: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=[seed, purpose], counter=[0, 0, slot, step]))


def mode_weights(mode: str | Mapping[str, float]) -> dict[Mode, float]:
    """Shares of the modes, summing to 1, from one mode's name or a map of weights; ValueError if neither."""
    weights = {mode: 1.0} if isinstance(mode, str) else dict(mode)
    unknown = set(weights) - set(MODES)
    if unknown:
        raise ValueError(f"unknown mode {sorted(unknown)[0]!r}, expected {', '.join(MODES)}")
    total = sum(weights.values())
    if any(weight < 0 for weight in weights.values()) or not 0 < total < float("inf"):
        raise ValueError(f"weights must be at least 0 and not all 0, found {weights}")
    return {name: weights.get(name, 0.0) / total for name in MODES}


def mode_stages(mode: ModeShares, mode_schedule: Mapping[int, ModeShares]) -> dict[int, dict[Mode, float]]:
    """The shares of the modes by the optimizer step that they begin at; in order, the first at step 0.

    Raises ValueError, naming the key, for a step below 0 and for what `mode_weights` refuses.
    """
    stages = {0: _weights_of("mode", mode)}
    for step in sorted(mode_schedule):
        if step < 0:
            raise ValueError(f"mode_schedule.{step}: expected an optimizer step, at least 0, found {step}")
        stages[step] = _weights_of(f"mode_schedule.{step}", mode_schedule[step])
    return stages


def _weights_of(key: str, mode: ModeShares) -> dict[Mode, float]:
    try:
        return mode_weights(mode)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def mode_weights_at(step: int, mode: ModeShares, mode_schedule: Mapping[int, ModeShares]) -> dict[Mode, float]:
    """Shares of the modes in optimizer step `step`, counted from 0."""
    stages = mode_stages(mode, mode_schedule)
    return stages[max(start for start in stages if start <= step)]


def trained_modes(mode: ModeShares, mode_schedule: Mapping[int, ModeShares]) -> tuple[Mode, ...]:
    """The modes that have a share at some step; `mode` itself counts only if no entry replaces it at step 0."""
    stages = mode_stages(mode, mode_schedule)
    return tuple(name for name in MODES if any(weights[name] for weights in stages.values()))


def draw_noise(
    batch: Batch,
    seed: int,
    step: int,
    global_batch_size: int,
    weights: Mapping[Mode, float],
    text: TimeSampler = UNIFORM,
    latent: TimeSampler = UNIFORM,
) -> Noise:
    """Modes, noise times, token uniforms and latent noise of the samples in `batch.slots`.

    Times and modes come from low-discrepancy grids over the global batch, each dealt in an order of its
    own, so that no two of them, nor a time and a length, go together; times that are not stratified are drawn
    one by one. l2t pins t_latent to 0, t2l t_text.
    """
    shared = _philox(seed, purpose=0, step=step)
    offsets = shared.random(3)
    local_items = [torch.from_numpy(shared.permutation(global_batch_size))[batch.slots] for _ in offsets]
    t_mode, u_text, u_latent = (
        stratified_times(float(offset), strata, global_batch_size)
        for offset, strata in zip(offsets, local_items, strict=True)
    )
    if not (text.stratified and latent.stratified):
        # After all else, so that they change nothing else.
        alone_text, alone_latent = torch.from_numpy(shared.random((2, global_batch_size)))[:, batch.slots]
        u_text, u_latent = u_text if text.stratified else alone_text, u_latent if latent.stratified else alone_latent
    shares = torch.tensor([weights[name] for name in MODES], dtype=torch.float64).cumsum(0)
    mode = torch.searchsorted(shares, t_mode, right=True).clamp_max(len(MODES) - 1)
    t_text = text.times(u_text).clamp_min(LogLinear.t_min).masked_fill(mode == MODES.index("t2l"), 0.0)
    t_latent = latent.times(u_latent).masked_fill(mode == MODES.index("l2t"), 0.0)
    uniforms, epsilon = sample_noise(batch, seed, step)
    return Noise(mode, t_text.float(), t_latent.float(), uniforms, epsilon, text.importance(u_text).float())


def sample_noise(batch: Batch, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Token uniforms [N] and latent noise [B, M, C]: each sample's own stream, whatever lies beside it."""
    uniforms, epsilon = [], []
    for slot, length in zip(batch.slots.tolist(), batch.lengths, strict=True):
        generator = _philox(seed, purpose=1, step=step, slot=slot)
        epsilon.append(generator.standard_normal(batch.latents.shape[1:], dtype=np.float32))
        uniforms.append(generator.random(length, dtype=np.float32))
    return torch.from_numpy(np.concatenate(uniforms)), torch.from_numpy(np.stack(epsilon))


class SampleStreams:
    """Random numbers of one generation: each sample's from its own stream, a function of (seed, kind, slot).

    So what is made of a sample does not depend on its company, its rank or the number of ranks.
    """

    def __init__(self, seed: int, kind: int, slots: Tensor):
        """`slots` int64 [B]; generations of another `kind` are drawn independently."""
        self._streams = [_philox(seed, purpose=2, step=kind, slot=slot) for slot in slots.tolist()]

    def normal(self, shape: Sequence[int]) -> Tensor:
        """float32 of `shape` [B, ...]."""
        return torch.from_numpy(np.stack([s.standard_normal(shape[1:], dtype=np.float32) for s in self._streams]))

    def uniform(self, shape: Sequence[int], dtype: torch.dtype, samples: Tensor) -> Tensor:
        """In [0, 1), of `shape` [rows, ...]; `samples` int64 [rows], rising: the sample that each row is of."""
        rows = torch.bincount(samples, minlength=len(self._streams)).tolist()
        drawn = [
            stream.random((count, *shape[1:]), dtype=np.float64 if dtype == torch.float64 else np.float32)
            for stream, count in zip(self._streams, rows, strict=True)
            if count
        ]
        return torch.from_numpy(np.concatenate(drawn)) if drawn else torch.empty(tuple(shape), dtype=dtype)


Randomness = torch.Generator | SampleStreams  # of a generation, on the host: the same on any device


def draw_normal(source: Randomness, shape: Sequence[int]) -> Tensor:
    """float32 of `shape` [B, ...], on the host."""
    return source.normal(shape) if isinstance(source, SampleStreams) else torch.randn(tuple(shape), generator=source)


def draw_uniform(source: Randomness, shape: Sequence[int], dtype: torch.dtype, samples: Tensor | None) -> Tensor:
    """In [0, 1), of `shape` [rows, ...], on the host; `samples` int64 [rows], rising: the sample of each row."""
    if isinstance(source, torch.Generator):
        return torch.rand(tuple(shape), generator=source, dtype=dtype)
    assert samples is not None, "a stream for each sample must know whose each row is"
    return source.uniform(shape, dtype, samples.cpu())
