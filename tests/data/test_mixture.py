"""`data.mixture`: several stores read as one, by their shares, as a pure function of the position."""

from __future__ import annotations

import hashlib
import pickle
import shutil
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.store_writer import StoreWriter
from mmldlm.config import load_config, require_paths
from mmldlm.data.encoders import ImportedLatents
from mmldlm.data.loader import DataConfig, Loader
from mmldlm.data.mixture import open_data
from mmldlm.data.sampler import MixedOrder, SampleOrder, StoreSamples, count_draws
from mmldlm.data.store import Store
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.errors import ConfigError, DataError
from mmldlm.evaluation.validate import validation_ids
from mmldlm.trainer.consistency import fingerprint
from tests.helpers.batch_sizes import constant_batch_size
from tests.helpers.stores import change_manifest, random_letters_store
from tests.helpers.user_errors import refused

pytestmark = pytest.mark.quick
WEIGHTS = [(0.7, 0.2, 0.1), (0.999, 0.001), (0.5, 0.5), (1 / 3, 1 / 3, 1 / 3), (8, 4, 2, 1, 1), (1,) * 9, (1,)]


def shares(weights: Sequence[float]) -> list[Fraction]:
    exact = [Fraction(str(weight)) for weight in weights]
    return [weight / sum(exact) for weight in exact]


def mixed(weights: Sequence[float], counts: Sequence[int], window: int = 64, block: int = 8) -> MixedOrder:
    """An order of parts of `counts` samples, of random lengths."""
    firsts = np.cumsum([0, *counts]).tolist()
    parts = [
        StoreSamples(first, count, np.empty(0, np.int64), share, key)
        for key, (first, count, share) in enumerate(zip(firsts, counts, shares(weights), strict=False))
    ]
    return MixedOrder(np.random.default_rng(0).integers(1, 100, firsts[-1]), 5, parts, window, block)


def test_order_of_one_store_is_unchanged() -> None:
    """Recorded before there were mixtures, and when lengths were held in memory."""
    recorded = {
        (1000, 7, 128, 16, ()): "3989e74b23184e02",
        (100, 0, 4096, 64, ()): "f9a966f8c5a07bb2",
        (257, 5, 256, 7, ()): "6ac8f18801670b26",
        (5000, 3, 4096, 64, (0, 17, 4999)): "a28b5e221064f94d",
        (40, 5, 8, 4, (0, 1, 17, 39)): "fdbe1fcb9e938e6b",
    }
    for (n, seed, window, block, skipped), digest in recorded.items():
        lengths = (np.arange(n) * 7919 % 97 + 1).astype(np.int32)
        rows = SampleOrder(lengths, seed, window, block, skipped).take(0, 3 * n)
        assert hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest()[:16] == digest


@pytest.mark.parametrize("weights", WEIGHTS)
def test_shares_hold_within_rounding(weights: tuple[float, ...]) -> None:
    exact, few = shares(weights), len(weights) <= 3
    for start in (0, 12_345_678_901_234):
        drawn = np.array([count_draws(position, exact) for position in range(start, start + 1500)])
        assert (drawn.sum(axis=1) == np.arange(start, start + 1500)).all()
        steps = np.diff(drawn, axis=0)
        assert steps.min() >= 0 and (steps.sum(axis=1) == 1).all(), "each position has one store"
        off = drawn - np.array(
            [[float(share * position) for share in exact] for position in range(start, start + 1500)]
        )
        assert abs(off).max() < (1 if few else 1.5) + start * 1e-15
        for window in (1, 7, 64, 1000):
            counts = drawn[window:] - drawn[:-window]
            assert abs(counts - np.array([float(share * window) for share in exact])).max() < (2 if few else 3)


@pytest.mark.parametrize(
    ("weights", "counts"), [((0.7, 0.2, 0.1), (60, 3, 20)), ((0.99, 0.01), (90, 3)), ((1, 1), (5, 1))]
)
def test_windows_and_epochs(weights: tuple[float, ...], counts: tuple[int, ...]) -> None:
    order, firsts = mixed(weights, counts), np.cumsum([0, *counts])
    stream = order.take(0, 64 * 8)
    source = np.searchsorted(firsts, stream, side="right") - 1
    for window in range(8):
        result = np.bincount(source[64 * window : 64 * (window + 1)], minlength=len(counts))
        edges = [count_draws(64 * each, shares(weights)) for each in (window, window + 1)]
        assert result.tolist() == np.subtract(edges[1], edges[0]).tolist()
    in_turn = mixed(weights, counts, window=1).take(0, 64 * 8)  # not sorted
    for number, count in enumerate(counts):
        own = in_turn[(in_turn >= firsts[number]) & (in_turn < firsts[number + 1])]
        epochs = [own[start : start + count] for start in range(0, len(own) - count + 1, count)]
        assert all(sorted(epoch) == list(range(firsts[number], firsts[number + 1])) for epoch in epochs)
        assert sorted(own) == sorted(stream[source == number])
        if count > 40 and len(epochs) > 1:
            assert not np.array_equal(epochs[0], epochs[1])
    assert order.epochs(640)[0] == count_draws(640, shares(weights))[0] / counts[0]


def test_any_start_gives_the_same_stream() -> None:
    stream = mixed((0.7, 0.2, 0.1), (300, 7, 50)).take(0, 3000)
    for start, count in [(0, 1), (63, 3), (64, 64), (500, 1000), (2999, 1), (17, 0)]:
        assert np.array_equal(mixed((0.7, 0.2, 0.1), (300, 7, 50)).take(start, count), stream[start : start + count])
    assert np.array_equal(pickle.loads(pickle.dumps(mixed((0.7, 0.2, 0.1), (300, 7, 50)))).take(9, 99), stream[9:108])


def test_samples_of_equal_length_are_mixed_in_every_block() -> None:
    order = mixed((0.75, 0.25), (500, 500), window=1024, block=64)
    order.lengths = np.ones(1000, np.int32)
    blocks = (order.take(0, 2048) < 500).reshape(-1, 64).sum(axis=1)
    assert abs(blocks - 48).max() <= 1
    order = mixed((0.75, 0.25), (5000, 5000), window=4096, block=64)
    lengths = order.lengths[order.take(0, 8192)].reshape(-1, 64)
    assert np.ptp(lengths, axis=1).mean() < 4, "a window is sorted over all stores"


# --- stores ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three stores with 300, 40 and 7 samples, whose latents have different means."""
    folder = tmp_path_factory.mktemp("stores")
    sizes = [("one", 300, 0.0, 1.0, 20), ("two", 40, 3.0, 2.0, 9), ("three", 7, -5.0, 0.5, 15)]
    return [
        random_letters_store(folder / name, samples, seed, center, spread, longest)
        for seed, (name, samples, center, spread, longest) in enumerate(sizes)
    ]


@pytest.fixture
def weighed(three: list[Path]) -> dict[str, float]:
    return dict(zip(map(str, three), (0.7, 0.2, 0.1), strict=True))


def test_shared_properties_follow_from_the_manifests(weighed: dict[str, float], three: list[Path]) -> None:
    store = open_data(weighed)
    assert [source.name for source in store.sources] == ["one", "two", "three"]
    assert len(store.split("train")) == store.manifest.splits["train"].samples == 347
    latents = [np.concatenate([shard.latents for shard in Store.open(path).split("train").shards]) for path in three]
    mean = sum(share * part.mean(axis=(0, 1)) for share, part in zip((0.7, 0.2, 0.1), latents, strict=True))
    square = sum(share * np.square(part - mean).mean() for share, part in zip((0.7, 0.2, 0.1), latents, strict=True))
    result = store.manifest.latent
    assert np.allclose(result.mean, mean, atol=1e-6) and result.rms == pytest.approx(square**0.5, rel=1e-6)
    longest = max(np.linalg.norm(store.standardize(part), axis=-1).max() for part in latents)
    assert longest <= result.max_norm * (1 + 1e-6) < 2 * longest
    assert store.manifest.max_length == max(Store.open(path).manifest.max_length for path in three)
    drawn = store.split("train").lengths[
        Loader(store, "train", DataConfig(), 0, constant_batch_size(64, 64)).order.take(0, 200_000)
    ]
    assert store.split("train").mean_length == pytest.approx(drawn.mean(), rel=0.01)
    own = [Store.open(path) for path in three]
    share = [float(each.token_counts.sum()) / len(each.split("train")) for each in own]
    expected = sum(weight * mean for weight, mean in zip((0.7, 0.2, 0.1), share, strict=True)) * 347
    assert store.token_counts.sum() == pytest.approx(expected, rel=0.01)


def test_rows_hold_the_samples_of_their_store(weighed: dict[str, float], three: list[Path]) -> None:
    store, first = open_data(weighed), 0
    split = store.split("train")
    for path in three:
        own = Store.open(path).split("train")
        for row in (0, len(own) // 2, len(own) - 1):
            assert np.array_equal(split.tokens(first + row), own.tokens(row))
            assert np.array_equal(split.latents(first + row), own.latents(row))
            assert split.group_by_source([first + row]) == {path.name: [row]}
        first += len(own)
    assert split.group_by_source([0, 341, 5, 300]) == {"one": [0, 5], "three": [1], "two": [0]}
    assert Store.open(three[0]).split("train").group_by_source([3, 2]) == [3, 2]
    again = pickle.loads(pickle.dumps(split))
    assert len(pickle.dumps(split)) < 1500 and np.array_equal(again.tokens(345), split.tokens(345))


def test_paths_and_map_order_do_not_matter(weighed: dict[str, float], three: list[Path], tmp_path: Path) -> None:
    elsewhere = {
        str(shutil.copytree(path, tmp_path / str(number))): weighed[str(path)] for number, path in enumerate(three)
    }
    turned = dict(reversed(elsewhere.items()))
    scaled = {path: 30 * weight for path, weight in weighed.items()}
    prints, streams = [], []
    for mixture in (weighed, elsewhere, turned, scaled):
        store = open_data(mixture)
        config = load_config(None, [f"data.mixture={mixture}"])
        prints.append(fingerprint(config, store))
        streams.append(Loader(store, "train", config.data, 3, constant_batch_size(8, 8)).order.take(0, 500).tolist())
    assert prints[0] == prints[1] == prints[2] == prints[3] and streams[0] == streams[1] == streams[2] == streams[3]
    other = open_data({path: weight + 0.1 for path, weight in weighed.items()})
    assert other.identity != open_data(weighed).identity


def test_a_mixture_of_one_is_that_store(three: list[Path]) -> None:
    alone, store = open_data({str(three[1]): 0.3}), Store.open(three[1])
    assert alone.identity == store.identity and alone.manifest == store.manifest
    orders = [Loader(each, "train", DataConfig(), 3, constant_batch_size(8, 8)).order for each in (alone, store)]
    assert all(isinstance(order, SampleOrder) for order in orders)
    assert orders[0].take(0, 99).tolist() == orders[1].take(0, 99).tolist()


def test_stores_with_equal_names_are_distinguished(three: list[Path], tmp_path: Path) -> None:
    shutil.copytree(three[1], tmp_path / "one")
    store = open_data({str(three[0]): 2, str(tmp_path / "one"): 1})
    assert [source.name for source in store.sources] == [str(three[0]), str(tmp_path / "one")]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"tokenizer__sha256": "f" * 64, "files__tokenizer/tokenizer.json__sha256": "f" * 64},
            "tokenizer ffff",
        ),
        ({"mask_id": 5}, "mask_id 27 5"),
        ({"vocab_size": 60}, "vocab_size 29 60"),
        ({"encoder__revision": "x"}, "revision 'x'"),
        ({"encoder": {"name": "lsa"}}, "dim 4 None"),
        ({"encoder__more": 1}, "encoder"),
    ],
)
def test_incompatible_stores_are_refused(
    three: list[Path], tmp_path: Path, change: dict[str, object], named: str
) -> None:
    other = Path(shutil.copytree(three[1], tmp_path / "other"))
    change_manifest(other, **change)
    with refused(DataError, three[0], other, *named.split()):
        open_data({str(three[0]): 2, str(other): 1})


def test_latents_of_another_shape_are_refused(three: list[Path], tmp_path: Path) -> None:
    encoder = ImportedLatents("other", "1", (1, 2))
    with StoreWriter(tmp_path / "other", Tokenizer.characters(), encoder, "float32") as writer:
        for split in ("train", "validation", "test"):
            writer.add(split, [np.array([1])] * 2, np.array([[[1.0, 2.0]], [[3.0, 4.0]]]), [1, 1])
        writer.finish([], {}, {}, {})
    with refused(DataError, "[1, 4]", "[1, 2]"):
        open_data({str(three[0]): 2, str(tmp_path / "other"): 1})


def test_the_same_store_twice_is_refused(three: list[Path], tmp_path: Path) -> None:
    shutil.copytree(three[1], tmp_path / "copy")
    with refused(DataError, three[1], tmp_path / "copy"):
        open_data({str(three[1]): 1, str(tmp_path / "copy"): 1})


def test_mixture_is_checked_before_reading(weighed: dict[str, float]) -> None:
    with refused(ConfigError, "data.mixture", "data.path is a"):
        load_config(None, ["data.path=a", "data.mixture={b: 1}"])
    for weight in (0, -1):
        with refused(ConfigError, "data.mixture.b", weight):
            load_config(None, [f"data.mixture={{a: 1, b: {weight}}}"])
    with refused(ConfigError, "data.mixture.b", "'x'"):
        load_config(None, ["data.mixture={b: x}"])
    require_paths(load_config(None, [f"data.mixture={weighed}"]), "data.path")
    with refused(ConfigError, "data.path"):
        require_paths(load_config(None), "data.path")


def test_validation_is_of_all_stores_by_their_shares(weighed: dict[str, float]) -> None:
    store = open_data(weighed)
    split = store.split("validation")
    ids = validation_ids(split, 20)
    assert len(set(ids)) == 20
    assert {name: len(rows) for name, rows in split.group_by_source(ids).items()} == {"one": 14, "two": 4, "three": 2}
    bad = [ids[0], ids[19]]
    assert not set(bad) & set(validation_ids(store.without({"validation": sorted(bad)}).split("validation"), 20))
    with refused(DataError, "two", 24, "validation"):
        store.without({"validation": range(24, 48)})
