"""`train.micro_batch_tokens`: micro-batches filled up to a number of tokens, on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from mmldlm import train
from mmldlm.batch import Batch, BatchSize
from mmldlm.config import load_config
from mmldlm.data.batch_schedule import deal, largest_micro_batches, largest_possible
from mmldlm.data.loader import DataConfig, Loader
from mmldlm.data.store import Store
from mmldlm.diffusion.objective import NoisedBatch
from mmldlm.errors import ConfigError
from mmldlm.trainer.trainer import Trainer
from tests.helpers.engine_runs import record_list
from tests.helpers.user_errors import refused

quick = pytest.mark.quick

# ---- the samples of a step ---------------------------------------------------------------------------------------


def documents(count: int, seed: int = 0) -> np.ndarray:
    """Lengths as of documents cut at 512 tokens: many short ones, and some of the maximum."""
    return np.random.default_rng(seed).lognormal(5, 1, count).clip(1, 512).astype(np.int32)


@quick
@pytest.mark.parametrize("world", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("budget", [1, 100, 600, 4096, 10**6])
@pytest.mark.parametrize("latent_tokens", [1, 16])
def test_each_sample_is_dealt_once_within_the_budget(world: int, budget: int, latent_tokens: int) -> None:
    lengths = documents(192, world)
    parts = deal(lengths, BatchSize(192, 192 // world, budget), world, latent_tokens)
    assert np.array_equal(np.sort(np.concatenate(parts, axis=None)), np.arange(192))
    for slots in parts:
        assert slots.shape == (len(slots), world) and len(slots)
        tokens = (lengths[slots] + latent_tokens).sum(axis=0)
        assert len(slots) == 1 or tokens.max() <= budget
        assert (np.diff(lengths[slots], axis=0) >= 0).all(), "samples of similar length are neighbors"
    if budget >= 4096 and world <= 8:  # then each rank has many samples in a micro-batch
        tokens = np.stack([lengths[slots].sum(axis=0) for slots in parts])
        assert np.ptp(tokens) <= 0.1 * tokens.max(), "all alike, of all ranks"
        assert np.ptp([len(slots) for slots in parts]) <= 1


@quick
def test_micro_batches_are_few_full_and_alike() -> None:
    for seed in range(20):
        lengths = documents(256, seed)
        total = int(lengths.sum()) + 256
        for budget in (2048, 8192, 16384):
            sums = [int((lengths[slots] + 1).sum()) for slots in deal(lengths, BatchSize(256, 256, budget), 1, 1)]
            # No packing has fewer than total / budget, and what each may leave empty is less than a sample.
            assert len(sums) <= -(-total // (budget - 512)) and max(sums) <= budget
            assert min(sums) > 0.85 * max(sums), "none is a remainder"


@quick
def test_a_sample_longer_than_the_budget_is_alone() -> None:
    lengths = np.array([3, 90, 4, 5, 6, 3])
    parts = deal(lengths, BatchSize(6, 6, 20), 1, 1)
    assert [lengths[slots[:, 0]].tolist() for slots in parts] == [[3, 3, 6], [4, 5], [90]]
    many = [lengths[slots[:, 0]].tolist() for slots in deal(lengths, BatchSize(6, 2, 20), 1, 1)]
    assert many == [[6], [3, 5], [3, 4], [90]], "micro_batch_size still bounds the samples"


# ---- the settings ------------------------------------------------------------------------------------------------


@quick
def test_stages_of_a_schedule_have_budgets() -> None:
    settings = ["train.global_batch_size=12", "train.micro_batch_tokens=100", "train.micro_batch_size=5"]
    schedule = "train.batch_schedule={3: {global_batch_size: 24}, 5: {micro_batch_tokens: 200}, "
    config = load_config(None, [*settings, schedule + "9: {micro_batch_tokens: 0, micro_batch_size: 6}}"]).train
    config.check_batches(4)
    expected = {0: (12, 5, 100), 3: (24, 5, 100), 5: (24, 5, 200), 9: (24, 6, 0)}
    assert config.batch_stages(4) == {step: BatchSize(*sizes) for step, sizes in expected.items()}
    assert config.batch_at(0, 4).accumulation(4) == 3 and config.batch_at(9, 4).accumulation(4) == 1


@quick
@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("train.micro_batch_tokens=-1", "train.micro_batch_tokens 0 -1"),
        ("train.micro_batch_tokens=many", "train.micro_batch_tokens 'many'"),
        (
            "train.batch_schedule={5: {micro_batch_tokens: -1}}",
            "batch_schedule.5.micro_batch_tokens 0 -1",
        ),
    ],
)
def test_invalid_budgets_are_refused(setting: str, named: str) -> None:
    with refused(ConfigError, *named.split()):
        load_config(None, [setting])


@quick
def test_with_a_budget_only_ranks_must_divide_a_global_batch() -> None:
    config = load_config(None, ["train={global_batch_size: 30, micro_batch_size: 4, micro_batch_tokens: 100}"]).train
    config.check_batches(5)
    with refused(ConfigError, "global_batch_size is 30", "28 or 32"):
        config.check_batches(4)


# ---- the loader --------------------------------------------------------------------------------------------------


@quick
@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize("size", [BatchSize(32, 4), BatchSize(32, 8, 60), BatchSize(32, 8, 10_000), BatchSize(32, 1)])
def test_the_largest_step_is_the_first_with_the_most_tokens(
    tiny_store: Path, monkeypatch: pytest.MonkeyPatch, size: BatchSize, world: int
) -> None:
    """The same whether steps are looked at one by one or together; a step that reaches the bound ends the search."""
    loader = Loader(Store.open(tiny_store), "train", DataConfig(window=64), 5, lambda _step: size, 0, world)
    most = [loader.micro_batch_tokens(step * 32, size).max() for step in range(40)]
    for samples in (1, 256, 1 << 16):
        monkeypatch.setattr("mmldlm.data.loader.SEARCHED_SAMPLES", samples)
        for first in (0, 7):
            expected = max(most[first:]), first + int(np.argmax(most[first:]))
            assert loader.largest_step(range(first, 40), first * 32, size) == expected
    taken: list[int] = []
    take = loader._dataset.take
    monkeypatch.setattr(loader._dataset, "take", lambda *of: taken.append(of[0]) or take(*of))
    monkeypatch.setattr("mmldlm.data.loader.largest_possible", lambda *_: most[0])
    monkeypatch.setattr("mmldlm.data.loader.SEARCHED_SAMPLES", 1)
    assert loader.largest_step(range(40), 0, size)[0] >= most[0] and len(taken) < 40


@quick
def test_no_micro_batch_is_larger_than_the_bound_that_ends_a_search() -> None:
    lengths = np.full(32, 9)
    sizes = (BatchSize(32, 4), 40, 40), (BatchSize(32, 32, 64), 60, 64), (BatchSize(32, 4, 99), 40, 40)
    for size, most, possible in sizes:
        assert largest_micro_batches(lengths[None] + 1, size, 2).tolist() == [most]
        assert largest_possible(10, size) == possible
    assert largest_possible(10, BatchSize(32, 32, 5)) == 10, "a sample longer than the budget is alone"


# ---- runs --------------------------------------------------------------------------------------------------------


class Recording(Trainer):
    """Records the lengths of each step's micro-batches, and the samples of each step."""

    read: ClassVar[dict[str, list[tuple[list[int], set[int]]]]] = {}

    def corrupt(self, step: int, micro_batches: Sequence[Batch]) -> list[NoisedBatch]:
        tokens = [batch.layout.num_tokens + len(batch.lengths) * batch.latents.shape[1] for batch in micro_batches]
        samples = {sample for batch in micro_batches for sample in batch.sample_ids.tolist()}
        self.read.setdefault(self.run_dir.name, []).append((tokens, samples))
        return super().corrupt(step, micro_batches)


COMMON = ("validation.every=0", "schedule.lr=constant", "optim.lr=1e-4", "train.global_batch_size=16")


def test_the_curve_is_that_of_micro_batches_by_samples(tiny_config: Path, tmp_path: Path) -> None:
    given = {
        "whole": "train.micro_batch_size=null",
        "samples": "train.micro_batch_size=2",
        "few": "train.micro_batch_tokens=40",
        "many": "train.micro_batch_tokens=150",
        "stages": "train.batch_schedule={0: {micro_batch_tokens: 30}, 3: {micro_batch_tokens: 90}, 5: "
        "{micro_batch_tokens: 0, micro_batch_size: 4}}",
    }
    for name, setting in given.items():
        arguments = [str(tiny_config), *COMMON, setting, f"run.dir={tmp_path / name}"]
        assert train.main(arguments, trainer_cls=Recording) == 0
    curves = {
        name: torch.tensor(
            [[record["loss/total"], record["optim/grad_norm"]] for record in record_list(tmp_path / name)],
            dtype=torch.float64,
        )
        for name in given
    }
    for name in given:
        assert curves[name].shape == (8, 2)
        assert (curves[name] / curves["whole"] - 1).abs().max() < 1e-6, name
        assert [samples for _, samples in Recording.read[name]] == [samples for _, samples in Recording.read["whole"]]
    assert all(max(tokens) <= 40 and len(tokens) > 1 for tokens, _ in Recording.read["few"])
    logged = [record.get("data/micro_batch_tokens") for record in record_list(tmp_path / "stages")]
    assert logged == [30] * 3 + [90] * 2 + [None] * 3


def test_learned_weights_are_means_over_steps_whatever_their_micro_batches(tiny_config: Path, tmp_path: Path) -> None:
    records = []
    for every in (1, 8):
        settings = ("train.micro_batch_tokens=60", "loss.latent_weighting=uncertainty", "optim.lr=0.05", "mode=joint")
        assert train.main([str(tiny_config), f"run.dir={tmp_path / str(every)}", f"log.every={every}", *settings]) == 0
        records.append(record_list(tmp_path / str(every)))
    for name in ("loss/latent_weight", "loss/text_weight"):
        by_step = [record[name] for record in records[0]]
        assert max(by_step) > 1.1 * min(by_step)
        assert records[1][0][name] == pytest.approx(np.mean(by_step), rel=1e-5)


def test_a_record_says_over_how_many_steps_it_averages(tiny_config: Path, tmp_path: Path) -> None:
    settings = [str(tiny_config), "log.every=4", "checkpoint.every_steps=0"]
    assert train.main([*settings, "--stop-at", "6"]) == 75 and train.main(settings) == 0
    assert [(record["step"], record["data/steps"]) for record in record_list(tmp_path / "run")] == [(4, 4), (8, 2)]
