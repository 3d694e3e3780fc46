"""`mmldlm checkpoints`: what there is, and what differs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save

from mmldlm import cli, train
from tests.helpers.changed_checkpoints import manifest_body, replace_file, seal
from tests.helpers.user_errors import assert_user_error


@pytest.fixture
def run(tiny_config: Path, tmp_path: Path) -> Path:
    settings = ["train.steps=4", "checkpoint.every_steps=2", "checkpoint.keep_every=2", "checkpoint.keep_best=1"]
    assert train.main([str(tiny_config), *settings, "data.num_workers=0"]) == 0
    return tmp_path / "run"


def show(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    capsys.readouterr()
    assert cli.main(["checkpoints", *map(str, arguments)]) == code
    return capsys.readouterr().out


def test_checkpoints(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run / "checkpoints"
    rows = json.loads(show(capsys, "list", run, "--json"))
    assert [row["step"] for row in rows] == [4, 2]
    assert rows[0]["notes"] == ["permanent", "best"] and rows[1]["notes"] == ["permanent"]
    size = sum(path.stat().st_size for path in (folder / rows[0]["name"]).rglob("*") if path.is_file())
    assert rows[0]["bytes"] == size - (folder / rows[0]["name"] / "manifest.json").stat().st_size
    assert "single x 1" in show(capsys, "list", run)

    assert " tensors are equal, 0 differ" in show(capsys, "diff", folder / "step-00000004", run).splitlines()[1]
    found = json.loads(show(capsys, "diff", folder / "step-00000002", folder / "step-00000004", "--json"))
    assert found["state"]["step"] == [2, 4] and found["config"] == {}
    weights = [load_file(folder / f"step-0000000{step}" / "model.safetensors") for step in (2, 4)]
    name = next(
        name for name in weights[0] if weights[0][name].dim() == 2 and not weights[0][name].equal(weights[1][name])
    )
    largest = (weights[0][name].double() - weights[1][name].double()).abs().max()
    assert found["tensors"][f"model/{name}"]["largest"] == pytest.approx(float(largest), rel=1e-6)

    shutil.rmtree(folder)
    assert_user_error((cli.main(["checkpoints", "diff", str(run), str(run)]), capsys.readouterr().err), 65, "expected")


def test_merge(
    run: Path, tiny_config: Path, tiny_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (run / "checkpoints" / f"step-0000000{step}" for step in (2, 4))
    shutil.copy(run / "metrics.jsonl", run / "evaluation.json")  # is not the merged model's
    said = show(capsys, "merge", first, run, "--out", tmp_path / "mean", "--shares", 3, 1)
    assert "the mean of 2 checkpoints" in said and not (tmp_path / "mean" / "evaluation.json").exists()
    before, after, mean = (load_file(folder / "model.safetensors") for folder in (first, second, tmp_path / "mean"))
    assert mean.keys() == before.keys()
    for name, tensor in mean.items():
        expected = (0.75 * before[name].double() + 0.25 * after[name].double()).to(tensor.dtype)
        assert tensor.equal(expected), name
    assert any(not mean[name].equal(before[name]) for name in mean)
    show(capsys, "merge", second, second, "--out", tmp_path / "same")
    assert all(load_file(tmp_path / "same/model.safetensors")[name].equal(tensor) for name, tensor in after.items())

    evaluated = [
        "evaluate",
        tmp_path / "mean",
        "--modes",
        "l2t",
        "--samples",
        8,
        "--texts",
        4,
        "--out",
        tmp_path / "out",
    ]
    evaluated += ["--data", tiny_store, "--out", tmp_path / "out"]
    assert cli.main(list(map(str, evaluated))) == 0 and (tmp_path / "out/evaluation.json").is_file()
    started = [f"run.dir={tmp_path / 'next'}", f"init.from={tmp_path / 'mean'}", "train.steps=1"]
    assert train.main([str(tiny_config), *started]) == 0


def test_merge_refuses(run: Path, tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    assert train.main([str(tiny_config), f"run.dir={other}", "train.steps=2", "model.width=16"]) == 0

    def refusal(code: int, *arguments: object) -> None:
        *given, expected = map(str, arguments)
        capsys.readouterr()
        assert_user_error((cli.main(["checkpoints", "merge", *given]), capsys.readouterr().err), code, expected)

    refusal(65, run, other, "--out", tmp_path / "new", "other: expected the same network and data")
    refusal(2, run, run, "--out", other, "exists already")
    for arguments in ([run], [run, run, "--shares", 1], [run, run, "--shares", 1, 0]):
        refusal(2, *arguments, "--out", tmp_path / "new", "checkpoints merge: ")
    assert not (tmp_path / "new").exists()


@pytest.mark.quick
def test_a_difference_is_relative_to_the_first(
    short_run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = max((short_run_dir / "checkpoints").glob("step-*"))
    second = tmp_path / "second"
    shutil.copytree(first, second)
    layout, tensors = manifest_body(second)["tensors"], load_file(second / "model.safetensors")
    name = next(name for name, tensor in tensors.items() if tensor.dim() == 2 and tensor.norm() > 0)
    replace_file(second, "model.safetensors", save(tensors | {name: 3 * tensors[name]}))
    seal(second, {**manifest_body(second), "tensors": layout})
    for pair, relative in (((first, second), 2), ((second, first), 2 / 3)):
        found = json.loads(show(capsys, "diff", *pair, "--json"))
        assert found["tensors"].keys() == {f"model/{name}"} and found["state"] == found["config"] == {}
        assert found["tensors"][f"model/{name}"]["relative"] == pytest.approx(relative)


def test_age_and_loss_are_those_of_the_records(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {one["step"]: one["validation/text"] for one in records if one["kind"] == "validation"}
    for record in records:
        record["time"] -= 7200  # of a run that was copied two hours later
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    rows = json.loads(show(capsys, "list", run, "--json"))
    assert all(7200 <= row["age_s"] < 9000 and row["validation_loss"] == losses.get(row["step"]) for row in rows)
    assert rows[0]["validation_loss"] is not None
    # A difference begins with what it sums up to, and no line is a page of numbers.
    lines = show(capsys, "diff", run / "checkpoints/step-00000002", run).splitlines()
    assert " -> " in lines[0] and "tensors are equal" in lines[1] and max(map(len, lines[2:])) < 400
    shutil.rmtree(run / "checkpoints")
    assert show(capsys, "list", run) == "no checkpoint yet\n"
    (run / "metrics.jsonl").unlink()
    status = cli.main(["checkpoints", "list", str(run)])
    assert_user_error((status, capsys.readouterr().err), 65, "expected a run folder")
