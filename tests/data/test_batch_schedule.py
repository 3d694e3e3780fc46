"""`train.batch_schedule`: batch sizes as a function of the step, in the config, the loader, a run and its estimate."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mmldlm import train
from mmldlm.batch import BatchSize
from mmldlm.config import load_config
from mmldlm.data.store import Store
from mmldlm.errors import ConfigError
from mmldlm.trainer.memory import Estimate, estimate
from tests.helpers.engine_runs import record_list
from tests.helpers.user_errors import refused

quick = pytest.mark.quick

RAMP = (
    "train.batch_schedule={3: {global_batch_size: 16, micro_batch_size: 2}, 7: {global_batch_size: 64}, "
    "5: {micro_batch_size: 4}}"
)

# ---- the sizes of a step -------------------------------------------------------------------------------------


@quick
@pytest.mark.parametrize("micro", ["null", "2"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_values_that_a_stage_does_not_name_are_kept(micro: str, world_size: int) -> None:
    config = load_config(None, ["train.global_batch_size=8", f"train.micro_batch_size={micro}", RAMP]).train
    first = 2 if micro == "2" else 8 // world_size
    expected = [(8, first)] * 3 + [(16, 2)] * 2 + [(16, 4)] * 2 + [(64, 4)] * 3
    config.check_batches(world_size)
    assert [config.batch_at(step, world_size) for step in range(10)] == [BatchSize(*sizes) for sizes in expected]
    assert list(config.batch_stages(world_size)) == [0, 3, 5, 7]


@quick
def test_stages_and_null() -> None:
    settings = [
        "train.global_batch_size=7",
        "train.batch_schedule={0: {global_batch_size: 8}, 9: {global_batch_size: 16}}",
    ]
    config = load_config(None, settings).train
    config.check_batches(4)
    assert config.batch_stages(4) == {0: BatchSize(8, 2), 9: BatchSize(16, 4)}
    assert load_config(None, ["train.batch_schedule.9.micro_batch_size=4"]).train.batch_schedule == {
        9: {"micro_batch_size": 4}
    }


@quick
@pytest.mark.parametrize(
    ("schedule", "named"),
    [
        ("{-5: {micro_batch_size: 4}}", ".-5 0"),
        ("{5: {}}", ".5 global_batch_size"),
        ("{5: {micro_batch_size: 0}}", ".5.micro_batch_size 1 0"),
        ("{5: {global_batch_size: -8}}", ".5.global_batch_size 1 -8"),
        ("{5: {micro_batch: 4}}", ".5.micro_batch 'global_batch_size' 'micro_batch_size'"),
        ("{5: {micro_batch_size: many}}", ".5.micro_batch_size 'many'"),
        ("{5: 16}", ".5 map 16"),
        ("{soon: {micro_batch_size: 4}}", ".soon 'soon'"),
    ],
)
def test_invalid_schedule_is_refused_by_key(schedule: str, named: str) -> None:
    key, *values = named.split()
    with refused(ConfigError, f"train.batch_schedule{key}", *values):
        load_config(None, [f"train.batch_schedule={schedule}"])


@quick
@pytest.mark.parametrize(
    ("size", "micro", "schedule", "world_size", "key", "nearest"),
    [
        (30, "4", "{}", 2, "train.global_batch_size is 30", "24 or 32"),
        (3, "4", "{}", 2, "train.global_batch_size is 3", "8 or 16"),
        (30, "null", "{}", 8, "train.global_batch_size is 30", "24 or 32"),
        (64, "4", "{9: {global_batch_size: 60}}", 2, "train.batch_schedule.9: global_batch_size is 60", "56 or 64"),
        (64, "4", "{9: {micro_batch_size: 24}}", 1, "train.batch_schedule.9: global_batch_size is 64", "48 or 72"),
        (30, "7", "{0: {global_batch_size: 60}}", 1, "train.batch_schedule.0: global_batch_size is 60", "56 or 63"),
        (64, "null", "{9: {global_batch_size: 5}}", 4, "train.batch_schedule.9: global_batch_size is 5", "4 or 8"),
    ],
)
def test_indivisible_stage_names_the_nearest_sizes(
    size: int, micro: str, schedule: str, world_size: int, key: str, nearest: str
) -> None:
    settings = [
        f"train.global_batch_size={size}",
        f"train.micro_batch_size={micro}",
        f"train.batch_schedule={schedule}",
    ]
    with refused(ConfigError, key, nearest):
        load_config(None, settings).train.check_batches(world_size)


def test_a_late_stage_is_refused_before_anything_is_created(
    tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ([], ["--dry-run"]):
        late = "train.batch_schedule={100000: {micro_batch_size: 3}}"
        assert train.main([str(tiny_config), *option, late]) == 64
        assert "train.batch_schedule.100000" in capsys.readouterr().err
        assert not (tmp_path / "run").exists()


# ---- runs ----------------------------------------------------------------------------------------------------


def curve(run: Path, key: str = "loss/total") -> torch.Tensor:
    return torch.tensor([record[key] for record in record_list(run)], dtype=torch.float64)


def newest(run: Path) -> Path:
    return max((run / "checkpoints").glob("step-*"))


def same_end(one: Path, other: Path) -> bool:
    """Weights, moments and counters, bit for bit."""
    tensors = [
        {**load_file(newest(run) / "model.safetensors"), **load_file(newest(run) / "optimizer.safetensors")}
        for run in (one, other)
    ]
    states = [json.loads((newest(run) / "state.json").read_text()) for run in (one, other)]
    assert tensors[0].keys() == tensors[1].keys()
    return states[0] == states[1] and all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])


COMMON = ("validation.every=0", "schedule.lr=constant", "optim.warmup_steps=2", "train.global_batch_size=8")


STAGES = ((4, 8, 8), (7, 24, 8), (9, 4, 2), (12, 128, 32))  # (end, global batch, micro-batch); the last in epoch 2
SCHEDULE = "train.batch_schedule=" + json.dumps(
    {
        start: {"global_batch_size": size, "micro_batch_size": micro}
        for (start, _, _), (_, size, micro) in pairwise(STAGES)
    }
).replace('"', "")


def test_a_schedule_is_the_chain_of_its_stages(tiny_config: Path, tmp_path: Path) -> None:
    """Runs of constant size, each going on where the one before ended, give the same bits and counters."""
    whole, chain = tmp_path / "whole", tmp_path / "chain"
    assert train.main([str(tiny_config), *COMMON, "train.steps=12", SCHEDULE, f"run.dir={whole}"]) == 0
    for end, size, micro in STAGES:
        changed = [f"train.steps={end}", f"train.global_batch_size={size}", f"train.micro_batch_size={micro}"]
        assert train.main([str(tiny_config), *COMMON, *changed, f"run.dir={chain}"]) == 0
    assert torch.equal(curve(whole), curve(chain)) and same_end(whole, chain)
    drawn = json.loads((newest(whole) / "state.json").read_text())["samples_drawn"]
    assert drawn == 4 * 8 + 3 * 24 + 2 * 4 + 3 * 128
    for key in ("data/epoch", "data/tokens"):
        assert torch.equal(curve(whole, key), curve(chain, key))
    assert curve(whole, "data/global_batch_size").tolist() == [8] * 4 + [24] * 3 + [4] * 2 + [128] * 3
    samples = curve(whole, "speed/samples_per_s") * curve(whole, "speed/step_s")
    assert torch.allclose(samples, curve(whole, "data/global_batch_size"))


def test_resume_across_stage_boundaries_is_bitwise_equal(tiny_config: Path, tmp_path: Path) -> None:
    """Ended in the midst of a stage, on an edge and again in the midst, in the second epoch."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    settings = [str(tiny_config), *COMMON, SCHEDULE, "train.micro_batch_size=8", "log.every=3"]
    assert train.main([*settings, "train.steps=12", f"run.dir={whole}"]) == 0
    for steps in (6, 9, 11, 12):
        given = [f"train.steps={steps}", f"run.dir={parts}", "data.num_workers=2"]
        assert train.main([*settings, *given]) == 0
    assert same_end(whole, parts)
    # A record over steps of several sizes counts the samples of each.
    per_step = curve(whole, "speed/samples_per_s") * curve(whole, "speed/step_s")
    assert torch.allclose(per_step * 3, torch.tensor([24, 8 + 48, 24 + 8, 384], dtype=torch.float64))


@pytest.mark.parametrize(
    ("size", "micro_batch", "count"),
    [
        ("micro_batch_size=4", "4 samples", {8: " x 2", 16: " x 4"}),
        ("micro_batch_tokens=1500", "up to 1,500 tokens", {}),
    ],
)
def test_report_and_dry_run_show_the_stages(
    size: str, micro_batch: str, count: dict[int, str], tiny_config: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    settings = [str(tiny_config), f"train.{size}", "train.batch_schedule={2: {global_batch_size: 16}}"]
    assert train.main([*settings, "train.steps=3", "validation.every=0"]) == 0
    shown = capsys.readouterr().out
    small, large = (
        f"{micro_batch}{count[samples]} micro-batches" if count else f"micro-batches of {micro_batch}"
        for samples in (8, 16)
    )
    assert f"batch        8 samples = 1 process x {small}" in shown
    assert f"16 samples = 1 process x {large} from step 2 on" in shown
    report = json.loads((tmp_path / "run" / "startup.json").read_text())
    name, _, value = size.partition("=")
    assert report["global_batch_size"] == 8 and report[name] == int(value) == report["batch_schedule"]["2"][name]
    assert train.main([*settings, "train.steps=1", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    for line, micro_batches in (("global batch         8", small), ("  from step 2        16", large)):
        assert f"{line} samples = 1 process x {micro_batches}" in shown


# ---- the estimate --------------------------------------------------------------------------------------------


def test_the_dry_run_goes_through_all_stages(tiny_store: Path) -> None:
    store = Store.open(tiny_store)

    def of(*settings: str) -> Estimate:
        small = [f"data.path={tiny_store}", "model.width=32", "model.num_heads=1", "model.depth=1", "train.steps=2"]
        return estimate(load_config(None, [*small, "mode=t2l", "train.global_batch_size=8", *settings]), store, 1)

    whole, half = of(), of("train.micro_batch_size=4")
    mixed = of("train.batch_schedule={1: {micro_batch_size: 4}, 9: {micro_batch_size: 1}}")
    swapped = of("train.micro_batch_size=4", "train.batch_schedule={1: {micro_batch_size: 8}}")
    assert half.step.activations < min(mixed.step.activations, swapped.step.activations)
    assert max(mixed.step.activations, swapped.step.activations) == whole.step.activations
    assert mixed.flops_per_step == pytest.approx(whole.flops_per_step) == swapped.flops_per_step
    # A step of 64 samples and one of 8.
    size = "train.global_batch_size=64"
    first, both = of(size, "train.steps=1"), of(size, "train.batch_schedule={1: {global_batch_size: 8}}")
    assert both.tokens_per_step == pytest.approx(first.tokens_per_step * 72 / 128)
    assert both.flops_per_step == pytest.approx(first.flops_per_step * 72 / 128, rel=0.1)
