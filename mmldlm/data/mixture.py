"""Mixtures: several compatible stores opened as one, each with its share of the samples.

Shape letters: K stores, C latent channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.data.manifest import LatentInfo, Manifest, SplitInfo
from mmldlm.data.sampler import count_draws
from mmldlm.data.store import Source, Split, Store
from mmldlm.errors import DataError
from mmldlm.utils.short_repr import short_repr


def open_data(location: str | Path | Mapping[str, float]) -> Store:
    """Open the store at a path, or the stores of `data.mixture` (proportions by path) as one.

    The stores are ordered by share, largest first, and then by content, so the index of a sample does not depend on
    their paths or on the order in the config. It is a `DataError` if the stores are incompatible.
    """
    if not isinstance(location, Mapping):
        return Store.open(location)
    weights = dict(location)
    if len(weights) == 1:
        return Store.open(*weights)
    exact = {path: Fraction(str(weight)) for path, weight in weights.items()}  # via str, so that 0.1 is exactly 1/10
    names = [Path(path).name for path in weights]
    sources = [
        # Records and curves call a store by the name of its folder, or by its path if two folders have that name.
        replace(
            Store.open(path, name if names.count(name) == 1 else path).sources[0],
            share=exact[path] / sum(exact.values()),
        )
        for path, name in zip(weights, names, strict=True)
    ]
    sources.sort(key=lambda source: (-source.share, source.identity))
    for source in sources[1:]:
        _check_compatible(sources[0], source)
    return Store(_pooled_manifest(sources), sources, partial(open_data, weights))


def samples_per_source(count: int, split: Split) -> list[int]:
    """Divide `count` samples of a split among its sources by their shares."""
    return count_draws(count, [source.share for source in split.sources])


def _check_compatible(first: Source, other: Source) -> None:
    if first.identity == other.identity:
        raise DataError(f"data.mixture: {first.path} and {other.path} are the same store, expected different ones")
    expected, actual = _shared_properties(first.manifest), _shared_properties(other.manifest)
    for key, value in expected.items():
        if value != actual.get(key):
            raise DataError(
                f"data.mixture: {first.path} and {other.path} are incompatible: {key} is {short_repr(value)} and "
                f"{short_repr(actual.get(key))}, expected the same"
            )


def _shared_properties(manifest: Manifest) -> dict[str, Any]:
    """Return the properties that must be equal in all stores of a mixture."""
    return {
        "vocab_size": manifest.vocab_size,
        "mask_id": manifest.mask_id,
        "pad_id": manifest.pad_id,
        "tokenizer": manifest.tokenizer["sha256"],
        "latent shape": [manifest.latent.tokens, manifest.latent.channels],
        # Key by key for a precise message. The whole dict also finds keys that only the other store has.
        **{f"encoder {key}": value for key, value in sorted(manifest.encoder.items())},
        "encoder": manifest.encoder,
        "splits": list(manifest.splits),
    }


def _pooled_manifest(sources: Sequence[Source]) -> Manifest:
    """Return a manifest of the mixture, with summed counts, the largest length and pooled latent statistics."""
    manifests = [source.manifest for source in sources]
    splits = {}
    for name in manifests[0].splits:
        totals = [manifest.splits[name] for manifest in manifests]
        sums = {key: sum(getattr(total, key) for total in totals) for key in ("samples", "tokens", "characters")}
        splits[name] = SplitInfo(**sums, shards=())
    max_length = max(manifest.max_length for manifest in manifests)
    latent = pooled_latents([(source.manifest.latent, float(source.share)) for source in sources])
    tokenizer = {key: value for manifest in reversed(manifests) for key, value in manifest.tokenizer.items()}
    return replace(manifests[0], max_length=max_length, latent=latent, tokenizer=tokenizer, splits=splits, files={})


def pooled_latents(parts: Sequence[tuple[LatentInfo, float]]) -> LatentInfo:
    """Return the latent statistics of a mixture of `parts`, given with their shares, which sum to 1.

    By the law of total variance, averaged over channels, the pooled mean square is the mean of the parts' mean squares
    plus the mean squared distance of their means from the pooled mean. `max_norm` is a bound: the norm of a centered
    latent is at most the largest norm in its part plus the distance of the part's mean.
    """
    means = np.array([latent.mean for latent, _ in parts])  # [K, C]
    shares = np.array([share for _, share in parts])
    rms = np.array([latent.rms for latent, _ in parts])
    mean = shares @ means
    distances = np.square(means - mean)  # squared, [K, C]
    # Within-part variance plus variance of the means, as `rms` averages over channels.
    pooled = float(np.sqrt(shares @ (np.square(rms) + distances.mean(axis=1))))
    max_norms = np.array([latent.max_norm for latent, _ in parts]) * rms + np.sqrt(distances.sum(axis=1))
    return replace(parts[0][0], mean=tuple(mean.tolist()), rms=pooled, max_norm=float(max_norms.max()) / pooled)
