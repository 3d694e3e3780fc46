"""Initial weights as a function of (seed, name of the parameter, place in the parameter).

Each rank computes the elements that it holds, and needs no other rank and no whole parameter. The bits are the same
under every engine, on every device and for every order of the parameters.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmldlm.checkpoint.tensors import TensorSource
from mmldlm.settings.declaration import setting
from mmldlm.utils.random_stream import random_stream
from mmldlm.utils.short_repr import short_repr

_BLOCK = 2**20  # one stream draws at most this many elements
_EMBEDDINGS = re.compile(r"(.+\.safetensors)(?::(.+))?")


@dataclass(frozen=True)
class InitConfig:
    """Trained weights from which a new run starts, in place of random weights. A run that resumes ignores them."""

    from_: str | None = setting(
        None,
        "run folder, checkpoint folder or bundle from which to take the weights: its EMA, if that run has one "
        "and evaluates by it. Optimizer, learning rate and data are new. null: random weights",
        advice="The network must have the same settings. Weights that depend on the data, e.g. on the tokenizer, are "
        "new if the data differ",
    )
    skip: list[str] = setting(
        factory=list,
        doc="weights to leave random: parts, as in `freeze`, or patterns of parameter names, e.g. `blocks.3.*`",
    )
    embeddings: str | None = setting(
        None,
        "FILE.safetensors or FILE.safetensors:TENSOR with token embeddings [vocabulary, model.width] of the data's "
        "tokenizer; null: none",
    )

    def __post_init__(self) -> None:
        if self.skip and not self.from_:
            raise ValueError(f"skip: {self.skip} does nothing without init.from, expected []")
        if self.embeddings and not _EMBEDDINGS.fullmatch(self.embeddings):
            raise ValueError(
                f"embeddings: expected FILE.safetensors or FILE.safetensors:TENSOR, found {short_repr(self.embeddings)}"
            )

    @property
    def embeddings_tensor(self) -> tuple[Path, str]:
        """File and tensor name from `embeddings`. The name may be empty."""
        match = _EMBEDDINGS.fullmatch(self.embeddings or "")
        assert match is not None
        return Path(match[1]), match[2] or ""


@dataclass(frozen=True)
class Normal:
    """A normal distribution, or a constant if `std` is 0. With several means, element i has mean i."""

    std: float = 0.0
    mean: float | tuple[float, ...] = 0.0


class Taken(NamedTuple):
    """Elements of a tensor to read from elsewhere: the first `elements` of tensor `key` of `source`."""

    source: TensorSource
    key: str
    elements: int


class InitialWeights(TensorSource):
    """Initial values of parameters by name, float32 on the host, computed on access, whole or in part."""

    def __init__(self, distributions: Mapping[str, Normal], shapes: Mapping[str, torch.Size], seed: int):
        self._distributions, self._shapes, self._seed = distributions, shapes, seed
        self._taken: Mapping[str, Taken] = {}

    def replaced(self, taken: Mapping[str, Taken]) -> InitialWeights:
        """Return these weights, with some elements taken from other tensors."""
        weights = InitialWeights(self._distributions, self._shapes, self._seed)
        weights._taken = taken
        return weights

    def meta(self) -> dict[str, Tensor]:
        return {name: torch.empty(shape, device="meta") for name, shape in self._shapes.items()}

    def read(self, name: str, start: int, stop: int) -> Tensor:
        if name in self._taken and start < self._taken[name].elements:
            source, key, count = self._taken[name]
            first = source.read(key, start, min(stop, count)).float()
            return first if stop <= count else torch.cat([first, self._draw(name, count, stop)])
        return self._draw(name, start, stop)

    def _draw(self, name: str, start: int, stop: int) -> Tensor:
        distribution = self._distributions[name]
        if isinstance(distribution.mean, tuple):
            return torch.tensor(distribution.mean[start:stop], device="cpu")
        if not distribution.std:
            return torch.full((stop - start,), distribution.mean, device="cpu")
        values = np.empty(stop - start, np.float32)
        # No two parameter names share a number. numpy takes numbers below 2**63.
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
