"""What the line about pairing says is what the runs draw."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mmldlm.config import RunConfig, load_config, write_config
from mmldlm.data.loader import Loader
from mmldlm.data.store import Store
from mmldlm.loading.factory import build_corruption, build_objective
from mmldlm.settings.declaration import dump
from mmldlm.telemetry.metrics import MetricsFile
from mmldlm.tools.compare import command as compare
from mmldlm.tools.compare.comparison import group_runs, setting_differences
from mmldlm.tools.compare.paired import pairing
from mmldlm.tools.compare.run_summary import RunSummary
from mmldlm.tools.runs import History
from tests.helpers.written_runs import write_lines

pytestmark = pytest.mark.quick


def draws(config: RunConfig, step: int = 1) -> dict[str, Any]:
    """The samples of a step, and what their noise and masks make of them."""
    store = Store.open(config.data.path)
    data = replace(config.data, num_workers=0)
    loader = Loader(store, "train", data, config.run.seed, lambda _: config.train.batch_at(0, 1), 0, 1)
    size = config.train.batch_at(step, 1)
    batches = loader.read(config.train.samples_before(step), size, 0)
    noised = build_corruption(config, build_objective(config, store.manifest))(step, batches)
    return {
        "samples": [sample for batch in batches for sample in batch.sample_ids],
        "tensors": [(name, value) for batch in noised for name, value in batch.tensors().items()],
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one["samples"] == other["samples"] and all(
        name == other_name and torch.equal(value, other_value)
        for (name, value), (other_name, other_value) in zip(one["tensors"], other["tensors"], strict=True)
    )


def line(folder: Path, *configs: RunConfig) -> str:
    for name, config in zip("ab", configs, strict=True):
        MetricsFile(folder / name / "metrics.jsonl", None).close()
        write_config(config, folder / name)
    return pairing(History(folder / "a"), History(folder / "b"))


@pytest.mark.parametrize(
    "change",
    [
        "optim.lr=1e-3",
        "model.width=64",
        "run.init_seed=7",
        "loss.latent=mse",
        "loss.latent_weight=3",
        "train.micro_batch_tokens=100",
        "schedule.lr=constant",
        "latent.prediction=v",
    ],
)
def test_paired_runs_draw_the_same(change: str, tiny_config: Path, tmp_path: Path) -> None:
    base, other = load_config(tiny_config), load_config(tiny_config, [change])
    assert line(tmp_path, base, other).startswith("paired")
    one, two = draws(base), draws(other)
    assert one["samples"] == two["samples"] or "micro_batch" in change
    assert sorted(one["samples"]) == sorted(two["samples"])
    if change.startswith(("optim", "model", "run", "schedule")):
        assert line(tmp_path, base, other) == "paired: the same samples, noise and masks in every step"
        assert same(one, two)
    if change.startswith("loss"):
        assert "other losses (" + change.partition("=")[0] in line(tmp_path, base, other)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("mode=l2t", "modes (mode"),
        ("text.masks=independent", "masks (text.masks)"),
        ("latent.time_sampling=logit_normal", "noise (latent.time_sampling)"),
    ],
)
def test_other_noise_of_the_same_samples(change: str, what: str, tiny_config: Path, tmp_path: Path) -> None:
    base, other = load_config(tiny_config), load_config(tiny_config, [change])
    assert line(tmp_path, base, other).startswith(f"paired except {what}")
    one, two = draws(base), draws(other)
    assert one["samples"] == two["samples"] and not same(one, two)


@pytest.mark.parametrize(
    "change",
    ["run.seed=4", "data.window=16", "train.global_batch_size=4", "train.batch_schedule={0: {global_batch_size: 4}}"],
)
def test_other_samples(change: str, tiny_config: Path, tmp_path: Path) -> None:
    base, other = load_config(tiny_config), load_config(tiny_config, [change])
    assert line(tmp_path, base, other).startswith(f"not paired because {change.partition('=')[0]}")
    assert draws(base)["samples"] != draws(other)["samples"]


def test_micro_batches_of_a_schedule(tiny_config: Path, tmp_path: Path) -> None:
    base = load_config(tiny_config, ["train.batch_schedule={5: {global_batch_size: 4}}"])
    other = load_config(tiny_config, ["train.batch_schedule={5: {global_batch_size: 4, micro_batch_size: 2}}"])
    assert line(tmp_path, base, other) == "paired: the same samples, noise and masks in every step"
    assert line(tmp_path, base, load_config(tiny_config, ["log.every=2"])).startswith("not paired because")
    (tmp_path / "b" / "config.yaml").unlink()
    assert pairing(History(tmp_path / "a"), History(tmp_path / "b")).startswith("perhaps not paired: ")


def recorded(folder: Path, config: Path, *starts: tuple[int, list[str]], **report: Any) -> RunSummary:
    """A run of 40 steps with these starts, after a step and with settings that replace the config's."""
    records: list[dict[str, Any]] = []
    report = {"world_size": 1, "ranks": [{"host": "h", "pid": 1, "processor": "x"}], "data_manifest": "m", **report}
    for (begin, settings), end in zip(starts, [*(begin for begin, _ in starts[1:]), 40], strict=True):
        kind, values = "resume" if records else "start", dump(load_config(config, settings))
        records.append({"kind": kind, "step": begin, "config": values, **report})
        records += [{"kind": "train", "step": step, "loss/total": 1.0} for step in range(begin + 1, end + 1)]
    write_lines(folder, records)
    write_config(load_config(config, settings), folder)
    return RunSummary(folder)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("run.seed=7", ["step 1 to 30 not paired because run.seed is 3 and 7", "from step 31 on paired: the same"]),
        ("data.window=16", ["1 to 30 not paired because data.window", "from step 31 on paired"]),
        ("train.global_batch_size=4", ["not paired because train.global", "31 on not paired because train.global"]),
        ("data.skip_samples=[own:3]", ["not paired because data.skip_samples"]),
        ("optim.lr=1e-3", ["^paired: the same samples"]),
    ],
)
def test_runs_are_judged_by_all_of_their_starts(
    setting: str, expected: list[str], tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second run had another setting in its first 30 of 40 steps."""
    first = recorded(tmp_path / "a", tiny_config, (0, []))
    second = recorded(tmp_path / "b", tiny_config, (0, [setting]), (30, []))
    line = pairing(first.history, second.history)
    assert all(re.search(part, line) for part in expected), line
    assert line.startswith("paired") == (expected[-1][0] == "^")
    # It is said what has changed, and the two are no runs of one config, or not of one seed.
    key = setting.partition("=")[0]
    assert compare.main([str(first.path), str(second.path)]) == 0
    assert re.search(rf"b: changed after step 30: .*{key} .* -> ", capsys.readouterr().out)
    groups = group_runs([first, second])
    assert len(groups) == 2 or (key == "run.seed" and len(groups[0].by_seed) == 2)
    assert key == "run.seed" or any(key in row for row in setting_differences(groups))


def test_other_environments_are_named(tiny_config: Path, tmp_path: Path) -> None:
    ranks = [{"host": "h", "pid": 1, "processor": "y"}]
    first, *others = (
        recorded(tmp_path / name, tiny_config, (0, [f"run.seed={seed}"]), versions=versions, **report)
        for name, seed, versions, report in (
            ("a", 3, {"torch": "2.12", "code": "c"}, {}),
            ("b", 3, {"torch": "2.13", "code": "d"}, {"world_size": 2, "ranks": ranks}),
            ("c", 4, {"torch": "2.14", "code": "c"}, {}),
        )
    )
    line, parts = pairing(first.history, others[0].history), ("torch 2.12 and 2.13", "code c and d", "x and y")
    assert line.startswith("paired: the same") and all(part in line for part in (*parts, "world_size 1 and 2"))
    # Of a group all runs count, not the first alone.
    (group,) = group_runs([first, others[1]])
    assert setting_differences([group]) == {"start-up: versions.torch": {group.name: "2.12 and 2.14"}}
