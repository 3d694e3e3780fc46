"""Initial weights as a function of (seed, name of the parameter, place in it).

No rank needs a parameter of another one, or the whole of its own: each computes the elements it holds, and the bits are
the same under every engine, on every device and for every order of the parameters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mmldlm.checkpoint.tensors import TensorSource
from mmldlm.utils.random_stream import random_stream

_BLOCK = 2**20  # elements that one stream draws, at most


@dataclass(frozen=True)
class Normal:
    """A normal distribution, or a constant if `std` is 0. With several means, element i has the i-th."""

    std: float = 0.0
    mean: float | tuple[float, ...] = 0.0


class InitialWeights(TensorSource):
    """Initial values of parameters by name, float32 on the host, computed on access, whole or in part.

    Args:
        distributions: Distribution of each parameter's elements.
        shapes: Shape of each parameter.
        seed: `run.init_seed`, or else `run.seed`.
    """

    def __init__(self, distributions: Mapping[str, Normal], shapes: Mapping[str, torch.Size], seed: int):
        self._distributions, self._shapes, self._seed = distributions, shapes, seed

    def meta(self) -> dict[str, Tensor]:
        return {name: torch.empty(shape, device="meta") for name, shape in self._shapes.items()}

    def read(self, name: str, start: int, stop: int) -> Tensor:
        distribution = self._distributions[name]
        if isinstance(distribution.mean, tuple):
            return torch.tensor(distribution.mean[start:stop], device="cpu")
        if not distribution.std:
            return torch.full((stop - start,), distribution.mean, device="cpu")
        values = np.empty(stop - start, np.float32)
        # Of the names that exist, no two share a number; numpy takes numbers below 2**63.
        slot = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1
        for block in range(start // _BLOCK, -(-stop // _BLOCK)):
            begin, end = max(start, block * _BLOCK), min(stop, (block + 1) * _BLOCK)
            drawn = random_stream(self._seed, purpose=3, step=block, slot=slot).standard_normal(
                end - block * _BLOCK, dtype=np.float32
            )
            values[begin - start : end - start] = drawn[begin - block * _BLOCK :]
        return torch.from_numpy(values).mul_(distribution.std).add_(distribution.mean)

    def __getitem__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        return self.read(name, 0, shape.numel()).view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._distributions)

    def __len__(self) -> int:
        return len(self._distributions)
