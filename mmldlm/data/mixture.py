"""Several stores as one, drawn from by their shares: whether they fit together, and what then holds for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.data.manifest import LatentInfo, Manifest, SplitInfo
from mmldlm.data.sampler import MixedOrder, Part, SampleOrder, drawn_before
from mmldlm.data.store import Source, Split, Store
from mmldlm.errors import DataError
from mmldlm.utils.short_repr import shown


def open_data(place: str | Path | Mapping[str, float]) -> Store:
    """The store at a path, or those of `data.mixture`, by path and weight. DataError as `Store.open` raises it."""
    return open_mixture(dict(place)) if isinstance(place, Mapping) else Store.open(place)


def open_mixture(weights: dict[str, float]) -> Store:
    """Several stores as one. DataError in one line where two do not fit together.

    Their order follows from shares and contents alone, so that samples have the same rows wherever the stores lie and
    however the map is written: the largest share first.
    """
    if len(weights) == 1:
        return Store.open(*weights)
    exact = {path: Fraction(str(weight)) for path, weight in weights.items()}  # 0.1 is a tenth
    stores = [(Store.open(path, name), exact[path]) for path, name in _names(list(weights)).items()]
    sources = [replace(store.sources[0], share=weight / sum(exact.values())) for store, weight in stores]
    sources.sort(key=lambda source: (-source.share, source.identity))
    for source in sources[1:]:
        _check_fits(sources[0], source)
    return Store.of(_pooled(sources), sources, partial(open_mixture, weights))


def order_of(split: Split, seed: int, window: int) -> SampleOrder | MixedOrder:
    """The order in which a run reads a split."""
    if len(split.sources) == 1:
        return SampleOrder(split.lengths, seed, window, skipped=split.skipped)
    parts = [
        Part(first, stop - first, split.skipped_in(first, stop) - first, source.share, int(source.identity[:16], 16))
        for source, first, stop in split.parts()
    ]
    return MixedOrder(split.lengths, seed, parts, window)


def shared_out(count: int, split: Split) -> list[int]:
    """`count` samples of a split, for each of its sources by its share."""
    return drawn_before(count, [source.share for source in split.sources])


def _names(paths: Sequence[str]) -> dict[str, str]:
    """What each store is called in records and curves: the last part of its path, or all of it where two have that."""
    last = [Path(path).name for path in paths]
    return {path: name if last.count(name) == 1 else path for path, name in zip(paths, last, strict=True)}


def _check_fits(first: Source, other: Source) -> None:
    if first.identity == other.identity:
        raise DataError(f"data.mixture: {first.path} and {other.path} are the same store, expected different ones")
    one, two = _common(first.manifest), _common(other.manifest)
    for what, value in one.items():
        if value != two.get(what):
            raise DataError(
                f"data.mixture: {first.path} and {other.path} do not fit together: {what} is {shown(value)} and "
                f"{shown(two.get(what))}, expected the same"
            )


def _common(manifest: Manifest) -> dict[str, Any]:
    """What all stores of a mixture must have in common."""
    return {
        "vocab_size": manifest.vocab_size,
        "mask_id": manifest.mask_id,
        "pad_id": manifest.pad_id,
        "tokenizer": manifest.tokenizer["sha256"],
        "latent shape": [manifest.latent.tokens, manifest.latent.channels],
        **{f"encoder {key}": value for key, value in sorted(manifest.encoder.items())},
        "encoder": manifest.encoder,
        "splits": list(manifest.splits),
    }


def _pooled(sources: Sequence[Source]) -> Manifest:
    """The manifest of all: sums, the longest sample, one scale of latents. Files are the sources' own."""
    manifests = [source.manifest for source in sources]
    splits = {
        name: SplitInfo(
            samples=sum(manifest.splits[name].samples for manifest in manifests),
            tokens=sum(manifest.splits[name].tokens for manifest in manifests),
            characters=sum(manifest.splits[name].characters for manifest in manifests),
            shards=(),
        )
        for name in manifests[0].splits
    }
    longest = max(manifest.max_length for manifest in manifests)
    latent = pooled_latents(
        [(manifest.latent, float(each.share)) for manifest, each in zip(manifests, sources, strict=True)]
    )
    return replace(manifests[0], max_length=longest, latent=latent, splits=splits, files={})


def pooled_latents(parts: Sequence[tuple[LatentInfo, float]]) -> LatentInfo:
    """Mean and root mean square of what is drawn from all `parts` by their shares, which sum to 1.

    The law of total variance, over channels too: the pooled mean square is the mean of the parts' own, plus that of
    their means' distances from the pooled mean. No latent is longer than its part's longest, plus that distance.
    """
    means = np.array([latent.mean for latent, _ in parts])  # [K, C]
    shares = np.array([share for _, share in parts])
    rms = np.array([latent.rms for latent, _ in parts])
    mean = shares @ means
    distances = np.square(means - mean)
    pooled = float(np.sqrt(shares @ (np.square(rms) + distances.mean(axis=1))))
    longest = np.array([latent.max_norm for latent, _ in parts]) * rms + np.sqrt(distances.sum(axis=1))
    return replace(parts[0][0], mean=tuple(mean.tolist()), rms=pooled, max_norm=float(longest.max()) / pooled)
