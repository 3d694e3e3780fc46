"""`mmldlm explain` finds what was planted, and a run that goes back is one that never had it."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from mmldlm import cli, train
from mmldlm.checkpoint.manifest import verify_checkpoint
from mmldlm.checkpoint.tensors import TensorFiles
from mmldlm.tools.replay import RecordedRun
from mmldlm.tools.spikes import explain, explain_main, rewind_main
from tests.helpers.engine_runs import records
from tests.helpers.spikes import SPIKY, drawn_at, spoil, spoiled_copy
from tests.helpers.user_errors import assert_user_error

SPIKE = 27  # the step whose sample is spoiled; the checkpoint before it is 20
MAX_REPLAYS = int(math.log2(8)) + 1


class Planted:
    """A store with a spoiled sample, and a config that trains on it."""

    def __init__(self, folder: Path, store: Path, samples: Sequence[int]):
        self.folder, self.samples = folder, list(samples)
        self.names = [f"own:{sample}" for sample in samples]
        self.store = spoiled_copy(store, folder, samples)
        self.config = folder / "config.yaml"
        self.config.write_text(SPIKY.format(run=folder / "run", store=self.store))

    def train(self, name: str, *settings: str) -> Path:
        assert train.main([str(self.config), f"run.dir={self.folder / name}", *settings]) == 0
        return self.folder / name


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory, tiny_store: Path) -> Planted:
    return Planted(tmp_path_factory.mktemp("planted"), tiny_store, [drawn_at(tiny_store, SPIKE)[3]])


def curve(run: Path, after: int) -> list[tuple[object, ...]]:
    """The bits of all losses and norms."""
    keys = ("step", "loss/total", "loss/latent", "grad_norms", "data/tokens", "optim/lr")
    return [tuple(map(repr, map(record.get, keys))) for step, record in records(run).items() if step > after]


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    files = TensorFiles.open(verify_checkpoint(run / f"checkpoints/step-{step:08}"), "model")
    return {name: files[name].clone() for name in files}


def assert_same_branch(run: Path, other: Path, after: int, last: int) -> None:
    assert curve(run, after) == curve(other, after) and len(curve(run, after))
    ours, theirs = weights(run, last), weights(other, last)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours) and ours.keys() == theirs.keys()


@pytest.mark.setting("data.skip_samples")
def test_explain_rewind_and_go_on(planted: Planted, tiny_store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = planted.train("run")
    assert [record["step"] for record in records(run, "skip").values()] == [SPIKE]
    capsys.readouterr()
    assert explain_main([str(run), str(SPIKE)]) == 0
    output = capsys.readouterr().out
    assert f"{planted.names[0]}: " in output and "they caused it" in output and f"{MAX_REPLAYS} replays" in output
    assert rewind_main([str(run), "--before", str(SPIKE), "--skip", *planted.names]) == 0
    assert "continues from step 20" in capsys.readouterr().out
    left = curve(run, 0)
    assert planted.train("run") == run  # the usual command
    assert not records(run, "skip") and "verified" in output_of_verify(run, capsys)
    # A run that never had the sample, whatever it was.
    assert_same_branch(run, planted.train("without", f"data.skip_samples={planted.names}"), 20, 40)
    spoil(planted.store, planted.samples, 1e-3)
    assert_same_branch(run, planted.train("other", f"data.skip_samples={planted.names}"), 20, 40)
    # Both branches stay, and the comparison shows them.
    branch = run / "branches/01-before-27"
    assert curve(branch, 0) == left and len(list(run.glob("checkpoints/superseded-*"))) == 2
    capsys.readouterr()
    assert cli.main(["compare", str(run), "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["runs"]) == {"run", "01-before-27"}


def output_of_verify(run: Path, capsys: pytest.CaptureFixture[str]) -> str:
    cli.main(["verify", str(run), "--from", "21"])
    return capsys.readouterr().out


def test_a_pair_and_none(tmp_path: Path, tiny_store: Path) -> None:
    planted = Planted(tmp_path, tiny_store, drawn_at(tiny_store, SPIKE)[2:4])
    run = RecordedRun.read(planted.train("run"))
    pair, lines = explain(run, SPIKE)
    assert pair.rest <= pair.limit
    assert {line.split(": ")[0] for line in lines if line.startswith("own:")} == set(planted.names)
    usual, lines = explain(run, SPIKE - 1)
    assert "no spike" in lines[0] and "above limit" not in lines[0]
    assert usual.norm < run_limit(run, SPIKE) and replays(lines) == 2 * MAX_REPLAYS


def replays(lines: Sequence[str]) -> int:
    match = re.search(r"(\d+) replays of parts", lines[0])
    assert match is not None, lines
    return int(match[1])


def run_limit(run: RecordedRun, step: int) -> float:
    return next(json.loads(line) for line in (run.folder / "skipped_steps.jsonl").open())["limit"]


def test_errors(planted: Planted, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(planted.train("errors", "train.steps=2"))

    def refused(*arguments: str) -> tuple[int, str]:
        capsys.readouterr()
        return cli.main(list(arguments)), capsys.readouterr().err

    for name in ("own:x", "other:1", "own:487"):
        assert_user_error(refused("rewind", run, "--before", "2", "--skip", name), 64, name, "own:0 to 486")
    assert_user_error(refused("explain", run, "9"), 2, "expected 1 to 2, found 9")


@pytest.mark.slow
def test_a_hundred_planted_samples(tmp_path: Path, tiny_store: Path) -> None:
    """One in each of 25 steps of 4 runs: each is found, within log2(8) + 1 replays."""
    found = 0
    for seed in range(4):
        rng, steps = random.Random(seed), range(24, 49)
        folder = tmp_path / str(seed)
        folder.mkdir()
        planted = Planted(folder, tiny_store, [rng.choice(drawn_at(tiny_store, step)) for step in steps])
        run = RecordedRun.read(planted.train("run", "train.steps=48", "checkpoint.every_steps=4"))
        for step, name in zip(steps, planted.names, strict=True):
            result, lines = explain(run, step)
            assert result.rest <= result.limit and replays(lines) <= MAX_REPLAYS, lines
            assert lines[1].startswith(f"{name}: "), lines
            found += 1
    assert found == 100
